"""Tokens that a share of the softmax takes (Tactic, Table 1)."""

from __future__ import annotations

from pathlib import Path

import torch

from papers.attention import Prompts, shares


def clusters_of(keys: torch.Tensor, size: int = 32, iterations: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    """k-means of keys: cluster of each, and centroids."""
    count = max(keys.shape[0] // size, 1)
    centroids = keys[torch.randperm(keys.shape[0], generator=torch.Generator().manual_seed(1))[:count]].clone()
    of = torch.zeros(keys.shape[0], dtype=torch.long)
    for _ in range(iterations):
        of = (keys @ centroids.T - centroids.square().sum(1) / 2).argmax(1)
        sums = torch.zeros_like(centroids).index_add_(0, of, keys)
        members = torch.bincount(of, minlength=count)
        centroids = torch.where(members[:, None] > 0, sums / members.clamp(min=1)[:, None], centroids)
    return of, centroids


def figure(prompts: Prompts) -> list[dict]:
    """The heaviest, and the first in the order of their clusters' centroids. Of one query head, and those that the
    heads of a group read together."""
    targets = (0.5, 0.6, 0.7, 0.8, 0.9)
    counted: dict[tuple[float, str], list[int]] = {}
    visible = 0
    for layers in prompts():
        for layer in layers:
            clusters = [clusters_of(layer.keys[:, head]) for head in range(layer.keys.shape[1])]
            for _, kv_head, queries, keys in layer.steps():
                of, centroids = clusters[kv_head]
                visible = keys.shape[0]
                masses = shares(queries, keys)
                # Tokens of a better cluster come first; in a cluster, by position.
                rank = (queries @ centroids.T).argsort(1, descending=True).argsort(1)
                orders = {"optimal": masses.argsort(1, descending=True),
                          "cluster_optimal": rank[:, of[:visible]].argsort(dim=1, stable=True)}
                for name, order in orders.items():
                    held = masses.gather(1, order).cumsum(1)
                    for target in targets:
                        counts = (held < target - 1e-6).sum(1) + 1
                        taken = torch.zeros(visible, dtype=torch.bool)
                        for head, count in enumerate(counts.tolist()):
                            taken[order[head, :count]] = True
                            counted.setdefault((target, name), []).append(count)
                        counted.setdefault((target, name + "_group"), []).append(int(taken.sum()))
    return [{"target": target, "order": name, "visible": visible, "tokens": sum(all_) / len(all_)}
            for (target, name), all_ in sorted(counted.items())]


def draw(rows: list[dict], file: Path) -> None:
    from papers.drawing import BLUE, RED, beside, save
    drawing, axes = beside(2, sharey=True)
    for place, unit in zip(axes, ("", "_group"), strict=True):
        for name, colour in (("optimal", BLUE), ("cluster_optimal", RED)):
            own = [row for row in rows if row["order"] == name + unit]
            place.plot([row["target"] for row in own], [row["tokens"] for row in own], "o-", color=colour,
                       label=name.replace("_", " "))
        place.set(title="one query head" if not unit else "a group's query heads together", xlabel="target share")
    axes[0].set_ylabel("tokens")
    axes[1].legend(frameon=False)
    save(drawing, file)
