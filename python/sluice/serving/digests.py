"""What a model's files are, by all of their bytes. A file is read once: its digest is kept in
$XDG_CACHE_HOME/sluice/digests (~/.cache/sluice/digests) for as long as the file is not touched.

Each line of that file is `ALGORITHM DIGEST SIZE MTIME CTIME INODE DEVICE`: the digest in hexadecimal, and numbers of
stat(2), times in nanoseconds since 1970. Of several lines with the same algorithm and numbers the last one holds; lines
of another shape or algorithm are others', and stay. Lines are appended whole, and old ones are dropped when there are
many."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_ALGORITHM, _PIECE = "sha256", 4 << 20
_SETTLED_NS = 2_000_000_000  # A file that was written in the same tick of its clock would look the same.
_MOST_LINES, _KEPT_LINES = 4096, 1024
_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"})


def digest_of_model(place: Path) -> str:
    """Of all files in a folder that decide what a model computes: weights, their index, configuration and code; or of
    one file.
    @throws OSError of a file that cannot be read"""
    files = sorted(each for each in (place.iterdir() if place.is_dir() else [place]) if each.is_file() and (
        each.suffix in _SUFFIXES or each.name in ("config.json", "adapter_config.json")
        or each.name.endswith(".index.json")))
    digest = hashlib.sha256()
    for file, content in zip(files, digests_of(files)):
        digest.update(f"{file.name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def digests_of(files: Sequence[Path]) -> list[str]:
    """SHA-256 of each file, by what is kept of those that are as they were."""
    known = _known()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda file: _digest(file, known), files))


def _digest(file: Path, known: dict[str, str]) -> str:
    with file.open("rb") as content:
        state = _state(content.fileno())
        if state in known:
            return known[state]
        digest = hashlib.sha256()
        while piece := content.read(_PIECE):
            digest.update(piece)
        if state == _state(content.fileno()) and _settled(content.fileno()):
            _keep(f"{_ALGORITHM} {digest.hexdigest()} {state}\n")
    return digest.hexdigest()


def _state(file: int) -> str:
    told = os.fstat(file)
    return f"{told.st_size} {told.st_mtime_ns} {told.st_ctime_ns} {told.st_ino} {told.st_dev}"


def _settled(file: int) -> bool:
    told = os.fstat(file)
    return max(told.st_mtime_ns, told.st_ctime_ns) + _SETTLED_NS < time.time_ns()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice" / "digests"


def _known() -> dict[str, str]:
    """Digests by the state of their files. Without a cache each file is read."""
    lines: list[str] = []
    with contextlib.suppress(OSError, RuntimeError):
        lines = _cache().read_text("ascii", "replace").splitlines()
    if len(lines) > _MOST_LINES:
        with _no_matter():
            _replace(lines[-_KEPT_LINES:])
    parts = (line.partition(" ")[2].partition(" ") for line in lines if line.startswith(_ALGORITHM + " "))
    return {state: digest for digest, _, state in parts if len(digest) == 2 * hashlib.sha256().digest_size}


def _keep(line: str) -> None:
    with _no_matter():
        _cache().parent.mkdir(parents=True, exist_ok=True)
        file = os.open(_cache(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


def _replace(lines: Sequence[str]) -> None:
    handle, aside = tempfile.mkstemp(dir=_cache().parent)
    with open(handle, "w", encoding="ascii", errors="replace") as content:
        content.writelines(line + "\n" for line in lines)
    os.replace(aside, _cache())


@contextlib.contextmanager
def _no_matter() -> Iterator[None]:
    """What is not kept is read once more, that is all."""
    with contextlib.suppress(OSError, RuntimeError):  # The latter: there is no home.
        yield
