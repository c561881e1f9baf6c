"""Pages that cross the link where some are kept (ArkVale's recall cache, PSA's unified pool)."""

from __future__ import annotations

from pathlib import Path

import torch

from papers.attention import Prompts
from papers.pages import PAGE, Digests, paged


def arkvale_pages(scores: torch.Tensor, visible: int, budget: int) -> set[int]:
    """The best by digest of every query head, beside two pages of sinks and the newest two, which are always there."""
    last = (visible - 1) // PAGE
    scores = scores[:, :max(last - 1, 0)].clone()
    scores[:, :2] = -torch.inf
    best = scores.topk(min(budget // PAGE, max(scores.shape[1] - 2, 0)), dim=1).indices
    return set(best.flatten().tolist())


def psa_pages(scores: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, share: float,
              microbatch: int = 4) -> set[int]:
    """Pages in the order of the mean digest score until every head's accumulated share passes, by the least page."""
    logits = queries @ keys.T / keys.shape[1] ** 0.5
    weights = paged(torch.exp(logits - logits.amax(1, keepdim=True))).sum(2)
    order = scores.mean(0).argsort(descending=True)
    held = weights[:, scores.shape[1]:].sum(1)  # The open page.
    least = torch.full_like(held, torch.inf)
    for first in range(0, len(order), microbatch):
        now = order[first:first + microbatch]
        held = held + weights[:, now].sum(1)
        least = torch.minimum(least, weights[:, now].amin(1))
        left = len(order) - first - len(now)
        if bool((held >= share * (held + least * left)).all()):
            return set(order[:first + len(now)].tolist())
    return set(order.tolist())


class Pool:
    """Pages that are kept, of a fixed number: the one used or brought least recently gives way."""

    def __init__(self, capacity: int, keep_used: bool) -> None:
        self.capacity, self.keep_used = capacity, keep_used
        self.held: dict[object, None] = {}

    def fetched(self, wanted: list[object]) -> int:
        """How many of these are not there; then they are, if all of them have room, else the last of them."""
        missing = [page for page in wanted if page not in self.held]
        for page in wanted:
            if page in self.held and not self.keep_used:
                continue
            self.held.pop(page, None)
            self.held[page] = None
        while len(self.held) > self.capacity:
            del self.held[next(iter(self.held))]
        return len(missing)


def choices_of(layers: list, choose) -> dict[tuple[int, int, int], list[int]]:
    """Pages of (layer, step, KV head)."""
    chosen = {}
    for index, layer in enumerate(layers):
        digests = Digests(layer)
        for step, head, queries, keys in layer.steps():
            chosen[index, step, head] = sorted(choose(digests.scores(head, queries, keys.shape[0]), queries, keys))
    return chosen


def figure(prompts: Prompts) -> list[dict]:
    """Pages over the link per step and KV head with pools of some share of all pages: none, of each layer and KV head,
    and one for all of them, all of which are empty at first. A layer's pages are asked for at once."""
    policies = {"arkvale": lambda scores, q, k: arkvale_pages(scores, k.shape[0], 1280),
                "psa": lambda scores, q, k: psa_pages(scores, q, k, 0.95)}
    room = (0.1, 0.2, 0.3, 0.4, 0.6)
    total: dict[tuple[str, str, float], list[int]] = {}
    wanted_pages: dict[str, list[int]] = {name: [] for name in policies}
    pages = 0
    for layers in prompts():
        chosen = {name: choices_of(layers, choose) for name, choose in policies.items()}
        steps, pages = layers[0].queries.shape[0], layers[0].keys.shape[0] // PAGE
        for name, choices in chosen.items():
            planes = sorted({(index, head) for index, _, head in choices})
            wanted_pages[name] += map(len, choices.values())
            for share in room:
                for kind in ("lru", "fifo"):
                    capacity = int(share * pages)
                    own = {plane: Pool(capacity, kind == "lru") for plane in planes}
                    one = Pool(capacity * len(planes), kind == "lru")
                    for step in range(steps):
                        for index, head in planes:
                            now = [(index, head, page) for page in choices[index, step, head]]
                            counts = {kind: own[index, head].fetched(now), kind + "_unified": one.fetched(now)}
                            for pool, count in counts.items():
                                total.setdefault((name, pool, share), []).append(count)
    rows = [{"policy": name, "pool": "none", "room": 0.0, "pages": pages, "fetched": sum(all_) / len(all_)}
            for name, all_ in wanted_pages.items()]
    return rows + [{"policy": name, "pool": pool, "room": share, "pages": pages, "fetched": sum(all_) / len(all_)}
                   for (name, pool, share), all_ in sorted(total.items())]


def draw(rows: list[dict], file: Path) -> None:
    from papers.drawing import BLUE, BROWN, GREEN, RED, beside, save
    drawing, axes = beside(2, sharey=True)
    for place, policy in zip(axes, ("arkvale", "psa"), strict=True):
        none = next(row["fetched"] for row in rows if row["policy"] == policy and row["pool"] == "none")
        place.axhline(none, color="#888", label="none kept")
        for pool, style, colour in (("lru", "o-", BLUE), ("fifo", "o--", RED),
                                    ("lru_unified", "s-", GREEN), ("fifo_unified", "s--", BROWN)):
            own = [row for row in rows if row["policy"] == policy and row["pool"] == pool]
            place.plot([row["room"] for row in own], [row["fetched"] for row in own], style, color=colour,
                       label=pool.replace("_", ", "))
        place.set(title=policy, xlabel="share of the pages that there is room for")
    axes[0].set(ylabel="pages fetched per step and KV head", ylim=(0, 1.05 * max(row["fetched"] for row in rows)))
    axes[1].legend(frameon=False)
    save(drawing, file)
