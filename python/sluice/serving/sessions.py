"""What was read of a prompt or a conversation, in a file from one run of a command to the next."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.errors import Corrupt, Error, InvalidArgument, NotFound, OutOfCapacity
from sluice.serving.digests import digest_of_model

if TYPE_CHECKING:
    from sluice.serving.model import PackedModel

_OURS, _LONGEST = re.compile(rb"sluice session, process (\d+)\n"), 64  # What locks say, and bytes of it at most.
_EMPTY_S = 1.0  # From when a lock is made to when it says so, at most.


@contextlib.contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """While it lasts no other process has this session: each would replace what the other writes. The lock is the
    kernel's, of a file beside it, and ends with the process.
    @throws InvalidArgument if another process has it, or a file of that name is none of ours"""
    lock = None if file is None else _lock(file)
    try:
        yield
    finally:
        if lock is not None:
            if _is_at(lock, _lock_file(file)):  # While it is held: afterwards it may be another's.
                _lock_file(file).unlink(missing_ok=True)
            os.close(lock)


def _lock_file(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def _lock(file: Path) -> int | None:
    """A descriptor; None where nothing can be written, and nothing has to be locked."""
    made: tuple[int, int] | None = None  # The file that was made here.
    ends = time.monotonic() + _EMPTY_S
    while True:
        opened = _open_lock(file)
        if opened is None:
            return None
        lock, new = opened
        made = _identity(lock) if new else made
        try:
            if _take_lock(lock, file, made == _identity(lock), time.monotonic() > ends):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(0.01)


def _open_lock(file: Path) -> tuple[int, bool] | None:
    """A descriptor of the lock, whether the file is new, and nothing done to it if it is not."""
    path, flags = _lock_file(file), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return None
            raise
        try:
            return os.open(path, flags), False
        except FileNotFoundError:  # Its owner has removed it since.
            continue
        except OSError as error:
            if not os.access(path.parent, os.W_OK):
                return None
            raise _foreign(file, error.strerror) from None


def _take_lock(lock: int, file: Path, made: bool, last: bool) -> bool:
    """Whether the lock is held now. `made`: the file was made here. `last`: a file that is empty, as between being made
    and being written by a process that just begins, has been so for long enough."""
    if not stat.S_ISREG(os.fstat(lock).st_mode):
        raise _foreign(file, "no regular file")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _OURS.fullmatch(os.pread(lock, _LONGEST, 0))
        if holder is None and not last:
            return False
        raise InvalidArgument(f"--session {file} is in use by process {holder[1].decode() if holder else '(unknown)'}; "
                              "wait for its end, or give another file") from None
    if not _is_at(lock, _lock_file(file)):  # The one who had it may have removed it since it was opened.
        return False
    text = os.pread(lock, _LONGEST, 0)
    if not made and _OURS.fullmatch(text) is None:
        if text or last:
            raise _foreign(file, "another program's" if text else "empty")
        return False
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"sluice session, process %d\n" % os.getpid(), 0)
    return True


def _foreign(file: Path, why: str) -> InvalidArgument:
    return InvalidArgument(f"--session {file}: {_lock_file(file)} is no lock of a session ({why}) and stays as it is; "
                           "give another file, or move that one away")


def _identity(lock: int) -> tuple[int, int]:
    return os.fstat(lock).st_dev, os.fstat(lock).st_ino


def _is_at(lock: int, path: Path) -> bool:
    """Whether the file that is open is the one of this name."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        return (found.st_dev, found.st_ino) == _identity(lock)
    return False


class Session:
    """Keys and values in a file. They are shared by pages, as those of known prompts are."""

    def __init__(self, file: Path, model: PackedModel, name: str, adapter: str | None = None) -> None:
        """`name` and `adapter`: as `signature_of` has them."""
        self.file, self._model = file, model
        self._signature = signature_of(model, name, adapter)
        self._keeps = 0  # Tokens of the file that the prompt has not; they must not be lost.
        self.failed = False
        """It could not be written. Who answers does so all the same."""

    def resume(self, ids: Sequence[int] | None) -> None:
        """Makes what the file has known, if there is one. Prompts that begin like it begin with that.
        @throws InvalidArgument if it is of another model or policy, or has nothing of a prompt of `ids`, if these are
        given; Corrupt; OutOfCapacity"""
        try:
            sequence = self._model.engine.resume(self.file, self._signature)
        except NotFound:
            return
        except (InvalidArgument, Corrupt) as error:
            raise self._refusal(error) from None
        except OutOfCapacity as error:
            raise OutOfCapacity(f"--session {self.file} has no room: {error}; give a larger --context or "
                                "--host-bytes") from None
        try:
            if ids is not None:
                self._compare(self._model.engine.tokens(sequence), ids)
        finally:
            self._model.end(sequence)

    def _compare(self, tokens: int, ids: Sequence[int]) -> None:
        """All of the file's tokens have names. Found are full pages, and none with the prompt's last tokens."""
        options = self._model.engine.options
        unseen = options.page_tokens + max(self._model.engine.sizes.prompt_queries, 1)
        found = self._model.engine.match_prefix(self._model.policy, ids)
        if found == 0 and min(tokens, len(ids)) >= unseen:
            raise self._refusal(InvalidArgument("the prompt begins otherwise"))
        self._keeps = tokens if tokens > len(ids) and tokens > found + unseen else 0

    def park(self, sequence: int) -> None:
        """Writes a sequence that lives, whose tokens have names. If that fails there is no more than a warning: what
        was read is still there to be answered."""
        if self._keeps:
            print(f"sluice: --session {self.file} stays as it is: it has a prompt of {self._keeps} tokens, and this "
                  "one is shorter", file=sys.stderr, flush=True)
            return
        try:
            self._model.engine.park(sequence, self.file, self._signature)
        except Error as error:
            self.was_not_written(error)

    def was_not_written(self, error: Exception) -> None:
        self.failed = True
        print(f"sluice: --session {self.file} was not written: {error}", file=sys.stderr, flush=True)

    def park_known(self, ids: Sequence[int]) -> None:
        """Writes as much as is known of a prompt of these ids. @throws Error  such as of a loop that has failed"""
        sequence = self._model.begin(ids)
        try:
            if self._model.engine.tokens(sequence):
                self.park(sequence)
        finally:
            self._model.end(sequence)

    def _refusal(self, error: Error) -> Error:
        return type(error)(f"--session {self.file} is not of this prompt and model: {error}; give another file, or "
                           "remove this one")


def signature_of(model: PackedModel, name: str, adapter: str | None = None) -> str:
    """All that keys and values depend on besides tokens. `name`: the model's, a folder or a name that transformers
    knows. `adapter`: the folder of its adapter."""
    made = signature(name) if adapter is None else f"{signature(name)} with {signature(adapter)}"
    return f"transformers {made} {model.weights}; policy {model.policy}; prefill {model.engine.options.prefill_mode}"


def signature(model: str) -> str:
    """Of a folder or a file, the digest of all its weights and its configuration; of any other name, itself."""
    return digest_of_model(Path(model)) if Path(model).exists() else model


class Conversation:
    """The messages of a chat, in a file of JSON beside its keys and values."""

    def __init__(self, file: Path | None, system: str | None) -> None:
        """`system`: what the model is told first.
        @throws InvalidArgument if the file is no conversation, or has begun with something else"""
        self._file = None if file is None else file.with_name(file.name + ".json")
        self._all: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        if self._file is not None and self._file.exists():
            self._all = self._read(system)
        elif file is not None and file.exists():
            raise InvalidArgument(f"--session {file} is no chat's: there is no {self._file}; give another file")
        self.messages = list(self._all)
        """Those that the model is told: where the context is full, the oldest are taken out of it."""

        self.kept = int(bool(self.messages) and self.messages[0]["role"] == "system")
        """Messages at the beginning that are never left out."""

        self._unsaved = False
        self.failed = False
        """Newest messages could not be written."""

    def add(self, role: str, content: str) -> None:
        for each in (self.messages, self._all):
            each.append({"role": role, "content": content})
        self._unsaved = True

    def tell(self, piece: str) -> None:
        """More of the newest message."""
        for each in (self.messages, self._all):
            each[-1]["content"] += piece

    def take_back(self) -> None:
        """The newest question, and what there is of its answer."""
        for each in (self.messages, self._all):
            while each.pop()["role"] != "user":
                pass

    def save(self) -> None:
        """Whole or not at all, and for the user alone; without a question that has no answer yet. If that fails there
        is no more than a warning."""
        if self._file is None or not self._unsaved:
            return
        try:
            self._write(self._all[:-1] if self._all[-1]["role"] == "user" else self._all)
            self.failed = self._unsaved = False
        except OSError as error:
            self.failed = True
            print(f"sluice: {self._file} was not written: {error}", file=sys.stderr, flush=True)

    def _write(self, messages: list[dict[str, str]]) -> None:
        handle, aside = tempfile.mkstemp(dir=self._file.parent, prefix=self._file.name)  # That nobody else may read.
        try:
            with open(handle, "w", encoding="utf-8") as content:
                json.dump({"messages": messages}, content, ensure_ascii=False)
                content.flush()
                os.fsync(content.fileno())
            os.replace(aside, self._file)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)
            raise

    def _read(self, system: str | None) -> list[dict[str, str]]:
        try:
            messages = json.loads(self._file.read_text("utf-8"))["messages"]
            texts = [each[part] for each in messages for part in ("role", "content")]
            if not isinstance(messages, list) or not all(isinstance(text, str) for text in texts):
                raise TypeError("messages are a list, role and content of each are texts")
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgument(f"{self._file} is no conversation: {error!r}; give another --session") from None
        first = next((each["content"] for each in messages[:1] if each["role"] == "system"), None)
        if system is not None and system != first:
            raise InvalidArgument(f"{self._file} has begun with another --system; leave that out, or give another "
                                  "--session")
        return messages
