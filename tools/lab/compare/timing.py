"""Times of kernels by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from cases import TOLERANCE, DecodeCase, PromptCase
from kernels import Kernel
from shapes import TOKEN_BYTES, Q_HEADS, HEAD_DIM, Shape

BURST = 20


def captured(call: Callable[[int], torch.Tensor], copies: int) -> Callable[[], object]:
    """A burst of calls as one graph: its time is the device's alone."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for at in range(BURST):
            call(at % copies)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for at in range(BURST):
            call(at % copies)
    # The graph has but addresses of what the call made ready, so the call has to live as long.
    return lambda: (graph.replay(), call)


def median_us(run: Callable[[], object], rounds: int) -> float:
    """What is queued is not waited for, so that the device is never idle."""
    events = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    # The first round wakes the clocks.
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events[1:])


def work(what: str, shape: Shape, us: float) -> dict[str, float]:
    if what == "decode":
        return {"GB_per_s": round(sum(shape.lengths) * TOKEN_BYTES / us * 1e-3)}
    return {"tflops": round(4 * HEAD_DIM * Q_HEADS * shape.tokens * (shape.tokens + 1) / 2 / us * 1e-6, 1)}


def measure(what: str, shape: Shape, name: str, kernel: Kernel, rounds: int) -> dict:
    """A kernel's time and how far it is off, or why it has none."""
    line = {"shape": str(shape), "kernel": name}
    try:
        case = DecodeCase(shape) if what == "decode" else PromptCase(shape)
        call = kernel.ready(case)
        off = line["relative_error"] = case.error(call(0))
        if off > TOLERANCE:
            raise ValueError(f"wrong: off by {off:.3g}, more than {TOLERANCE}")
        if what == "decode":
            us = median_us(captured(call, case.copies), rounds) / BURST
        else:
            us = median_us(lambda: call(0), rounds)
    except Exception as error:  # Whatever a library raises: other shapes are measured all the same.
        return line | {"error": (str(error) or type(error).__name__).splitlines()[0]}
    return line | {"us": round(us, 2), **work(what, shape, us)}
