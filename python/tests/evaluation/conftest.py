"""Saved models, and the command in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from saved import DEVICE, KV, TEXT, model_of, tokenizer
from sluice.__main__ import main


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    model_of().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


class Done(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs `python -m sluice eval`."""
    always = ("--device", DEVICE, "--host-bytes", "16MiB", "--option", "threads=1", "--option", "pin_threads=false",
              "--option", "answer_timeout_ms=30000", "--near-bytes", "0",
              *(word for name, value in KV.items() for word in ("--option", f"{name}={value}")))

    def call(model: Path | str, *arguments: object) -> Done:
        monkeypatch.setattr("sys.argv", ["sluice", "eval", "--model", str(model), *always, *map(str, arguments)])
        try:
            status = main()
        except SystemExit as error:  # Of argparse.
            status = int(error.code or 0)
        return Done(status, *capsys.readouterr())

    return call
