"""Times of kernels by events, in turns, so that what the GPU's clocks do is the same for all."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from cases import TOLERANCE, DecodeCase, PromptCase
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
    return graph.replay


def in_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median of the microseconds of each; what is queued is not waited for, so that the device is never idle."""
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    # The first round wakes the clocks.
    return {name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs[1:]) for name, pairs in events.items()}


def work(what: str, shape: Shape, us: float) -> dict[str, float]:
    if what == "decode":
        return {"GB_per_s": round(sum(shape.lengths) * TOKEN_BYTES / us * 1e-3)}
    return {"tflops": round(4 * HEAD_DIM * Q_HEADS * shape.tokens * (shape.tokens + 1) / 2 / us * 1e-6, 1)}


def measure(what: str, shape: Shape, kernels: dict, rounds: int) -> list[dict]:
    """A line for each kernel: its time and how far it is off, or why it has none."""
    case = DecodeCase(shape) if what == "decode" else PromptCase(shape)
    lines = {name: {"shape": str(shape), "kernel": name} for name in kernels}
    runs = {}
    for name, kernel in kernels.items():
        try:
            call = kernel.ready(case)
            off = lines[name]["relative_error"] = case.error(call(0))
            if off > TOLERANCE:
                raise ValueError(f"wrong: off by {off:.3g}, more than {TOLERANCE}")
            runs[name] = captured(call, case.copies) if what == "decode" else lambda call=call: call(0)
        except Exception as error:  # Whatever a library raises: the others are measured all the same.
            lines[name]["error"] = (str(error) or type(error).__name__).splitlines()[0]
    for name, us in in_turns(runs, rounds).items():
        us /= BURST if what == "decode" else 1
        lines[name] |= {"us": round(us, 2), **work(what, shape, us)}
    return list(lines.values())
