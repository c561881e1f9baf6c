"""Score tables of what queries attended before, which propose candidates: LFPS (arXiv 2506.15704), section 4.

Tensors are float32 and begin with the query heads, [heads, ...]. Positions and distances are columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DECAY = 0.95  #: of a score per step
ALPHA = 0.2  #: threshold of the tables; larger proposes less
LOCAL = 5  #: newest tokens, which are always candidates
OFFSETS = (-1, 0, 1, 2)  #: neighbours of a candidate that are candidates, too


@dataclass
class Tables:
    """Of some query heads of a layer."""

    vertical: Tensor  #: [heads, tokens], by position
    slash: Tensor  #: [heads, tokens], by the distance to the query
    sinks: int  #: first tokens, which are in no table

    @classmethod
    def of_queries(cls, scores: Tensor, first: int, sinks: int) -> Tables:
        """:param scores: [heads, queries, tokens] of the prompt's last queries, minus infinity where one sees no key
        :param first: position of the first of these queries"""
        heads, count, tokens = scores.shape
        weights = scores[..., sinks:].softmax(-1)
        scale = 1 / (2 * count * (1 - DECAY))
        vertical, slash = scores.new_zeros(heads, tokens), scores.new_zeros(heads, tokens)
        vertical[:, sinks:] = weights.sum(1) * scale
        for row in range(count):
            seen = first + row + 1 - sinks
            slash[:, :seen] += weights[:, row, :seen].flip(-1) * scale
        return cls(vertical, slash, sinks)

    def candidates(self, position: int) -> Tensor:
        """Before the query of this position is known. :return: [heads, position + 1], bool; no sinks"""
        off, seen = self.sinks, position + 1
        vertical = self.vertical[:, off:seen]
        slash = self.slash[:, : seen - off].flip(-1)
        found = (vertical > _threshold(vertical)) | (slash > _threshold(slash))
        near = torch.zeros_like(found)
        for offset in OFFSETS:
            width = found.shape[1] - abs(offset)
            if width > 0:
                near[:, max(0, offset) :][:, :width] |= found[:, max(0, -offset) :][:, :width]
        near &= (vertical > vertical.mean(-1, keepdim=True)) | (slash > slash.mean(-1, keepdim=True))
        near[:, -LOCAL:] = True
        return torch.cat([near.new_zeros(near.shape[0], off), near], -1)

    def observe(self, position: int, attended: Tensor, scores: Tensor) -> None:
        """:param attended: [heads, position + 1], bool, what each head attended; the sinks in it do not count
        :param scores: [heads, position + 1], exact"""
        off, seen = self.sinks, position + 1
        weights = scores[:, off:].masked_fill(~attended[:, off:], -torch.inf).softmax(-1).nan_to_num(0) / 2
        self.vertical *= DECAY
        self.slash *= DECAY
        self.vertical[:, off:seen] += weights
        self.slash[:, : seen - off] += weights.flip(-1)


def _threshold(table: Tensor) -> Tensor:
    """:return: [heads, 1], from the mean, the largest score and the kurtosis"""
    mean = table.mean(-1, keepdim=True)
    squares = (table - mean) ** 2
    variance = squares.mean(-1, keepdim=True)
    kurtosis = (squares**2).mean(-1, keepdim=True) / (variance**2).clamp_min(1e-30)
    return mean + ALPHA * (table.amax(-1, keepdim=True) - mean) / kurtosis.clamp_min(1).sqrt()


def choose(tables: Tables, scores: Tensor, first: int, count: int, recent: int) -> tuple[Tensor, Tensor]:
    """Steps one after another, each of which learns from what it attended; `tables` are those of the last one then.
    :param scores: [heads, queries, tokens], exact, minus infinity where a query does not see a key
    :param count: candidates that a head attends beside the sinks and the `recent` newest tokens
    :return: [heads, queries, tokens] bool twice: attended candidates, and those whose key was scored for it"""
    attended = torch.zeros(scores.shape, dtype=torch.bool)
    scored = torch.zeros_like(attended)
    for row in range(scores.shape[1]):
        position = first + row
        seen, far = position + 1, max(tables.sinks, position + 1 - recent)
        exact = scores[:, row, :seen]
        candidates = tables.candidates(position)
        candidates[:, far:] = False
        best = exact.masked_fill(~candidates, -torch.inf).topk(min(count, seen), -1)
        kept = torch.zeros_like(candidates).scatter_(-1, best.indices, best.values > -torch.inf)
        attended[:, row, :seen], scored[:, row, :seen] = kept, candidates
        learned = kept.clone()
        learned[:, far:] = True
        tables.observe(position, learned, exact)
    return attended, scored
