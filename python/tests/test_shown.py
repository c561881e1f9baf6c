"""Commands that README and the pages of docs/ show run as they are written, with less to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shown
from shown import COMMANDS, LISTED, OF_THE_PROGRAM, ROOT, Shown, listed, program

PROGRAM = program()
TESTBED = str(ROOT / "tests" / "data" / "testbed")
WORDS = {"DIR": [TESTBED], "tests/data/testbed": [TESTBED], "...": ["--model", TESTBED, "--prompt-file", "prompt.txt"],
         "REPORT...": ["report.json"]}
# Of options, by command; `` is all commands. What is not here stays as it is shown.
LESS = {
    "": {"--prompt-file": "prompt.txt", "--session": "session", "--trace": "trace.json", "--machine": "machine.json",
         "--cores": str(min(os.sched_getaffinity(0)))},
    "run": {"--max-tokens": "4"},
    "eval": {"--tasks": "tasks.jsonl"},
    "bench cpu": {"--length": "1K", "--steps": "1", "--sections": "attention"},
    "bench prefill": {"--length": "512", "--repeat": "1"},
    "bench serve": {"--rates": "50,100", "--requests": "2", "--prompt": "64", "--answer": "4", "--layers": "1",
                    "--seconds": "0.1"},
    "plan": {}, "plot": {}, "doctor": {}, "policies": {}, "manual": {},
}
# These are added where they are not shown.
ADDED = {"run": ("--max-tokens",), "bench cpu": ("--steps", "--sections"),
         "bench prefill": ("--repeat",),
         "bench serve": ("--requests", "--prompt", "--answer", "--layers")}
# What has nothing to do on a machine without a GPU: it says so, with exit code 3.
OF_A_GPU = ("link", "bench gpu", "bench decode")


def name_of(words: tuple[str, ...]) -> str:
    """run, or bench cpu."""
    return " ".join(words[1 : 3 if words[1] == "bench" else 2])


def needs_gpu(words: tuple[str, ...]) -> bool:
    return name_of(words) in OF_A_GPU or "cuda" in words


def smaller(words: tuple[str, ...]) -> list[str]:
    name = name_of(words)
    less = {**LESS[""], **LESS.get(name, {})}
    made: list[str] = []
    for word in words[1:]:
        made += [less[made[-1]]] if made and made[-1] in less else WORDS.get(word, [word])
    for option in ADDED.get(name, ()):
        made += [] if option in made else [option, less[option]]
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the files that commands read."""
    (tmp_path / "tasks.jsonl").write_text((Path(TESTBED) / "tasks.jsonl").read_text().partition("\n")[0])
    found = {"tasks": {"results": [{"task": "niah", "policy": "full", "accuracy": 1, "bytes": 1}]}}
    # As doctor --machine writes it, which measures for a minute.
    rates = {"device_gbps": 1000.0, "link_gbps": 50.0, "cpu_gbps": 100.0, "launch_us": 5.0, "hand_over_us": 5.0}
    machine = {"kind": "machine", "schema_version": 1, "name": "by hand", "device_bytes": 8 << 30,
               "host_bytes": 64 << 30, **rates}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    (tmp_path / "found.json").write_text(json.dumps(found))
    (tmp_path / "prompt.txt").write_text("The grass is green. " * 30 + "\nQ: What is the special magic value?\nA:")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess:
    # No GPU, also where there is one: what is to be seen is the same everywhere.
    return subprocess.run([PROGRAM, *words], cwd=folder, capture_output=True, text=True, timeout=600,
                          stdin=subprocess.DEVNULL, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_every_command_has_a_place(command: Shown) -> None:
    """It is run here, or by serving/test_shown_package.py, or it is listed, with a reason."""
    of_program = shown.is_of_program(command.words)
    places = [of_program, shown.is_of_package(command.words), *map(bool, listed(command))]
    assert sum(places) == 1, "neither run nor listed: see shown.py"
    if of_program:
        assert name_of(command.words) in LESS or name_of(command.words) in OF_A_GPU, "say what is less: LESS"


def test_what_is_listed_is_shown() -> None:
    assert {start for command in COMMANDS for start in listed(command)} == set(LISTED)


@pytest.mark.parametrize("command", [each for each in COMMANDS if listed(each)], ids=lambda command: command.place)
def test_listed(command: Shown) -> None:
    (start,) = listed(command)
    _, holds = LISTED[start]
    assert holds(command.words)


@pytest.mark.skipif(PROGRAM is None and "CI" not in os.environ, reason="the command is not built")
@pytest.mark.parametrize("command", OF_THE_PROGRAM, ids=lambda command: command.place)
def test_the_program_runs(command: Shown, folder: Path) -> None:
    words = smaller(command.words)
    if "--measured" in words:
        measure = "bench gpu --device host --length 1K --layers 1 --steps 1 --warm-up 1 --sections attention"
        assert run(folder, *measure.split(), "-o", "json", "--output", "report.json").returncode == 0
    done = run(folder, *words)
    if needs_gpu(command.words):
        # It was built without, or there is none.
        assert done.returncode == 3 and re.search("GPU|CUDA", done.stderr), done.stderr
        return
    assert done.returncode == 0 and (done.stdout or "--output" in words), done.stderr
    for option, is_json in (("--trace", True), ("--session", False), ("--plot", False), ("--output", False)):
        if option in words:
            file = folder / words[words.index(option) + 1]
            assert file.stat().st_size > 0
            assert not is_json or json.loads(file.read_text())


def test_doctor_of_the_package() -> None:
    """The one command of the package that needs no more than the package."""
    words = next(each.words for each in shown.OF_THE_PACKAGE if each.words[3] == "doctor")
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_less_is_asked_for() -> None:
    assert smaller(("sluice", "run", "...", "--cores", "0-7")) == [
        "run", "--model", TESTBED, "--prompt-file", "prompt.txt", "--cores", LESS[""]["--cores"], "--max-tokens", "4"]
    assert smaller(("./sluice", "bench", "cpu", "--length", "16K,128K", "--steps", "9")) == [
        "bench", "cpu", "--length", "1K", "--steps", "1", "--sections", "attention"]
    assert needs_gpu(("sluice", "run", "--device", "cuda")) and not needs_gpu(("sluice", "bench", "cpu"))


def test_what_is_new_has_no_place() -> None:
    (command,) = shown.shown_in("page", "```sh\nmake install \\\n  all  # a remark\n```\n`sluice run`\n")
    assert command.words == ("make", "install", "all") and not listed(command)
    assert not shown.is_of_program(command.words) and not shown.is_of_package(command.words)
    assert not shown.extras(("pip", "install", "./python[none]")) and not shown.presets(("cmake", "--preset", "none"))
