"""Ranks that share a model: each has an engine for its own heads and layers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sluice
from engines import Engine, arguments, greedy, prompts
from sluice.vllm._engine import in_order, ranks_of
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor

PROMPTS = prompts(5, 40, 100, seed=9)
MANY = prompts(*range(20, 200, 15), seed=3)
TOKENS = 24
DEADLINE_S = 600
SHARED = {"Llama": 16 << 20, "Gemma2": 1 << 20}  # Of host memory; MANY prompts of the second do not fit.


def ranks(count: int, *words: str) -> list[dict[str, Any]]:
    """What each has told. Started as torchrun would: each has a scheduler of its own, which decides what the others'
    do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One thread each: vLLM's ranks look for each other without a rest, and take the cores that these wait for. Memory
    # that they share has a name on the machine.
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": f"sluice-test-{port}"}
    started = [subprocess.Popen([sys.executable, str(Path(__file__).parent / "rank.py"), *words],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
               for rank in range(count)]
    try:
        told = []
        for rank in started:
            out, said = rank.communicate(timeout=DEADLINE_S)
            assert rank.returncode == 0, said
            told.append(json.loads(out.splitlines()[-1]))
        return told
    finally:
        for rank in started:
            rank.kill()


def test_two_ranks_share_heads(model_of: Callable[[str], Path]) -> None:
    with Engine(model_of("Llama"), None) as engine:
        own = engine.tokens(PROMPTS, greedy(TOKENS))
    for told in ranks(2, str(model_of("Llama")), json.dumps(PROMPTS), str(TOKENS), str(16 << 20), "2", "1"):
        assert told["tokens"] == [own, own]
        assert told["known"] == [0, 32, 96]
        assert told["shape"] == [2, 1, 8 << 20]  # Half the heads, in half of host_bytes.


def test_two_ranks_share_layers(model_of: Callable[[str], Path]) -> None:
    """Every other layer has a window, and host memory is too small for all requests: the ranks preempt the same."""
    with Engine(model_of("Gemma2"), None) as engine:
        own = engine.tokens(MANY, greedy(TOKENS))
    told = ranks(2, str(model_of("Gemma2")), json.dumps(MANY), str(TOKENS), str(SHARED["Gemma2"]), "1", "2")
    for at, each in enumerate(told):
        assert each["tokens"] == [own, own]
        assert each["known"] == [0] * len(MANY)
        assert each["layers"] == [f"model.layers.{2 * at + layer}.self_attn.attn" for layer in range(2)]
        assert each["windows"] == [48, 0]
        assert each["shape"] == [4, 2, SHARED["Gemma2"] // 2]
    assert told[0]["preemptions"] == told[1]["preemptions"] > 0
    assert told[0]["blocks"] == told[1]["blocks"]


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_pipeline_of_processes(model_of: Callable[[str], Path], family: str) -> None:
    """As `vllm serve --pipeline-parallel-size 2` has it: the scheduler beside its workers, two batches under way. Llama
    has three layers, so that one rank has more of them; Gemma2 has little memory."""
    with Engine(model_of(family), None) as engine:
        own = engine.tokens(MANY, greedy(TOKENS))
    options = arguments(model_of(family), {"host_bytes": SHARED[family]}, pipeline_parallel_size=2,
                        distributed_executor_backend="mp")
    with Pipeline(options) as engine:
        assert engine.tokens(MANY, greedy(TOKENS)) == own
        assert engine.tokens(PROMPTS, greedy(TOKENS)) == engine.tokens(PROMPTS, greedy(TOKENS))


class Pipeline(Engine):
    """Whose workers are in other processes."""

    def __init__(self, options: dict[str, Any]) -> None:
        config = EngineArgs(**options).create_engine_config()
        self.vllm = LLMEngine(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False,
                              multiprocess_mode=False)
        self.core = self.vllm.engine_core.engine_core
        self._count = 0


def shares(layers: list[int], heads: int, pipeline: int = 2) -> list[int]:
    """Of 16 MiB, of ranks with so many layers of a model that has as many as all of them."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=heads, pipeline_parallel_size=pipeline),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: sum(layers)))
    return [(16 << 20) // ranks_of(config, each) for each in layers]


def test_host_memory_is_shared_by_layers_and_heads() -> None:
    assert shares([3], 1, 1) == [16 << 20] and shares([3], 2, 1) == [8 << 20]
    assert shares([1, 3], 1) == [4 << 20, 12 << 20] and shares([1, 3], 2) == [2 << 20, 6 << 20]
    assert shares([2, 1], 1) == [(32 << 20) // 3, (16 << 20) // 3]


def test_a_rank_without_layers_is_refused() -> None:
    with pytest.raises(sluice.Unsupported, match="no layer that attends: give a smaller --pipeline-parallel-size"):
        in_order({})
