"""Pages of a KV head that a share of the softmax takes (PSA, Fig. 2)."""

from __future__ import annotations

from pathlib import Path

import torch

from papers.attention import Layer, Prompts, shares

PAGE = 32  # Tokens, as PSA and ArkVale have it.


class Digests:
    """Of a layer's full pages, as ArkVale has them: centre and cuboid mean of their keys, [pages, d] each."""

    def __init__(self, layer: Layer) -> None:
        self._of = [self._of_head(layer.keys[:, head]) for head in range(layer.keys.shape[1])]

    @staticmethod
    def _of_head(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        full = keys[:keys.shape[0] // PAGE * PAGE].unflatten(0, (-1, PAGE))
        centre = (full.amax(1) + full.amin(1)) / 2
        return centre, (full - centre[:, None]).abs().mean(1)

    def scores(self, head: int, queries: torch.Tensor, visible: int) -> torch.Tensor:
        """Of the full pages of a KV head's first `visible` tokens, [heads, pages]."""
        centre, radius = self._of[head]
        full = visible // PAGE
        return queries @ centre[:full].T + queries.abs() @ radius[:full].T


def paged(values: torch.Tensor) -> torch.Tensor:
    """[heads, tokens] to [heads, pages, PAGE], the last page filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % PAGE)).unflatten(1, (-1, PAGE))


def needed(masses: torch.Tensor, order: torch.Tensor, share: float) -> int:
    """How many of the first in `order` hold `share` for every head of [heads, entries]."""
    held = masses[:, order].cumsum(1)
    return int((held < share - 1e-6).sum(1).max()) + 1


def quantiles(values: list[int]) -> dict[str, float]:
    found = torch.tensor(values, dtype=torch.float).quantile(torch.tensor([0.2, 0.5, 0.8]))
    return {name: float(value) for name, value in zip(("p20", "p50", "p80"), found, strict=True)}


def figure(prompts: Prompts) -> list[dict]:
    """In the best order for its query heads' mean, and in that of the digests."""
    counted: dict[tuple[int, float, str], list[int]] = {}
    pages = 0
    for layers in prompts():
        for index, layer in enumerate(layers):
            digests = Digests(layer)
            for _, head, queries, keys in layer.steps():
                masses = paged(shares(queries, keys)).sum(2)
                pages = masses.shape[1]
                scores = digests.scores(head, queries, keys.shape[0]).mean(0)
                order = torch.cat([torch.arange(scores.shape[0], pages), scores.argsort(descending=True)])
                for share in (0.9, 0.95):
                    best = masses.mean(0).argsort(descending=True)
                    counted.setdefault((index, share, "true"), []).append(needed(masses, best, share))
                    counted.setdefault((index, share, "digest"), []).append(needed(masses, order, share))
    return [{"layer": layer, "share": share, "order": order, "pages": pages, "mean": sum(all_) / len(all_),
             **quantiles(all_)} for (layer, share, order), all_ in sorted(counted.items())]


def draw(rows: list[dict], file: Path) -> None:
    from papers.drawing import BLUE, RED, beside, save
    drawing, axes = beside(2, sharey=True)
    for place, share in zip(axes, (0.9, 0.95), strict=True):
        for order, colour, shift in (("true", BLUE, -0.12), ("digest", RED, 0.12)):
            own = [row for row in rows if row["share"] == share and row["order"] == order]
            x = [row["layer"] + shift for row in own]
            place.vlines(x, [row["p20"] for row in own], [row["p80"] for row in own], color=colour, linewidth=3)
            place.plot(x, [row["p50"] for row in own], "o", color=colour, label=f"{order} order")
        place.set(title=f"pages of {PAGE} that hold {share:g} of the softmax", xlabel="layer")
    axes[0].set_ylabel("pages (20%, median, 80% of steps)")
    axes[1].legend(frameon=False)
    save(drawing, file)
