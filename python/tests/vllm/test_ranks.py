"""Tensor parallelism: each rank has an engine for its own heads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engines import Engine, greedy, prompts

PROMPTS = prompts(5, 40, 100, seed=9)
TOKENS = 24
DEADLINE_S = 300


def test_two_ranks(model_of: Callable[[str], Path]) -> None:
    """Started as torchrun would: each has a scheduler of its own, which decides what the other's does."""
    with Engine(model_of("Llama"), None) as engine:
        own = engine.tokens(PROMPTS, greedy(TOKENS))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One thread each: vLLM's ranks look for each other without a rest, and take the cores that these wait for. Memory
    # that they share has a name on the machine.
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": f"sluice-test-{port}"}
    words = [sys.executable, str(Path(__file__).parent / "rank.py"), str(model_of("Llama")), json.dumps(PROMPTS),
             str(TOKENS)]
    ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank in range(2)]
    try:
        for rank in ranks:
            out, said = rank.communicate(timeout=DEADLINE_S)
            assert rank.returncode == 0, said
            told = json.loads(out.splitlines()[-1])
            assert told["tokens"] == [own, own]
            assert told["known"] == [0, 32, 96]
            assert told["shape"] == [2, 1, 8 << 20]  # Half the heads, in half of host_bytes.
    finally:
        for rank in ranks:
            rank.kill()
