"""tools/demo_real.py, which tools/demo.sh --real runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_smollm2 import MODEL

DEMO = Path(__file__).parents[3] / "tools" / "demo_real.py"


@pytest.mark.skipif(not MODEL.exists(), reason=f"there is no {MODEL}; tools/python_env.sh makes it")
def test_the_demo_finds_what_dense_attention_finds() -> None:
    run = subprocess.run([sys.executable, DEMO, MODEL, "--tokens", "1536"], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = re.findall(r"^  (sluice|full|streaming) +(\S+) +(right|wrong) +(all|[\d.]+%) ", run.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["sluice", "full", "streaming"] * 2
    for policy, _, verdict, tokens in rows:
        assert policy == "streaming" or verdict == "right"
        assert (tokens == "all") == (policy == "full")


def test_lengths_that_the_model_does_not_take_are_refused() -> None:
    run = subprocess.run([sys.executable, DEMO, MODEL, "--tokens", "9000"], capture_output=True, text=True, timeout=900)
    assert run.returncode == 2 and "--tokens is 9000; give 1,024 to 8,000" in run.stderr
