"""How whatever was raised is told to the user of a command: one line, and an exit code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

from sluice.errors import Error, InternalError, NotFound, Unsupported

VARIABLE = "SLUICE_TRACEBACK"
_LONGEST = 2000  # Characters of a line: some errors tell all of what they did not understand.


def told(error: BaseException, reworded: Callable[[str], str] = str) -> tuple[str, int]:
    """The line, with its end, and the code. With SLUICE_TRACEBACK=1 the place comes before it."""
    line, code = _line(error)
    where = "".join(traceback.format_exception(error)) if os.environ.get(VARIABLE) == "1" else ""
    return f"{where}sluice: {one_line(reworded(line))}\n", code


def one_line(text: str) -> str:
    """Without breaks, marks that terminals obey and most of what is long, and of characters that can be written."""
    words = " ".join("".join(each if each.isprintable() or each.isspace() else "?" for each in text).split())
    return words if len(words) <= _LONGEST else f"{words[:_LONGEST // 2]} ... {words[-_LONGEST // 2:]}"


def _line(error: BaseException) -> tuple[str, int]:
    if isinstance(error, FileNotFoundError):
        return str(error), NotFound.exit_code
    if isinstance(error, Error):
        return str(error), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        return (f"{error}; pip install './python[serve]', in Sluice's sources, has what this command needs",
                Unsupported.exit_code)
    if isinstance(error, ImportError):
        return (f"a package that this command needs is there and cannot be loaded: {error}; install it anew",
                Unsupported.exit_code)
    if isinstance(error, MemoryError):
        return "this process gets no more memory; give it more, or ask for less", 1
    if isinstance(error, OSError):
        return str(error), 1
    return (f"a defect: {type(error).__name__}: {error}; please report it, with what {VARIABLE}=1 shows",
            InternalError.exit_code)
