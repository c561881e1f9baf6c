"""Which pattern FlexPrefill chooses for each head, and how many blocks it keeps (its heat maps)."""

from __future__ import annotations

from pathlib import Path

from papers.attention import Prompts
from papers.flexprefill import Spec, choose_all, computed_share, kept_of

GAMMAS = (0.9, 0.95)


def figure(prompts: Prompts) -> list[dict]:
    """Of each layer and query head: share of the chunks that chose per query block, mean distance of pooled from true
    attention, share of the blocks kept. Chunks as an engine on a CPU has them."""
    found: dict[tuple[float, int, int], list[tuple[float, float, float]]] = {}
    for layers in prompts():
        for index, layer in enumerate(layers):
            for head in range(layer.queries.shape[1]):
                for gamma in GAMMAS:
                    choices = choose_all(layer.queries[:, head], layer.keys[:, head // layer.group], Spec(gamma=gamma))
                    told = [each for each in choices if each.divergence is not None]
                    found.setdefault((gamma, index, head), []).append(
                        (sum(each.query_aware for each in told) / max(len(told), 1),
                         sum(each.divergence for each in told) / max(len(told), 1),
                         computed_share(kept_of(choices))))
    names = ("query_aware_share", "divergence", "blocks_share")
    return [{"gamma": gamma, "layer": layer, "head": head,
             **{name: sum(each[i] for each in all_) / len(all_) for i, name in enumerate(names)}}
            for (gamma, layer, head), all_ in sorted(found.items())]


def draw(rows: list[dict], file: Path) -> None:
    from papers.drawing import RED, beside, plt, save
    drawing, axes = beside(3, height=2.9)
    pictures = [("distance", "divergence", 0.95, "magma_r", 0.8),
                *((f"blocks, gamma {gamma:g}", "blocks_share", gamma, "viridis", 1.0) for gamma in GAMMAS)]
    for place, (title, name, gamma, colours, most) in zip(axes, pictures, strict=True):
        own = {(row["layer"], row["head"]): row for row in rows if row["gamma"] == gamma}
        layers, heads = (1 + max(key[i] for key in own) for i in (0, 1))
        values = [[own[layer, head][name] for head in range(heads)] for layer in range(layers)]
        # A pixel each, and few colours, that the file stays small.
        picture = place.imshow(values, cmap=plt.get_cmap(colours, 16), vmin=0, vmax=most, origin="lower",
                               interpolation="none")
        for (layer, head), row in own.items():
            if name == "divergence" and row["query_aware_share"] > 0.5:
                place.text(head, layer, "q", ha="center", va="center", color=RED, weight="bold")
        place.set(title=title, xlabel="query head", xticks=range(heads), yticks=range(layers))
        place.grid(False)
        plt.colorbar(picture, ax=place, shrink=0.8)
    axes[0].set_ylabel("layer")
    save(drawing, file)
