"""Decides which requests run, and what the next forward has."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Any

from sluice import _structs as structs
from sluice import figures
from sluice._closing import Closing
from sluice._library import library
from sluice.engine import Engine
from sluice.errors import InvalidArgument
from sluice.figures import AdmissionUse
from sluice.options import _unsigned


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    """What is shared out."""

    pages: int  #: host memory, in pages of all layers and KV heads; or blocks, see page_blocks
    decode_rows: int = 1  #: of a forward; as many requests run at once, at most
    prefill_rows: int = 512  #: rows of chunks of prompts in a forward
    prefills: int = 1  #: chunks of prompts in a forward
    sequences: int = 16  #: requests that run at once, at most
    cpu_sequences: int = 0  #: of them, those whose policies choose on the CPU
    page_tokens: int = 16
    max_tokens: int = 0  #: of a sequence, at most; 0: all that `pages` hold
    watermark_pages: int = 0  #: that the admission of a request leaves free while others run
    near_pages: int = 0  #: device memory that all that run share, in pages; 0: no bound
    near_pages_per_sequence: int = 0  #: of these, what each takes, at most; 0: all pages that it has
    slowdown: float = 0.0
    """Beside chunks of prompts, rows that decode come this many times as slowly as alone on the average, by what
    `complete` was told; 0: chunks have all prefill_rows in every forward. Else in [1, 1000]."""
    page_blocks: int = 1  #: of those that `pages` counts, what each page of a sequence takes
    window_blocks: int = 0  #: and each of its newest `window_pages` beside that: of layers with windows
    window_pages: int = 0
    window_resting_pages: int = 0  #: of these, what a sequence of which no forward is under way holds at least

    @staticmethod
    def of(engine: Engine) -> AdmissionOptions:
        """For an engine: its largest bucket, sequences, and the pages that its host_bytes hold."""
        struct = structs.AdmissionOptions()
        engine._call(library().admission_options_of, byref(struct))
        return AdmissionOptions._from_struct(struct)

    @staticmethod
    def _from_struct(struct: structs.AdmissionOptions) -> AdmissionOptions:
        return figures.read(AdmissionOptions, struct)

    def _to_struct(self) -> structs.AdmissionOptions:
        kinds = dict(structs.AdmissionOptions._fields_)
        return structs.AdmissionOptions(**{
            name: value if kinds[name] is ctypes.c_double else _unsigned(name, value, 8 * ctypes.sizeof(kinds[name]))
            for name, value in self.__dict__.items()})


@dataclass(frozen=True)
class Changes:
    """Which requests lose their memory, and which get some. No request is in both."""

    preempt: list[int]  #: youngest first: end their sequences before others begin
    admit: list[int]  #: oldest first: begin a sequence for each


@dataclass(frozen=True)
class TurnItem:
    """Tokens of one request, consecutive rows of a forward."""

    request: int
    tokens: int
    first: int  #: position of the first one among the prompt's tokens and the request's own
    prefill: bool  #: a chunk of a prompt
    output: bool  #: the last row's output is the request's next token


class Admission(Closing):
    """First come, first served: those that run are always the oldest of all requests that live. It knows no engine and
    no clock, and the same calls have the same answers. A turn of a server:

        changes = admission.admit()
        for request in changes.preempt:
            engine.end(sequences[request])  # comes again with all its tokens so far as its prompt
        for request in changes.admit:
            sequences[request] = engine.begin(policy, ids[request])
            admission.begun(request, engine.tokens(sequences[request]))
        items = admission.next()  # none: nothing to do until a request is submitted
        ...  # plan, attend and finish them, in this order; draw a token for each that has an output
        for request in admission.complete():  # have all their tokens; or fail(), if the forward came to nothing
            engine.end(sequences[request])

    Every request that runs and has its prompt has one row in every forward; chunks of prompts share the rows for them,
    the oldest first, and end where pages do. The youngest is preempted when there is no page for one that decodes.
    sluice/admission.hpp says more. Calls from several threads take turns."""

    def __init__(self, options: AdmissionOptions) -> None:
        self._handle: ctypes.c_void_p | None = None
        # A signal's handler may interrupt a call of the same thread, hence RLock.
        self._lock = threading.RLock()
        self._library = lib = library()
        handle = ctypes.c_void_p()
        lib.check(lib.admission_create(byref(options._to_struct()), byref(handle)))
        self._handle = handle
        made = structs.AdmissionOptions()
        lib.check(lib.admission_get_options(handle, byref(made)))
        self.options: AdmissionOptions = AdmissionOptions._from_struct(made)
        """As it was created with, max_tokens being what there is room for."""
        self._most = min(made.decode_rows, made.sequences)

    def close(self) -> None:
        with self._lock:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._library.admission_destroy(handle)

    def submit(self, request: int, prompt_tokens: int, max_new_tokens: int, on_cpu: bool = False) -> None:
        """A request that waits from now on. `max_new_tokens` 0: its prompt is computed, and that is all. `on_cpu`: its
        policy chooses on the CPU. OutOfCapacity if it could not run to its end though it were alone."""
        struct = structs.Request(prompt_tokens=_unsigned("prompt_tokens", prompt_tokens),
                                 max_new_tokens=_unsigned("max_new_tokens", max_new_tokens), on_cpu=bool(on_cpu),
                                 id=_unsigned("request", request, 64))
        self._call(self._library.admission_submit, byref(struct))

    def admit(self, held_pages: int | None = None) -> Changes:
        """Makes room for the next forward of those that run, then admits those that wait, as many as there is room for.
        `held_pages`: pages that the sequences of those that run hold by the engine's count, if no others are alive:
        memory().far_pages_used in pages. What they share can be given to others then; it needs `begun` to be right."""
        held = None if held_pages is None else byref(ctypes.c_uint64(_unsigned("held_pages", held_pages, 64)))
        preempt, admit = self._list(), self._list()
        self._call(self._library.admission_admit, held, *preempt, *admit)
        return Changes(preempt=_ids(preempt), admit=_ids(admit))

    def begun(self, request: int, cached_tokens: int) -> None:
        """The sequence of a request that was admitted began with as many tokens of its prompt."""
        self._call(self._library.admission_begun, _unsigned("request", request, 64),
                   _unsigned("cached_tokens", cached_tokens))

    def preempt(self, request: int) -> list[int]:
        """Preempts a request and all younger ones that run, as the engine had no room for it. They are returned,
        youngest first; none if it waits. Nothing is admitted until one of those that still run has ended. If it is the
        oldest, it waits for no other request: end it, or it is admitted again at once."""
        ids = self._list()
        self._call(self._library.admission_preempt, _unsigned("request", request, 64), *ids)
        return _ids(ids)

    def next(self, chunk_tokens: int = 0) -> list[TurnItem]:
        """The next forward, after `admit`: rows that decode, then chunks of prompts. If there are any, a turn is open
        until it is completed or has failed. `chunk_tokens`: rows of prompts, at most; 0: as `slowdown` has it."""
        items = (structs.TurnItem * self._most)()
        for struct in items:
            struct.struct_size = ctypes.sizeof(structs.TurnItem)
        count = ctypes.c_size_t(self._most)
        self._call(self._library.admission_next, _unsigned("chunk_tokens", chunk_tokens), items, byref(count))
        return [TurnItem(item.request, item.tokens, item.first, bool(item.prefill), bool(item.output))
                for item in items[: count.value]]

    def complete(self, seconds: float = 0.0) -> list[int]:
        """The turn's forward has been finished. Requests that have all their tokens are returned, and are gone.
        `seconds`: that it took, a model's own work included; 0: it was not measured."""
        ids = self._list()
        self._call(self._library.admission_complete, seconds, *ids)
        return _ids(ids)

    def fail(self) -> None:
        """It came to nothing: the same rows are to come again."""
        self._call(self._library.admission_fail)

    def end(self, request: int) -> None:
        """A request has all that it wants, or is wanted no longer. May be called while a turn is open; end its sequence
        before the next `admit`."""
        self._call(self._library.admission_end, _unsigned("request", request, 64))

    def running(self) -> list[int]:
        """Requests that run, oldest first."""
        ids = self._list()
        self._call(self._library.admission_running, *ids)
        return _ids(ids)

    def use(self) -> AdmissionUse:
        """What is shared out now."""
        struct = structs.AdmissionUse()
        self._call(self._library.admission_get_use, byref(struct))
        return figures.read(AdmissionUse, struct)

    def _list(self) -> tuple[Any, Any]:
        return (ctypes.c_uint64 * self._most)(), ctypes.pointer(ctypes.c_size_t(self._most))

    def _call(self, function: Callable[..., int], *arguments: object) -> None:
        with self._lock:
            if self._handle is None:
                raise InvalidArgument("the admission is closed; create another one")
            self._library.check(function(self._handle, *arguments))


def _ids(written: tuple[Any, Any]) -> list[int]:
    ids, count = written
    return ids[: count.contents.value]
