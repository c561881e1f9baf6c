"""A folder with prefixes that host memory has no room for: files of parked sequences, which are found by their tokens.

Two files belong to a prefix, MODEL-PREFIX.kv, as Engine.park writes it, and MODEL-PREFIX.ids, a line of JSON and the
tokens; MODEL is a digest of all that keys and values depend on, PREFIX one of the tokens and their salt. Several servers
may share a folder. Who writes or deletes holds the lock of the file `lock`; nobody waits for it. A file appears under
its name when all of it is on the disk, first the .kv and then the .ids. What was used longest ago, by the time of the
.kv, gives way first. Names of other models and of others' files are never touched. What cannot be opened, or is no
regular file, is left alone: only contents that are wrong are damage."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.serving.disk_files import OPTION, locked, made, opened, write

_VERSION = 1
_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{32}")
_ASIDE = re.compile(r"\.sluice-\w{6,8}")  # What is written to until it is whole.
_ABANDONED_S = 600.0  # A file that is written to has changed since; parked sessions are written under such names, too.
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

    def __init__(self, path: Path, most_bytes: int, model: str, option: str = OPTION) -> None:
        """`most_bytes`: of this model's files. `model`: all that keys and values depend on. `option`: what names the
        folder, for messages.
        @throws InvalidArgument if there is no such folder and none can be made, or nothing can be written to it"""
        self.path, self.model, self.option, self._most_bytes = path, model, option, most_bytes
        self._tag = hashlib.sha256(model.encode()).hexdigest()[:16]
        self._stored: dict[str, Stored] = {}
        self._by_mark: dict[str, set[str]] = {}
        self._seen: int | None = None  # When the folder had changed last.
        self._damaged: list[str] = []  # Names whose .ids are no such files.
        self._useless: set[str] = set()  # Names that are there, and nothing can be done with them.
        with made(path, option):
            self.look()
            with self.locked() as mine:
                if mine:
                    self.make_room(0)

    def locked(self) -> contextlib.AbstractContextManager[bool]:
        """As `locked` has it."""
        return locked(self.path)

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
        there = self._names("ids")
        self._useless &= there
        for name in self._stored.keys() - there:
            self.forget(name)
        for name in there - self._stored.keys() - self._useless:
            try:
                with opened(self.path / f"{name}.ids") as content:
                    head = json.loads(content.readline(HEAD_BYTES))
                if head["version"] == _VERSION:
                    self._add(Stored(name, int(head["tokens"]), tuple(map(str, head["marks"]))))
                else:
                    self._useless.add(name)
            except OSError:  # It is gone, another user's, or too many files are open: that is no damage.
                continue
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self._damaged.append(name)
                self._useless.add(name)

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
            with opened(self.path / f"{stored.name}.ids") as content:
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
        self._useless.discard(stored.name)
        for mark in stored.marks:
            self._by_mark.setdefault(mark, set()).add(stored.name)

    def used(self, name: str) -> None:
        """It is the newest now."""
        with contextlib.suppress(OSError):
            os.utime(self.file(name), follow_symlinks=False)

    def forget(self, name: str) -> None:
        """It is not found any more. Its files stay."""
        stored = self._stored.pop(name, None)
        for mark in stored.marks if stored is not None else ():
            self._by_mark[mark].discard(name)
            if not self._by_mark[mark]:
                del self._by_mark[mark]

    def leave(self, name: str) -> None:
        """It is not found any more as long as it is there."""
        self.forget(name)
        self._useless.add(name)

    def drop(self, name: str) -> None:
        """It is of no use. It is deleted unless another process writes just now, and perhaps this one anew."""
        self.leave(name)
        with self.locked() as mine:
            if mine:
                self.delete(name)

    def delete(self, name: str) -> None:
        """The lock is held."""
        self.forget(name)
        for each in (self.path / f"{name}.ids", self.file(name)):
            with contextlib.suppress(OSError):
                each.unlink()

    def make_room(self, bytes: int) -> bool:
        """Deletes what was used longest ago, until as many bytes may come; False if they are more than may ever be. The
        lock is held: halves of prefixes, which nobody writes then, are deleted, too."""
        self._clear()
        if bytes > self._most_bytes:
            return False
        files = self._files()
        left = sum(size for size, _, _ in files)
        for size, _, name in sorted(files, key=lambda each: each[1]):
            if left + bytes <= self._most_bytes:
                break
            self.delete(name)
            left -= size
        return True

    def _clear(self) -> None:
        """Deletes halves: what was being written, and one file of the two."""
        for each in self.path.iterdir():
            with contextlib.suppress(OSError):  # Such as another user's in a folder where all may write.
                if _ASIDE.fullmatch(each.name) and time.time() - each.lstat().st_mtime > _ABANDONED_S:
                    each.unlink()
        for name in self._names("kv") ^ self._names("ids"):
            self.delete(name)

    def _files(self) -> list[tuple[int, int, str]]:
        """Bytes, time of use and name of each prefix of this model."""
        found = []
        for name in self._names("kv"):
            with contextlib.suppress(OSError):  # Another process deletes, too.
                kv, ids = self.file(name).lstat(), (self.path / f"{name}.ids").lstat()
                found.append((kv.st_size + ids.st_size, kv.st_mtime_ns, name))
        return found

    def _names(self, kind: str) -> set[str]:
        """Of this model's files of a kind."""
        return {each.stem for each in self.path.glob(f"{self._tag}-*.{kind}") if _NAME.fullmatch(each.stem)}
