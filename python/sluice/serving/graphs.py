"""Forwards of decoded tokens alone, at a few fixed sizes, so that CUDA graphs can be replayed for every token."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch


class Padding(NamedTuple):
    """What a forward is made for."""

    rows: int
    max_tokens: int  #: of its longest sequence


Compute = Callable[[Padding, torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""Ids [rows], positions [rows] and whether the engine attends, which is false where nothing is planned; returns logits
[rows, vocabulary]."""


class Staging:
    """Whole numbers on their way to a device, always at the same place there. They are written to pinned memory and
    follow in one asynchronous copy."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._here = torch.zeros(capacity, dtype=torch.long, device="cpu", pin_memory=cuda)
        self._there = torch.zeros(capacity, dtype=torch.long, device=device) if cuda else self._here
        self._numbers = self._here.numpy()
        self._copied = torch.cuda.Event() if cuda else None

    def places(self, *sizes: int) -> tuple[torch.Tensor, ...]:
        """Where columns of these sizes lie on the device, behind each other."""
        return self._there[: sum(sizes)].split(sizes)

    def put(self, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Brings columns to their places, on the current stream."""
        if self._copied is not None:
            self._copied.synchronize()  # After a forward that was given up the newest copy may be under way.
        end = 0
        for column in columns:
            first, end = end, end + len(column)
            self._numbers[first:end] = column
        if self._copied is not None:
            self._there[:end].copy_(self._here[:end], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._there.device))
        return self.places(*map(len, columns))


class Recorder(Protocol):
    """Makes of a forward what can be run again and again."""

    def record(self, warm_up: Callable[[], None], forward: Callable[[], None]) -> Callable[[], None]:
        """`warm_up` is the same without the engine. Nothing is planned."""


class Uncaptured:
    """Runs the forward itself. All that this leaves out of CudaGraphs is CUDA."""

    def record(self, warm_up: Callable[[], None], forward: Callable[[], None]) -> Callable[[], None]:
        warm_up()
        return forward


class CudaGraphs:
    """Captures forwards in CUDA graphs that share their memory: one of them runs at a time, and none needs what another
    has left there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, warm_up: Callable[[], None], forward: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            try:
                self._stream.wait_stream(before)
                with torch.cuda.stream(self._stream):
                    # Libraries choose their kernels and take their memory at first calls, which must not be captured.
                    warm_up()
                    # What waits for the device cannot be captured. It is told here, where that leaves nothing behind:
                    # a capture that breaks off may leave memory in torch's allocator.
                    with _waits_are_errors():
                        warm_up()
                # Of this thread alone: the engine's threads may do what they like.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    forward()
                before.wait_stream(self._stream)
            except BaseException:
                _free_generator(self._device)
                raise
            finally:
                torch.cuda.set_stream(before)  # torch leaves another one behind where a capture breaks off.
        return graph.replay


def _free_generator(device: torch.device) -> None:
    """A capture that broke off keeps the device's random generator registered, and later draws would fail: a copy of
    its state takes its place."""
    generator = torch.cuda.default_generators[device.index or 0]
    with contextlib.suppress(RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())


def padded_rows(largest: int) -> tuple[int, ...]:
    """Powers of two, and `largest`."""
    return *(1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest), largest


def padded_tokens(longest: int, whole: int = 0) -> tuple[int, ...]:
    """4K, 16K, 64K, ..., and `longest`: what a forward takes to choose grows with the tokens that it is made for. And
    `whole`, if not 0: sequences of no more attend everything, without what it takes to choose."""
    sizes = {1 << bit for bit in range(12, longest.bit_length(), 2) if 1 << bit < longest} | {longest}
    return tuple(sorted(sizes | ({whole} if 0 < whole < longest else set())))


class PaddedForwards:
    """Forwards of decoded tokens, of so many rows and sequences of so many tokens as `padded_rows` and `padded_tokens`
    say. All of them read and write the same tensors."""

    def __init__(self, largest: Padding, staging: Staging, compute: Compute, recorder: Recorder,
                 whole: int = 0) -> None:
        """Records all sizes, the largest first, in whose memory the others have room; `whole` as for `padded_tokens`.
        Raises what the model, torch or the engine raises if one cannot be recorded."""
        self._staging, self._compute = staging, compute
        self._logits: torch.Tensor | None = None
        self._most_rows = largest.rows
        self._forwards: dict[Padding, Callable[[], None]] = {}
        self.sizes = tuple(Padding(rows, tokens) for tokens in padded_tokens(largest.max_tokens, whole)
                           for rows in padded_rows(largest.rows))
        for size in reversed(self.sizes):
            self._forwards[size] = recorder.record(lambda size=size: self._run(size, False),
                                                   lambda size=size: self._run(size, True))

    def size(self, rows: int, max_tokens: int) -> Padding | None:
        """The smallest that has room for these; None if none has."""
        return next((size for size in self.sizes if rows <= size.rows and max_tokens <= size.max_tokens), None)

    @torch.inference_mode()
    def run(self, size: Padding, ids: Sequence[int], positions: Sequence[int], kept: Sequence[int]) -> torch.Tensor:
        """A forward that has been planned for a bucket of this size, on the current stream: the logits [kept,
        vocabulary] in f32, which are good until the next run."""
        padding = [0] * (size.rows - len(ids))
        self._staging.put([*ids, *padding], [*positions, *padding])
        self._forwards[size]()
        assert self._logits is not None
        kept = list(kept)
        return self._logits[: len(kept)] if kept == list(range(len(kept))) else self._logits[kept]

    @torch.inference_mode()
    def _run(self, size: Padding, attends: bool) -> None:
        logits = self._compute(size, *self._staging.places(size.rows, size.rows), attends)
        if self._logits is None:
            self._logits = torch.empty(self._most_rows, logits.shape[-1], dtype=torch.float32, device=logits.device)
        self._logits[: size.rows].copy_(logits)


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    """Whatever has the host wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That this finds most of them, not all.
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
