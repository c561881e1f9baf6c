"""Continuous batching: in every forward each sequence decodes a token or reads a part of its prompt."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from sluice.admission import Admission, AdmissionOptions, TurnItem
from sluice.errors import Error, InternalError, InvalidArgument, OutOfCapacity
from sluice.serving.behind import Behind
from sluice.serving.guides import Guides
from sluice.serving.live import Live
from sluice.serving.model import PackedModel
from sluice.serving.requests import Chosen, Event, Request, Status
from sluice.serving.rows import Rows
from sluice.serving.sampling import choose

if TYPE_CHECKING:
    from sluice.serving.tier import DiskTier

_HOPELESS = 3  # Turns in a row whose forwards failed, after which a loop is no longer worth asking.


class Loop:
    """Serves requests with one model. One thread calls it; `step` runs one forward.

    A forward that fails is repeated once; if it fails again its requests end with the error, and others go on. What is
    told of a request has always passed `Engine.finish`, and a forward that has is never repeated."""

    def __init__(self, model: PackedModel, tokenizer: Any, *, end_ids: Iterable[int] = (), prefix: bool = True,
                 slowdown: float = 0, disk: DiskTier | None = None) -> None:
        """`end_ids`: tokens with which the model ends an answer. `prefix`: prompts begin with what is known of them.
        `slowdown`: as AdmissionOptions has it. `disk`: has what is known and memory has no room for."""
        self._model, self._engine, self._tokenizer = model, model.engine, tokenizer
        self._end_ids, self._prefix, self._disk = frozenset(end_ids), prefix, disk
        self._guides = Guides(tokenizer, model.vocabulary, self._end_ids)
        self._live: dict[int, Live] = {}
        self._behind = Behind()
        shares = dataclasses.replace(AdmissionOptions.of(self._engine), slowdown=slowdown)
        self._admission = Admission(shares)
        self._page_bytes = self._engine.memory().far_pages // shares.pages
        self._on_cpu = self._engine.sizes.cpu_sequences > 0
        self.limit: int = min(model.context, self._admission.options.max_tokens)
        """Tokens of prompt and answer together, at most."""

        self.on_prompt: Callable[[int], None] | None = None
        """Called with a request's sequence when that has the prompt's tokens, and no others yet."""

        self._events: list[Event] = []
        self._forwards = self._failed = self._preemptions = 0
        self._took_s = 0.0  # The newest forward.
        self._in_vain, self._error = 0, ""  # Turns in a row whose forwards failed, and the newest error.

    def submit(self, request: Request) -> None:
        """@throws InvalidArgument if the prompt is empty or too long, or a token is none of the model's"""
        if not request.prompt:
            raise InvalidArgument("the prompt has no tokens; it must have one")
        strange = [token for token in (*request.prompt, *request.sampling.logit_bias)
                   if not 0 <= token < self._model.vocabulary]
        if strange:
            raise InvalidArgument(f"token {strange[0]} is none of the model's, which are in [0, "
                                  f"{self._model.vocabulary - 1}]")
        if len(request.prompt) >= self.limit:
            raise InvalidArgument(f"the prompt has {len(request.prompt)} tokens, and prompt and answer together may "
                                  f"have {self.limit}; shorten it")
        leader = self._live.get(request.after)
        if leader is not None and leader.past.answered == 0 and self._prefix:
            self._behind.add(request)
            return
        room = self.limit - len(request.prompt)
        most = request.sampling.max_tokens
        guide = None if request.sampling.guide is None else self._guides.of(request.sampling.guide)
        self._admission.submit(request.number, len(request.prompt), room if most is None else min(max(most, 1), room),
                               self._on_cpu)
        self._live[request.number] = Live(request, self._tokenizer, self._end_ids, guide)

    def abort(self, number: int) -> None:
        """Ends a request, whose memory is free when this returns. There are no more events of it."""
        live = self._live.get(number)
        if live is not None:
            self._admission.end(number)
            self._drop(live)
        self._behind.remove(number)

    def close(self) -> None:
        """Gives up what has not ended, and all memory; the model's other ranks end."""
        self._model.close()

    @property
    def model(self) -> PackedModel:
        return self._model

    @property
    def idle(self) -> bool:
        return not self._live

    @property
    def hopeless(self) -> str | None:
        """Why it is to be made anew, in a new process: several turns in a row have failed, as they do after an error
        that a device keeps, or a rank is lost. None if not."""
        if self.lost is not None:
            return self.lost
        if self._in_vain < _HOPELESS:
            return None
        return f"the forwards of {self._in_vain} turns in a row have failed; the newest error: {self._error}"

    @property
    def lost(self) -> str | None:
        """Why no forward can run any more; None if one can."""
        return self._model.lost

    def progress(self, number: int) -> tuple[int, int]:
        """Tokens of a request's prompt that have been read, and all."""
        live = self._live.get(number)
        if live is None or live.sequence is None:
            return 0, 0 if live is None else len(live.request.prompt)
        whole = len(live.request.prompt)
        return min(self._engine.tokens(live.sequence), whole), whole

    def status(self) -> Status:
        running = sum(live.sequence is not None for live in self._live.values())
        waiting = len(self._live) - running + len(self._behind)
        return Status(running, waiting, self._forwards, self._failed, self._preemptions, self._model.graph_captures,
                      self._model.graph_replays, self._engine.memory(), dataclasses.asdict(self._engine.stats()),
                      {} if self._disk is None else dict(self._disk.figures))

    def step(self) -> list[Event]:
        """Runs a forward, if there is something to do, and tells what came of it."""
        changes = self._admission.admit(self._model.held_bytes() // self._page_bytes)
        for number in changes.preempt:
            self._rest(self._live[number])
        for number in changes.admit:
            self._begin(self._live[number])
        items = self._admission.next()
        if items:
            self._turn(items)
        if self._disk is not None:
            self._disk.spill()
        events, self._events = self._events, []
        return events

    def _begin(self, live: Live) -> None:
        try:
            live.named = self._prefix and not live.unread(0, len(live.ids))
            if live.named and self._disk is not None:
                self._disk.bring(live.ids, live.request.salt)
            live.sequence = self._model.begin(live.ids if live.named else None, live.request.salt)
        except Error as error:
            self._fail(live, error)
            return
        found = self._engine.tokens(live.sequence)
        if found:
            self._admission.begun(live.request.number, found)
        if live.cached is None:
            live.cached = found

    def _rest(self, live: Live) -> None:
        """Gives a sequence's memory back. It begins again with all tokens it has, as a prompt."""
        self._preemptions += 1
        self._let_go(live)

    def _let_go(self, live: Live) -> None:
        """Of a sequence. What is known of it stays for others, until its memory is needed."""
        tokens = 0 if self._disk is None else self._engine.tokens(live.sequence)
        self._model.end(live.sequence)
        live.sequence = None
        if self._disk is not None and live.named:
            self._disk.let_go(live.ids[:tokens], live.request.salt)

    def _turn(self, items: list[TurnItem]) -> None:
        lives = [self._live[item.request] for item in items]
        if moved := self._moved(items):
            self._admission.fail()
            for live in moved:
                self._fail(live, InternalError("the engine does not have the tokens that this request has"))
            return
        try:
            logits = self._twice(items)
        except OutOfCapacity as error:
            self._admission.fail()
            self._make_room(error)
        except Exception as error:  # Models are others' code, and raise what they like.
            self._in_vain, self._error = self._in_vain + 1, f"{type(error).__name__}: {error}"
            self._admission.fail()
            for live in lives:
                self._fail(live, error)
        except BaseException:  # Interrupted. What was under way has been taken back.
            self._admission.fail()
            raise
        else:
            self._in_vain = 0
            self._continue([live for live, item in zip(lives, items) if item.output], logits)

    def _continue(self, lives: list[Live], logits: torch.Tensor) -> None:
        """The next tokens of requests. The engine has the forward's tokens: whatever comes, it is not repeated."""
        error: Exception | None = None
        chosen: list[Chosen | None] = [None] * len(lives)
        for _ in range(2):
            began = time.monotonic()
            try:
                chosen, error = choose(logits, [live.past for live in lives]) if lives else [], None
                break
            except Exception as failed:  # Such as no memory for what is sorted.
                error = failed
        gone = self._admission.complete(self._took_s + time.monotonic() - began)
        for live, token in zip(lives, chosen):
            if error is None:
                self._take(live, token, live.request.number in gone)
            else:
                self._fail(live, error, live.request.number in gone)

    def _moved(self, items: list[TurnItem]) -> list[Live]:
        """Requests of whose tokens the engine has others than those before their items."""
        lives = [self._live[item.request] for item in items]
        return [live for live, item in zip(lives, items) if self._engine.tokens(live.sequence) != item.first]

    def _twice(self, items: list[TurnItem]) -> torch.Tensor:
        try:
            return self._forward(items)
        except OutOfCapacity:
            raise
        except Exception:
            self._failed += 1
            if self._moved(items):
                raise
        try:
            return self._forward(items)
        except Exception:
            self._failed += 1
            raise

    def _make_room(self, error: OutOfCapacity) -> None:
        """The engine has no room for a forward, whatever admission counted."""
        running = self._admission.running()
        if len(running) == 1:
            self._fail(self._live[running[0]], error)
            return
        for number in self._admission.preempt(running[-1]):
            self._rest(self._live[number])

    def _forward(self, items: list[TurnItem]) -> torch.Tensor:
        """The logits of items that have an output. If it fails, the engine has none of the items' tokens."""
        lives = [self._live[item.request] for item in items]
        for item, live in zip(items, lives):
            if live.named:
                # Names of a prompt again, too: a forward that failed has taken them along.
                self._model.name_tokens(live.sequence, item.first, live.ids[item.first : item.first + item.tokens])
        rows = Rows(items, lives)
        self._forwards += 1
        began = time.monotonic()
        number, logits = self._model.run(rows.plan, rows.ids, rows.kept)
        self._model.finish(number)
        self._took_s = time.monotonic() - began
        return rows.outputs(logits)

    def _take(self, live: Live, chosen: Chosen | None, gone: bool) -> None:
        """A new token of an answer. `gone`: admission has let go of the request."""
        guide = live.past.guide
        if chosen is None or guide is not None and guide.error is not None:
            self._fail(live, InternalError("the model's logits are not finite numbers" if chosen is None else
                                           f"the answer cannot follow its grammar: {guide.error}"), gone)
            return
        number = live.request.number
        event = live.take(chosen, self.limit)
        if live.past.answered <= 1:
            if self.on_prompt is not None:
                self.on_prompt(live.sequence)
            self._follow(number, True)
        self._events.append(event)
        if event.finish and not gone:
            self._admission.end(number)
        if event.finish:
            self._drop(live)

    def _fail(self, live: Live, error: Exception, gone: bool = False) -> None:
        number = live.request.number
        self._events.append(Event(number, count=live.past.answered, error=f"{type(error).__name__}: {error}"))
        if not gone:
            self._admission.end(number)
        self._drop(live)

    def _drop(self, live: Live) -> None:
        number = live.request.number
        del self._live[number]
        if live.sequence is not None:
            self._let_go(live)
        self._follow(number, live.past.answered > 0)

    def _follow(self, number: int, read: bool) -> None:
        """Those that waited for this request's prompt come."""
        for request in self._behind.take(number, read):
            self.submit(request)
