"""A folder with prefixes that host memory has no room for: files of parked sequences, which are found by their tokens.

Two files belong to a prefix, MODEL-PREFIX.kv, as Engine.park writes it, and MODEL-PREFIX.ids, a line of JSON and the
tokens; MODEL is a digest of all that keys and values depend on, PREFIX one of the tokens and their salt. Several servers
may share a folder. Who writes or deletes holds the lock of the file `lock`; nobody waits for it. A file appears under
its name when all of it is on the disk, first the .kv and then the .ids. What was used longest ago, by the time of the
.kv, gives way first. Names of other models and of others' files are never touched."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import InvalidArgument

_VERSION = 1
_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{32}")
_ASIDE = re.compile(r"\.sluice-\w{6,8}")  # What is written to until it is whole.
_SECRET_BYTES, _SECRET_S = 32, 1.0
HEAD_BYTES = 4096  #: the line of an .ids has fewer
_MOST_COMPARED = 8  # Prefixes that begin like a prompt.


def page_digests(ids: Sequence[int], page_tokens: int, salt: int) -> list[bytes]:
    """Of all pages of these tokens that are full: each of the page and all before it."""
    digest, found = hashlib.blake2b(salt.to_bytes(8, "little"), digest_size=16), []
    packed = array.array("i", ids).tobytes()
    for end in range(4 * page_tokens, len(packed) + 1, 4 * page_tokens):
        digest.update(packed[end - 4 * page_tokens : end])
        found.append(digest.digest())
    return found


def _marks(digests: Sequence[bytes]) -> list[str]:
    """Behind 1, 2, 4, ... pages and behind all: by one of these a prompt finds a prefix that it shares most of."""
    pages = {len(digests)}
    pages.update(1 << each for each in range(len(digests).bit_length()) if 1 << each <= len(digests))
    return [digests[each - 1].hex() for each in sorted(pages)]


@dataclass(frozen=True)
class Stored:
    """A prefix in the folder."""

    name: str
    tokens: int
    marks: tuple[str, ...]


class Folder:
    """The files of one model in a folder."""

    def __init__(self, path: Path, most_bytes: int, model: str) -> None:
        """`most_bytes`: of this model's files. `model`: all that keys and values depend on.
        @throws InvalidArgument if there is no such folder and none can be made, or nothing can be written to it"""
        self.path, self.model, self._most_bytes = path, model, most_bytes
        self._tag = hashlib.sha256(model.encode()).hexdigest()[:16]
        self._stored: dict[str, Stored] = {}
        self._by_mark: dict[str, set[str]] = {}
        self._seen: int | None = None  # When the folder had changed last.
        self._damaged: list[str] = []  # Names whose .ids cannot be read.
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.locked():
                pass
        except OSError as error:
            raise InvalidArgument(f"--disk {path}: {error.strerror or error}; give a folder that may be written to") \
                from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process may write and delete, as no other does so now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(self.path / "lock", flags, 0o600)  # It stays: to delete it would be a race.
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(lock)

    def file(self, name: str) -> Path:
        """With keys and values."""
        return self.path / f"{name}.kv"

    def name_of(self, digests: Sequence[bytes]) -> str:
        return f"{self._tag}-{digests[-1].hex()}"

    def has(self, name: str) -> bool:
        return name in self._stored

    def bytes(self) -> int:
        return sum(size for size, _, _ in self._files())

    def others(self) -> int:
        """How many prefixes of other models there are."""
        found = (_NAME.fullmatch(each.stem) for each in self.path.glob("*.ids"))
        return sum(each is not None and each[1] != self._tag for each in found)

    def look(self) -> None:
        """Notices what others have written and deleted."""
        changed = os.stat(self.path).st_mtime_ns
        if changed == self._seen:
            return
        self._seen = changed
        there = {each.stem: each for each in self.path.glob(f"{self._tag}-*.ids") if _NAME.fullmatch(each.stem)}
        for name in self._stored.keys() - there.keys():
            self.forget(name)
        for name in there.keys() - self._stored.keys():
            try:
                with there[name].open("rb") as content:
                    head = json.loads(content.readline(HEAD_BYTES))
                if head["version"] == _VERSION:
                    self._add(Stored(name, int(head["tokens"]), tuple(map(str, head["marks"]))))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError):
                self._damaged.append(name)

    def take_damaged(self) -> list[str]:
        """Names of prefixes that cannot be read, as the newest looks found them."""
        found, self._damaged = self._damaged, []
        return found

    def find(self, ids: Sequence[int], digests: Sequence[bytes]) -> tuple[str, int, int] | None:
        """A prefix that has many of these tokens, from the first one on: its name, how many begin alike, and how many
        it has."""
        names = next(filter(None, (self._by_mark.get(digest.hex()) for digest in reversed(digests))), set())
        few = sorted((self._stored[name] for name in names), key=lambda stored: stored.tokens)[:_MOST_COMPARED]
        alike, name = max(((self._alike(stored, ids), stored.name) for stored in few), default=(0, ""))
        return (name, alike, self._stored[name].tokens) if alike else None

    def _alike(self, stored: Stored, ids: Sequence[int]) -> int:
        given, kept = array.array("i", ids[: stored.tokens]), array.array("i")
        try:
            with (self.path / f"{stored.name}.ids").open("rb") as content:
                content.readline(HEAD_BYTES)
                kept.frombytes(content.read(4 * len(given)))
        except (OSError, ValueError):
            return 0
        if kept == given:
            return len(given)
        return next((at for at, (one, other) in enumerate(zip(kept, given)) if one != other), min(len(kept), len(given)))

    def add(self, name: str, ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Keys and values have been written; from now on they are found. The lock is held."""
        stored = Stored(name, len(ids), tuple(_marks(digests)))
        head = {"version": _VERSION, "tokens": stored.tokens, "marks": stored.marks}
        write(self.path / f"{name}.ids", json.dumps(head).encode() + b"\n" + array.array("i", ids).tobytes())
        self._add(stored)
        for each in digests[:-1]:  # A shorter one is a part of it.
            if self.has(older := self.name_of([each])):
                self.delete(older)

    def _add(self, stored: Stored) -> None:
        self._stored[stored.name] = stored
        for mark in stored.marks:
            self._by_mark.setdefault(mark, set()).add(stored.name)

    def used(self, name: str) -> None:
        """It is the newest now."""
        with contextlib.suppress(OSError):
            os.utime(self.file(name))

    def forget(self, name: str) -> None:
        """It is not found any more. Its files stay."""
        stored = self._stored.pop(name, None)
        for mark in stored.marks if stored is not None else ():
            self._by_mark[mark].discard(name)
            if not self._by_mark[mark]:
                del self._by_mark[mark]

    def delete(self, name: str) -> None:
        self.forget(name)
        for each in (self.path / f"{name}.ids", self.file(name)):
            with contextlib.suppress(OSError):
                each.unlink()

    def make_room(self, bytes: int) -> bool:
        """Deletes what was used longest ago, until as many bytes may come; False if they are more than may ever be. The
        lock is held: halves of prefixes, which nobody writes then, are deleted, too."""
        for each in self.path.iterdir():
            if _ASIDE.fullmatch(each.name):
                each.unlink(missing_ok=True)
        if bytes > self._most_bytes:
            return False
        files = self._files()
        for _, _, name in files:
            if not (self.path / f"{name}.ids").exists():
                self.delete(name)
        left = sum(size for size, _, _ in files)
        for size, _, name in sorted(files, key=lambda each: each[1]):
            if left + bytes <= self._most_bytes:
                break
            self.delete(name)
            left -= size
        return True

    def _files(self) -> list[tuple[int, int, str]]:
        """Bytes, time of use and name of each prefix of this model."""
        found = []
        for each in self.path.glob(f"{self._tag}-*.kv"):
            with contextlib.suppress(FileNotFoundError):
                told = each.stat()
                ids = self.path / f"{each.stem}.ids"
                found.append((told.st_size + (ids.stat().st_size if ids.exists() else 0), told.st_mtime_ns, each.stem))
        return found


def write(file: Path, content: bytes) -> None:
    """Whole or not at all, and for the user alone."""
    handle, aside = tempfile.mkstemp(dir=file.parent, prefix=".sluice-", suffix="")
    try:
        with open(handle, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(aside, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def secret_of(path: Path) -> bytes:
    """By which servers that share a folder tell whose prompts may begin alike; made by the first of them.
    @throws InvalidArgument if it cannot be read or made"""
    file, ends = path / "secret", time.monotonic() + _SECRET_S
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # Another server was first.
            made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(made, "wb") as content:
                content.write(secrets.token_bytes(_SECRET_BYTES))
        while len(found := file.read_bytes()) < _SECRET_BYTES and time.monotonic() < ends:
            time.sleep(0.01)  # Who made it is about to write it.
    except OSError as error:
        raise InvalidArgument(f"--disk {path}: {error.strerror or error}; give a folder that may be written to") \
            from None
    if len(found) != _SECRET_BYTES:
        raise InvalidArgument(f"--disk {path}: {file} is not of a server; give another folder, or remove this file")
    return found
