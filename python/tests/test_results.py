"""Forwards give what dense attention gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import sluice
from conftest import HEAD_DIM, KV_HEADS, LAYERS, POLICIES, Q_HEADS, Story, buckets, forward

Make = Callable[..., sluice.Engine]


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_in_chunks_decoding_and_batches(make: Make, policy: str) -> None:
    engine = make(policy)
    mixed, decode = buckets(engine)
    (a, story_a), (b, story_b) = ((engine.begin(policy), Story(seed)) for seed in (1, 2))
    forward(engine, mixed, (a, story_a, 0, 60, True))
    forward(engine, mixed, (a, story_a, 60, 30, True), (b, story_b, 0, 34, True))
    forward(engine, mixed, (a, story_a, 90, 1, False), (b, story_b, 34, 64, True))
    for step in range(3):
        forward(engine, decode, (b, story_b, 98 + step, 1, False), (a, story_a, 91 + step, 1, False))
    assert (engine.tokens(a), engine.tokens(b)) == (94, 101)


def test_rows_of_8_bits(make: Make) -> None:
    engine = make("full", kv_dtype="fp8_e4m3")
    assert engine.options.kv_dtype == "fp8_e4m3"
    mixed, decode = buckets(engine)
    a, story = engine.begin("full"), Story(9)
    for each in (story.k, story.v):  # Whole numbers of four bits, which nothing is lost of.
        each[:] = np.clip(np.round(4 * each), -15, 15) / 4
    forward(engine, mixed, (a, story, 0, 60, True))
    forward(engine, decode, (a, story, 60, 3, False))


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_truncate_and_fork(make: Make, policy: str) -> None:
    engine = make(*POLICIES)
    mixed, decode = buckets(engine)
    a, story = engine.begin(policy), Story(3)
    forward(engine, mixed, (a, story, 0, 50, True))
    forward(engine, decode, (a, story, 50, 3, False))  # Two of them drafts,
    engine.truncate(a, 51)  # which are not accepted.
    other = Story(4)
    for mine, old in ((other.k, story.k), (other.v, story.v)):
        mine[:, :51] = old[:, :51]
    b = engine.fork(a, 51)
    c = engine.fork(a, 40, POLICIES[0])
    forward(engine, decode, (a, story, 51, 2, False), (b, other, 51, 1, False), (c, story, 40, 1, False))
    assert [engine.tokens(each) for each in (a, b, c)] == [53, 52, 41]
    engine.end(a)
    forward(engine, decode, (b, other, 52, 1, False))


def test_drafts_that_are_verified_together(make: Make) -> None:
    engine = make("full", largest=sluice.Bucket(decode_rows=6, prefill_rows=64, prefills=1, drafts=3))
    assert engine.options.largest.drafts == 3
    features = engine.options.largest.features
    together = sluice.Bucket(decode_rows=6, drafts=3, features=features)
    (a, story_a), (b, story_b) = ((engine.begin("full"), Story(seed)) for seed in (6, 7))
    forward(engine, sluice.Bucket(prefill_rows=64, prefills=1), (a, story_a, 0, 47, True))
    forward(engine, together, (b, story_b, 0, 2, False), (a, story_a, 47, 3, False))
    engine.truncate(a, 48)
    forward(engine, together, (a, story_a, 48, 5, False))  # Two teams, one of them whole.
    with pytest.raises(sluice.InvalidArgument, match="multiple of its drafts"):
        engine.plan([sluice.PlanItem(a)], sluice.Bucket(decode_rows=4, drafts=3, features=features))


def test_rehearsed_queries(make: Make) -> None:
    policy = "infinigen:alpha=1000,most=100% | dense=1"  # All that it could leave out it may attend.
    engine = make(policy)
    assert engine.options.largest is not None and sluice.Features.REHEARSED in engine.options.largest.features
    mixed, decode = buckets(engine)
    a, story = engine.begin(policy), Story(8)
    forward(engine, mixed, (a, story, 0, 60, True))
    for step in range(3):
        forward(engine, decode, (a, story, 60 + step, 1, False))
    without = dataclasses.replace(decode, features=decode.features & ~sluice.Features.REHEARSED)
    with pytest.raises(sluice.InvalidArgument, match="rehearsed queries"):
        engine.plan([sluice.PlanItem(a)], without)


def test_a_rehearsed_query_decides(make: Make) -> None:
    policy = "exact | skewed=100% | rehearsed | within=0.5,most=4 | near=0,sinks=0,recent=1 | dense=1"
    engine = make(policy)
    mixed, decode = buckets(engine)
    a, story = engine.begin(policy), Story(8)
    forward(engine, mixed, (a, story, 0, 60, True))
    number = engine.plan([sluice.PlanItem(a)], decode)
    q, k, v = (np.zeros((decode.rows, heads, HEAD_DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    out = np.zeros_like(q)
    engine.attend(decode, 0, q, k, v, out)
    with pytest.raises(sluice.InvalidArgument, match="layer 1 comes without"):
        engine.attend(decode, 1, q, k, v, out)
    with pytest.raises(sluice.InvalidArgument, match="rehearsed"):
        engine.attend(decode, 1, q, k, v, out, rehearsed=k)
    wanted = story.k[1, 20]  # The key that is asked for, of a query that itself is 0.
    rehearsed = np.repeat(100 * wanted, Q_HEADS // KV_HEADS, axis=0)[np.newaxis].repeat(decode.rows, axis=0)
    engine.attend(decode, 1, q, k, v, out, rehearsed=rehearsed.astype(np.float32))
    for layer in range(2, LAYERS):
        engine.attend(decode, layer, q, k, v, np.zeros_like(q), rehearsed=q)
    engine.finish(number)
    # It and the newest, whose value is 0, alike.
    want = np.repeat(story.v[1, 20] / 2, Q_HEADS // KV_HEADS, axis=0)
    np.testing.assert_allclose(out[0], want, rtol=1e-5, atol=1e-5)


def test_scores_decide(make: Make) -> None:
    """What a caller's indexer says: the keys are not looked at."""
    policy = "scores | top_k=1 | near=0,sinks=0,recent=1"
    engine = make(policy)
    assert engine.options.largest is not None and sluice.Features.SCORES in engine.options.largest.features
    assert engine.sizes.code_bits == 0 and engine.memory().codes == 0
    mixed, decode = buckets(engine)
    a, story = engine.begin(policy), Story(9)
    forward(engine, mixed, (a, story, 0, 60, True))
    number = engine.plan([sluice.PlanItem(a)], decode)
    q, k, v = (np.zeros((decode.rows, heads, HEAD_DIM), np.float32) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    tokens = engine.options.largest.max_tokens
    scores = np.full((decode.rows, KV_HEADS, tokens), -np.inf, np.float32)
    scores[0, :, 20], scores[0, :, 30], scores[0, :, 40:] = 3, np.nan, 9  # Of which 60 alone is there, and new.
    scores[0, 1, 7] = 4
    scores[0, :, 40:60] = -1
    out = np.zeros_like(q)
    with pytest.raises(sluice.InvalidArgument, match="layer 0 comes without scores"):
        engine.attend(decode, 0, q, k, v, out)
    with pytest.raises(sluice.InvalidArgument, match=r"scores is \[4, 2, \d+\]; this bucket needs \[4, 2 or 1, "):
        engine.attend(decode, 0, q, k, v, out, scores=scores[:, :, 1:])
    with pytest.raises(sluice.InvalidArgument, match="f32"):
        engine.attend(decode, 0, q, k, v, out, scores=scores.astype(np.float16))
    for layer in range(LAYERS):
        engine.attend(decode, layer, q, k, v, out, scores=scores)
    engine.finish(number)
    # What was chosen and the newest, whose value is 0, alike.
    chosen = np.stack([story.v[LAYERS - 1, 20, 0], story.v[LAYERS - 1, 7, 1]])
    np.testing.assert_allclose(out[0], np.repeat(chosen / 2, Q_HEADS // KV_HEADS, axis=0), rtol=1e-5, atol=1e-5)


def test_prompts_that_are_known_in_part(make: Make) -> None:
    engine = make()
    mixed, decode = buckets(engine)
    prompt, story = np.arange(60, dtype=np.int64) % 31, Story(5)
    assert engine.match_prefix("full", prompt) == 0
    a = engine.begin("full", prompt.tolist(), salt=7)
    forward(engine, mixed, (a, story, 0, 60, True))
    assert engine.match_prefix("full", prompt, salt=7) == 48  # Whole pages of 16.
    assert engine.match_prefix("full", prompt) == 0
    b = engine.begin("full", prompt, salt=7)
    assert engine.tokens(b) == 48
    forward(engine, mixed, (b, story, 48, 12, True))
    engine.name_tokens(b, 60, range(4))
    forward(engine, decode, (b, story, 60, 4, False), )
    engine.preempt(a)
    assert engine.stats().matched_tokens == 48
    assert engine.match_prefix("full", [*prompt.tolist(), 0, 1, 2, 3, 9], salt=7) == 64
    engine.end(a), engine.end(b)
    assert engine.memory().far_pages_cached > 0


@pytest.mark.parametrize("there", [0, 20, 32])
def test_names_of_a_prompt_to_come(make: Make, there: int) -> None:
    """Stay where a truncation takes nothing back; else those behind what is left go."""
    engine = make()
    mixed, _ = buckets(engine)
    prompt, story = list(range(60)), Story(8)
    a = engine.begin("full", prompt)
    if there:
        forward(engine, mixed, (a, story, 0, there, True))
    engine.truncate(a, there)
    with pytest.raises(sluice.InvalidArgument, match="names of its first 60 tokens"):
        engine.name_tokens(a, 61, [0])
    with pytest.raises(sluice.InvalidArgument, match="keep no more than it has"):
        engine.truncate(a, there + 1)
    forward(engine, mixed, (a, story, there, 60 - there, True))
    assert engine.match_prefix("full", prompt) == 48  # Whole pages of 16.
    engine.truncate(a, 59)
    with pytest.raises(sluice.InvalidArgument, match="names of its first 59 tokens"):
        engine.name_tokens(a, 60, [0])


@pytest.mark.parametrize("with_queries", [False, True])
def test_import(make: Make, with_queries: bool) -> None:
    engine = make(POLICIES[1])
    _, decode = buckets(engine)
    a, story = engine.begin(POLICIES[1]), Story(6)
    for first, count in ((0, 64), (64, 20)):
        for layer in range(LAYERS):
            rows = slice(first, first + count)
            engine.import_prefix(a, layer, story.k[layer, rows], story.v[layer, rows],
                                 story.q[layer, rows][-8:] if with_queries else None)
        assert engine.tokens(a) == first + count
    forward(engine, decode, (a, story, 84, 2, False))


def test_cancel(make: Make) -> None:
    engine = make()
    _, decode = buckets(engine)
    a, story = engine.begin("full"), Story(7)
    forward(engine, decode, (a, story, 0, 2, False))
    first, second = (engine.plan([sluice.PlanItem(a)], decode) for _ in range(2))
    engine.cancel(first)
    with pytest.raises(sluice.InvalidArgument, match=f"forward {second}"):
        engine.finish(second)
    forward(engine, decode, (a, story, 2, 1, False))


def test_audit_watch_and_figures(make: Make) -> None:
    policy = "exact | int4 | top_k=8 | near=0"
    engine = make(policy, largest=sluice.Bucket(decode_rows=1, features=sluice.Features.AUDIT), host_bytes=4 << 20)
    a, story = engine.begin(policy), Story(8)
    for first in range(0, 192, 64):
        for layer in range(LAYERS):
            engine.import_prefix(a, layer, *(each[layer, first : first + 64] for each in (story.k, story.v)))
    assert engine.audit(a).tokens == 0
    engine.watch(a, [3, 4])
    bucket = engine.options.largest
    assert bucket is not None and bucket.features == sluice.Features.AUDIT | sluice.Features.TOP_K
    number = engine.plan([sluice.PlanItem(a)], bucket)
    out = np.empty((1, Q_HEADS, HEAD_DIM), np.float32)
    for layer in range(LAYERS):
        engine.attend(bucket, layer, story.q[layer, 192:193], story.k[layer, 192:193], story.v[layer, 192:193], out)
    engine.finish(number)
    audit, heads = engine.audit(a), engine.audit_heads(a)
    assert audit.tokens == 1 and audit.layers == LAYERS and 0 < audit.coverage_mean < 1
    assert [len(each) for each in heads] == [Q_HEADS] * LAYERS and heads[1][3].steps == 1
    mean = np.mean([head.coverage for layer in heads for head in layer])
    assert mean == pytest.approx(audit.coverage_mean, abs=1e-6)
    assert audit.dense_tokens == 193 * LAYERS * KV_HEADS
    memory = engine.memory()
    assert memory.far_pages == 4 << 20 and 0 < memory.far_pages_used == engine.far_bytes(a)
    assert engine.can_admit(16) and not engine.can_admit(1 << 20)
    assert engine.can_admit(16, policy) and not engine.can_admit(16, "magicpig")
    use = engine.sequence_memory(a)
    assert use.far_pages == memory.far_pages_used and use.far_pages_shared == use.policy == use.names == 0
    assert use.near_pages == memory.near_pages_used and use.near_pages_shared == 0


def test_forecasts_are_a_gpus() -> None:
    with sluice.Engine(sluice.EngineOptions(
            layers=1, q_heads=4, kv_heads=1, head_dim=64, host_bytes=1 << 20, threads=1, pin_threads=False,
            policies=["history:observe_every=8 | int4 | top_k=9 | near=0,recent=16"])) as engine:
        assert engine.sizes.forecasts == 0 and engine.stats().awaited == 0


def test_copies_of_keys_have_the_bits_that_policies_name() -> None:
    options = sluice.EngineOptions(layers=1, q_heads=4, kv_heads=1, head_dim=64, host_bytes=1 << 20)
    wide = options.memory_needed().codes
    options.policies = ["exact | int3 | sample=9 | near=0"]
    with sluice.Engine(options) as engine:
        assert engine.sizes.code_bits == 3 and engine.memory().codes * (32 + 4) == wide * (24 + 4)
        with pytest.raises(sluice.Unsupported, match="engine of its own"):
            engine.begin("sluice")
    options.policies = [*options.policies, "exact | int4 | sample=9 | near=0"]
    with pytest.raises(sluice.Unsupported, match="EngineOptions.policies: `exact | int4.*4 bits.*engine of its own"):
        options.resolved()


def test_options_are_what_was_made() -> None:
    options = sluice.EngineOptions(layers=1, q_heads=4, kv_heads=1, head_dim=64, host_bytes=1 << 20, cores=[0],
                                   prefill_gamma=0.5, kv_dtype="f16", pin_threads=False, scale=0.25, softcap=30.0,
                                   windows=[24], fetch_share=0.375, handover="stream")
    with sluice.Engine(options) as engine:
        made = engine.options
    assert (made.kv_dtype, made.cores, made.prefill_gamma, made.device) == ("f16", [0], 0.5, "cpu")
    assert (made.scale, made.softcap, made.windows) == (0.25, 30.0, [24])
    assert (made.placement, made.fetch_share, made.handover) == ("hybrid", 0.375, "stream")
    assert made.pin_threads is False and made.timeout_ms == 30_000
    assert made.largest is not None and made.largest.features == sluice.Features.TOP_K
    assert made.policies == ["sluice"]
