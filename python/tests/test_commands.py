"""Commands that README and the pages of docs/ show: their names and options are those of today."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from typing import NamedTuple

import pytest
from shown import PAGES, ROOT, program

PROGRAM = program()
# A word that is an option, before what stands for another program's arguments.
OPTION = re.compile(r"--?[a-z][a-z-]*")


class Shown(NamedTuple):
    page: str
    words: list[str]


def lines_of(text: str) -> list[str]:
    """What is in blocks of shell, a command a line; and what is in the text between backticks."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + \
        [" ".join(each.split()) for each in inline]


def commands() -> list[Shown]:
    found = []
    for page in PAGES:
        for line in lines_of(page.read_text()):
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # An apostrophe: no command.
                continue
            for start in (["sluice"], ["python", "-m", "sluice"], ["python"]):
                if words[: len(start)] == start and len(words) > len(start):
                    found.append(Shown(page.name, words))
                    break
    return found


def options(words: list[str]) -> list[str]:
    """All options among them, without values and up to --."""
    until = words.index("--") if "--" in words else len(words)
    return [match[0] for word in words[:until] if (match := OPTION.fullmatch(word.partition("=")[0]))]


@functools.cache
def help_of(*command: str) -> str:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)} --help: {done.stderr}"
    return done.stdout


def unknown(words: list[str], text: str) -> list[str]:
    return [each for each in options(words) if not re.search(rf"(?<![\w-]){re.escape(each)}(?![\w-])", text)]


OF_THE_PROGRAM = [each for each in commands() if each.words[0] == "sluice"]
OF_PYTHON = [each for each in commands() if each.words[:3] == ["python", "-m", "sluice"]]
OF_BENCHMARKS = [each for each in commands() if each.words[0] == "python" and each.words[1].startswith("tools/lab/")]


def test_there_are_commands() -> None:
    assert min(map(len, (OF_THE_PROGRAM, OF_PYTHON, OF_BENCHMARKS))) >= 5


def test_what_is_looked_for_is_found() -> None:
    assert options(["run", "--a", "-o", "json", "--b=c", "-1", "--", "--d"]) == ["--a", "-o", "--b"]
    assert unknown(["--length", "--len", "-o"], "  -o,--length TEXT") == ["--len"]
    assert lines_of("```sh\na \\\n  b\n```\n`c\nd`") == ["a    b", "c d"]


@pytest.mark.skipif(PROGRAM is None and "CI" not in os.environ, reason="the command is not built")
@pytest.mark.parametrize("shown", OF_THE_PROGRAM, ids=lambda shown: f"{shown.page}: {' '.join(shown.words)[:60]}")
def test_the_program(shown: Shown) -> None:
    names = []
    for word in shown.words[1:]:
        if not re.fullmatch("[a-z]+", word):
            break
        names.append(word)
    if names:
        assert re.search(rf"^  {names[0]}\b", help_of(PROGRAM), re.MULTILINE), f"there is no sluice {names[0]}"
    if names[1:]:  # A second one may be an argument.
        names = names[: 1 + bool(re.search(rf"^  {names[1]}\b", help_of(PROGRAM, names[0]), re.MULTILINE))]
    assert not unknown(shown.words, help_of(PROGRAM, *names))


@pytest.mark.parametrize("shown", OF_PYTHON, ids=lambda shown: f"{shown.page}: {' '.join(shown.words[2:])[:60]}")
def test_the_package(shown: Shown) -> None:
    name = shown.words[3]
    assert re.search(rf"\b{name}\b", help_of(sys.executable, "-m", "sluice")), f"there is no {name}"
    assert not unknown(shown.words[4:], help_of(sys.executable, "-m", "sluice", name))


@pytest.mark.parametrize("shown", OF_BENCHMARKS, ids=lambda shown: f"{shown.page}: {' '.join(shown.words[1:])[:60]}")
def test_benchmarks(shown: Shown) -> None:
    """Some need a GPU's torch to say what they take: their text says it, too."""
    assert not unknown(shown.words[2:], (ROOT / shown.words[1]).read_text())
