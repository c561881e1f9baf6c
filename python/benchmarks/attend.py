"""What Python adds to a call of attend: microseconds with tensors that are new in every call, and a C function that
does nothing in place of the library's. `python benchmarks/attend.py` from python/; torch is left out where it is
missing."""

from __future__ import annotations

import ctypes
import timeit

import numpy as np
import sluice

ROWS, CALLS, ROUNDS = 1, 20_000, 7


def main() -> None:
    options = sluice.EngineOptions(layers=1, q_heads=32, kv_heads=8, head_dim=128, host_bytes=1 << 24, threads=1)
    bucket = sluice.Bucket(decode_rows=ROWS)
    shapes = ((ROWS, 32, 128), (ROWS, 8, 128), (ROWS, 8, 128), (ROWS, 32, 128))
    with sluice.Engine(options) as engine:
        # A C function that takes no arguments does no harm with some, and None is no failure.
        nothing = ctypes.PyDLL(engine._library.name).sluice_abi_version
        nothing.argtypes, nothing.restype = engine._attend.argtypes, None
        engine._attend = nothing

        def report(name: str, tensors: list) -> None:
            def call() -> None:
                engine.attend(bucket, 0, *tensors)

            best = min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6
            print(f"{name:28} {best:5.2f} us")

        report("numpy, f32", [np.zeros(shape, np.float32) for shape in shapes])
        read_only = [np.zeros(shape, np.float32) for shape in shapes]
        for array in read_only[:3]:
            array.flags.writeable = False
        report("numpy, inputs read-only", read_only)
        try:
            import torch
        except ImportError:
            return
        report("torch, bf16", [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes])


if __name__ == "__main__":
    main()
