"""Policies that an engine is made for, by `EngineOptions.policies`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import sluice

THREE_BITS = "exact | int3 | sample=9 | near=0"


def bare(**changes: object) -> sluice.EngineOptions:
    options = sluice.EngineOptions(layers=1, q_heads=4, kv_heads=1, head_dim=64, host_bytes=1 << 20, sequences=3,
                                   largest=sluice.Bucket(decode_rows=1), threads=1, pin_threads=False)
    return dataclasses.replace(options, **changes)


def test_an_engine_is_for_the_default_policy() -> None:
    with sluice.Engine(bare()) as engine:
        made = engine.options
        assert made.policies == ["sluice"] and made.largest.features == sluice.Features.TOP_K
        assert made.cpu_sequences == made.cluster_sequences == sluice.ALL_SEQUENCES
        assert engine.sizes.cpu_sequences == engine.sizes.cluster_sequences == 0
        assert engine.sizes.code_bits == 4 and engine.sizes.digests == 0
        q, k, v = (np.ones((1, heads, 64), np.float32) for heads in (4, 1, 1))
        out = np.zeros_like(q)
        forward = engine.plan([sluice.PlanItem(engine.begin("sluice"))], made.largest)
        engine.attend(made.largest, 0, q, k, v, out)
        engine.finish(forward)
        np.testing.assert_array_equal(out, q)
        with pytest.raises(sluice.Unsupported, match="name the policy in EngineOptions.policies"):
            engine.begin("full")
        with pytest.raises(sluice.OutOfCapacity, match="name the policy in EngineOptions.policies"):
            engine.begin("topk")
        with pytest.raises(sluice.Unsupported, match="name the policy in EngineOptions.policies"):
            engine.begin("lfps")
        with pytest.raises(sluice.Unsupported, match="name the policy in EngineOptions.policies"):
            engine.begin("quest | near=0")


def test_an_engine_has_room_for_what_is_named() -> None:
    policies = [THREE_BITS, "lfps", "quest | near=0", "tactic | int4"]
    with pytest.raises(sluice.Unsupported, match="EngineOptions.policies: `tactic | int4`.*bits.*engine of its own"):
        sluice.Engine(bare(policies=policies))
    options = bare(policies=policies[:3])
    resolved = options.resolved()
    assert resolved.cpu_sequences == 3 and resolved.cluster_sequences == 0
    assert resolved.largest.features == (
        sluice.Features.TOP_K | sluice.Features.UNBOUNDED | sluice.Features.PAGES)  # lfps has a dense layer.
    assert options.cpu_sequences is None and options.largest == sluice.Bucket(decode_rows=1)
    with sluice.Engine(options) as engine:
        assert engine.options.largest == resolved.largest
        assert engine.sizes.code_bits == 3 and engine.sizes.digests == 1 and engine.sizes.prompt_queries == 32
        assert engine.sizes.cpu_sequences == 3 and engine.sizes.cluster_sequences == 0
        for policy in policies[:3]:
            engine.end(engine.begin(policy))
    with sluice.Engine(bare(policies=["lfps"], cpu_sequences=1)) as engine:
        engine.begin("lfps")
        with pytest.raises(sluice.OutOfCapacity, match="EngineOptions.cpu_sequences says"):
            engine.begin("lfps")


def test_options_of_an_engine_make_one_for_other_policies() -> None:
    """Bounds are as they were given, not what an engine of other policies came to."""
    with sluice.Engine(bare()) as engine:
        changed = dataclasses.replace(engine.options, policies=["lfps", "tactic | int4"])
    with sluice.Engine(changed) as engine:
        assert engine.sizes.cpu_sequences == engine.sizes.cluster_sequences == 3
        for policy in changed.policies:
            engine.begin(policy)


def test_policies_that_there_are_not_are_refused_by_name() -> None:
    with pytest.raises(sluice.InvalidArgument, match="fulll"):
        sluice.Engine(bare(policies=["full", "fulll"]))
    with pytest.raises(sluice.InvalidArgument, match='policies is \'full\'; it must be a list of texts, such as'):
        sluice.Engine(bare(policies="full"))
    with pytest.raises(sluice.InvalidArgument, match="policy is 7"):
        sluice.Engine(bare(policies=[7]))
    with pytest.raises(sluice.InvalidArgument, match="cpu_sequences is 0, and the policy chooses on the CPU"):
        sluice.Engine(bare(policies=["lfps"], cpu_sequences=0))


def test_none_are_named() -> None:
    with sluice.Engine(bare(policies=[], largest=sluice.Bucket(decode_rows=1,
                                                               features=sluice.Features.SCORES))) as engine:
        assert engine.options.policies == [] and engine.options.largest.features == sluice.Features.SCORES
        assert engine.sizes.code_bits == 0
