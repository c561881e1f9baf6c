"""Which tokens a copy of each key finds, by its bits: the engine's 4, half of them as a first pass, and codes of papers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from papers.attention import Layer, Prompts
from papers.bits import rotation

SINKS, RECENT = 4, 128  # Tokens that are attended unasked, as the policy `sluice` does.
INT4, SCALED = "int4", "int4, pairs scaled"
FIRST_PASSES = ((INT4, (2, 4)), (SCALED, (4,)))  # Times as many candidates as tokens are wanted.
# Of normal values of variance 1: what uniform cells of so many bits leave of it, and the step that leaves least.
LEFT = torch.tensor((1, 0.3634, 0.1188, 0.0374, 0.01154, 0.0035, 0.001))
STEPS = torch.tensor((1, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041))


class Sizes(NamedTuple):
    """Of each pair of channels that positions rotate together, c and c + d / 2, as another text has them."""

    queries: torch.Tensor  # [d / 2] mean squares
    keys: torch.Tensor     # [d / 2] mean squares
    factors: torch.Tensor  # [d] powers of two, by which `sluice.transformers.balance` would scale keys


class Copy(NamedTuple):
    """Of keys: what a code of so many bits a channel says that they are, [tokens, d]."""

    bits: float
    keys: torch.Tensor


def half(values: torch.Tensor) -> torch.Tensor:
    """Rounded to f16, as scales and zeros are stored."""
    return values.half().float()


def pairs(rows: torch.Tensor) -> torch.Tensor:
    """Squares of each pair, [rows, d / 2]."""
    return (rows ** 2).unflatten(1, (2, -1)).sum(1)


def sizes(queries: torch.Tensor, keys: torch.Tensor) -> Sizes:
    """Of queries and keys of one KV head, [rows, d] each."""
    squares = pairs(keys)
    wanted = -0.25 * squares.median(0).values.clamp(min=1e-30).log2()
    factors = torch.exp2((wanted - wanted.mean()).round().clamp(-8, 8))
    return Sizes(pairs(queries).mean(0), squares.mean(0), torch.cat([factors, factors]))


def int4(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the engine's copy has what it is made of (include/sluice/step/int4.hpp): codes 0 to 15, scale and zero of each."""
    least, most = keys.amin(1, keepdim=True), keys.amax(1, keepdim=True)
    scale, zero = half(((most - least) / 15).clamp(2.0 ** -24, 65504)), half(least.clamp(-65504, 65504))
    return ((keys - zero) * (1 / scale)).round().clamp(0, 15), scale, zero


def all_bits(keys: torch.Tensor) -> torch.Tensor:
    codes, scale, zero = int4(keys)
    return codes * scale + zero


def high_bits(keys: torch.Tensor) -> torch.Tensor:
    """The two high bits of int4's codes, and the middle of what the others may be."""
    codes, scale, zero = int4(keys)
    return ((codes / 4).floor() * 4 + 1.5) * scale + zero


def unbiased(points: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Points of a grid by the f16 scale that makes each key's product with itself right, as RaBitQ's is."""
    square, along = (keys * keys).sum(1, keepdim=True), (points * keys).sum(1, keepdim=True)
    return points * half(square / along.clamp(min=1e-30))


def deviation(keys: torch.Tensor) -> torch.Tensor:
    return (keys * keys).mean(1, keepdim=True).sqrt().clamp(min=1e-9)


def two_bits(keys: torch.Tensor) -> torch.Tensor:
    """A uniform grid of four points a channel."""
    return unbiased((keys / (STEPS[2] * deviation(keys))).floor().clamp(-2, 1) + 0.5, keys)


@functools.cache
def grid(points: int = 16, samples: int = 60_000) -> torch.Tensor:
    """Points that normal pairs are near to, [points, 2]: k-means."""
    drawn = torch.randn(samples, 2, generator=torch.Generator().manual_seed(1))
    means = drawn[:points].clone()
    for _ in range(60):
        nearest = torch.cdist(drawn, means).argmin(1)
        means = torch.stack([drawn[nearest == point].mean(0) for point in range(points)])
    return means


def on_grid(keys: torch.Tensor) -> torch.Tensor:
    """Neighbouring channels together on 16 points, as HIGGS has it."""
    near = torch.cdist((keys / deviation(keys)).reshape(-1, 2), grid()).argmin(1)
    return unbiased(grid()[near].view_as(keys), keys)


def turned(code: Callable[[torch.Tensor], torch.Tensor], keys: torch.Tensor) -> torch.Tensor:
    """The code of the keys with every channel spread over all: Hadamard's transform behind random signs."""
    size = keys.shape[1]
    flips = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    turn = flips * rotation(size)
    return code(keys @ turn) @ turn.T


def signs(keys: torch.Tensor) -> torch.Tensor:
    """RaBitQ: keys less their mean (of the whole text, which a cache that grows has not), a bit a channel."""
    return unbiased(torch.where(keys < 0, -1.0, 1.0), keys)


def shared_out(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """Bits of each pair's channels, `bits` on average, one after the other to where it takes off most (Block-GTQ)."""
    given = torch.zeros(len(weights), dtype=torch.long)
    for _ in range(bits * len(weights)):
        more = (given + 1).clamp(max=len(LEFT) - 1)
        given[(weights * (LEFT[given] - LEFT[more])).where(more > given, -1).argmax()] += 1
    return given


def by_pair(keys: torch.Tensor, own: Sizes, bits: int) -> torch.Tensor:
    """Each pair in steps of its own size and bits, times one scale of the key."""
    given = shared_out(own.queries * own.keys, bits).repeat(2)
    size = (own.keys / 2).sqrt().clamp(min=1e-9).repeat(2)
    coded = given > 0
    step = STEPS[given] * size * half((keys / size)[:, coded].pow(2).mean(1, keepdim=True).sqrt())
    most = 2.0 ** (given - 1)
    points = (keys / step.clamp(min=1e-30)).floor().maximum(-most).minimum(most - 1) + 0.5
    return points * step * coded


def copies(keys: torch.Tensor, own: Sizes) -> dict[str, Copy]:
    """Of one KV head's keys, [tokens, d]; a query's product with each estimates that with the key."""
    mean = keys.mean(0)
    return {INT4: Copy(4, all_bits(keys)),
            f"high 2 bits of {INT4}": Copy(2, high_bits(keys)),
            "Hadamard, 2-bit grid": Copy(2, turned(two_bits, keys)),
            "Hadamard, pairs on 16 points (HIGGS)": Copy(2, turned(on_grid, keys)),
            "Hadamard, signs (RaBitQ)": Copy(1, turned(signs, keys - mean) + mean),
            "bits by RoPE pair (Block-GTQ)": Copy(2, by_pair(keys, own, 2)),
            SCALED: Copy(4, all_bits(keys * own.factors) / own.factors),
            f"high 2 bits of {SCALED}": Copy(2, high_bits(keys * own.factors) / own.factors)}


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest of each row, of those that are not ruled out by -inf: a set, [rows, tokens]."""
    found = scores.topk(min(count, scores.shape[1]), dim=1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, found, True) & scores.isfinite()


def reranked(first: torch.Tensor, then: torch.Tensor, candidates: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best by `then` of the best by `first`, and these."""
    among = best(first, candidates)
    return best(then.masked_fill(~among, -torch.inf), count), among


def seen(layer: Layer, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of a KV head's group, [steps * group, d], and which tokens they choose among, [steps * group, tokens]."""
    queries = layer.queries[:, head * layer.group:(head + 1) * layer.group]
    tokens = torch.arange(layer.keys.shape[0])
    visible = tokens[-queries.shape[0]:, None] + 1
    open_ = (tokens >= SINKS) & (tokens < visible - RECENT)
    return queries.flatten(0, 1), open_.repeat_interleave(layer.group, 0)


def found(queries: torch.Tensor, keys: torch.Tensor, open_: torch.Tensor, coded: dict[str, Copy], count: int,
          group: int) -> dict[str, torch.Tensor]:
    """Of each code, and first pass by one: bits a channel that are read, overlap with the exact choice, and softmax
    mass as a share of the exact choice's."""
    def scores(rows: torch.Tensor) -> torch.Tensor:
        return (queries @ rows.T / keys.shape[1] ** 0.5).masked_fill(~open_, -torch.inf)

    exact = scores(keys)
    weights = torch.softmax(exact, 1)  # A share of the mass does not depend on what others have.
    wanted = best(exact, count)
    held = (weights * wanted).sum(1)

    def row(bits: float, chosen: torch.Tensor) -> torch.Tensor:
        overlap = (chosen & wanted).sum(1) / wanted.sum(1)
        return torch.tensor([bits, overlap.mean(), ((weights * chosen).sum(1) / held).mean()])

    estimates = {name: scores(copy.keys) for name, copy in coded.items()}
    rows = {name: row(coded[name].bits, best(estimate, count)) for name, estimate in estimates.items()}
    for whole, all_times in FIRST_PASSES:
        high = f"high 2 bits of {whole}"
        for times in all_times:
            chosen, among = reranked(estimates[high], estimates[whole], times * count, count)
            read = among.unflatten(0, (-1, group)).any(1).sum() / open_.unflatten(0, (-1, group)).any(1).sum()
            more = coded[whole].bits - coded[high].bits  # Of tokens that are candidates of a head of the group.
            rows[f"{high}, {times}k by all 4"] = row(coded[high].bits + more * float(read), chosen)
    return rows


def figure(prompts: Prompts) -> list[dict]:
    """Mean over layers, heads, steps and prompts; sizes of pairs are those of another prompt, of another task if there
    are two."""
    if len(prompts.texts) < 2:
        raise SystemExit("codes: error: sizes of pairs come from another prompt; give --count 2 or two --tasks")
    texts = list(prompts())
    totals: dict[str, list[torch.Tensor]] = {}
    for index, layers in enumerate(texts):
        others = texts[(index + len(texts) // 2) % len(texts)]
        for layer, other in zip(layers, others, strict=True):
            count = max(64, layer.keys.shape[0] // 100)
            for head, keys in enumerate(layer.keys.unbind(1)):
                coded = copies(keys, sizes(seen(other, head)[0], other.keys[:, head]))
                queries, open_ = seen(layer, head)
                for name, row in found(queries, keys, open_, coded, count, layer.group).items():
                    totals.setdefault(name, []).append(row)
    means = {name: torch.stack(rows).mean(0).tolist() for name, rows in totals.items()}
    return [{"code": name, "bits": bits, "overlap": overlap, "mass_kept": kept, "top_k": count}
            for name, (bits, overlap, kept) in means.items()]
