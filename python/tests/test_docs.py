"""The programs of docs/python.md that need no model run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
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
