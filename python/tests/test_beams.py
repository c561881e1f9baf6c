"""Beam search under policies that learn from what they decode: beams that are reordered say what each would alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import sluice
from conftest import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, Story, buckets

Make = Callable[..., sluice.Engine]
PROMPT, STEPS, BEAMS = 200, 40, 3
LEARNING = ("lfps", "history:observe_every=2 | top_k=20 | near=0,sinks=4,recent=8",
            "tactic:least=64,size=4,recluster=64")


def run(engine: sluice.Engine, bucket: sluice.Bucket, pool: Story, rows: Sequence[tuple[int, Sequence[int]]],
        prefill: bool) -> np.ndarray:
    """One forward of these sequences' next tokens, which are of the pool: [rows, layers, q_heads, head_dim]."""
    number = engine.plan([sluice.PlanItem(sequence, len(tokens), prefill) for sequence, tokens in rows], bucket)
    tokens = [token for _, more in rows for token in more]
    outputs = np.zeros((bucket.rows, LAYERS, Q_HEADS, HEAD_DIM), np.float32)
    for layer in range(LAYERS):
        q, k, v = (np.zeros((bucket.rows, heads, HEAD_DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
        for mine, pools in ((q, pool.q), (k, pool.k), (v, pool.v)):
            mine[:len(tokens)] = pools[layer, tokens]
        out = np.zeros_like(q)
        engine.attend(bucket, layer, q, k, v, out)
        outputs[:, layer] = out
    engine.finish(number)
    return outputs[:len(tokens)]


def begin(engine: sluice.Engine, bucket: sluice.Bucket, pool: Story, policy: str) -> int:
    sequence = engine.begin(policy)
    for first in range(0, PROMPT, bucket.prefill_rows):
        run(engine, bucket, pool, [(sequence, range(first, min(first + bucket.prefill_rows, PROMPT)))], True)
    return sequence


def alone(engine: sluice.Engine, pool: Story, policy: str, tokens: Sequence[int]) -> np.ndarray:
    """What the newest of these tokens says behind the prompt, in a sequence that nothing happens to."""
    mixed, decode = buckets(engine)
    sequence = begin(engine, mixed, pool, policy)
    out = np.empty(0)
    for token in tokens:
        out = run(engine, decode, pool, [(sequence, [token])], False)[0]
    engine.end(sequence)
    return out


@pytest.mark.parametrize("policy", LEARNING)
def test_beam_search(make: Make, policy: str) -> None:
    engine = make(policy, cpu_sequences=2 * BEAMS + 1, sequences=2 * BEAMS + 1, host_bytes=32 << 20)
    mixed, decode = buckets(engine)
    pool, random = Story(11, 600), np.random.default_rng(12)
    first = begin(engine, mixed, pool, policy)
    beams = [first, *(engine.fork(first, PROMPT) for _ in range(BEAMS - 1))]
    told: list[list[int]] = [[] for _ in beams]
    for step in range(STEPS):
        tokens = random.integers(PROMPT, 600, BEAMS)
        out = run(engine, decode, pool, [(beam, [int(token)]) for beam, token in zip(beams, tokens)], False)
        told = [[*past, int(token)] for past, token in zip(told, tokens)]
        if step % 13 == 12:
            for past, mine in zip(told, out):
                np.testing.assert_allclose(mine, alone(engine, pool, policy, past), rtol=1e-4, atol=1e-4)
        parents = random.integers(0, BEAMS, BEAMS)  # Some beams go on twice, some not at all.
        chosen = [engine.fork(beams[parent], engine.tokens(beams[parent])) for parent in parents]
        for beam in beams:
            engine.end(beam)
        beams, told = chosen, [told[parent] for parent in parents]


@pytest.mark.parametrize("policy", LEARNING)
def test_drafts_are_forgotten(make: Make, policy: str) -> None:
    engine = make(policy, cpu_sequences=2, sequences=2, host_bytes=32 << 20)
    mixed, decode = buckets(engine)
    pool, random = Story(13, 600), np.random.default_rng(14)
    sequence = begin(engine, mixed, pool, policy)
    told: list[int] = []
    for step in range(10):
        for draft in random.integers(PROMPT, 600, 3):
            run(engine, decode, pool, [(sequence, [int(draft)])], False)
        engine.truncate(sequence, PROMPT + len(told))
        told.append(int(random.integers(PROMPT, 600)))
        out = run(engine, decode, pool, [(sequence, [told[-1]])], False)[0]
        if step % 3 == 0:
            np.testing.assert_allclose(out, alone(engine, pool, policy, told), rtol=1e-4, atol=1e-4)
