"""Texts that are there wherever Python is: prose and code that nobody wrote for this purpose."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from sluice.errors import InvalidArgument

PROSE, CODE = "prose", "code"
_CODE_CHARACTERS = 1_500_000


def text_of(name: str) -> str:
    """`prose`, `code`, or what a file has.
    @throws InvalidArgument if that is no text of UTF-8, or this Python came without it"""
    path = Path(name)
    if name == PROSE and not path.exists():
        return _prose()
    if name == CODE and not path.exists():
        return _code()
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} is no text of UTF-8: {error}") from None


def _prose() -> str:
    """The reference of the language Python, as `help()` shows it: 0.7 MB of English."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InvalidArgument(f"{PROSE}: this Python came without the texts of help(); name a file") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _code() -> str:
    """Modules of Python's standard library, in the order of their names, but for those that a machine makes."""
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        if len(text) < _CODE_CHARACTERS:
            text += path.read_text("utf-8", "replace")
    if not text:
        raise InvalidArgument(f"{CODE}: this Python came without the sources of its library; name a file")
    return text
