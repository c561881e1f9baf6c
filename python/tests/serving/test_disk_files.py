"""Files of a folder for prefixes, the secret of the servers that share it, and the server's options for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from server import Server
from sluice.__main__ import main
from sluice.errors import InvalidArgument
from sluice.serving.disk import Folder, page_digests
from sluice.serving.disk_files import locked, secret_of, write
from small import KV_BYTES, SHAPE, prompt_ids

PAGE = 16
PAGE_BYTES = PAGE * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * 2 * SHAPE["head_dim"] * KV_BYTES
LENGTH = 100


def test_digests_and_files(tmp_path: Path) -> None:
    ids = prompt_ids(70)
    digests = page_digests(ids, PAGE, 3)
    assert len(digests) == len(set(digests)) == 4 and page_digests(ids[:64], PAGE, 3) == digests
    assert page_digests([*ids[:20], 7, *ids[21:]], PAGE, 3)[:1] == digests[:1]
    assert not set(page_digests([*ids[:20], 7, *ids[21:]], PAGE, 3)[1:]) & set(digests)
    assert not set(page_digests(ids, PAGE, 4)) & set(digests) and page_digests(ids[:15], PAGE, 3) == []
    write(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"x"


def test_secrets(tmp_path: Path) -> None:
    assert secret_of(tmp_path / "a") == secret_of(tmp_path / "a") != secret_of(tmp_path / "b")
    (tmp_path / "b/secret").write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="is not of a server"):
        secret_of(tmp_path / "b")
    (tmp_path / "c").write_bytes(b"")
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(0o777)
    for call in (secret_of, lambda path: Folder(path, 1, "m")):
        with pytest.raises(InvalidArgument, match="give a folder that may be written to"):
            call(tmp_path / "c")
        with pytest.raises(InvalidArgument, match="every user of this machine may write to it"):
            call(tmp_path / "d")
    (tmp_path / "e").mkdir()
    with locked(tmp_path / "e"), pytest.raises(InvalidArgument, match="makes no"):
        secret_of(tmp_path / "e")
    os.mkfifo(tmp_path / "e/secret")  # Which would keep a reader waiting.
    with pytest.raises(InvalidArgument, match="no regular file"):
        secret_of(tmp_path / "e")


def test_a_server_with_a_folder(folder: Path, tmp_path: Path) -> None:
    """Keeps clients apart. That the server after it does so by the same secret, test_api.py has."""
    options = ("--disk", str(tmp_path), "--disk-bytes", "64MiB", "--host-bytes", str(40 * PAGE_BYTES), "--context", "256",
               "--sequences", "2")
    prompts = [prompt_ids(LENGTH, seed) for seed in range(10)]

    def known(server: Server, user: str) -> list[int]:
        answers = [server.client().completions.create(model="tiny", prompt=each, max_tokens=2, temperature=0,
                                                      user=user) for each in prompts]
        return [each.usage.prompt_tokens_details.cached_tokens for each in answers]

    with Server(folder, *options) as server:
        assert known(server, "a") == [0] * 10 and known(server, "a") == [96] * 10
        assert server.metric('sluice_disk{kind="found"}') > 0 and server.metric('sluice_disk{kind="bytes"}') > 0
        assert known(server, "b") == [0] * 10 and sum(known(server, "a")) > 0


@pytest.mark.parametrize(("options", "words"), [
    (("--disk", "d"), "belong together"), (("--disk-bytes", "1G"), "belong together"),
    (("--disk", "d", "--disk-bytes", "1G", "--no-prefix-cache"), "leave one of them out"),
    (("--disk", "/dev/null", "--disk-bytes", "1G"), "give a folder")])
def test_options_that_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sluice", "serve", "--model", str(folder), "--port", "0", *options])
    assert main() == 2 and words in capsys.readouterr().err
