"""What FlexPrefill's choice costs and holds by block size, by the queries that stand for the others, and by whether
query blocks choose together or each for itself (Tables 7 and 9)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from papers.attention import Layer, Prompts
from papers.flexprefill import Spec, choose_all, computed_share, kept_of

ROWS = 1024  # At a time.
EVERY = 32  # Row whose output is looked at.
ALL = 1.0  # tau, beyond any distance, so that every head is query-aware.


def variants() -> dict[str, Spec]:
    whole = Spec(chunk=0)
    named = {"block 128": whole, "block 64": dataclasses.replace(whole, block=64)}
    named |= {f"chunks of {tokens}": Spec(chunk=tokens) for tokens in (4096, 2048, 1024)}
    named |= {"all query-aware, per row": Spec(tau=ALL), "all query-aware, flattened": Spec(tau=ALL, flattened=True)}
    return {f"{name}, gamma {gamma:g}": dataclasses.replace(spec, gamma=gamma)
            for name, spec in named.items() for gamma in (0.9, 0.95)} | {
        f"all query-aware, {way}, least 128, gamma {gamma:g}":
            Spec(tau=ALL, gamma=gamma, min_budget=128, flattened=way == "flattened")
        for way in ("per row", "flattened") for gamma in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)}


@dataclasses.dataclass
class Held:
    """Of one variant, over heads, rows and prompts."""
    blocks: list[float] = dataclasses.field(default_factory=list)
    query_aware: list[bool] = dataclasses.field(default_factory=list)
    coverage: list[torch.Tensor] = dataclasses.field(default_factory=list)
    error: float = 0.0
    size: float = 0.0

    def row(self) -> dict:
        coverage = torch.cat(self.coverage)
        some = coverage[torch.randperm(len(coverage), generator=torch.Generator().manual_seed(0))[:1 << 20]]
        return {"blocks_share": sum(self.blocks) / len(self.blocks), "coverage": float(coverage.mean()),
                "coverage_p5": float(some.quantile(0.05)), "output_error": (self.error / self.size) ** 0.5,
                "query_aware_share": sum(self.query_aware) / max(len(self.query_aware), 1)}


def weigh(layer: Layer, head: int, kept: dict[str, torch.Tensor], specs: dict[str, Spec], held: dict[str, Held]) -> None:
    """Attends densely, some rows at a time, and adds up what each variant has of that."""
    queries, keys = layer.queries[:, head], layer.keys[:, head // layer.group]
    values = layer.values[:, head // layer.group]
    for first in range(0, len(queries), ROWS):
        end = min(first + ROWS, len(queries))
        scores = queries[first:end] @ keys[:end].T / keys.shape[1] ** 0.5
        position = torch.arange(first, end)
        weights = torch.softmax(scores.masked_fill(torch.arange(end) > position[:, None], -torch.inf), 1)
        sums = {block: torch.nn.functional.pad(weights, (0, -end % block)).unflatten(1, (-1, block)).sum(2)
                for block in {spec.block for spec in specs.values()}}
        looked_at = weights[::EVERY]
        dense = looked_at @ values[:end]
        for name, spec in specs.items():
            has = kept[name][position // spec.block, :sums[spec.block].shape[1]]
            held[name].coverage.append((sums[spec.block] * has).sum(1))
            chosen = looked_at * has[::EVERY].repeat_interleave(spec.block, 1)[:, :end]
            out = chosen @ values[:end] / chosen.sum(1, keepdim=True)
            held[name].error += float((out - dense).square().sum())
            held[name].size += float(dense.square().sum())


def figure(prompts: Prompts) -> list[dict]:
    specs = variants()
    held = {name: Held() for name in specs}
    for layers in prompts():
        for layer in layers:
            for head in range(layer.queries.shape[1]):
                kept = {}
                for name, spec in specs.items():
                    choices = choose_all(layer.queries[:, head], layer.keys[:, head // layer.group], spec)
                    kept[name] = kept_of(choices)
                    held[name].blocks.append(computed_share(kept[name]))
                    held[name].query_aware += [each.query_aware for each in choices if each.divergence is not None]
                weigh(layer, head, kept, specs, held)
    return [{"variant": name, **dataclasses.asdict(specs[name]), **held[name].row()} for name in specs]


def draw(rows: list[dict], file: Path) -> None:
    from papers.drawing import BLUE, RED, beside, save
    drawing, axes = beside(2)
    for place, names, title in ((axes[0], ("block 128", "block 64"), "size of a block"),
                                (axes[1], ("all query-aware, per row, least", "all query-aware, flattened, least"),
                                 "query blocks choose")):
        for name, colour in zip(names, (BLUE, RED), strict=True):
            own = sorted((row for row in rows if row["variant"].startswith(name)), key=lambda row: row["blocks_share"])
            label = name.removeprefix("all query-aware, ").removesuffix(", least")
            for key, style in (("coverage", "o-"), ("coverage_p5", "o--")):
                place.plot([row["blocks_share"] for row in own], [row[key] for row in own], style, color=colour,
                           label=label if key == "coverage" else f"{label}, 5% of the rows below")
        place.set(title=title, xlabel="share of the blocks computed")
        place.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("share of the softmax")
    save(drawing, file)
