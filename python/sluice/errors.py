"""Errors, one class for each status of the C interface."""

from __future__ import annotations

from typing import ClassVar


class Error(Exception):
    """A call failed and changed nothing, unless it says otherwise. The text names cause and remedy."""

    status: ClassVar[int] = -1

    exit_code: ClassVar[int] = 1
    """Of a command that ends with it: as `sluice` has it, 2 for wrong usage or input, 3 for what is unsupported here."""


class InvalidArgument(Error, ValueError):
    """An argument, option, tensor or call order breaks its documented range."""

    status = 1
    exit_code = 2


class OutOfCapacity(Error):
    """A pool sized at creation is full, or this process gets no more memory or threads."""

    status = 2


class Unsupported(Error):
    """Valid, but this build or device has no kernel for it."""

    status = 3
    exit_code = 3


class NotFound(Error, LookupError):
    """No such sequence."""

    status = 4
    exit_code = 2


class Corrupt(Error):
    """A file contradicts itself."""

    status = 5
    exit_code = 2


class ReadWriteError(Error):
    """The operating system refused to read or write."""

    status = 6


class DeviceError(Error):
    """Work of the device failed; the text carries the cause."""

    status = 7


class Timeout(Error, TimeoutError):
    """A wait passed its deadline; it may be repeated."""

    status = 8


class InternalError(Error):
    """A defect of the library; please report it with its text."""

    status = 9


BY_STATUS: dict[int, type[Error]] = {
    kind.status: kind
    for kind in (InvalidArgument, OutOfCapacity, Unsupported, NotFound, Corrupt, ReadWriteError, DeviceError, Timeout,
                 InternalError)
}
