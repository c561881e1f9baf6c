"""Drawings as files that differ only where the figures do."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

BLUE, RED, GREEN, BROWN = "#1b6ca8", "#c0504d", "#5b9a3b", "#b8860b"
# Text stays text, and the same figures give the same file.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sluice", "font.size": 9, "axes.grid": True,
                     "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})


def beside(columns: int, rows: int = 1, height: float = 3.0, **options: object) -> tuple:
    """Axes beside each other."""
    return plt.subplots(rows, columns, figsize=(8.4, height), layout="constrained", **options)


def save(drawing: plt.Figure, file: Path) -> None:
    drawing.savefig(file, metadata={"Date": None})
