"""Engines as a whole: host memory that they share out, what a failure ends, what vLLM tries and captures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import sluice
import torch
from engines import Breaks, Engine, greedy, prompts
from sluice.vllm._backend import Builder
from vllm.v1.kv_cache_interface import FullAttentionSpec

PROMPTS = prompts(5, 40, 100)
LATER = prompts(17, 33, seed=2)


def test_requests_that_are_not_in_a_forward_that_fails_go_on(model_of: Callable[[str], Path]) -> None:
    """Two run, and the others wait for room among those that run."""
    with Engine(model_of("Llama"), {}, max_num_seqs=2) as engine:
        given = PROMPTS + LATER
        own = engine.tokens(given, greedy(30))
        breaks = Breaks(engine, 4, False)
        answers = engine.run(given, greedy(30), breaks)
    assert [each.reason for each in answers] == ["error"] * 2 + ["length"] * 3
    assert [each.tokens for each in answers[2:]] == own[2:]


def test_with_another_scheduler_a_failure_ends_the_engine(model_of: Callable[[str], Path]) -> None:
    """vLLM's own has no way to be told."""
    with Engine(model_of("Llama"), {}, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler") as engine:
        with pytest.raises(sluice.DeviceError, match="as a test wants"):
            engine.run(PROMPTS, greedy(30), Breaks(engine, 4, False))


@pytest.mark.parametrize(("late", "asynchronous"), [(False, False), (True, False), (True, True)],
                         ids=["in a layer", "at its end", "in the next step"])
def test_a_failure_ends_a_rank_whose_answers_are_not_read(late: bool, asynchronous: bool,
                                                          model_of: Callable[[str], Path]) -> None:
    """As of a second rank."""
    with Engine(model_of("Llama"), {}, asynchronous=asynchronous) as engine:
        engine.worker.rank, engine.forwards._goes_on = 1, False
        with pytest.raises(SystemExit):
            engine.run(PROMPTS, greedy(30), Breaks(engine, 4, late))


@pytest.mark.parametrize(("rank", "raised"), [(1, SystemExit), (2, sluice.DeviceError), (3, SystemExit)])
def test_answers_are_those_of_the_first_rank_with_the_last_layers(rank: int, raised: type[BaseException],
                                                                  model_of: Callable[[str], Path]) -> None:
    """Of two stages with two ranks each."""
    with Engine(model_of("Llama"), {}) as engine:
        engine.worker.rank, engine.forwards._goes_on = rank, False
        engine.worker.parallel_config = SimpleNamespace(world_size=4, tensor_parallel_size=2)
        with pytest.raises(raised):
            engine.run(PROMPTS, greedy(30), Breaks(engine, 4, late=True))


def test_blocks_count_pages_of_the_engine(model_of: Callable[[str], Path]) -> None:
    """Those of vLLM and of host memory are as many tokens, but for one that vLLM keeps for itself."""
    for family in ("Llama", "Gemma2"):
        with Engine(model_of(family), {"host_bytes": 4 << 20}) as engine:
            made, cache = engine.forwards.engine.options, engine.core.vllm_config.cache_config
            groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
            token = 2 * made.kv_heads * made.head_dim * 4 * len(groups[0].layer_names)
            assert 0 <= made.host_bytes - cache.num_gpu_blocks * 32 * token < 2 * 32 * token
            assert len(groups) == (2 if family == "Gemma2" else 1)


def test_full_memory_with_windows(model_of: Callable[[str], Path]) -> None:
    """All that vLLM admits has room: no forward fails where layers with windows share host memory with others."""
    with Engine(model_of("Gemma3"), {"host_bytes": 1 << 20}, asynchronous=True) as engine:
        answers = engine.run(prompts(*range(20, 200, 15), seed=3), greedy(50))
        assert [each.reason for each in answers] == ["length"] * len(answers)
        assert engine.forwards.preemptions > 0


def test_engines_beside_each_other(model_of: Callable[[str], Path]) -> None:
    """One of vLLM's own between two with Sluice."""
    folder = model_of("Qwen3")
    with Engine(folder, {}) as one, Engine(folder, None) as own, Engine(folder, {}) as another:
        impls = {type(each.impl).__module__ for each in
                 own.worker.vllm_config.compilation_config.static_forward_context.values()}
        assert impls == {"vllm.v1.attention.backends.cpu_attn"}
        assert own.tokens(PROMPTS, greedy(8)) == one.tokens(PROMPTS, greedy(8)) == another.tokens(PROMPTS, greedy(8))
        assert another.link is not one.link


class Common:
    """As much of vLLM's metadata of a batch as a capture has."""

    def __init__(self, rows: int) -> None:
        self.num_actual_tokens = rows


def test_trials_attend_nothing_and_captures_are_for_the_longest_context(model_of: Callable[[str], Path]) -> None:
    """What vLLM runs to see how much memory it takes, and what it captures on a GPU."""
    with Engine(model_of("Llama"), {}) as engine:
        worker, made = engine.worker, engine.forwards.engine
        before = made.stats()
        worker.model_runner._dummy_run(16, force_attention=True)
        worker.execute_dummy_batch()
        assert made.stats() == before and engine.forwards.planned is None
        layer = next(iter(worker.vllm_config.compilation_config.static_forward_context.values()))
        spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=1, dtype=torch.int8)
        builder = Builder(spec, list(engine.link.layers), worker.vllm_config, torch.device("cpu"))
        captured = builder.build_for_cudagraph_capture(Common(4))
        for metadata in (None, builder.build(0, Common(4)), captured):
            out = torch.full((4, 4, 32), torch.nan)
            layer.impl.forward(layer, torch.ones(4, 4, 32), *[torch.ones(4, 2, 32)] * 2, layer.kv_cache, metadata, out)
            assert not out.any()
        largest = made.options.largest
        assert captured.bucket == sluice.Bucket(decode_rows=4, max_tokens=largest.max_tokens, features=largest.features)
        assert not builder.use_cascade_attention(64, [1], 4, 2, False, False, False, 1)
        assert engine.tokens(PROMPTS, greedy(2))
