"""Each kernel in a process of its own: one that fails there, or ends the process, costs the others nothing."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import NamedTuple

import kernels
import torch
from shapes import Shape
from timing import measure

# Forked processes need not import torch anew. The parent must not touch CUDA: what is forked after that cannot use it.
FORK = multiprocessing.get_context("fork")


class Task(NamedTuple):
    what: str
    kernel: str
    fa3: str | None
    rounds: int


class Kind(NamedTuple):
    """What is measured, and on what."""
    version: str | None = None  # None: the kernel is missing
    gpu: str | None = None
    missing: str | None = None


def answer(task: Task, shapes: list[Shape], to: Connection) -> None:
    """In the process of the kernel: what it is, then a line for each shape."""
    torch.set_num_threads(1)  # A forked process has none of its parent's threads.
    if not torch.cuda.is_available():
        to.send(Kind())
        return
    gpu = torch.cuda.get_device_name()
    found, missing = kernels.available(task.what, task.kernel, task.fa3)
    if missing:
        to.send(Kind(None, gpu, missing[task.kernel]))
        return
    kernel = found[task.kernel]
    to.send(Kind(kernel.version, gpu))
    for shape in shapes:
        to.send(measure(task.what, shape, task.kernel, kernel, task.rounds))
        # Raises if the device was lost to an error: nothing more is to be had from this process.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def answers(task: Task, shapes: list[Shape], limit: float) -> tuple[list, str]:
    """All that one process answers, and how it ended."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=answer, args=(task, shapes, send))
    process.start()
    send.close()  # Else its end would not be seen.
    got = []
    try:
        while receive.poll(limit):
            got.append(receive.recv())
        process.kill()
        process.join()
        return got, f"no answer in {limit:g} s"
    except EOFError:
        process.join()
    code = process.exitcode
    return got, f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}"


def measure_apart(task: Task, shapes: list[Shape], limit: float) -> tuple[Kind, list[dict]]:
    """A line for each shape, none if the kernel is missing. A process that ends early is followed by another for the shapes
    that are left; `limit` is how many seconds each shape, and getting started, may take."""
    kind, lines = Kind(), []
    while len(lines) < len(shapes):
        got, end = answers(task, shapes[len(lines):], limit)
        if got:
            kind = got[0]
            if kind.version is None:
                break
        lines += got[1:]
        # An error of the last line may be what the process ended of.
        if len(lines) < len(shapes) and "error" not in (got or [{}])[-1]:
            lines.append({"shape": str(shapes[len(lines)]), "kernel": task.kernel, "error": end})
    return kind, lines
