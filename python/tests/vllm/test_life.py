"""What becomes of requests: they end, are given up, wait for host memory, or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sluice
import torch
from engines import Engine, greedy, prompts
from sluice.vllm._backend import Builder
from vllm.v1.kv_cache_interface import FullAttentionSpec

PROMPTS = prompts(5, 40, 100)
LATER = prompts(17, 33, seed=2)


@pytest.fixture(params=[False, True], ids=["one", "two"])
def engine(request: pytest.FixtureRequest, engines: dict[bool, Engine]) -> Engine:
    """With one forward under way, or two."""
    return engines[request.param]


@pytest.fixture(scope="module")
def engines(model_of: Callable[[str], Path]) -> Iterator[dict[bool, Engine]]:
    made = {ahead: Engine(model_of("Llama"), {}, asynchronous=ahead) for ahead in (False, True)}
    yield made
    for each in made.values():
        each.close()


def test_memory_comes_back(engine: Engine) -> None:
    far = engine.forwards.engine
    engine.settle()
    before = far.memory().far_pages_used
    engine.tokens(PROMPTS + LATER, greedy(20))
    assert far.memory().far_pages_used > 0
    engine.settle()
    assert far.memory().far_pages_used == before
    assert len(engine.forwards) == 1  # settle()'s own, of which the worker is not told that it has ended.


def test_requests_that_are_given_up_leave_the_others_alone(engine: Engine) -> None:
    own = engine.tokens(PROMPTS, greedy(30))

    def give_up(step: int, numbers: list[str]) -> None:
        if step == 10:
            engine.vllm.abort_request([numbers[1]])

    answers = engine.run(PROMPTS, greedy(30), give_up)
    assert [answers[0].tokens, answers[2].tokens] == [own[0], own[2]]
    assert answers[1].reason in (None, "abort") and answers[1].tokens == own[1][: len(answers[1].tokens)]
    assert len(answers[1].tokens) < 30
    engine.settle()
    assert len(engine.forwards) == 1


class Breaks:
    """Has a step's forward fail in its second layer, or when it is finished."""

    def __init__(self, engine: Engine, step: int, late: bool) -> None:
        self._far, self._step, self._late = engine.forwards.engine, step, late
        self.broke = 0

    def __call__(self, step: int, numbers: list[str]) -> None:
        if step == self._step and self._late:
            self._far.finish = self._finish
        elif step == self._step:
            self._far.attend = self._attend

    def _attend(self, bucket: sluice.Bucket, layer: int, *tensors: torch.Tensor, **options: object) -> None:
        if layer == 1:
            del self._far.attend
            self.broke += 1
            raise sluice.DeviceError("the device failed, as a test wants")
        sluice.Engine.attend(self._far, bucket, layer, *tensors, **options)

    def _finish(self, forward: int) -> None:
        del self._far.finish
        self.broke += 1
        self._far.cancel(forward)
        raise sluice.DeviceError("the device failed, as a test wants")


@pytest.mark.parametrize("late", [False, True], ids=["in a layer", "at its end"])
def test_a_forward_that_fails_ends_its_requests_alone(engine: Engine, late: bool) -> None:
    own = engine.tokens(PROMPTS + LATER, greedy(30))
    breaks = Breaks(engine, 6, late)
    answers = engine.run(PROMPTS, greedy(30), breaks)
    assert breaks.broke == 1
    assert [each.reason for each in answers] == ["error"] * len(PROMPTS)
    assert all(each.tokens == want[: len(each.tokens)] for each, want in zip(answers, own))
    assert engine.tokens(PROMPTS + LATER, greedy(30)) == own
    engine.settle()
    assert len(engine.forwards) == 1


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


def test_trials_attend_nothing(qwen3: Engine) -> None:
    """What vLLM runs to see how much memory it takes, and what it captures."""
    worker, forwards = qwen3.worker, qwen3.forwards
    planned = forwards.engine.stats()
    worker.model_runner._dummy_run(16, force_attention=True)
    worker.execute_dummy_batch()
    assert forwards.engine.stats() == planned and forwards.planned is None or not forwards.running
    layer = next(iter(worker.vllm_config.compilation_config.static_forward_context.values()))
    q, kv = torch.randn(4, 4, 32), torch.randn(4, 2, 32)
    for metadata in (None, qwen3.link.planned(Common(4))):
        out = torch.full((4, 4, 32), torch.nan)
        layer.impl.forward(layer, q, kv, kv, layer.kv_cache, metadata, out)
        assert not out.any()


class Common:
    """As much of vLLM's metadata of a batch as a capture has."""

    def __init__(self, rows: int) -> None:
        self.num_actual_tokens = rows


def test_captures_are_for_the_longest_context(qwen3: Engine) -> None:
    config = qwen3.worker.vllm_config
    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=1, dtype=torch.int8)
    builder = Builder(spec, list(qwen3.link.layers), config, torch.device("cpu"))
    largest = qwen3.forwards.engine.options.largest
    captured = builder.build_for_cudagraph_capture(Common(8))
    assert not captured.planned
    assert captured.bucket == sluice.Bucket(decode_rows=8, max_tokens=largest.max_tokens, features=largest.features)
    assert not builder.use_cascade_attention(64, [1], 4, 2, False, False, False, 1)
