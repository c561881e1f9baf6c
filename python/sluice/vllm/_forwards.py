"""Sequences of an engine for the requests of vLLM, and the forwards that are under way.

A step of vLLM is one forward:

    bring, known, expect    of prompts, when vLLM schedules the step
    start(ended)     requests that have ended or lost their memory give up their sequences
    plan(rows)       once, when vLLM builds its metadata
    attend(...)      once for each layer; after an error the model runs on, with attention of 0
    stop()           the model has run
    failed()         the requests of forwards that came to nothing, which vLLM is to be told of

Up to `ahead` steps are planned before the one at hand has been finished, as asynchronous scheduling wants. What happens
at a step is known of an older one then, and a sequence ends when the last forward with it has been finished.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.engine import Engine
from sluice.errors import Error, InternalError, OutOfCapacity
from sluice.options import Bucket, Features, PlanItem, bucket_tokens
from sluice.serving.tier import DiskTier


@dataclass(frozen=True)
class Rows:
    """New tokens of a request, consecutive rows of a forward."""

    request: str
    tokens: int
    first: int  #: position of the first one
    prefill: bool  #: a chunk of a prompt, or of what was answered before the request was preempted


@dataclass(frozen=True)
class Prompt:
    """What a request begins with."""

    ids: Sequence[int]
    salt: int  #: what keys and values depend on besides the ids
    stored: bool = False  #: a disk may have it: ids and salt say all that keys and values depend on, for good


@dataclass
class _Flight:
    """A forward that is under way."""

    number: int
    requests: list[str]
    sequences: list[int]


@dataclass
class _Sequence:
    number: int
    tokens: int = 0  #: with those of forwards that are under way
    prompt: Prompt | None = None  #: None: its tokens have no names


class Forwards:
    """Not to be used by two threads at once."""

    def __init__(self, engine: Engine, policy: str, *, ahead: int = 0, goes_on: bool = True,
                 graphs: bool = False, disk: DiskTier | None = None) -> None:
        """`engine` is for this policy alone, and has no bound of `prefix_bytes`. `goes_on`: a
        forward that fails ends its requests, by `failed`; else its error is raised. `graphs`: forwards of single tokens
        may be replayed from graphs, which are captured for the longest context. `disk`: has prefixes that host memory
        has no room for, and the engine one sequence more than requests have."""
        self.engine, self._policy, self._ahead, self._goes_on = engine, policy, ahead, goes_on
        self._graphs = graphs
        self.disk = disk  #: it may be left, and then has nothing of prompts and is given nothing
        self._sequences: dict[str, _Sequence] = {}
        self._prompts: dict[str, Prompt] = {}  # Of requests whose first tokens are in the next step.
        self._promised = False  # Whether one of these begins with known tokens.
        self._leaving: list[_Sequence] = []  # Without a request; forwards under way may have them.
        self._flights: deque[_Flight] = deque()
        self._failed: set[str] = set()
        self._broken: set[str] = set()  # Those that failed and have not ended yet.
        self._running = False
        # Of this step:
        self._rows: list[Rows] = []
        self._bucket: Bucket | None = None
        self._flight: _Flight | None = None
        self._error: Exception | None = None
        self.preemptions = 0  #: sequences that ended before their requests
        self.most_under_way = 0  #: forwards at once

    @property
    def running(self) -> bool:
        """Whether a step has been started and not stopped: what vLLM builds metadata for is that, and no trial."""
        return self._running

    @property
    def planned(self) -> Bucket | None:
        """The bucket of this step, if it is planned."""
        return self._bucket

    @property
    def promised(self) -> bool:
        """Whether a request of the next step begins with known tokens: until it has, none may give way to others."""
        return self._promised

    def __len__(self) -> int:
        """Requests that have sequences."""
        return len(self._sequences)

    def bring(self, prompt: Prompt) -> bool:
        """Has the engine know what the disk has of a prompt. False: it has something, which is not read while known
        tokens are `promised`."""
        if self.disk is None or not prompt.stored:
            return True
        try:
            found = self.disk.find(prompt.ids, prompt.salt)
            if found is None:
                return True
            if self._promised:
                return False
            if len(self._sequences) + len(self._leaving) >= self.engine.options.sequences:
                self._settle(0)
            self.disk.read(found)
        except Error:
            if not self._goes_on:
                raise  # Else an engine that has failed says so to a forward.
        return True

    def known(self, prompt: Prompt) -> int:
        """How many of a prompt's first tokens need not come; whole pages, and never the last token."""
        try:
            return self.engine.match_prefix(self._policy, prompt.ids, prompt.salt)
        except Error:
            if not self._goes_on:
                raise
            return 0  # An engine that has failed says so to a forward, whose requests end.

    def expect(self, request: str, prompt: Prompt, known: int) -> None:
        """In the next step a request begins, with the tokens behind so many that are known now. Others may begin like
        it then."""
        self._prompts[request] = prompt
        self._promised = self._promised or known > 0

    def start(self, finished: Iterable[str], preempted: Iterable[str] = ()) -> None:
        """A step. Finished requests are not heard of again; preempted ones begin again with all their tokens."""
        for request in preempted:
            self.preemptions += self._leave(request)
        for request in finished:
            self._leave(request)
            self._broken.discard(request)
        self._settle(self._ahead)
        self._running, self._rows, self._bucket, self._flight, self._error = True, [], None, None, None

    def plan(self, rows: Sequence[Rows], padded: int, stream: Any = None) -> Bucket:
        """Plans the step's forward. `padded`: its rows, with padding, if all are single tokens: then they choose what
        they attend, also those of prompts, as a graph has rows of one kind."""
        self._rows = list(rows)
        self._bucket = bucket = self._bucket_of(rows, padded)
        try:
            items = [PlanItem(self._sequence_of(each), each.tokens, each.prefill) for each in rows]
            try:
                number = self.engine.plan(items, bucket, stream)
            except OutOfCapacity:
                # Room that vLLM has counted may still be held by sequences that leave.
                self._settle(0)
                number = self.engine.plan(items, bucket, stream)
        except Error as error:
            self._fail(error)
            return bucket
        self._flight = _Flight(number, [each.request for each in rows], [item.sequence for item in items])
        self._flights.append(self._flight)
        self.most_under_way = max(self.most_under_way, len(self._flights))
        for each in rows:
            self._sequences[each.request].tokens += each.tokens
        return bucket

    def attend(self, bucket: Bucket, layer: int, q: Any, k: Any, v: Any, out: Any, lse: Any,
               stream: Any = None) -> None:
        """The next layer of the step's forward."""
        if self._error is not None:
            out.zero_()
            return
        try:
            self.engine.attend(bucket, layer, q, k, v, out, lse, stream=stream)
        except Error as error:
            out.zero_()
            self._fail(error)

    def stop(self, raised: bool = False) -> None:
        """The model has run, or `raised` an error of its own."""
        self._running = False
        self._prompts.clear()  # A forward that failed may have left some.
        self._promised = False
        if self._error is not None or raised:
            self._give_up()
        if self.disk is not None:
            with contextlib.suppress(Error):
                self.disk.spill()  # Beside the forward, where there is a GPU.

    def failed(self) -> set[str]:
        """Requests of forwards that came to nothing since this was called last. Without forwards ahead the newest is
        awaited."""
        if not self._ahead:
            self._settle(0)
        failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Gives the engine's memory back."""
        self.engine.close()

    def _bucket_of(self, rows: Sequence[Rows], padded: int) -> Bucket:
        made = self.engine.options
        tokens = bucket_tokens(max((each.first + each.tokens for each in rows), default=1), made)
        chunks = [each.tokens for each in rows if each.prefill]
        single = sum(each.tokens for each in rows if not each.prefill)
        if not chunks:
            # Whether a graph is replayed is decided later.
            return Bucket(decode_rows=max(padded, single), features=made.largest.features,
                          max_tokens=made.largest.max_tokens if self._graphs else tokens)
        return Bucket(decode_rows=single, prefill_rows=sum(chunks), prefills=len(chunks), max_tokens=tokens,
                      features=made.largest.features if single else Features.NONE)

    def _sequence_of(self, rows: Rows) -> int:
        """The engine's number for a request, which has the tokens before these."""
        kept, prompt = self._sequences.get(rows.request), self._prompts.pop(rows.request, None)
        if rows.request in self._broken:
            # vLLM planned it before it was told of the failure: whatever comes of it is thrown away.
            self._leave(rows.request)
            kept = prompt = None
        elif kept is None and prompt is not None:
            kept = self._begin_with(rows, prompt)
        elif (kept.tokens if kept is not None else 0) != rows.first:
            raise InternalError(f"request {rows.request} goes on at token {rows.first}, and the engine has "
                                f"{kept.tokens if kept is not None else 0}")
        if kept is None:
            self._sequences[rows.request] = kept = _Sequence(self._begin())
        return kept.number

    def _begin_with(self, rows: Rows, prompt: Prompt) -> _Sequence | None:
        """A request whose first tokens are known. None: some of them have been forgotten, and it fails."""
        # No more are found than vLLM was told of, though more may be known by now: it gives the others. The policy
        # wants the queries of the last tokens of what is asked for.
        begun = prompt.ids[: rows.first + self.engine.sizes.prompt_queries]
        number = self._begin(begun, prompt.salt)
        self._sequences[rows.request] = kept = _Sequence(number, self.engine.tokens(number), prompt)
        if kept.tokens != rows.first:
            if not self._goes_on:
                raise InternalError(f"request {rows.request} was to begin with {rows.first} known tokens, and the "
                                    f"engine has {kept.tokens}")
            self._end_of([rows.request])
            return None
        self.engine.name_tokens(number, len(begun), prompt.ids[len(begun) :])
        return kept

    def _begin(self, *prompt: Any) -> int:
        try:
            return self.engine.begin(self._policy, *prompt)
        except OutOfCapacity:
            self._settle(0)
            return self.engine.begin(self._policy, *prompt)

    def _leave(self, request: str) -> bool:
        """Gives up a request's sequence, if it has one."""
        kept = self._sequences.pop(request, None)
        if kept is not None:
            self._leaving.append(kept)
        return kept is not None

    def _settle(self, left: int) -> None:
        """Finishes forwards until so many are under way, and ends the sequences that leave and are in none of those."""
        while len(self._flights) > left:
            flight = self._flights[0]
            try:
                self.engine.finish(flight.number)
                self._flights.popleft()
            except Error as error:
                self._lose(error)
        busy = {sequence for flight in self._flights for sequence in flight.sequences}
        left, self._leaving = self._leaving, [each for each in self._leaving if each.number in busy]
        for each in left:
            if each.number not in busy:
                self._end(each)

    def _end(self, kept: _Sequence) -> None:
        """What is known of its tokens stays for others, until memory is needed."""
        tokens = self.engine.tokens(kept.number)
        self.engine.end(kept.number)
        if self.disk is not None and kept.prompt is not None and kept.prompt.stored:
            with contextlib.suppress(Error):
                self.disk.let_go(kept.prompt.ids[:tokens], kept.prompt.salt)

    def _lose(self, error: Error) -> None:
        """The oldest forward did not get to its end, and so none behind it has what it builds on."""
        lost = [request for flight in self._flights for request in flight.requests]
        with contextlib.suppress(Error):  # It was taken back when it failed.
            self.engine.cancel(self._flights[0].number)
        self._flights.clear()
        self._end_of(lost)
        if not self._goes_on:
            raise error

    def _fail(self, error: Exception) -> None:
        """This step's forward has failed."""
        self._error = error
        if not self._goes_on:
            raise error

    def _give_up(self) -> None:
        """Takes the step's forward back, and lets its requests fail."""
        if self._flight is not None:
            with contextlib.suppress(Error):  # It was taken back when it failed.
                self.engine.cancel(self._flight.number)
            self._flights.remove(self._flight)
        self._end_of(each.request for each in self._rows)

    def _end_of(self, requests: Iterable[str]) -> None:
        for request in set(requests) - self._broken:
            self._failed.add(request)
            self._broken.add(request)
            self._leave(request)
