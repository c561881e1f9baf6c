"""What a model is: all bytes of its files, which are read once."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from sluice.serving import digests
from sluice.serving.digests import digests_of
from sluice.serving.sessions import signature
from test_command import Done, here  # noqa: F401: a fixture

DAY_S = 86400


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SETTLED_NS", -DAY_S * 10**9)
    return tmp_path / "cache" / "sluice" / "digests"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder whose weights are sparse, and longer than what samples of them would reach."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(70 << 20)
    return folder


def change(file: Path, at: int) -> None:
    """One bit."""
    with file.open("r+b") as content:
        content.seek(at)
        byte = content.read(1)[0]
        content.seek(at)
        content.write(bytes([byte ^ 1]))


def test_every_byte_of_the_weights_matters(large: Path) -> None:
    seen = {signature(str(large))}
    for at in (0, 64 << 10, 1_234_567, (35 << 20) + 7, (70 << 20) - 1):
        change(large / "model.safetensors", at)
        seen.add(signature(str(large)))
    assert len(seen) == 6
    for name in ("model.safetensors.index.json", "adapter_config.json", "code.py"):
        (large / name).write_text("{}")
        seen.add(signature(str(large)))
    assert len(seen) == 9
    (large / "README.md").write_text("{}")
    assert signature(str(large)) in seen


def test_a_file_is_read_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"a" * 1000)
    want = hashlib.sha256(b"a" * 1000).hexdigest()
    assert digests_of([file]) == [want] and stat.S_IMODE(cache.stat().st_mode) == 0o600
    told = file.stat()
    assert cache.read_text() == (f"sha256 {want} 1000 {told.st_mtime_ns} {told.st_ctime_ns} {told.st_ino} "
                                 f"{told.st_dev}\n")
    known = digests._known()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "sha256", None)
        assert digests._digest(file, known) == want
    # As it was by size and time of change, but not by its bytes.
    file.write_bytes(b"b" * 1000)
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert digests_of([file]) == [hashlib.sha256(b"b" * 1000).hexdigest()]


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path, cache: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written within the same tick of the clock cannot be told from what was there."""
    monkeypatch.setattr(digests, "_SETTLED_NS", DAY_S * 10**9)
    (tmp_path / "weights.bin").write_bytes(b"a")
    digests_of([tmp_path / "weights.bin"])
    assert not cache.exists()


def test_a_cache_that_others_have_written(tmp_path: Path, cache: Path) -> None:
    """Lines of other programs and damage are no digests, and stay."""
    file = tmp_path / "weights.bin"
    file.write_bytes(b"a")
    want = digests_of([file])
    state = cache.read_text().split(" ", 2)[2]
    strange = f"crc32c 12345678 {state}sha256\nsha256 short {state}\udcff\n".encode("utf-8", "surrogateescape")
    cache.write_bytes(strange)
    assert digests_of([file]) == want and cache.read_bytes().startswith(strange)
    cache.write_text(cache.read_text("ascii", "replace") + "other line\n" * 5000)
    assert digests_of([file]) == want and len(cache.read_text().splitlines()) == 1024


@pytest.mark.parametrize("what", ["folder", "link"])
def test_a_cache_that_cannot_be_written(tmp_path: Path, cache: Path, what: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.mkdir() if what == "folder" else cache.symlink_to(tmp_path / "other")
    (tmp_path / "weights.bin").write_bytes(b"a")
    assert digests_of([tmp_path / "weights.bin"]) == [hashlib.sha256(b"a").hexdigest()]
    assert not (tmp_path / "other").exists()


def test_a_session_of_a_model_that_differs_in_one_weight(folder: Path, here: Callable[..., Done],
                                                         tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "s"
    shutil.copytree(folder, model)
    words = ("run", "--model", str(model), "--session", str(file), "--prompt", "the cat sat on the mat " * 9)
    assert here(*words).returncode == 0
    was = file.read_bytes()
    weights = next(model.glob("*.safetensors"))
    change(weights, weights.stat().st_size * 2 // 3)
    done = here(*words)
    assert (done.returncode, done.stdout) == (2, "") and "is not of this prompt and model" in done.stderr
    change(weights, weights.stat().st_size * 2 // 3)
    assert here(*words).returncode == 0 and file.read_bytes() == was
