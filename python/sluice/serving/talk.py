"""The commands run and chat: answers of one loop to one user."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from sluice._reporting import one_line
from sluice.errors import Error, InvalidArgument
from sluice.serving.arguments import settings_of
from sluice.serving.child import exit_at_once
from sluice.serving.ranks import Launch
from sluice.serving.requests import Request, Sampling
from sluice.serving.sessions import Conversation, Session, locked
from sluice.serving.template import rendered
from sluice.serving.terminal import Lines, Took


class Teller:
    """Answers of one loop to one user."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from sluice.serving.load import load_loop, load_tokenizer

        self._loop, ready = load_loop(settings_of(arguments))
        self.session = arguments.session and Session(arguments.session, self._loop.model, arguments.model,
                                                       arguments.adapter)
        """Of --session, or None."""

        self.tokenizer = load_tokenizer(arguments.model, arguments.trust_remote_code)
        said = {name: getattr(arguments, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
        said = {name: value for name, value in said.items() if value is not None}
        self._sampling = Sampling(**{**ready.defaults, "seed": secrets.randbits(63), **said})
        self._number = 0
        self.limit = ready.limit
        """Tokens of prompt and answer."""

        self.took: Took | None = None
        """The newest answer."""

    def close(self) -> None:
        self._loop.close()

    def keep(self, ids: list[int]) -> None:
        """The session has this prompt's beginning, and all of it when that has been read."""
        if self.session:
            self.session.resume(ids)
            self._loop.on_prompt = self.session.park

    def answer(self, ids: list[int]) -> Iterator[str]:
        """The answer's text in pieces. It is given up with the iterator."""
        self._number += 1
        self.took, progress = Took(time.monotonic(), len(ids)), Progress()
        self._loop.submit(Request(self._number, ids, self._sampling))
        try:
            while not self._loop.idle:
                memory = self._loop.model.engine.memory()  # With the last token it is given back.
                with _uninterrupted():
                    events = self._loop.step()
                if events and events[-1].error is None:
                    self.took.take(events[-1].count, memory)
                if not events:
                    progress.tell(*self._loop.progress(self._number))
                for event in events:
                    progress.clear()
                    if event.error:
                        if self._loop.lost is not None:  # What torch has under way may never end.
                            exit_at_once(f"sluice: {self._loop.lost}\n")
                        raise Error(event.error)
                    yield event.text
        finally:
            progress.clear()
            self._loop.abort(self._number)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM come after it: a forward that is cut leaves the engine with half of it. A second one comes at
    once."""
    before: dict[int, Any] = {}
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        if came:
            restore()
            signal.raise_signal(number)
        came.append(number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        restore()
    for number in came[:1]:
        signal.raise_signal(number)


class Terminated(SystemExit):
    """SIGTERM came."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """In it SIGTERM raises Terminated, so that what is kept is written. A second one ends the process at once."""
    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Progress:
    """Of a prompt that is read: a line on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._shown, self._began, self._first = False, time.monotonic(), 0

    def tell(self, done: int, whole: int) -> None:
        if not sys.stderr.isatty():
            return
        self._first = self._first or done
        new = done - self._first
        left = ""
        if new > 0:
            seconds = int((time.monotonic() - self._began) / new * (whole - done))
            left = f", {seconds // 60}:{seconds % 60:02} left"
        else:
            self._began = time.monotonic()
        print(f"\rreading the prompt: {done:,} of {whole:,} tokens{left}\033[K", end="", file=sys.stderr, flush=True)
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._shown = False


def run(arguments: argparse.Namespace) -> int:
    prompt = arguments.prompt
    if prompt is None:
        try:
            prompt = sys.stdin.read() if str(arguments.file) == "-" else arguments.file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"{arguments.file} is no text of UTF-8: {error}") from None
    check_session(arguments)
    with locked(arguments.session), contextlib.closing(Teller(arguments)) as teller:
        ids = teller.tokenizer.encode(prompt)
        teller.keep(ids)
        for piece in teller.answer(ids):
            print(piece, end="", flush=True)
        print()
        return int(bool(teller.session and teller.session.failed))


def chat(arguments: argparse.Namespace) -> int:
    check_session(arguments)
    with _terminable(), locked(arguments.session):
        said = Conversation(arguments.session, arguments.system)
        with contextlib.closing(Teller(arguments)) as teller:
            if not getattr(teller.tokenizer, "chat_template", None):
                raise InvalidArgument("this model's tokenizer has no chat template; use run")
            if teller.session:
                teller.session.resume(None)
            try:
                converse(teller, said)
            finally:
                keep(teller, said)
            return int(said.failed or bool(teller.session and teller.session.failed))


def keep(teller: Teller, said: Conversation) -> None:
    """The session has all that was said, and its keys and values."""
    if len(said.messages) <= said.kept:
        return
    said.save()
    if teller.session:
        # Templates are others' code; what they raise here must not hide why the chat has ended.
        try:
            teller.session.park_known(ids_of(teller, said.messages, False))
        except Exception as error:
            teller.session.was_not_written(error)


def check_session(arguments: argparse.Namespace) -> None:
    """Refuses what --session does not go with, before anything is loaded."""
    if arguments.session is None:
        return
    if arguments.no_prefix_cache:
        raise InvalidArgument("--session: what it has is found as known prompts are; leave --no-prefix-cache out")
    if Launch.of_environment().ranks > 1:
        raise InvalidArgument("--session: a model that several processes share has none; leave it out")
    if arguments.session.is_dir() or not arguments.session.name:
        raise InvalidArgument(f"--session: {arguments.session} is a folder; name a file")
    if not arguments.session.parent.is_dir():
        raise InvalidArgument(f"--session: there is no folder {arguments.session.parent}")


def converse(teller: Teller, said: Conversation) -> None:
    """Until there are no more lines."""
    lines = Lines()
    while True:
        try:
            line = lines.next(teller.took)
            line.encode()
        except EOFError:
            return
        except UnicodeError as error:
            raise InvalidArgument(f"standard input is no text of UTF-8: {error}") from None
        if not line.strip():
            continue
        said.add("user", line)
        try:
            ids = conversation(teller, said.messages, said.kept)
            said.add("assistant", "")
            for piece in teller.answer(ids):
                said.tell(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:  # The answer is given up, and what there is of it stays.
            if said.messages[-1]["role"] == "user":
                said.add("assistant", "")
        except Error as error:
            print(f"sluice: {error}", file=sys.stderr, flush=True)
            if said.messages[-1]["role"] == "user" or not said.messages[-1]["content"]:
                said.take_back()
                continue
        print()
        said.save()
        if lines.of_a_person:
            print(teller.took.line(), file=sys.stderr, flush=True)


def ids_of(teller: Teller, messages: list[dict[str, str]], asks: bool = True) -> list[int]:
    """Tokens of messages; if it `asks`, up to where an answer begins.
    @throws InvalidArgument of messages that the model's template does not take"""
    try:
        text = rendered(teller.tokenizer, messages, asks)
    except InvalidArgument:
        raise
    except Exception as error:  # Templates are programs, and refuse messages by raising what they like.
        raise InvalidArgument("the model's chat template does not take these messages: "
                              f"{type(error).__name__}: {one_line(str(error))}") from None
    return teller.tokenizer.encode(text, add_special_tokens=False)


def conversation(teller: Teller, messages: list[dict[str, str]], kept: int) -> list[int]:
    """Tokens of messages, without the oldest turns where the context has no room; the first `kept` stay.
    @throws InvalidArgument if the last turn alone is too long"""
    fits = list(messages)
    while True:
        ids = ids_of(teller, fits)
        if len(ids) < teller.limit:
            break
        if len(fits) <= kept + 1:
            raise InvalidArgument(f"this has {len(ids)} tokens, and prompt and answer together may have "
                                  f"{teller.limit}; write less")
        del fits[kept: kept + 2]  # A question and its answer.
    if left_out := (len(messages) - len(fits)) // 2:
        messages[:] = fits
        print(f"sluice: the context is full; the oldest turns ({left_out}) are left out from here on",
              file=sys.stderr, flush=True)
    return ids
