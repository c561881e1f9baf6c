"""The programs of docs/python.md that need no model run as they are; what docker/Dockerfile names exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
PROGRAMS = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
            if "import numpy" in block]


def test_there_are_programs() -> None:
    assert PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    names: dict[str, object] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    assert names["engine"].tokens(1) == 1
    assert abs(names["out"]).max() > 0


def test_dockerfile() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    presets = {each["name"] for each in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    named = re.findall(r"PRESET=([\w-]+)", text)
    assert named and set(named) <= presets
    scripts = re.findall(r"\btools/\w+\.sh", text)
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    stages = re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE)
    assert all(stage in stages for stage in re.findall(r"--from=(\w+)", text))
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE):
        assert (ROOT / source).exists()
    # The last stage has a user, and not root.
    assert re.findall(r"^USER (\w+)", text.rpartition("FROM ")[2], re.MULTILINE) == ["10001"]
