"""What servers that share a folder do with its files: a lock, a secret, and files that are whole or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sluice.errors import InvalidArgument

OPTION = "--disk"  #: the server's, that names a folder
_SECRET_BYTES, _SECRET_S = 32, 1.0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether this process may write and delete in a folder, as no other does so now. @throws OSError"""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path / "lock", flags, 0o600)  # It stays: to delete it would be a race.
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)


@contextlib.contextmanager
def made(path: Path, option: str = OPTION) -> Iterator[None]:
    """Makes a folder and what it needs. `option`: by which messages call it.
    @throws InvalidArgument"""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & stat.S_IWOTH:
            raise InvalidArgument(f"{option} {path}: every user of this machine may write to it; give a folder of your "
                                  f"own, or chmod o-w {path}")
        yield
    except OSError as error:
        raise InvalidArgument(f"{option} {path}: {error.strerror or error}; give a folder that may be written to") \
            from None


@contextlib.contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """A regular file of this name: a pipe would keep its reader waiting, and a link may lead anywhere."""
    with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        yield content


def write(file: Path, content: bytes) -> None:
    """Whole or not at all, and for the user alone."""
    handle, aside = tempfile.mkstemp(dir=file.parent, prefix=".sluice-", suffix="")
    try:
        with open(handle, "wb") as new:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
        os.replace(aside, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def secret_of(path: Path) -> bytes:
    """By which servers that share a folder tell whose prompts may begin alike; made by the first of them.
    @throws InvalidArgument if it cannot be read or made"""
    file, ends = path / "secret", time.monotonic() + _SECRET_S
    with made(path):
        while True:
            with contextlib.suppress(FileNotFoundError), opened(file) as content:
                found = content.read(_SECRET_BYTES + 1)
                break
            with locked(path) as mine:
                if mine and not os.path.lexists(file):
                    write(file, secrets.token_bytes(_SECRET_BYTES))
            if time.monotonic() > ends:
                raise InvalidArgument(f"{OPTION} {path}: a process holds {path / 'lock'} and makes no {file}; end it, or "
                                      "give another folder")
            time.sleep(0.01)  # Who holds the lock is about to write it.
    if len(found) != _SECRET_BYTES:
        raise InvalidArgument(f"{OPTION} {path}: {file} is not of a server; give another folder, or remove this file")
    return found
