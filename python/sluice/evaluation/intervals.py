"""What figures of a few samples are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_RESAMPLES = 2000
_Z = 1.959964  # 95% of a normal distribution lie within as many standard deviations.

Interval = tuple[float, float]


def wilson(right: int, count: int) -> Interval:
    """Wilson's 95% interval of a share."""
    share, z2 = right / count, _Z * _Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count)) / (1 + z2 / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def mcnemar(one: int, other: int) -> float:
    """The exact two-sided p-value of McNemar's test: how likely counts of pairs that differ are that are at least as
    uneven, if both sides are as good."""
    count = one + other
    tail = sum(math.comb(count, index) for index in range(min(one, other) + 1))
    return min(1.0, 2 * tail / 2**count)


def bootstrap(means: Sequence[float], seed: int) -> Interval | None:
    """The 95% interval of the mean of samples of equal weight, by the percentiles of means of samples that are drawn
    from them again. Of one sample there is none. Calls of one seed draw the same samples, whatever the values."""
    if len(means) < 2:
        return None
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randint(len(means), (_RESAMPLES, len(means)), generator=generator, device="cpu")
    again = torch.tensor(means, dtype=torch.float64, device="cpu")[drawn].mean(1)
    low, high = again.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64, device="cpu")).tolist()
    return low, high


def quantile(values: Sequence[float], share: float) -> float:
    """The value that as large a share of values does not exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
