"""Engines of vLLM in this process, by itself and with Sluice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sluice
import torch
import vllm.model_executor.models.registry as registry
from sluice.vllm import register
from sluice.vllm._backend import Link
from sluice.vllm._forwards import Forwards
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

# vLLM looks at a model's class in a process of its own, which loads torch: 20 seconds for each family.
registry._run_in_subprocess = lambda function: function()
register()  # As the entry point does, which test_server.py has.

WORKER = {"worker_cls": "sluice.vllm.Worker"}
STEPS = 2000  # More than any of these tests takes.


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Ids of random tokens."""
    chosen = random.Random(seed)
    return [[chosen.randrange(3, 97) for _ in range(length)] for length in lengths]


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)


def arguments(model: Path, sluice: Mapping[str, Any] | None, **changes: Any) -> dict[str, Any]:
    """Of EngineArgs. `sluice`: options of its engine; None: vLLM is by itself."""
    options: dict[str, Any] = {
        "model": str(model), "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "seed": 0,
        "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 32}
    if sluice is None:
        return {**options, "kv_cache_memory_bytes": 64 << 20, **changes}
    ours = {"policy": "full", "host_bytes": 16 << 20, "threads": 1, "pin_threads": False, "answer_timeout_ms": 30_000}
    return {**options, **WORKER, "additional_config": {"sluice": {**ours, **sluice}}, **changes}


def configured(model: Path, sluice: Mapping[str, Any] | None, **changes: Any) -> VllmConfig:
    return EngineArgs(**arguments(model, sluice, **changes)).create_engine_config()


@dataclass
class Answer:
    tokens: list[int]
    reason: str | None  #: why it ended; None: it has not
    known: int = 0  #: tokens of its prompt that were not computed


class Engine:
    """`with Engine(...)`: an engine of vLLM, in this thread."""

    def __init__(self, model: Path, sluice: Mapping[str, Any] | None, *, asynchronous: bool = False,
                 **changes: Any) -> None:
        config = configured(model, sluice, **changes)
        if asynchronous:  # The CPU's platform turns it off.
            config.scheduler_config.async_scheduling = True
            config.scheduler_config.scheduler_cls = "sluice.vllm.AsyncScheduler"
        self.vllm = LLMEngine(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False,
                              multiprocess_mode=False)
        self.core = self.vllm.engine_core.engine_core
        self._count = 0

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    @property
    def link(self) -> Link:
        return self.worker._link

    @property
    def forwards(self) -> Forwards:
        return self.link.forwards

    def submit(self, ids: Sequence[int], sampling: SamplingParams, **prompt: Any) -> str:
        """`prompt`: what else vLLM is told of it, such as `cache_salt`."""
        self._count += 1
        number = str(self._count)
        return self.vllm.add_request(number, {"prompt_token_ids": list(ids), **prompt}, sampling) or number

    def run(self, given: Sequence[Sequence[int]], sampling: SamplingParams,
            before: Callable[[int, list[str]], None] = lambda step, numbers: None, **prompt: Any) -> list[Answer]:
        """Answers to prompts; `before` is called with the number of each step, and the requests."""
        first = self._count
        for ids in given:
            self.submit(ids, sampling, **prompt)
        numbers = [str(first + 1 + index) for index in range(len(given))]
        answers = {number: Answer([], None) for number in numbers}
        for step in range(STEPS):
            if not self.vllm.has_unfinished_requests():
                break
            before(step, numbers)
            for output in self.vllm.step():
                told = output.outputs[0]
                answers[output.request_id] = Answer(list(told.token_ids), told.finish_reason,
                                                    output.num_cached_tokens or 0)
        return [answers[number] for number in numbers]

    def tokens(self, given: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
        return [answer.tokens for answer in self.run(given, sampling)]

    def settle(self) -> None:
        """Lets the worker know of what has ended since its last step: it is told with the next one."""
        self.tokens(prompts(3), greedy(1))

    def close(self) -> None:
        self.core.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
