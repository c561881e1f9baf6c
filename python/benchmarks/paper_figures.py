"""What the papers' figures ask of a model's attention, of that in tests/data/testbed: pages that hold a share of the
softmax (PSA, Fig. 2), tokens that a share takes (Tactic, Table 1), and pages that cross the link where some are kept
(ArkVale's recall cache, PSA's unified pool).

`python benchmarks/paper_figures.py pages --model ../tests/data/testbed >pages.json` from python/; `--svg FILE` draws.
Dense attention decodes, so that what is counted does not depend on what a policy misses."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from testbed_tasks import make, tokens
from transformers import AttentionInterface, AutoModelForCausalLM

PAGE = 32  # Tokens, as PSA and ArkVale have it.


def digests_of(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of full pages: centre and cuboid mean, [pages, d] each."""
    full = keys[:keys.shape[0] // PAGE * PAGE].unflatten(0, (-1, PAGE))
    centre = (full.amax(1) + full.amin(1)) / 2
    return centre, (full - centre[:, None]).abs().mean(1)


class Layer:
    """Queries of a layer's newest tokens and keys of all tokens: [steps, q_heads, d] and [tokens, kv_heads, d]."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        self.queries, self.keys = queries, keys
        self.group = queries.shape[1] // keys.shape[1]
        self._digests = [digests_of(keys[:, head]) for head in range(keys.shape[1])]

    def digest_scores(self, head: int, queries: torch.Tensor, visible: int) -> torch.Tensor:
        """Of the full pages of a KV head's first `visible` tokens, [heads, pages]."""
        centre, radius = self._digests[head]
        full = visible // PAGE
        return queries @ centre[:full].T + queries.abs() @ radius[:full].T

    def steps(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Step, KV head, the queries of its group, and the keys that they see."""
        first = self.keys.shape[0] - self.queries.shape[0]
        for step in range(self.queries.shape[0]):
            for head in range(self.keys.shape[1]):
                own = self.queries[step, head * self.group:(head + 1) * self.group]
                yield step, head, own, self.keys[:first + step + 1, head]


def attention_of(model: AutoModelForCausalLM, ids: list[int], steps: int) -> list[Layer]:
    layers: list[Layer] = []

    def probe(module, query, key, value, attention_mask, scaling=None, **kwargs):
        layers.append(Layer(query[0, :, -steps:].transpose(0, 1).float(), key[0].transpose(0, 1).float()))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("probe", probe)
    model.config._attn_implementation = "probe"
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    return layers


def shares(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of the softmax, [heads, tokens]."""
    return torch.softmax(queries @ keys.T / keys.shape[1] ** 0.5, dim=-1)


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


def pages_figure(prompts: Callable[[], Iterator[list[Layer]]]) -> list[dict]:
    """Pages of a KV head that a share takes, in the best order for its query heads' mean and in that of the digests."""
    counted: dict[tuple[int, float, str], list[int]] = {}
    pages = 0
    for layers in prompts():
        for index, layer in enumerate(layers):
            for _, head, queries, keys in layer.steps():
                masses = paged(shares(queries, keys)).sum(2)
                pages = masses.shape[1]
                scores = layer.digest_scores(head, queries, keys.shape[0]).mean(0)
                order = torch.cat([torch.arange(scores.shape[0], pages), scores.argsort(descending=True)])
                for share in (0.9, 0.95):
                    best = masses.mean(0).argsort(descending=True)
                    counted.setdefault((index, share, "true"), []).append(needed(masses, best, share))
                    counted.setdefault((index, share, "digest"), []).append(needed(masses, order, share))
    return [{"layer": layer, "share": share, "order": order, "pages": pages, "mean": sum(all_) / len(all_),
             **quantiles(all_)} for (layer, share, order), all_ in sorted(counted.items())]


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


def tokens_figure(prompts: Callable[[], Iterator[list[Layer]]]) -> list[dict]:
    """Tokens that a share takes: the heaviest, and the first in the order of their clusters' centroids. Of one query
    head, and those that the heads of a group read together."""
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


def recall_figure(prompts: Callable[[], Iterator[list[Layer]]]) -> list[dict]:
    """Pages over the link per step and KV head with pools of some share of all pages: none, of each layer and KV head,
    and one for all of them, all of which are empty at first. A layer's pages are asked for at once."""
    policies = {"arkvale": lambda scores, q, k: arkvale_pages(scores, k.shape[0], 1280),
                "psa": lambda scores, q, k: psa_pages(scores, q, k, 0.95)}
    room = (0.1, 0.2, 0.3, 0.4, 0.6)
    total: dict[tuple[str, str, float], list[int]] = {}
    wanted_pages: dict[str, list[int]] = {name: [] for name in policies}
    pages = 0
    for layers in prompts():
        chosen = {name: {(index, step, head): sorted(
            choose(layer.digest_scores(head, queries, keys.shape[0]), queries, keys))
                         for index, layer in enumerate(layers) for step, head, queries, keys in layer.steps()}
                  for name, choose in policies.items()}
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


FIGURES = {"pages": pages_figure, "tokens": tokens_figure, "recall": recall_figure}


def version() -> str:
    project = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    found = re.search(r"^project\(sluice VERSION (\S+)", project, re.MULTILINE)
    return found[1] if found else "unknown"


def processor() -> str:
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def draw(figure: str, rows: list[dict], file: Path) -> None:
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    # Text stays text, and the same figures give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sluice", "font.size": 9, "axes.grid": True,
                         "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    drawing, axes = plt.subplots(1, 2, figsize=(8.4, 3.0), layout="constrained", sharey=True)
    if figure == "pages":
        for place, share in zip(axes, (0.9, 0.95), strict=True):
            for order, colour, shift in (("true", "#1b6ca8", -0.12), ("digest", "#c0504d", 0.12)):
                own = [row for row in rows if row["share"] == share and row["order"] == order]
                x = [row["layer"] + shift for row in own]
                place.vlines(x, [row["p20"] for row in own], [row["p80"] for row in own], color=colour, linewidth=3)
                place.plot(x, [row["p50"] for row in own], "o", color=colour, label=f"{order} order")
            place.set(title=f"pages of {PAGE} that hold {share:g} of the softmax", xlabel="layer")
        axes[0].set_ylabel("pages (20%, median, 80% of steps)")
    elif figure == "tokens":
        for place, unit in zip(axes, ("", "_group"), strict=True):
            for name, colour in (("optimal", "#1b6ca8"), ("cluster_optimal", "#c0504d")):
                own = [row for row in rows if row["order"] == name + unit]
                place.plot([row["target"] for row in own], [row["tokens"] for row in own], "o-", color=colour,
                           label=name.replace("_", " "))
            place.set(title="one query head" if not unit else "a group's query heads together", xlabel="target share")
        axes[0].set_ylabel("tokens")
    else:
        for place, policy in zip(axes, ("arkvale", "psa"), strict=True):
            none = next(row["fetched"] for row in rows if row["policy"] == policy and row["pool"] == "none")
            place.axhline(none, color="#888", label="none kept")
            for pool, style, colour in (("lru", "o-", "#1b6ca8"), ("fifo", "o--", "#c0504d"),
                                        ("lru_unified", "s-", "#5b9a3b"), ("fifo_unified", "s--", "#b8860b")):
                own = [row for row in rows if row["policy"] == policy and row["pool"] == pool]
                place.plot([row["room"] for row in own], [row["fetched"] for row in own], style, color=colour,
                           label=pool.replace("_", ", "))
            place.set(title=policy, xlabel="share of the pages that there is room for")
        axes[0].set(ylabel="pages fetched per step and KV head", ylim=(0, 1.05 * max(row["fetched"] for row in rows)))
    axes[1].legend(frameon=False)
    drawing.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", default="niah,kv", help="(%(default)s)")
    parser.add_argument("--length", type=tokens, default=8192, help="of prompts, in tokens, 8K (%(default)s)")
    parser.add_argument("--count", type=int, default=2, help="prompts for each task (%(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="newest tokens that are looked at (%(default)s)")
    parser.add_argument("--seed", type=int, default=4242, help="(%(default)s)")
    parser.add_argument("--svg", type=Path)
    wants = parser.parse_args()
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(wants.model, dtype=torch.float32)

    def prompts() -> Iterator[list[Layer]]:
        for task in wants.tasks.split(","):
            for index in range(wants.count):
                text = make(task, wants.length, wants.seed + index)
                yield attention_of(model, text["prompt"] + text["answer"], wants.steps)

    rows = FIGURES[wants.figure](prompts)
    config = {name: str(value) for name, value in vars(wants).items() if name != "svg"}
    json.dump({"command": "paper_figures.py", "version": version(), "host": {"cpu": processor(), "gpu": None},
               "config": config, "results": {wants.figure: rows}}, sys.stdout, indent=1)
    sys.stdout.write("\n")
    if wants.svg:
        draw(wants.figure, rows, wants.svg)


if __name__ == "__main__":
    main()
