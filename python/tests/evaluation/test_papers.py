"""What benchmarks/papers takes for FlexPrefill and for copies of few bits is what they are defined to be."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from papers import bits  # noqa: E402
from papers.flexprefill import Spec, choose, choose_all, computed_share, kept_of  # noqa: E402

SMALL = Spec(gamma=0.9, tau=0.1, min_budget=16, block=16, chunk=64)


def prompt(tokens: int = 150, size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    queries, keys = torch.randn(2, tokens, size, generator=drawn) * 2
    keys[37] += 3 * queries.mean(0)  # A column.
    return queries, keys


def softmax_row(query: torch.Tensor, keys: torch.Tensor) -> list[float]:
    scores = [math.exp(float(query @ key) / math.sqrt(len(query))) for key in keys]
    return [score / sum(scores) for score in scores]


def fewest(weights: list[float], share: float) -> int:
    held, count = 0.0, 0
    for weight in sorted(weights, reverse=True):
        if held >= share * sum(weights):
            break
        held, count = held + weight, count + 1
    return count


def largest(sums: list[float], count: int) -> set[int]:
    order = sorted(range(1, len(sums)), key=lambda i: -sums[i])
    return {0, *order[:count - 1]}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block", (16, 1))
def test_columns_and_diagonals(seed: int, block: int) -> None:
    queries, keys = prompt(seed=seed)
    spec = dataclasses.replace(SMALL, tau=0.0, block=block, min_budget=block)
    for first, end in ((64, 128), (128, 150)):
        newest = range(end - min(spec.block, end - first), end)
        columns, diagonals = [0.0] * end, [0.0] * end
        for row in newest:
            for j, weight in enumerate(softmax_row(queries[row], keys[:row + 1])):
                columns[j] += weight
                diagonals[row - j] += weight
        blocks = math.ceil(end / spec.block)
        sums = [[sum(lines[b * spec.block:(b + 1) * spec.block]) for b in range(blocks)]
                for lines in (columns, diagonals)]
        counts = [max(math.ceil(fewest(lines, spec.gamma) / spec.block), 1) for lines in (columns, diagonals)]
        of_columns, of_diagonals = (largest(each, count) for each, count in zip(sums, counts, strict=True))
        got = choose(queries[first:end], keys[:end], first, spec)
        for row in range(got.kept.shape[0]):
            own = first // spec.block + row
            want = {b for b in range(own + 1) if b in of_columns or own - b in of_diagonals}
            assert set(got.kept[row].nonzero().flatten().tolist()) == want
        assert not got.query_aware


@pytest.mark.parametrize("gamma", (0.5, 0.9, 1.0))
def test_query_blocks_that_choose(gamma: float) -> None:
    queries, keys = prompt(128)
    spec = dataclasses.replace(SMALL, gamma=gamma, tau=1.0, chunk=0)
    mean = [rows.unflatten(0, (-1, 16)).mean(1) for rows in (queries, keys)]
    shares = [softmax_row(mean[0][row], mean[1][:row + 1]) for row in range(8)]
    each, (together,) = choose_all(queries, keys, spec)[0], choose_all(queries, keys,
                                                                         dataclasses.replace(spec, flattened=True))
    assert each.query_aware and together.query_aware
    for row, weights in enumerate(shares):
        held = sum(weight for block, weight in enumerate(weights) if each.kept[row, block])
        assert held >= gamma - 1e-5
    total = sum(weight for row, weights in enumerate(shares) for b, weight in enumerate(weights) if together.kept[row, b])
    assert total >= gamma * 8 - 1e-4
    if gamma < 1:
        assert together.kept.sum() <= each.kept.sum()
    else:
        assert computed_share(each.kept) == computed_share(together.kept) == 1


def test_what_is_short_is_kept_and_chunks_are_put_together() -> None:
    queries, keys = prompt()
    choices = choose_all(queries, keys, dataclasses.replace(SMALL, min_budget=64))
    assert [choice.divergence is None for choice in choices] == [True, False, False]
    kept = kept_of(choices)
    assert kept.shape == (10, 10)
    assert kept[:4, :4].equal(torch.ones(4, 4).tril().bool())
    assert not kept.triu(1).any() and kept.diagonal().all() and kept[:, 0].all()


def test_copies_of_few_bits() -> None:
    keys = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    step = keys.amax(1) - keys.amin(1)
    for count in (1, 2, 4, 8):
        off = (bits.coded(keys, count) - keys).abs().amax(1)
        assert (off <= step / (2 ** count - 1) / 2 + 1e-6).all()
    turn = bits.rotation(16)
    assert torch.allclose(turn @ turn.T, torch.eye(16), atol=1e-6)
    weights = torch.tensor([[0.5, 0.2, 0.25, 0.05]])
    assert bits.fewest(weights, 0.7).tolist() == [[True, False, True, False]]
    assert bits.fewest(weights, 0.96).all()
