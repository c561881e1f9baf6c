"""Whatever goes wrong in a command is one line on standard error, and an exit code."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sluice.__main__ import main
from sluice._reporting import one_line, told
from sluice.serving.arguments import number, option, size
from test_command import ARGUMENTS, Done, here  # noqa: F401: a fixture
from waiting import DEADLINE_S

HUGE = "9" * 500


def ended(call: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the line."""
    try:
        code = call()
    except SystemExit as exit:  # Of argparse, behind how the command is used.
        code = exit.code
    out, err = capsys.readouterr()
    line = err.splitlines()[-1] if "usage: " in err else err.removesuffix("\n")
    assert out == "" and "\n" not in line and "Traceback" not in err and len(line) < 3000
    return code, line


@pytest.mark.parametrize("arguments", [
    ("--host-bytes", HUGE), ("--host-bytes", HUGE + "T"), ("--host-bytes", "1" * 5000), ("--sequences", HUGE),
    ("--sequences", "1" * 5000), ("--context", HUGE), ("--prefill-rows", "4294967296"), ("--slowdown", "1e999"),
    ("--slowdown", HUGE), ("--max-tokens", HUGE), ("--temperature", HUGE), ("--temperature", "nan"),
    ("--seed", "1" * 5000), ("--option", "page_tokens=" + HUGE), ("--option", "page_tokens=1e999"),
    ("--option", "fetch_share=" + HUGE), ("--option", "fetch_share=NaN"), ("--option", "threads=" + "[" * 100_000),
    ("--option", "cores=" + "[" * 500 + "]" * 500), ("--option", 'cores={"a":1}'), ("--option", "cores=[-1]"),
    ("--option", "kv_dtype=[]"), ("--option", "\udcff=1"), ("--option", "kv_dtype=\udcff"), ("--policy", "\udcff"),
    ("--policy", "full\u0661"), ("--prompt", "\udcff"), ("--prompt", ""), ("--model", "\udcff"), ("--model", ""),
    ("--device", ""), ("--device", "cuda:\u0663"), ("--device", "cuda:" + HUGE), ("--policy", ""), ("--session", ""),
    ("--session", "."), ("--session", "/"), ("--session", "x" * 300), ("--session", "\udcff/s"), ("--host-bytes", ""),
    ("--sequences", "\u0661"), ("--host-bytes", "\u0661G"), ("--sequences", "1_0"), ("--sequences", " 1"),
    ("--top-p", "1_0"), ("--host-bytes", "1.5"), ("--host-bytes", "7iB"),
])
def test_arguments_that_are_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str], arguments: tuple[str, str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sluice.serving.load.load_loop", lambda *_: pytest.fail("a model was loaded"))
    prompt = () if arguments[0] == "--prompt" else ("--prompt", "a")
    monkeypatch.setattr("sys.argv", ["sluice", "run", "--model", str(folder), *ARGUMENTS, *prompt, *arguments])
    code, line = ended(main, capsys)
    assert code == (1 if arguments[1] == "x" * 300 else 2) and "a defect" not in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "arguments", "words"), [
    ("eval", ("--json", "", "--text", "x"), "--json is empty"), ("eval", ("--text", "", "--tasks", "x"), "--text is"),
    ("serve", ("--name", ""), "--name is empty"), ("serve", ("--host", ""), "--host is empty"),
    ("serve", ("--port", "\u0661"), "must be a whole number"), ("serve", ("--silence", "1e999"), "must be a number"),
    ("serve", ("--max-body", HUGE), "is no size"), ("run", ("--file", ""), "is empty"),
])
def test_arguments_of_other_commands(folder: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str], name: str, arguments: tuple[str, ...],
                                     words: str) -> None:
    monkeypatch.setattr("sys.argv", ["sluice", name, "--model", str(folder), *arguments])
    code, line = ended(main, capsys)
    assert code == 2 and words in line


def test_numbers_and_sizes_as_the_command_reads_them() -> None:
    assert [size(text) for text in ("64mib", "64MiB", "64mb", "1.5g", "7", "7b", "8 GiB")] == [
        64 << 20, 64 << 20, 64 << 20, 3 << 29, 7, 7, 8 << 30]
    assert size(str((1 << 63) - 1)) == (1 << 63) - 1
    assert [number(float, 0)(text) for text in ("1.5", "1e3", ".5", "2.")] == [1.5, 1000, 0.5, 2]
    assert option("a=1_0") == ("a", "1_0")


def test_what_nobody_has_thought_of(here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("a\nb\x1b[31m" + "x" * 100_000)

    monkeypatch.setattr("sluice.serving.talk.Teller", fails)
    done = here("run", "--prompt", "a")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and len(done.stderr) < 3000
    assert done.stderr.startswith("sluice: a defect: KeyError: ") and "SLUICE_TRACEBACK=1" in done.stderr
    monkeypatch.setenv("SLUICE_TRACEBACK", "1")
    assert "Traceback" in here("run", "--prompt", "a").stderr
    assert one_line("a\tb\r\n\x07c") == "a b ?c" and told(MemoryError())[1] == 1


@pytest.mark.parametrize("name", ["run", "serve"])
def test_a_torch_that_cannot_be_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: no such file')")
    words = ("--prompt", "a") if name == "run" else ("--port", "0")
    done = subprocess.run([sys.executable, "-m", "sluice", name, "--model", str(folder), "--device", "cpu", *words],
                          capture_output=True, text=True, timeout=DEADLINE_S,
                          env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), done.stderr
    assert "cannot be loaded: libtorch.so: no such file; install it anew" in done.stderr


def test_a_template_that_raises(here: Callable[..., Done], folder: Path, tmp_path: Path) -> None:
    """The chat goes on, and its files are written."""
    path = tmp_path / "strict"
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('not\n that') }}{% endif %}"
        "{{ m.content }}{% endfor %}")
    done = here("chat", "--model", str(path), typed="no\nthe cat\n")
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert done.stderr == ("sluice: the model's chat template does not take these messages: TemplateError: not that\n")
    (path / "chat_template.jinja").write_text("{{ 1 // 0 }}")
    done = here("chat", "--model", str(path), "--session", str(tmp_path / "s"), typed="a\n")
    assert (done.returncode, done.stdout) == (0, "") and "ZeroDivisionError" in done.stderr


def strange(seed: int) -> Any:
    """A value that a field of a configuration should not have."""
    draw = random.Random(seed)
    return draw.choice([0, -1, 1, 7, 1 << 31, 1 << 70, 1e400, float("nan"), 0.5, "8", "", None, [], [1], {}, True,
                        {"rope_type": "yarn"}, ["full_attention"], "\ud800", "x" * 5000])


@pytest.mark.parametrize("seed", range(60))
def test_configurations_at_random(here: Callable[..., Done], folder: Path, tmp_path: Path, seed: int) -> None:
    """They are served or refused; never with more than a line, and never as a defect."""
    path, draw = tmp_path / "hostile", random.Random(seed)
    shutil.copytree(folder, path)
    said = json.loads((path / "config.json").read_text())
    field = draw.choice(sorted(said))
    (path / "config.json").write_text(json.dumps({**said, field: strange(seed)}))
    done = here("run", "--prompt", "the cat", "--max-tokens", "2", "--model", str(path))
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[transformers]")]
    assert done.returncode in (0, 1, 2, 3) and len(lines) == (done.returncode != 0), (field, done.stderr)
    assert "defect" not in done.stderr, (field, said.get(field), done.stderr)
