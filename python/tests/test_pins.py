"""What tools/python_env.sh installs takes the oldest Python that it is promised for: Debian 12's."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

OLDEST = "3.11.2"
HERE = Path(__file__).parent
BASE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sluice"
# The file, and where its packages are.
PLACES = {"requirements.txt": "venv/lib/python3*/site-packages", "requirements-newest.txt": "newest",
          "requirements-build.txt": "build", "requirements-site.txt": "site",
          "requirements-gguf.txt": "gguf", "requirements-extras.txt": "extras", "requirements-vllm.txt": "vllm"}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    lines = (HERE / file).read_text().splitlines()
    return {plain(name): version for name, version in (line.split("==") for line in lines if re.match(r"\w", line))}


def refusing(pinned: dict[str, str], found: Iterator[tuple[str, str, str | None]]) -> list[str]:
    """Of (name, version, Requires-Python) those that are pinned and do not take the oldest Python."""
    return [f"{name}=={version} wants Python {needs}" for name, version, needs in found
            if pinned.get(plain(name)) == version and not SpecifierSet(needs or "").contains(OLDEST)]


@pytest.mark.parametrize("file", PLACES)
def test_pins_take_the_oldest_python(file: str) -> None:
    folders = [str(folder) for folder in BASE.glob(PLACES[file])]
    if not folders:
        pytest.skip(f"{BASE} has not what tools/python_env.sh makes of {file}")
    found = ((each.metadata["Name"], each.version, each.metadata["Requires-Python"])
             for each in metadata.distributions(path=folders))
    assert refusing(pins(file), found) == []


def test_what_refuses_is_found() -> None:
    found = [("A_b", "1.0", ">=3.11.5"), ("c", "2.0", ">=3.10"), ("d", "3.0", None), ("e", "1.0", ">=3.12")]
    assert refusing({"a-b": "1.0", "c": "2.0", "d": "3.0"}, iter(found)) == ["A_b==1.0 wants Python >=3.11.5"]
