"""The command of this package needs no more than the package."""

from __future__ import annotations

import re
import subprocess
import sys


def command(*arguments: str, blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """`python -m sluice`, in a Python without some modules."""
    program = (f"import sys, runpy; sys.modules.update(dict.fromkeys({blocked!r})); "
               "sys.argv = ['sluice', *sys.argv[1:]]; runpy.run_module('sluice', run_name='__main__')")
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600)


def test_doctor_without_torch() -> None:
    done = command("doctor", blocked=("torch", "transformers", "fastapi", "uvicorn"))
    assert done.returncode == 0, done.stderr
    assert "library" in done.stdout
    assert re.search(r"^GPUs +([1-9]\d*|0: no driver .*)$", done.stdout, re.MULTILINE)


def test_commands_name_what_they_need() -> None:
    for arguments in (("run", "--prompt", "a"), ("chat",), ("serve", "--port", "0")):
        done = command(*arguments, "--model", "x", blocked=("torch", "transformers", "fastapi", "uvicorn"))
        assert done.returncode == 3 and "pip install './python[serve]'" in done.stderr and not done.stdout
