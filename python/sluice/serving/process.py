"""The engine in a process of its own: the web server answers while a forward runs, and lives if the engine does not."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import multiprocessing
import queue
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from sluice.errors import Error
from sluice.serving import clock
from sluice.serving.child import BEAT_S, main as _main
from sluice.serving.requests import Event, Failed, Request, Sampling, Status


@dataclass(frozen=True)
class Settings:
    """Of a model and its engine."""

    model: str  #: a folder, or a name that transformers knows
    _: KW_ONLY
    policy: str = "sluice"
    host_bytes: int = 8 << 30
    context: int | None = None  #: tokens of prompt and answer together, at most; None: the model's
    sequences: int = 16  #: requests that run at once
    prefill_rows: int = 2048  #: tokens of prompts in a forward
    device: str = "cpu"
    dtype: str = "auto"  #: of the model: "auto", "float32", "float16" or "bfloat16"
    trust_remote_code: bool = False  #: Python files of the model's may run
    slowdown: float = 0  #: of answers beside prompts, as AdmissionOptions has it
    graphs: str = "auto"  #: "auto", "on" or "off": CUDA graphs of forwards, as PackedModel has it
    compile: bool = False  #: the model is compiled by torch
    prefix: bool = True  #: prompts begin with what is known of them
    adapter: str | None = None  #: a folder of peft's
    disk: Path | None = None  #: a folder for prefixes that host memory has no room for
    disk_bytes: int = 0  #: and what they may take there
    silence_s: float = 600  #: a process that says nothing for as long, longer than a forward takes, is lost
    options: dict[str, Any] = field(default_factory=dict)  #: others of EngineOptions


@dataclass(frozen=True)
class Ready:
    """What the process has loaded."""

    limit: int  #: tokens of prompt and answer together
    defaults: dict[str, Any]  #: sampling, as the model's generation_config has it
    vocabulary: int
    near_bytes: int = 0  #: device memory for near keys and values


class EngineLost(Error):
    """The engine's process has ended, or does not answer."""


class CannotStart(EngineLost):
    """The process has not become an engine."""

    def __init__(self, why: str, exit_code: int) -> None:
        super().__init__(why)
        self.exit_code = exit_code


class EngineProcess:
    """A process with a serving loop, and the asyncio side of what it tells. After `ready` all methods but `close` and
    `close_in` belong to one event loop."""

    def __init__(self, settings: Settings, start_timeout_s: float = 1800) -> None:
        """`start_timeout_s`: to load the model."""
        self.settings, self._start_timeout_s, self._silence_s = settings, start_timeout_s, settings.silence_s
        self._numbers = itertools.count(1)
        self._outbox: queue.SimpleQueue[list[Request] | list[int] | None] = queue.SimpleQueue()
        self._queues: dict[int, asyncio.Queue[Event]] = {}
        self._lost: str | None = None
        self._closes: float | None = None
        self._ends = False
        self._heard = clock.now()
        self.status = Status()
        """The newest that it told."""

    def start(self) -> None:
        """Begins to load the model."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, self.settings), name="sluice-engine", daemon=True)
        self._process.start()
        atexit.register(self._process.kill)  # Else multiprocessing would send SIGTERM, which it ignores, and wait.
        theirs.close()  # Or its end would not be noticed.
        threading.Thread(target=self._tell, name="sluice-requests", daemon=True).start()

    def ready(self) -> Ready:
        """Waits until the model is loaded.
        @throws CannotStart, EngineLost with the reason if it cannot be served"""
        try:
            if not clock.comes(self._connection, self._start_timeout_s):
                raise EngineLost(f"the model was not loaded within {self._start_timeout_s:g} s")
            said = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise EngineLost(self._exit()) from None
        if isinstance(said, Failed):
            raise CannotStart(said.why, said.exit_code)
        self._heard = clock.now()
        return said

    def listen(self) -> None:
        """Called once, by the event loop that answers are for."""
        loop = asyncio.get_running_loop()

        def tick() -> None:  # So that the clock goes while nobody asks.
            clock.now()
            loop.call_later(clock.NAP_S, tick)

        tick()
        threading.Thread(target=self._listen, args=(loop,), name="sluice-events", daemon=True).start()

    def close(self, timeout_s: float = 10) -> None:
        """Ends the process: it is told to, and killed if it does not."""
        self._ends = True
        self._outbox.put(None)
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout_s)
        atexit.unregister(self._process.kill)

    @property
    def lost(self) -> str | None:
        """Why there are no more answers; None if there are."""
        now = clock.now()
        if self._closes is not None and now > self._closes:
            return "the server is being shut down"
        if self._lost is None and now - self._heard > self._silence_s:
            return f"the engine has said nothing for {self._silence_s:g} s"
        return self._lost

    def close_in(self, seconds: float) -> None:
        """Answers that have not ended by then end with an error."""
        self._closes = clock.now() + seconds

    @property
    def outstanding(self) -> int:
        """Answers that the engine has not ended, however much of them has been taken."""
        return len(self._queues)

    def answer(self, prompts: Sequence[list[int]], samplings: Sequence[Sequence[Sampling]], salt: int = 0) -> Answers:
        """Begins answers to prompts, for each as many as there are samplings. `salt`: see Request.
        @throws EngineLost"""
        return Answers(self, prompts, samplings, salt)

    def _tell(self) -> None:
        """A thread, as a process that does not read stops who writes to it."""
        message: object = ()
        try:
            while message is not None:
                message = self._outbox.get()
                self._connection.send(message)
        except OSError:
            pass  # The process has ended, as the other thread notices.
        except Exception as error:
            self._lose(f"the engine could not be told of a request: {type(error).__name__}: {error}")

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        why = ""
        try:
            while not loop.is_closed():
                loop.call_soon_threadsafe(self._take, *self._connection.recv())
        except (EOFError, OSError):
            self._process.join(5)
            why = self._exit()
        except Exception as error:
            why = f"what the engine said could not be read: {type(error).__name__}: {error}"
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # It is now.
                loop.call_soon_threadsafe(self._lose, why)

    def _take(self, events: list[Event], status: Status | None) -> None:
        self._heard, self.status = clock.now(), status or self.status
        for event in events:
            ended = event.finish or event.error
            news = self._queues.pop(event.number, None) if ended else self._queues.get(event.number)
            if news is not None:
                news.put_nowait(event)

    def _lose(self, why: str) -> None:
        if self._lost is None and not self._ends:
            print(f"sluice: {why}; requests are answered with 503 until the server is started again", file=sys.stderr,
                  flush=True)
        self._lost = self._lost or why

    def _exit(self) -> str:
        return f"the engine's process has ended with exit code {self._process.exitcode}"


class Answers:
    """Answers that an engine gives. Events have the numbers of answers in order: the first prompt's come first."""

    def __init__(self, engine: EngineProcess, prompts: Sequence[list[int]],
                 samplings: Sequence[Sequence[Sampling]], salt: int = 0) -> None:
        requests: list[Request] = []
        for prompt, wants in zip(prompts, samplings):
            first = None
            for sampling in wants:
                requests.append(Request(next(engine._numbers), prompt, sampling, first, salt))
                first = first or requests[-1].number
        self._engine, self._news = engine, asyncio.Queue[Event]()
        self._numbers = {request.number: index for index, request in enumerate(requests)}
        if engine.lost is not None:
            raise EngineLost(engine.lost)
        engine._outbox.put(requests)
        engine._queues.update(dict.fromkeys(self._numbers, self._news))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """@throws EngineLost"""
        left = len(self._numbers)
        while left:
            event = await self._next()
            if event.finish or event.error:
                left -= 1
            yield self._numbers[event.number], event

    async def _next(self) -> Event:
        """@throws EngineLost"""
        if not self._news.empty():
            return self._news.get_nowait()
        news = asyncio.ensure_future(self._news.get())
        try:
            while not news.done():
                if self._engine.lost is not None:
                    raise EngineLost(self._engine.lost)
                # Not wait_for(): up to Python 3.11 it forgets that it was cancelled if there is news at the same time.
                await asyncio.wait((news,), timeout=BEAT_S)
            return news.result()
        finally:
            news.cancel()

    def close(self) -> None:
        """Gives up those that have not ended."""
        left = [number for number in self._numbers if self._engine._queues.pop(number, None)]
        if left:
            self._engine._outbox.put(left)
