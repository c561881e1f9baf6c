"""Commands of `python -m sluice` that README and the pages of docs/ show run as they are written, with a tiny model."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from shown import OF_THE_PACKAGE, Shown
from sluice.__main__ import main
from small import DEVICE, HOST_MIB, KV

TEXT = "the cat sat on the mat and the dog ran. " * 30
# Of options, by command; what is not here stays as it is shown.
LESS = {"--host-bytes": f"{HOST_MIB}MiB", "--max-tokens": "4", "--file": "long.txt", "--tokens": "80",
        "--windows": "2", "--score": "4", "--lengths": "1500", "--count": "1"}
SMALL = ("--device", DEVICE, "--host-bytes", f"{HOST_MIB}MiB", "--option", "threads=1", "--option",
         "pin_threads=false", "--option", "answer_timeout_ms=30000",
         *(word for name, value in KV.items() for word in ("--option", f"{name}={value}")))
ADDED = {"run": SMALL, "chat": (*SMALL, "--max-tokens", "4"), "eval": SMALL}
# Of a text; a command with tasks takes none of these.
OF_A_TEXT = ("--windows", "2", "--score", "4")
# Of each command, how it is tested; doctor needs no model and is in test_shown.py.
ONCE = {"run", "chat", "eval"}


def smaller(words: tuple[str, ...], folder: Path) -> list[str]:
    made: list[str] = []
    for word in words:
        made.append(LESS[made[-1]] if made and made[-1] in LESS else str(folder) if word == "DIR" else word)
    return made


def shown(*names: str) -> list[Shown]:
    return [each for each in OF_THE_PACKAGE if each.words[3] in names]


def once_each(commands: list[Shown]) -> list[Shown]:
    """Of commands that several pages show, the first: a server takes seconds to start."""
    return list({each.words: each for each in reversed(commands)}.values())


def test_every_command_has_a_test() -> None:
    assert {each.words[3] for each in OF_THE_PACKAGE} == {*ONCE, "serve", "doctor"}


@pytest.mark.parametrize("command", shown(*ONCE), ids=lambda command: command.place)
def test_it_runs(command: Shown, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("long.txt", "book.txt"):
        Path(name).write_text(TEXT)
    Path("tasks.jsonl").write_text(json.dumps({"task": "cats", "length": 40, "prompt": TEXT[:40], "answer": "cat"}))
    words = smaller(command.words[3:], folder)
    more = (*ADDED[words[0]], *(OF_A_TEXT if "--text" in words else ()))
    monkeypatch.setattr("sys.argv", ["sluice", *words[:1], *more, *words[1:]])
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert main() == 0
    assert capsys.readouterr().out.strip()
    if "--json" in words:
        assert json.loads(Path(words[words.index("--json") + 1]).read_text())


@pytest.mark.parametrize("command", once_each(shown("serve")), ids=lambda command: command.place)
def test_it_serves(command: Shown, folder: Path, start: Callable) -> None:
    """It starts, answers one request, and ends when it is asked to."""
    server = start(*smaller(command.words[4:], folder))
    client = server.client()
    answer = client.completions.create(model=client.models.list().data[0].id, prompt="the cat", max_tokens=4)
    assert answer.usage.completion_tokens >= 1
    server.close()
    assert server.process.returncode in (0, -signal.SIGTERM)
