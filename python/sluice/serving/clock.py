"""Deadlines of a process that runs: what it waited for while it was suspended has not come too late."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection

NAP_S = 0.5  #: Who waits reads the clock at least as often.
_GAP_S = 2.0  # The clock goes no further between two reads.

_lock = threading.Lock()
_ran = 0.0
_seen = time.monotonic()


def now() -> float:
    """Seconds in which this process ran: time.monotonic() without the spans in which it was suspended (SIGSTOP, Ctrl-Z,
    `docker pause`, a machine that was moved or slept). Nothing tells a process that it was, so this clock goes only
    while some thread reads it. On a machine so busy that naps take longer, deadlines come later."""
    global _ran, _seen
    with _lock:
        steady = time.monotonic()
        _ran += min(steady - _seen, _GAP_S)
        _seen = steady
        return _ran


def comes(connection: Connection, seconds: float | None) -> bool:
    """Whether there is something to read, or its end, within as many seconds; None: waits for ever."""
    if not seconds:
        return connection.poll(seconds)
    ends = now() + seconds
    while (left := ends - now()) > 0:
        if connection.poll(min(left, NAP_S)):
            return True
    return connection.poll(0)
