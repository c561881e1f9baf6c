"""The wheel that pip builds, in an environment that has nothing else, from a folder that is not the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = next(block for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
               if "import numpy" in block)
ENGINE = """
import sluice
made = sluice.EngineOptions(layers=1, q_heads=2, kv_heads=1, head_dim=64, host_bytes=1 << 20, threads=1,
                            policies=["full"])
with sluice.Engine(made) as engine:
    sequence = engine.begin("full")
    print(sluice.__file__, engine.tokens(sequence), engine.can_admit(16))
"""


def run(*command: object, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SLUICE_LIBRARY")}
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=1500, cwd="/",
                          env={**clean, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the CUDA device, which takes long to compile and has the same files; nothing comes from the network. What
    the compiler is told is what it is told in build/release, from a folder as deep, so that ccache has it all."""
    folder = tmp_path_factory.mktemp("wheel")
    settings = (f"build-dir={ROOT / 'build/wheel'}", "cmake.define.SLUICE_CUDA=OFF", "cmake.define.SLUICE_WERROR=ON")
    run(sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder,
        *(word for setting in settings for word in ("--config-settings", setting)), ROOT / "python",
        PYTHONPATH=os.environ["SLUICE_TEST_BUILD"], CC=os.environ["SLUICE_TEST_CC"], CXX=os.environ["SLUICE_TEST_CXX"])
    made = list(folder.iterdir())
    assert len(made) == 1
    return made[0]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that has the wheel alone, not even pip."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder)
    made = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", made, "install", "--no-index", "--no-deps", wheel)
    return made


def test_what_is_in_it(wheel: Path) -> None:
    assert re.fullmatch(r"sluice-[0-9.]+-py3-none-(linux|manylinux)\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        texts = {name: files.read(name) for name in names}
    assert {"sluice/libsluice.so", "sluice/py.typed", "sluice/__init__.py", "sluice/serving/api.py"} <= set(names)
    assert any(name.startswith("sluice/licences/") for name in names)
    assert not any("test" in name or name.endswith((".hpp", ".cpp", ".a")) for name in names)
    assert not [name for name, text in texts.items() if not name.endswith(".so") and str(ROOT).encode() in text]
    assert "License-Expression: Apache-2.0" in texts[next(name for name in names if name.endswith("/METADATA"))].decode()


def test_its_library_finds_its_own(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extract("sluice/libsluice.so", tmp_path)
    told = run("readelf", "--dynamic", tmp_path / "sluice/libsluice.so")
    assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", told) == ["$ORIGIN"]


def test_in_a_clean_environment(python: Path) -> None:
    told = run(python, "-m", "sluice", "doctor")
    assert re.search(r"^torch +not installed$", told, re.MULTILINE) and f"{python.parents[1]}/lib" in told
    file, tokens, admits = run(python, "-c", ENGINE).split()
    assert file.startswith(str(python.parents[1])) and (tokens, admits) == ("0", "True")


def test_the_program_of_the_page(python: Path) -> None:
    """With numpy, which comes from beside it."""
    told = run(python, "-c", f"{PROGRAM}\nprint(sluice.__file__, abs(out).max() > 0)",
               PYTHONPATH=str(Path(numpy.__file__).parents[1]))
    assert told.split() == [f"{next(python.parents[1].glob('lib/python*'))}/site-packages/sluice/__init__.py", "True"]
