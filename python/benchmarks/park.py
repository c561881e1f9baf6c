"""How long a sequence takes to leave an engine and to come back: to a memory area, and to a file. Random keys and values.

`python benchmarks/park.py --tokens 100000` from python/: the 8B shape on a GPU; `--device cpu --layers 2` shows that it
runs. The file is read from the system's cache, if that has room."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sluice
import torch


def seconds(work: Callable[[], object]) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def filled(engine: sluice.Engine, wants: argparse.Namespace) -> int:
    options = engine.options
    sequence = engine.begin(wants.policy)
    stream = torch.cuda.current_stream() if wants.device != "cpu" else None
    for first in range(0, wants.tokens, options.import_rows):
        shape = (min(options.import_rows, wants.tokens - first), options.kv_heads, options.head_dim)
        k, v = (torch.randn(shape, dtype=torch.bfloat16, device=wants.device) for _ in range(2))
        for layer in range(options.layers):
            engine.import_prefix(sequence, layer, k, v, stream=stream)
    return sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--policy", default="sluice")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default=None, help="where the file goes; by default the system's temporary one")
    wants = parser.parse_args()
    numbers = 2 * wants.layers * 8 * 128  # Of a token.
    options = sluice.EngineOptions(
        layers=wants.layers, q_heads=32, kv_heads=8, head_dim=128, device=wants.device, sequences=2,
        host_bytes=2 * (wants.tokens + 512) * numbers, largest=sluice.Bucket(decode_rows=1), import_rows=512)
    options.make_room_for(wants.policy, wants.tokens + 64)
    result: dict[str, float] = {"tokens": wants.tokens}
    with sluice.Engine(options) as engine:
        result["import_s"], sequence = seconds(lambda: filled(engine, wants))
        size = engine.park_bytes(sequence)
        result["gib"] = size / 2**30
        area = np.zeros(size, np.uint8)
        area[::4096] = 1  # Its pages are there.
        result["park_memory_s"], _ = seconds(lambda: engine.park(sequence, area))
        engine.end(sequence)
        result["resume_memory_s"], sequence = seconds(lambda: engine.resume(area))
        del area
        with tempfile.TemporaryDirectory(dir=wants.folder) as folder:
            path = Path(folder) / "sequence"
            result["park_file_s"], _ = seconds(lambda: engine.park(sequence, path))
            engine.end(sequence)
            result["resume_file_s"], _ = seconds(lambda: engine.resume(path))
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
