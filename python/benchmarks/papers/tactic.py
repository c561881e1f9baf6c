"""What Tactic rests on, and what it gives a query head by itself: how many tokens a share of the softmax takes, from head
to head; what a number of tokens and a share leave of the output; in which order clusters and pages put tokens; the
curve through their weights; and what the heads of a group read together."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from papers.attention import Prompts, shares
from papers.tokens import clusters_of

TARGETS = (0.5, 0.6, 0.7, 0.8, 0.9)
BUDGETS = (64, 128, 256, 512, 1024)
PAGE = 16  # Quest's.
RANKS = torch.unique(torch.logspace(0, 3.9, 40).round().long())


def box_scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Quest's bound of each page, for each of its tokens: [heads, tokens]."""
    pages = -(-keys.shape[0] // PAGE)
    padded = torch.cat([keys, keys[-1:].expand(pages * PAGE - keys.shape[0], -1)]).view(pages, PAGE, -1)
    least, most = padded.amin(1), padded.amax(1)
    bound = queries.clamp(min=0) @ most.T + queries.clamp(max=0) @ least.T
    return bound.repeat_interleave(PAGE, 1)[:, :keys.shape[0]]


def fitted_count(weights: torch.Tensor, target: float) -> tuple[int, float, float]:
    """Algorithm 1 on the weights of one head in the order of its clusters: tokens that it takes, and the curve a / i + b
    through two windows. What a tail would give below zero counts as nothing, and a curve that rises is flat."""
    count = weights.shape[0]
    half = max(math.ceil(0.005 * count), 16) // 2
    near, far = round(0.1 * count), round(0.6 * count)
    head = min(math.ceil(0.015 * count), near - half - 1)
    first, second = (float(weights[at - half:at + half].double().mean()) for at in (near, far))
    a = max((first - second) / (1 / near - 1 / far), 0.0)
    b = first - a / near if a > 0 else (first + second) / 2
    rank = torch.arange(1, count + 1, dtype=torch.float64)
    estimate = torch.where(rank <= head, weights.double(), (a / rank + b).clamp(min=0))
    sums = estimate.cumsum(0)
    return min(int((sums < target * sums[-1]).sum()) + 1, count), a, b


class Totals:
    """Lists of numbers by what they are of."""

    def __init__(self) -> None:
        self.lists: dict[tuple, list] = {}

    def add(self, *of_and_values: object) -> None:
        *of, values = of_and_values
        self.lists.setdefault(tuple(of), []).extend(values)

    def of(self, kind: str) -> list[tuple[tuple, torch.Tensor]]:
        return [(of[1:], torch.tensor(all_, dtype=torch.float64)) for of, all_ in self.lists.items() if of[0] == kind]


def outputs_off(masses: torch.Tensor, taken: torch.Tensor, values: torch.Tensor) -> tuple[list, list]:
    """Of each head: distance of the output over `taken` from that over all, relative to it, and as a part of
    2 (1 - share) max ||v||, which bounds it."""
    masses, values = masses.double(), values.double()
    masses = masses / masses.sum(1, keepdim=True)  # Exactly, as what is left may be next to nothing.
    rest = masses * ~taken
    left = rest.sum(1, keepdim=True)
    whole = masses @ values
    off = (whole - (masses - rest) @ values / (1 - left)).norm(dim=1)
    bound = (2 * left[:, 0] * values.norm(dim=1).max()).clamp(min=1e-12)
    return (off / whole.norm(dim=1)).tolist(), (off / bound).tolist()


def step_of(totals: Totals, place: tuple[int, int], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
            clusters: tuple[torch.Tensor, torch.Tensor]) -> None:
    """One step of the heads that share a KV head."""
    of, centroids = clusters
    masses = shares(queries, keys)
    visible = keys.shape[0]
    rank = (queries @ centroids.T).argsort(1, descending=True).argsort(1)
    by_weight = masses.argsort(1, descending=True)
    orders = {"optimal": by_weight, "clusters": rank[:, of[:visible]].argsort(dim=1, stable=True),
              "pages": (-box_scores(queries, keys)).argsort(dim=1, stable=True)}
    held = {name: masses.gather(1, order).cumsum(1) for name, order in orders.items()}
    for budget in BUDGETS:
        for name in orders:
            totals.add("order", name, budget, held[name][:, min(budget, visible) - 1].tolist())
        taken = torch.zeros_like(masses, dtype=torch.bool).scatter_(1, by_weight[:, :budget], True)
        errors, bounds = outputs_off(masses, taken, values)
        totals.add("error", "budget", budget, errors)
        totals.add("bound", "budget", budget, bounds)
        totals.add("count", "budget", budget, [min(budget, visible)] * masses.shape[0])
    in_clusters = masses.gather(1, orders["clusters"])
    for target in TARGETS:
        counts = (held["optimal"] < target - 1e-6).sum(1) + 1
        taken = torch.zeros_like(masses, dtype=torch.bool)
        taken.scatter_(1, by_weight, torch.arange(visible) < counts[:, None])
        errors, bounds = outputs_off(masses, taken, values)
        totals.add("error", "target", target, errors)
        totals.add("bound", "target", target, bounds)
        totals.add("count", "target", target, counts.tolist())
        fits = [fitted_count(head, target)[0] for head in in_clusters]
        reached = [float(held["clusters"][head, count - 1]) for head, count in enumerate(fits)]
        totals.add("fit", target, list(zip(fits, reached, [share >= target - 1e-6 for share in reached], strict=True)))
        union = torch.zeros(visible, dtype=torch.bool)
        for head, count in enumerate(fits):
            union[orders["clusters"][head, :count]] = True
        totals.add("union", target, [(sum(fits), int(union.sum()))])
        if target == TARGETS[-1]:
            for head, count in enumerate(counts.tolist()):
                totals.add("head", place[0], place[1] * len(fits) + head, [count])
    at = RANKS.clamp(max=visible)
    means = masses.mean(1, keepdim=True)
    for name in ("optimal", "clusters"):
        totals.add("curve", name, [(masses.gather(1, orders[name]) / means)[:, at - 1].mean(0)])
    totals.add("curve", "fitted", [torch.stack([
        (a / at + b).clamp(min=0) for _, a, b in (fitted_count(head, 0.9) for head in in_clusters / means)]).mean(0)])


def figure(prompts: Prompts) -> list[dict]:
    totals, visible = Totals(), 0
    for layers in prompts():
        for index, layer in enumerate(layers):
            clusters = [clusters_of(layer.keys[:, head]) for head in range(layer.keys.shape[1])]
            for _, kv_head, queries, keys in layer.steps():
                visible = keys.shape[0]
                step_of(totals, (index, kv_head), queries, keys, layer.values[:visible, kv_head], clusters[kv_head])
    rows = []
    for (layer, head), counts in totals.of("head"):
        low, middle, high = torch.quantile(counts, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        rows.append({"what": "head", "layer": layer, "head": head, "target": TARGETS[-1], "visible": visible,
                     "tokens_p10": low, "tokens_p50": middle, "tokens_p90": high})
    errors, bounds = dict(totals.of("error")), dict(totals.of("bound"))
    for (kind, limit), counts in totals.of("count"):
        error = errors[kind, limit]
        rows.append({"what": "distance", "by": kind, "limit": limit, "tokens": float(counts.mean()),
                     "error_mean": float(error.mean()), "error_p95": float(torch.quantile(error, 0.95)),
                     "error_worst": float(error.max()), "of_bound_mean": float(bounds[kind, limit].mean()),
                     "of_bound_worst": float(bounds[kind, limit].max())})
    for (order, budget), masses in totals.of("order"):
        rows.append({"what": "order", "order": order, "tokens": budget, "mass": float(masses.mean())})
    for (target,), fits in totals.of("fit"):
        tokens, share, reached = fits.mean(0).tolist()
        rows.append({"what": "fit", "target": target, "tokens": tokens, "mass": share, "reached_share": reached})
    for (target,), sums in totals.of("union"):
        apart, together = sums.mean(0).tolist()
        rows.append({"what": "union", "target": target, "tokens_apart": apart, "tokens_together": together})
    for of, curves in totals.lists.items():
        if of[0] == "curve":
            rows.append({"what": "curve", "order": of[1], "ranks": RANKS.tolist(),
                         "weights": [round(weight, 5) for weight in torch.stack(curves).mean(0).tolist()]})
    return rows


def draw(rows: list[dict], file: Path) -> None:
    from papers.drawing import BLUE, BROWN, GREEN, RED, beside, save
    drawing, ((heads, distance), (order, curve)) = beside(2, rows=2, height=6.0)

    def of(what: str, **which: object) -> list[dict]:
        return [row for row in rows if row["what"] == what and all(row[key] == to for key, to in which.items())]

    sorted_ = sorted(of("head"), key=lambda row: row["tokens_p50"])
    heads.fill_between(range(len(sorted_)), [row["tokens_p10"] for row in sorted_],
                       [row["tokens_p90"] for row in sorted_], color=BLUE, alpha=0.25, label="80% of steps")
    heads.plot([row["tokens_p50"] for row in sorted_], color=BLUE, label="median")
    heads.set(title=f"tokens that {TARGETS[-1]:.0%} take", xlabel="query heads, sorted", yscale="log")
    for by, colour in (("budget", RED), ("target", BLUE)):
        own = of("distance", by=by)
        distance.plot([row["tokens"] for row in own], [row["error_mean"] for row in own], "o-", color=colour, label=by)
        distance.plot([row["tokens"] for row in own], [row["error_p95"] for row in own], "o:", color=colour,
                      label=f"{by}, 95% of heads and steps")
    distance.set(title="error of the output, heaviest tokens", xlabel="tokens, mean", xscale="log")
    for name, colour in (("optimal", GREEN), ("clusters", BLUE), ("pages", RED)):
        own = of("order", order=name)
        order.plot([row["tokens"] for row in own], [row["mass"] for row in own], "o-", color=colour, label=name)
    order.set(title="softmax mass of the first", xlabel="tokens", xscale="log")
    for name, colour in (("optimal", GREEN), ("clusters", BLUE), ("fitted", BROWN)):
        own = of("curve", order=name)[0]
        curve.plot(own["ranks"], own["weights"], color=colour, label=name)
    curve.set(title="weight by rank, mean of a head's is 1", xlabel="rank", xscale="log", yscale="log")
    for place in (heads, distance, order, curve):
        place.legend(frameon=False, fontsize=7)
    save(drawing, file)
