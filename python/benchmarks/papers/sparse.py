"""Answers after prompts whose blocks FlexPrefill chose, by the size of a block (Table 7)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from papers.attention import Prompts, dense, run
from papers.flexprefill import Spec, choose_all, computed_share, kept_of

ROWS = 1024  # At a time.
QUESTION = 24  # Tokens at a prompt's end that are attended densely, as the answer is; `sluice eval` does likewise.
VARIANTS = {"dense": None, **{f"block {block}, gamma {gamma:g}": Spec(block=block, gamma=gamma)
                              for block in (128, 64) for gamma in (0.9, 0.95)}}


def attend_chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor,
                  block: int) -> torch.Tensor:
    """One head's rows under causal attention of the blocks that were kept: [tokens, d] each."""
    out = torch.empty_like(query)
    tokens = torch.arange(len(query))
    columns = kept.repeat_interleave(block, 1)  # [query blocks, tokens]
    for first in range(0, len(query), ROWS):
        end = min(first + ROWS, len(query))
        rows = tokens[first:end, None]
        seen = columns[rows[:, 0] // block, :end] & (tokens[:end] <= rows)
        scores = query[first:end] @ key[:end].T / key.shape[1] ** 0.5
        out[first:end] = torch.softmax(scores.masked_fill(~seen, -torch.inf), 1) @ value[:end]
    return out


def attention(spec: Spec, tokens: int, blocks: list[float]) -> Callable:
    """Of a model whose first tokens are attended so, and the others densely."""
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = dense(query, key, value)
        group = query.shape[0] // key.shape[0]
        for head in range(query.shape[0]):
            own = query[head, :tokens], key[head // group, :tokens], value[head // group, :tokens]
            kept = kept_of(choose_all(own[0], own[1], spec))
            blocks.append(computed_share(kept))
            out[head, :tokens] = attend_chosen(*own, kept, spec.block)
        return out
    return attend


def figure(prompts: Prompts) -> list[dict]:
    """Share of the prompts whose answer is the likeliest, token by token: what greedy decoding says."""
    rows = []
    for name, spec in VARIANTS.items():
        right, blocks, nats = 0, [], 0.0
        for prompt, answer in prompts.texts:
            attend = dense if spec is None else attention(spec, len(prompt) - QUESTION, blocks)
            logits = run(prompts.model, prompt + answer, attend)[len(prompt) - 1:-1]
            right += logits.argmax(1).tolist() == answer
            nats -= float(logits.log_softmax(1).gather(1, torch.tensor(answer)[:, None]).mean())
        rows.append({"variant": name, "prompts": len(prompts.texts), "accuracy": right / len(prompts.texts),
                     "answer_nats": nats / len(prompts.texts),
                     "blocks_share": sum(blocks) / len(blocks) if blocks else 1.0})
    return rows
