"""Random weights of vLLM's --load-format dummy that give attention something to choose: normal ones of 0.02, and norms
of 1. vLLM's own are within 0.001 of 0, with which all scores are 0 and all tokens weigh the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_DEVIATION = 0.02


def register() -> None:
    """Of an entry point of vLLM's plug-ins, or before an engine is made in this process."""
    import vllm.model_executor.model_loader.dummy_loader as loader

    loader.initialize_dummy_weights = fill


@torch.no_grad()
def fill(module: torch.nn.Module, *_: Any, **__: Any) -> None:
    """One module's own weights: vLLM calls it for each."""
    for weight in module.parameters(recurse=False):
        if "Norm" in type(module).__name__:
            weight.fill_(1.0)
        elif weight.is_floating_point():
            weight.normal_(0.0, _DEVIATION)


def installed(folder: Path) -> Path:
    """Makes a folder for PYTHONPATH, with which vLLM's processes have these weights."""
    information = folder / "normal_weights-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: normal-weights\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnormal_weights = normal_weights:register\n")
    (folder / "normal_weights.py").symlink_to(Path(__file__).resolve())
    return folder
