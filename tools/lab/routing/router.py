"""Which policy each query head gets, and what a layer does under such a choice."""

from __future__ import annotations

import time
from dataclasses import dataclass

import history
import torch
import torch.nn.functional as F
from policies import (BYPASS, HISTORY, LOCAL, SAMPLE, SINKS, STREAMING, Prompt, Rows, attend, bypass, copies, draws,
                      sample, together)
from torch import Tensor

FILL = 32  #: queries of the prompt that fill the tables of what was attended
JUDGE = 32  #: its newest queries, by which a policy is judged
LOOK = FILL + JUDGE


@dataclass(frozen=True)
class Budgets:
    """Of a query head, beside the sinks and the newest tokens."""

    sample: int = 128
    history: int = 64
    recent: int = 128


@dataclass
class Look:
    """What one look at the prompt leaves of a layer."""

    bars: Tensor  #: [3, kv_heads, group], of bypass, streaming and history: see `error_bar`
    prompt: Prompt
    tables: history.Tables  #: by all prompt's last queries
    prompt_tokens: int
    seconds: float  #: that it took, without dense attention

    def route(self, bound: float, together: bool = False) -> Tensor:
        """The cheapest policy whose error bar is at most `bound`, else `sample`. [kv_heads, group]
        :param together: the query heads of a KV head get one policy, by the largest of their bars"""
        bars = self.bars.amax(-1, keepdim=True).expand(self.bars.shape) if together else self.bars
        chosen = torch.full(bars.shape[1:], SAMPLE)
        for policy in (HISTORY, STREAMING, BYPASS):
            chosen[bars[policy] <= bound] = policy
        return chosen


@dataclass
class Cost:
    """Of the steps of one layer, by KV head: mean over its rows and KV heads."""

    tokens: float  #: read, of a KV head's union
    bytes: float  #: of keys and values in 16 bits, and of what the choice reads


def error_bar(out: Tensor, dense: Tensor) -> Tensor:
    """Root mean square over the queries of the distance to dense attention, relative to its norm. [kv_heads, group]"""
    away, norm = ((out - dense) ** 2).sum(-1), (dense**2).sum(-1)
    return (away / norm.clamp_min(1e-30)).mean(-1).sqrt()


def look(rows: Rows, scores: Tensor, dense: Tensor, budgets: Budgets) -> Look:
    """Judges bypass, streaming and history by the newest queries of a prompt.
    :param rows: the newest LOOK queries of the prompt
    :param dense: their output"""
    began = time.perf_counter()
    newest = Rows(rows.q[:, :, FILL:], rows.k, rows.v, rows.scale)
    judged, wanted = scores[:, :, FILL:], dense[:, :, FILL:]
    prompt, near = Prompt.of(rows), newest.near(budgets.recent)
    flat = scores.flatten(0, 1)
    tables = history.Tables.of_queries(flat[:, :FILL], rows.first, SINKS)
    kept, _ = history.choose(tables, flat[:, FILL:], newest.first, budgets.history, budgets.recent)
    outs = (bypass(newest, judged, prompt), attend(judged, rows.v, near),
            attend(judged, rows.v, near | kept.view(judged.shape)))
    bars = torch.stack([error_bar(out, wanted) for out in outs])
    tables = history.Tables.of_queries(flat[:, FILL:], newest.first, SINKS)
    return Look(bars, prompt, tables, rows.k.shape[1], time.perf_counter() - began)


def step(rows: Rows, scores: Tensor, seen: Look, choice: Tensor, budgets: Budgets, seed: int) -> tuple[Tensor, Cost]:
    """The rows as decode steps, each query head under its policy. What a KV head reads is the union of its query heads.
    All of them attend it, except that tokens which were drawn count for heads that draw, and a bypassed head attends
    its sinks alone.
    :param choice: [kv_heads, group]"""
    chosen, scored = _of_history(rows, scores, seen, choice == HISTORY, budgets)
    near = rows.near(budgets.recent)
    drawn, chances = _of_samples(rows, near, seen, choice == SAMPLE, budgets, seed)
    certain = (near | chosen.any(1)) & (choice != BYPASS).any(1)[:, None, None]
    union = certain | drawn.any(1)
    weighed = together(chances).where(~certain, torch.ones(())).clamp_min(1e-6)[:, None]
    out = bypass(rows, scores, seen.prompt)
    for of, attended, likely in ((choice == SAMPLE, union, weighed),
                                 ((choice == HISTORY) | (choice == STREAMING), certain, None)):
        if of.any():
            out = attend(scores, rows.v, attended[:, None], likely).where(of[..., None, None], out)
    return out, _cost(rows, union, scored.any(1), choice)


def _of_history(rows: Rows, scores: Tensor, seen: Look, of: Tensor, budgets: Budgets) -> tuple[Tensor, Tensor]:
    """What heads attend by the tables, and what is scored for it. :param of: which heads do, [kv_heads, group]"""
    chosen, scored = (torch.zeros(scores.shape, dtype=torch.bool) for _ in range(2))
    if of.any():
        more = scores.shape[-1] - seen.tables.vertical.shape[1]
        tables = history.Tables(*(F.pad(table[of.flatten()], (0, more))
                                  for table in (seen.tables.vertical, seen.tables.slash)), SINKS)
        chosen[of], scored[of] = history.choose(tables, scores[of], rows.first, budgets.history, budgets.recent)
    return chosen, scored


def _of_samples(rows: Rows, near: Tensor, seen: Look, of: Tensor, budgets: Budgets, seed: int) -> tuple[Tensor, Tensor]:
    """What heads draw, and the chance of each token for it; no other head draws. Tokens that the KV head attends by
    history anyway can be drawn, too: such draws add nothing to the union."""
    if not of.any():
        return torch.zeros((*of.shape, *near.shape), dtype=torch.bool), torch.zeros((*of.shape, *near.shape))
    estimates = rows.scores(copies(rows.k, seen.prompt_tokens))
    drawn, chances = sample(estimates, rows.seen() & ~near, draws(seed, *of.shape, near.shape[1]), budgets.sample)
    return drawn & of[..., None, None], chances * of[..., None, None]


def _cost(rows: Rows, union: Tensor, scored: Tensor, choice: Tensor) -> Cost:
    """Of a KV head: 16-bit keys and values of its union, 16-bit keys of candidates that it does not attend, and 4-bit
    copies of all visible keys with 4 bytes for their step if one of its query heads draws. The newest keys of a
    bypassed head count as tokens of its union. The score tables of `history` are left out: two scores per token and
    query head, of which an engine that keeps blocks' maxima reads only a part."""
    head_dim, visible = rows.k.shape[-1], rows.seen()
    bypassed = (choice == BYPASS).any(1)[:, None, None]
    union = union | (bypassed & rows.near(LOCAL))
    draws_here = (choice == SAMPLE).any(1)[:, None]
    seen = visible.sum(-1).expand(union.shape[:2])
    used = (4 * head_dim * union.sum(-1) + 2 * head_dim * (scored & ~union).sum(-1) +
            draws_here * seen * (head_dim // 2 + 4))
    return Cost(union.sum(-1).float().mean().item(), used.float().mean().item())
