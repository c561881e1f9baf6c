"""Models for vLLM, and what vLLM by itself makes of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

_WRITTEN = tempfile.TemporaryDirectory(prefix="sluice-vllm.")  # Goes with the process.

# Before vLLM is imported. Engines run in this process, and nothing is written to the user's directories.
os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_CACHE_ROOT": _WRITTEN.name, "HF_HUB_OFFLINE": "1",
                   "VLLM_CONFIG_ROOT": _WRITTEN.name, "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   # Or torch compiles what vLLM has compiled even when it is eager, and asks what vectors the CPU has,
                   # in processes of its own.
                   "TORCHDYNAMO_DISABLE": "1"})

from families import save  # noqa: E402

SMOLLM2 = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sluice" / "models" / "smollm2"


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by its family."""
    folder, saved = tmp_path_factory.mktemp("models"), {}

    def of(family: str) -> Path:
        if family not in saved:
            saved[family] = save(family, folder)
        return saved[family]

    return of


@pytest.fixture(scope="session")
def smollm2() -> Path:
    assert SMOLLM2.is_dir(), f"there is no {SMOLLM2}; tools/python_env.sh makes it"
    return SMOLLM2
