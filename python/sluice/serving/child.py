"""What the engine's process does: it runs a serving loop for the web server, which is at the pipe's other end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from sluice._reporting import told
from sluice.errors import Error
from sluice.serving.ranks import Launch
from sluice.serving.requests import Event, Failed, Request

if TYPE_CHECKING:
    from sluice.serving.process import Settings

BEAT_S = 1.0  #: The process says something as often, if it is not in a forward,
_STATUS_S = 0.1  # and of itself, if it is busy.


def main(connection: Connection, settings: Settings) -> None:
    """The process. Lists of requests come in, lists of numbers to give up, and None or the pipe's end to end it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Of a group they are meant for the web server, which ends this one.
        signal.signal(number, signal.SIG_IGN)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loaded = threading.Event()
    threading.Thread(target=_receive, args=(connection, inbox, loaded), daemon=True).start()
    try:
        from sluice.serving.load import load_loop  # Takes seconds, and is of no use to the other side.

        loop, ready = load_loop(settings)
    except Exception as error:  # Whatever transformers raises: it is told, and that is all.
        line, code = told(error)
        _say(connection, Failed(line.removeprefix("sluice: ").rstrip(), code))
        return
    loaded.set()
    if _say(connection, ready):
        _serve(connection, inbox, loop)
    loop.close()
    if Launch.of_environment().ranks > 1:
        exit_of_rank(0)


def _serve(connection: Connection, inbox: queue.SimpleQueue[Any], loop: Any) -> None:
    told = 0.0
    while True:
        events: list[Event] = []
        for message in _messages(inbox, wait=loop.idle):
            if message is None:
                return
            for each in message:
                events.extend(_apply(loop, each))
        events.extend(loop.step())
        if loop.idle or time.monotonic() - told > _STATUS_S:
            status, told = loop.status(), time.monotonic()
        else:
            status = None
        if not _say(connection, (events, status)):
            return
        if loop.hopeless is not None:
            exit_at_once(f"sluice: the engine's process ends: {loop.hopeless}\n")


def _say(connection: Connection, what: object) -> bool:
    """Whether the other end is open."""
    try:
        connection.send(what)
    except OSError:
        return False
    return True


def _receive(connection: Connection, inbox: queue.SimpleQueue[Any], loaded: threading.Event) -> None:
    """A thread. While a model is loaded no other thread notices the end."""
    message: object = ()
    try:
        while message is not None:
            message = connection.recv()
            inbox.put(message)
    except (EOFError, OSError):
        inbox.put(None)
    except Exception as error:
        line, code = told(error)
        exit_at_once(line, code)
    if not loaded.is_set():
        exit_at_once()


def exit_at_once(why: str = "", code: int = 1) -> NoReturn:
    """Without what would wait for a device, or for other threads."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(why)
        sys.stderr.flush()
    os._exit(code)


def exit_of_rank(code: int) -> NoReturn:
    """A rank has done all it had to. Threads of torch's gloo let go of a collective's tensors a moment after its result
    is there, and outlive destroy_process_group() where the model refers to the group. One that is still at it when the
    interpreter ends would abort the process, and with it what torchrun had started."""
    sys.stdout.flush()
    exit_at_once(code=code)


def _messages(inbox: queue.SimpleQueue[Any], wait: bool) -> list[Any]:
    messages = []
    with contextlib.suppress(queue.Empty):
        if wait:
            messages.append(inbox.get(timeout=BEAT_S))
        while True:
            messages.append(inbox.get_nowait())
    return messages


def _apply(loop: Any, message: Request | int) -> list[Event]:
    if isinstance(message, int):
        loop.abort(message)
        return []
    try:
        loop.submit(message)
    except Error as error:
        return [Event(message.number, error=str(error))]
    return []
