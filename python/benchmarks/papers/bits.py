"""What top-p over estimated weights keeps and holds, by the bits of the keys' copies (Twilight, Fig. 5)."""

from __future__ import annotations

from pathlib import Path

import torch

from papers.attention import Prompts, shares

TARGETS = (0.85, 0.95)
DENSE_LAYERS = 2  # The first ones, which Twilight leaves alone.


def coded(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """Keys as copies of so many bits a channel have them: least value and step of each token's own."""
    least, most = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    step = ((most - least) / (2 ** bits - 1)).clamp(min=1e-9)
    return ((keys - least) / step).round() * step + least


def rotation(size: int) -> torch.Tensor:
    """Hadamard's, which spreads every channel over all."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size ** 0.5


def fewest(weights: torch.Tensor, share: float) -> torch.Tensor:
    """The fewest of each row that hold this share: a set, [rows, tokens]."""
    order = weights.argsort(1, descending=True)
    sorted_ = weights.gather(1, order)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, sorted_.cumsum(1) - sorted_ < share)


def figure(prompts: Prompts) -> list[dict]:
    """Of the layers that Twilight prunes, with all tokens before it: tokens kept by a query head and by the heads of
    its group together, softmax mass that they truly hold, and the part of the exact choice that is among them."""
    totals: dict[tuple[float, str], list[torch.Tensor]] = {}
    visible = 0
    for layers in prompts():
        for layer in layers[DENSE_LAYERS:]:
            turn = rotation(layer.keys.shape[2])
            copies = [{"exact": keys, **{f"{bits} bits": coded(keys, bits) for bits in (8, 4, 3, 2)},
                       "2 bits, rotated": coded(keys @ turn, 2) @ turn.T}
                      for keys in layer.keys.unbind(1)]
            for _, head, queries, keys in layer.steps():
                visible = keys.shape[0]
                masses = shares(queries, keys)
                for target in TARGETS:
                    exact = fewest(masses, target)
                    for name, copy in copies[head].items():
                        kept = fewest(shares(queries, copy[:visible]), target)
                        totals.setdefault((target, name), []).append(torch.tensor([
                            kept.sum(1).float().mean(), kept.any(0).sum(), (masses * kept).sum(1).mean(),
                            ((masses * kept).sum(1) >= target - 1e-6).float().mean(),
                            ((kept & exact).sum(1) / exact.sum(1)).mean()]))
    names = ("tokens", "tokens_group", "mass", "reached_share", "overlap")
    return [{"target": target, "estimate": estimate, "visible": visible,
             **dict(zip(names, torch.stack(all_).mean(0).tolist(), strict=True)),
             "pruned_share": 1 - float(torch.stack(all_)[:, 0].mean()) / visible}
            for (target, estimate), all_ in totals.items()]


def draw(rows: list[dict], file: Path) -> None:
    from papers.drawing import BLUE, RED, beside, save
    drawing, axes = beside(2)
    names = [row["estimate"] for row in rows if row["target"] == TARGETS[0]]
    for place, key, label in zip(axes, ("mass", "tokens"), ("softmax mass held", "tokens of a query head"), strict=True):
        for target, colour, shift in zip(TARGETS, (BLUE, RED), (-0.2, 0.2), strict=True):
            own = [row[key] for row in rows if row["target"] == target]
            place.bar([i + shift for i in range(len(own))], own, 0.4, color=colour, label=f"top-p {target:g}")
        place.set(title=label, xticks=range(len(names)))
        place.set_xticklabels([name.replace(", ", ",\n") for name in names], fontsize=8)
    axes[1].legend(frameon=False, loc="upper right")
    save(drawing, file)
