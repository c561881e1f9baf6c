"""What tests of processes wait for. Nothing here loads torch: processes that need none begin with it, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 600.0  #: Only what hangs takes as long, on a machine that does other work, too.


def wait_until(what: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, f"not within {seconds} s"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Of a process, by its main thread."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def alive(pid: int) -> bool:
    """False also of one that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
