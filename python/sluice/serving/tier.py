"""Prefixes go from host memory to a folder before they give way, and come back for prompts that begin with them."""

from __future__ import annotations

import array
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice.admission import AdmissionOptions
from sluice.engine import Engine
from sluice.errors import Corrupt, Error, InvalidArgument, NotFound, OutOfCapacity
from sluice.options import EngineOptions
from sluice.serving.disk import HEAD_BYTES, Folder, page_digests

_SHARE = 4  # Prefixes are written while less than one in so many of the pages are free or written already.
_CHOICE = ("prefill_min_budget", "prefill_max_budget", "prefill_lines", "prefill_gamma", "prefill_tau")
_STEP_S = 0.5  # That a step writes for, and one prefix more.
_PAUSE_S = 60.0  # After a disk has refused,
_AGAIN_S = 0.1  # or another process writes, or as many sequences live as may.


def kind_of(options: EngineOptions, signature: str) -> str:
    """A model's signature with what else decides whether an engine of these options can use keys and values. Prompts
    that were read by another choice of blocks are none of its own."""
    chosen = [getattr(options, name) for name in _CHOICE] if options.prefill_mode != "full" else []
    return f"{signature}; keys and values {options.kv_dtype}; blocks {chosen}"


@dataclass(frozen=True)
class Found:
    """What the folder has of a prompt, and the engine has not."""

    name: str
    gain: int  #: tokens


def _print(text: str) -> None:
    print(f"sluice: {text}", file=sys.stderr, flush=True)


class DiskTier:
    """Of one engine, and the thread that plans its forwards. What it cannot do costs time, and no answer.

    The engine gives up first what was let go of first. So long as enough pages are free, or hold what is in the folder
    already, nothing is written; then all that is not, the oldest first. A conversation whose turns come before that is
    written once."""

    def __init__(self, engine: Engine, policy: str, folder: Folder, say: Callable[[str], None] = _print) -> None:
        """`policy`: of all sequences. `say`: is told what cannot be done."""
        self._engine, self._policy, self._folder, self._tell = engine, policy, folder, say
        self._page_tokens = self._engine.options.page_tokens
        self._block_bytes = self._engine.memory().far_pages // max(1, AdmissionOptions.of(self._engine).pages)
        # In host memory alone, by the digest of all full pages: tokens and salt. The one let go of last comes last.
        self._unwritten: OrderedDict[bytes, tuple[array.array[int], int]] = OrderedDict()
        self._written_bytes = self._evicted = 0  # What was cached when all of it had been written, and evicted till then.
        self._paused_until = self._again_at = 0.0
        self.figures = {"written": 0, "found": 0, "found_tokens": 0, "refused": 0, "bytes": folder.bytes()}
        """How many prefixes were written, came back, with how many tokens, and could not be written or read; and the bytes
        of this model's in the folder."""

        self._drop_damaged()
        if others := folder.others():
            self._say(f"{others} prefixes there are of other models, and stay")

    def bring(self, ids: Sequence[int], salt: int) -> None:
        """Has the engine know as much of a prompt as the folder has, if that is worth reading."""
        if (found := self.find(ids, salt)) is not None:
            self.read(found)

    def find(self, ids: Sequence[int], salt: int) -> Found | None:
        """What is worth reading of a prompt."""
        known = self._engine.match_prefix(self._policy, ids, salt)
        if len(ids) - known <= self._page_tokens or time.monotonic() < self._paused_until:
            return None
        try:
            self._folder.look()
            self._drop_damaged()
            name, alike, tokens = self._folder.find(ids, page_digests(ids, self._page_tokens, salt)) or ("", 0, 0)
        except OSError as error:
            self._refused(f"cannot be read: {error.strerror or error}")
            return None
        gain = alike - known
        return Found(name, gain) if gain >= self._page_tokens and 2 * gain >= tokens else None

    def read(self, found: Found) -> None:
        """Has the engine know it. What the engine knows of others may give way."""
        try:
            self._read(found.name, found.gain)
        except OSError as error:
            self._refused(f"cannot be read: {error.strerror or error}")

    def _read(self, name: str, gain: int) -> None:
        try:
            self._engine.end(self._engine.resume(self._folder.file(name), self._folder.model))
        except OutOfCapacity:
            return  # Others need the memory; the prompt is read.
        except NotFound:
            self._folder.drop(name)  # What is left of it.
        except Corrupt as error:
            self.figures["refused"] += 1
            self._say(f"{self._folder.file(name).name} is damaged and is deleted: {error}")
            self._folder.drop(name)
        except InvalidArgument as error:  # Such as of another version. That says nothing of the disk.
            self.figures["refused"] += 1
            self._say(f"{self._folder.file(name).name} is not read, and stays: {error}")
            self._folder.leave(name)
        except Error as error:
            self._refused(f"{self._folder.file(name).name} is not read: {error}")
            self._folder.leave(name)
        else:
            self._folder.used(name)
            self.figures["found"] += 1
            self.figures["found_tokens"] += gain

    def let_go(self, ids: Sequence[int], salt: int) -> None:
        """A sequence of these tokens, which have names, has been ended. Shorter ones that it begins with are part of
        it."""
        ids = ids[: self._engine.match_prefix(self._policy, [*ids, 0], salt)]
        digests = page_digests(ids, self._page_tokens, salt)
        if not digests:
            return
        for each in digests:
            self._unwritten.pop(each, None)
        if not self._folder.has(self._folder.name_of(digests)):
            self._unwritten[digests[-1]] = array.array("i", ids), salt
        self._forget_gone()
        self._again_at = 0.0  # A sequence fewer lives.

    def _forget_gone(self) -> None:
        """Of those let go of first, two for each that comes: where nothing can be written they must not grow."""
        for _ in range(2):
            ids, salt = next(iter(self._unwritten.values()), (None, 0))
            if ids is None or self._engine.match_prefix(self._policy, [*ids, 0], salt) == len(ids):
                return
            self._unwritten.popitem(last=False)

    def spill(self) -> None:
        """Writes what is about to give way, for a while."""
        now = time.monotonic()
        if not self._unwritten or now < max(self._paused_until, self._again_at) or not self._short():
            return
        try:
            with self._folder.locked() as mine:
                wrote = mine and self._write_until(now + _STEP_S)
            if wrote:
                self.figures["bytes"] = self._folder.bytes()
            else:
                self._again_at = now + _AGAIN_S
        except OSError as error:
            self._refused(f"cannot be written to: {error.strerror or error}")
        if not self._unwritten:
            self._written_bytes = self._engine.memory().far_pages_cached
            self._evicted = self._engine.stats().evicted_blocks

    def _write_until(self, ends: float) -> bool:
        """The oldest first; whether there was one that need not come again. The folder's lock is held."""
        before = len(self._unwritten)
        while self._unwritten and time.monotonic() < ends:
            if not self._write(*next(iter(self._unwritten.values()))):
                break
            self._unwritten.popitem(last=False)
        return len(self._unwritten) < before

    def _short(self) -> bool:
        """Whether there are few pages left that cost nothing."""
        memory = self._engine.memory()
        free = memory.far_pages - memory.far_pages_used - memory.far_pages_cached
        gone = (self._engine.stats().evicted_blocks - self._evicted) * self._block_bytes
        return free + max(self._written_bytes - gone, 0) < memory.far_pages // _SHARE

    def _write(self, ids: Sequence[int], salt: int) -> bool:
        """Whether it need not come again. The folder's lock is held."""
        try:
            # The last token is never among those that are found.
            sequence = self._engine.begin(self._policy, [*ids, 0], salt)
        except Error:  # As many sequences live as may, or the engine is lost, which others tell.
            return False
        name = ""
        try:
            ids = ids[: self._engine.tokens(sequence)]
            digests = page_digests(ids, self._page_tokens, salt)
            if not digests or self._folder.has(self._folder.name_of(digests)):
                return True
            bytes = self._engine.park_bytes(sequence, self._folder.model) + 4 * len(ids) + HEAD_BYTES
            if self._folder.make_room(bytes):
                name = self._folder.name_of(digests)
                self._engine.park(sequence, self._folder.file(name), self._folder.model)
                self._folder.add(name, ids, digests)
                self.figures["written"] += 1
            return True
        except (Error, OSError) as error:
            if name:
                self._folder.delete(name)
            self._refused(f"cannot be written to: {error}")
            return False
        finally:
            self._engine.end(sequence)

    def _drop_damaged(self) -> None:
        for name in self._folder.take_damaged():
            self._say(f"{name}.ids is damaged and is deleted")
            self._folder.drop(name)

    def _refused(self, what: str) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S
        self.figures["refused"] += 1
        self._say(what)

    def _say(self, what: str) -> None:
        self._tell(f"{self._folder.option} {self._folder.path}: {what}")
