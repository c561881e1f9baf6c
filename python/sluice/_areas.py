"""Where sequences are parked: files by their names, and memory of whoever asks."""

from __future__ import annotations

import ctypes
import os
from typing import Any, TypeGuard, Union

from sluice.errors import InvalidArgument

Path = Union[str, "os.PathLike[str]"]
Buffer = Any
"""What has the buffer protocol: bytes, bytearray, memoryview, mmap, an array."""


def is_path(place: Path | Buffer) -> TypeGuard[Path]:
    return isinstance(place, (str, os.PathLike))


def file_name(path: Path) -> bytes:
    name = os.fsencode(path)
    if b"\0" in name:
        raise InvalidArgument(f"{path!r} is no name of a file: it has a null character")
    return name


def writable(area: Buffer) -> tuple[Any, int]:
    """Its memory, and how many bytes that is."""
    view = _bytes_of(area)
    if view.readonly:
        raise InvalidArgument("a sequence is parked in a buffer that can be written to, such as a bytearray")
    return (ctypes.c_char * len(view)).from_buffer(view), len(view)


def readable(area: Buffer) -> tuple[Any, int]:
    """The same; a copy of what can only be read."""
    view = _bytes_of(area)
    if not view.readonly:
        return (ctypes.c_char * len(view)).from_buffer(view), len(view)
    return (area if isinstance(area, bytes) else bytes(view)), len(view)


def _bytes_of(area: Buffer) -> memoryview:
    try:
        return memoryview(area).cast("B")
    except TypeError as reason:
        raise InvalidArgument(f"a sequence is parked in a file's name or one row of bytes: {reason}") from reason
