"""What selectors leave for Twilight's pruner: pages by Quest's bound, tokens by a quarter of the channels (Double
Sparsity), or everything, then top-p by 4-bit copies of the keys."""

from __future__ import annotations

import torch

from papers.attention import Layer, Prompts, shares
from papers.bits import DENSE_LAYERS, TARGETS, coded, fewest
from papers.tactic import box_scores

SHARE = 0.25  # Of the tokens, that a selector leaves: 8,192 of 32K in the paper.
CHANNELS = 0.25  # That Double Sparsity reads.


def heavy_channels(layer: Layer) -> list[torch.Tensor]:
    """Of each KV head, those that matter most to the products of queries and keys."""
    queries = layer.queries.abs().mean(0).view(layer.keys.shape[1], layer.group, -1).mean(1)
    weight = queries * layer.keys.abs().mean(0)
    return list(weight.topk(int(weight.shape[1] * CHANNELS), dim=1).indices)


def selected(scores: torch.Tensor) -> torch.Tensor:
    """The best of each row: a set, [rows, tokens]."""
    best = scores.topk(int(scores.shape[1] * SHARE), dim=1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def figure(prompts: Prompts) -> list[dict]:
    """Of the layers that Twilight prunes; the channels are those of the first prompt, which is not counted."""
    totals: dict[tuple[str, float], list[torch.Tensor]] = {}
    visible, channels = 0, []
    for layers in prompts():
        if not channels:
            channels = [heavy_channels(layer) for layer in layers]
            continue
        for index, layer in enumerate(layers[DENSE_LAYERS:], DENSE_LAYERS):
            copies = [coded(keys, 4) for keys in layer.keys.unbind(1)]
            for _, head, queries, keys in layer.steps():
                visible = keys.shape[0]
                masses = shares(queries, keys)
                own = channels[index][head]
                sets = {"full": torch.ones_like(masses, dtype=torch.bool), "quest": selected(box_scores(queries, keys)),
                        "double_sparsity": selected(queries[:, own] @ keys[:, own].T)}
                estimates = queries @ copies[head][:visible].T / keys.shape[1] ** 0.5
                for name, left in sets.items():
                    weights = torch.softmax(estimates.masked_fill(~left, -torch.inf), 1)
                    for target in (1.0, *TARGETS):
                        kept = left if target == 1.0 else fewest(weights, target) & left
                        totals.setdefault((name, target), []).append(torch.tensor([
                            kept.sum(1).float().mean(), kept.any(0).sum(), (masses * kept).sum(1).mean()]))
    rows = []
    for (name, target), all_ in totals.items():
        tokens, group, mass = torch.stack(all_).mean(0).tolist()
        rows.append({"selector": name, "top_p": None if target == 1.0 else target, "visible": visible, "tokens": tokens,
                     "tokens_group": group, "mass": mass, "pruned_share": 1 - tokens / visible})
    return rows
