"""FlexPrefill's choice of blocks for a query head and a chunk of its prompt, by its definition (Lai et al., ICLR 2025,
section 4), with what the paper and its code leave open as options: size of a block, chunks, and both ways in which
query blocks choose. As cpu/backend/flex_choice.hpp has it, but for rounding."""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Spec:
    gamma: float = 0.95
    tau: float = 0.1
    min_budget: int = 1024
    block: int = 128
    chunk: int = 4096  # Tokens that choose together, by the newest block of their queries; 0: all of the prompt.
    flattened: bool = False  # Query blocks choose together (Algorithm 4).


@dataclasses.dataclass
class Choice:
    kept: torch.Tensor  # [query blocks, key blocks]
    query_aware: bool
    divergence: float | None  # None: nothing was chosen, all blocks are kept


def chunks_of(tokens: int, spec: Spec) -> list[tuple[int, int]]:
    """First token and the one behind the last."""
    size = spec.chunk or tokens
    return [(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def _blocks(tokens: int, spec: Spec) -> int:
    return math.ceil(tokens / spec.block)


def _block_sums(lines: torch.Tensor, spec: Spec) -> torch.Tensor:
    return torch.nn.functional.pad(lines, (0, -lines.shape[0] % spec.block)).unflatten(0, (-1, spec.block)).sum(1)


def _block_means(rows: torch.Tensor, spec: Spec) -> torch.Tensor:
    """[blocks, d]; the last one over the rows that it has."""
    sums = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % spec.block)).unflatten(0, (-1, spec.block)).sum(1)
    counts = torch.full((sums.shape[0], 1), float(spec.block))
    counts[-1] = rows.shape[0] - (sums.shape[0] - 1) * spec.block
    return sums / counts


def _fewest(weights: torch.Tensor, share: float) -> int:
    """How many of the largest hold this share of all."""
    held = weights.double().sort(descending=True).values.cumsum(0)
    return int((held < share * held[-1]).sum()) + 1


def _largest(sums: torch.Tensor, count: int) -> torch.Tensor:
    """The first block and the `count - 1` with the largest sums, as a set."""
    forced = sums.clone()
    forced[0] = torch.inf
    has = torch.zeros(len(sums), dtype=torch.bool)
    has[forced.argsort(descending=True, stable=True)[:count]] = True
    return has


def _divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Jensen-Shannon distance, natural logarithm."""
    middle = (p + q) / 2
    return math.sqrt(max(0.0, float(sum(torch.special.xlogy(each, each / middle).nansum() for each in (p, q))) / 2))


def _lines(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest queries, summed over them, by position and by distance; each sums to 1."""
    rows, tokens = queries.shape[0], keys.shape[0]
    scores = queries @ keys.T / keys.shape[1] ** 0.5
    scores[:, tokens - rows:].masked_fill_(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    weights = torch.softmax(scores, 1) / rows
    # Row r, read backwards from its own position, is at column rows - 1 - r.
    backwards = torch.nn.functional.pad(weights.flip(1), (0, rows - 1)).contiguous()
    width = backwards.shape[1]
    distances = backwards.as_strided((rows, tokens), (width - 1, 1), rows - 1).sum(0)
    return weights.sum(0), distances


def _pooled_rows(queries: torch.Tensor, key_means: torch.Tensor, top: int, spec: Spec) -> torch.Tensor:
    """What the mean query of each block attends of the mean keys: [query blocks, key blocks]."""
    scores = _block_means(queries, spec) @ key_means.T / key_means.shape[1] ** 0.5
    visible = torch.arange(key_means.shape[0]) <= top + torch.arange(scores.shape[0])[:, None]
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), 1)


def _fewest_of_rows(weights: torch.Tensor, spec: Spec) -> torch.Tensor:
    if spec.flattened:
        return _fewest_of_rows(weights.flatten()[None], dataclasses.replace(spec, flattened=False)).view_as(weights)
    order = weights.argsort(dim=1, descending=True, stable=True)
    sorted_ = weights.gather(1, order).double()
    before = sorted_.cumsum(1) - sorted_
    kept = (before < spec.gamma * sorted_.sum(1, keepdim=True) - 1e-9) & (sorted_ > 0)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, kept)


def choose(queries: torch.Tensor, keys: torch.Tensor, first: int, spec: Spec) -> Choice:
    """Blocks for the chunk of queries [count, d] that begins at position `first`, a multiple of a block; keys [first +
    count, d] are all that it sees."""
    tokens = keys.shape[0]
    blocks, top = _blocks(tokens, spec), first // spec.block
    rows = top + torch.arange(_blocks(tokens, spec) - top)[:, None]
    causal = torch.arange(blocks) <= rows
    if tokens <= max(2 * spec.block, spec.min_budget):
        return Choice(kept=causal, query_aware=False, divergence=None)
    least = min(_blocks(spec.min_budget, spec), blocks)
    newest = queries[-spec.block:]
    columns, diagonals = _lines(newest, keys)
    column_sums, diagonal_sums = _block_sums(columns, spec), _block_sums(diagonals, spec)
    key_means = _block_means(keys, spec)
    pooled = torch.softmax(key_means @ newest.mean(0) / keys.shape[1] ** 0.5, 0)
    divergence = _divergence(pooled, column_sums)
    query_aware = divergence < spec.tau
    counts = [least, least] if query_aware else [
        min(max(_blocks(_fewest(lines, spec.gamma), spec), least), blocks) for lines in (columns, diagonals)]
    of_columns, of_diagonals = _largest(column_sums, counts[0]), _largest(diagonal_sums, counts[1])
    kept = of_columns | of_diagonals[(rows - torch.arange(blocks)).clamp(min=0)]
    if query_aware:
        kept = kept | _fewest_of_rows(_pooled_rows(queries, key_means, top, spec), spec)
    return Choice(kept=kept & causal, query_aware=query_aware, divergence=divergence)


def choose_all(queries: torch.Tensor, keys: torch.Tensor, spec: Spec) -> list[Choice]:
    """Of all chunks of a prompt: queries, keys [tokens, d]."""
    return [choose(queries[first:end], keys[:end], first, spec) for first, end in chunks_of(queries.shape[0], spec)]


def kept_of(choices: list[Choice]) -> torch.Tensor:
    """[query blocks, key blocks] of a whole prompt."""
    blocks = choices[-1].kept.shape[1]
    return torch.cat([torch.nn.functional.pad(each.kept, (0, blocks - each.kept.shape[1])) for each in choices])


def computed_share(kept: torch.Tensor) -> float:
    """Of the blocks that dense attention computes."""
    return float(kept.sum()) / (kept.shape[0] * (kept.shape[0] + 1) / 2)
