"""What figures of a few samples are worth."""

from __future__ import annotations

import math

import pytest
import torch
from sluice.evaluation.intervals import bootstrap, mcnemar, quantile, wilson


@pytest.mark.parametrize(("right", "count", "want"), [
    (0, 10, (0.0, 0.2775)), (5, 10, (0.2366, 0.7634)), (10, 10, (0.7225, 1.0)), (81, 263, (0.2553, 0.3662)),
])
def test_wilson(right: int, count: int, want: tuple[float, float]) -> None:
    """The last one is Newcombe's (1998, table I)."""
    assert wilson(right, count) == pytest.approx(want, abs=1e-4)


def test_mcnemar() -> None:
    """By hand: 2 (1 + 6) / 2^6 of 1 and 5."""
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1
    assert mcnemar(5, 1) == mcnemar(1, 5) == 14 / 64
    assert mcnemar(4, 0) == 2 / 16


def test_bootstrap() -> None:
    """Of many samples it is the normal one. Of the same seed it is the same."""
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64).add(3).tolist()
    low, high = bootstrap(values, 7)
    mean, half = sum(values) / 400, 1.96 * torch.tensor(values, dtype=torch.float64).std().item() / math.sqrt(400)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.2 * half)
    assert bootstrap(values, 7) == (low, high) != bootstrap(values, 8)
    assert bootstrap([2.0, 2.0], 0) == (2.0, 2.0) and bootstrap([2.0], 0) is None


def test_quantile() -> None:
    values = [float(value) for value in range(200, 0, -1)]
    assert (quantile(values, 0.99), quantile(values, 1.0), quantile([5.0], 0.99)) == (198, 200, 5)
