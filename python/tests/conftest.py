"""A small engine, and dense attention to hold it against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import sluice

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 64
POLICIES = ("full", "exact | int4 | top_k=all | near=0")


def small_options(*policies: str, **changes: object) -> sluice.EngineOptions:
    options = sluice.EngineOptions(
        layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, kv_dtype="f32", host_bytes=8 << 20,
        largest=sluice.Bucket(decode_rows=4, prefill_rows=64, prefills=2), threads=1, pin_threads=False,
        import_rows=64, answer_timeout_ms=30_000)  # However busy the machine is.
    return dataclasses.replace(options, policies=policies or POLICIES[:1], **changes)


@pytest.fixture
def make() -> Iterator[Callable[..., sluice.Engine]]:
    """Makes engines that are closed after the test."""
    engines: list[sluice.Engine] = []

    def make_engine(*policies: str, **changes: object) -> sluice.Engine:
        engines.append(sluice.Engine(small_options(*policies, **changes)))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


class Story:
    """All tokens of a sequence, in every layer, and what dense attention makes of them."""

    def __init__(self, seed: int, tokens: int = 200) -> None:
        random = np.random.default_rng(seed)
        # Scores of a few units: peaks that a wrong key would show in.
        self.q, self.k, self.v = (random.standard_normal((LAYERS, tokens, heads, HEAD_DIM)).astype(np.float32) * scale
                                  for heads, scale in ((Q_HEADS, 2), (KV_HEADS, 1), (KV_HEADS, 1)))

    def want(self, layer: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and log-sums of tokens from `first` on, in float64."""
        out, lse = np.empty((count, Q_HEADS, HEAD_DIM)), np.empty((count, Q_HEADS))
        for row in range(count):
            seen = first + row + 1
            for head in range(Q_HEADS):
                k, v = (each[layer, :seen, head * KV_HEADS // Q_HEADS].astype(np.float64) for each in (self.k, self.v))
                scores = k @ self.q[layer, first + row, head].astype(np.float64) / np.sqrt(HEAD_DIM)
                lse[row, head] = np.log(np.exp(scores).sum())
                out[row, head] = np.exp(scores - lse[row, head]) @ v
        return out, lse


Part = tuple[int, Story, int, int, bool]
"""Sequence, its story, the first token, how many, whether they are a chunk of a prompt."""


def forward(engine: sluice.Engine, bucket: sluice.Bucket, *parts: Part) -> None:
    """One forward, whose outputs must be those of dense attention."""
    items = [sluice.PlanItem(sequence, count, prefill) for sequence, _, _, count, prefill in parts]
    number = engine.plan(items, bucket)
    for layer in range(LAYERS):
        q, k, v = (np.zeros((bucket.rows, heads, HEAD_DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        out, lse = np.full_like(q, 1e4), np.full(q.shape[:2], 1e4, np.float32)
        row = 0
        for _, story, first, count, _ in parts:
            for rows, all_of in ((q, story.q), (k, story.k), (v, story.v)):
                rows[row : row + count] = all_of[layer, first : first + count]
            row += count
        asked = layer > 0 and sluice.Features.REHEARSED in bucket.features
        scored = sluice.Features.SCORES in bucket.features
        scores = np.zeros((bucket.decode_rows, 1, engine.options.largest.max_tokens), np.float32)
        engine.attend(bucket, layer, q, k, v, out, lse, rehearsed=-q if asked else None,
                      scores=scores if scored else None)
        row = 0
        for _, story, first, count, _ in parts:
            want, want_lse = story.want(layer, first, count)
            np.testing.assert_allclose(out[row : row + count], want, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(lse[row : row + count], want_lse, rtol=1e-5, atol=1e-5)
            row += count
        assert not out[row:].any()  # Padding.
    engine.finish(number)


def buckets(engine: sluice.Engine) -> tuple[sluice.Bucket, sluice.Bucket]:
    """One that prompts go through, and one for decoding."""
    assert engine.options.largest is not None
    features = engine.options.largest.features
    return (sluice.Bucket(decode_rows=1, prefill_rows=64, prefills=2, features=features),
            sluice.Bucket(decode_rows=4, features=features))
