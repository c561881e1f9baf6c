"""What a query head attends under each policy, and what it makes of it.

One layer's queries are [kv_heads, group, rows, head_dim], its keys and values [kv_heads, tokens, head_dim], float32;
the queries are those of the newest `rows` tokens. Scores are [kv_heads, group, rows, tokens], scaled, and minus
infinity where a query does not see a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SINKS, RECENT = 4, 128  #: always attended, except by a bypassed head
LOCAL = 5  #: newest tokens whose weight a bypassed head computes
BYPASS, STREAMING, HISTORY, SAMPLE = range(4)  #: the cheapest first
NAMES = ("bypass", "streaming", "history", "sample")


@dataclass(frozen=True)
class Rows:
    """The queries of one layer, and what they see."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float

    @property
    def first(self) -> int:
        """Position of the first query."""
        return self.k.shape[1] - self.q.shape[2]

    def seen(self) -> Tensor:
        """[rows, tokens]"""
        tokens = self.k.shape[1]
        return torch.arange(tokens)[None] <= torch.arange(self.first, tokens)[:, None]

    def near(self, recent: int = RECENT) -> Tensor:
        """Sinks and newest tokens. [rows, tokens]"""
        tokens = self.k.shape[1]
        columns, positions = torch.arange(tokens)[None], torch.arange(self.first, tokens)[:, None]
        return ((columns < SINKS) | (columns > positions - recent)) & self.seen()

    def scores(self, keys: Tensor | None = None) -> Tensor:
        """Of these keys instead of the exact ones, such as copies in few bits."""
        found = torch.einsum("kgrd,knd->kgrn", self.q, self.k if keys is None else keys) * self.scale
        return found.masked_fill(~self.seen(), -torch.inf)


def attend(scores: Tensor, v: Tensor, attended: Tensor, chances: Tensor | None = None) -> Tensor:
    """Softmax attention over what is attended; with `chances` each token weighs as often more as it was less likely
    (Horvitz-Thompson). :return: [kv_heads, group, rows, head_dim]"""
    logits = scores if chances is None else scores - chances.log()
    return torch.einsum("kgrn,knd->kgrd", logits.masked_fill(~attended, -torch.inf).softmax(-1), v)


# ---- Bypass: LFPS, section 4.3


@dataclass(frozen=True)
class Prompt:
    """Of the keys and values of a prompt behind its sinks."""

    mean_key: Tensor  #: [kv_heads, head_dim]
    mean_value: Tensor  #: likewise
    spread: Tensor  #: [kv_heads, group], variance of the last query's scores by its squared norm

    @classmethod
    def of(cls, rows: Rows) -> Prompt:
        """:param rows: the newest queries of the prompt"""
        last = rows.q[:, :, -1]
        scores = torch.einsum("kgd,knd->kgn", last, rows.k[:, SINKS:]) * rows.scale
        return cls(rows.k[:, SINKS:].mean(1), rows.v[:, SINKS:].mean(1), scores.var(-1, False) / (last**2).sum(-1))


def bypass(rows: Rows, scores: Tensor, prompt: Prompt) -> Tensor:
    """The mean of the sinks' values and of all others, by the estimated weight of the sinks."""
    mean = torch.einsum("kgrd,kd->kgr", rows.q, prompt.mean_key) * rows.scale
    variance = prompt.spread[..., None] * (rows.q**2).sum(-1)
    others = torch.arange(rows.first, rows.k.shape[1]) + 1 - SINKS
    positions = torch.arange(rows.k.shape[1])[None]
    local = rows.near(LOCAL) & (positions >= SINKS)
    whole = others.clamp_min(1).log() + mean + variance / 2
    rest = torch.maximum(whole, scores.masked_fill(~local, -torch.inf).logsumexp(-1))
    sinks = scores[..., :SINKS]
    share = (sinks.logsumexp(-1) - rest).sigmoid()[..., None]
    at_sinks = torch.einsum("kgrn,knd->kgrd", sinks.softmax(-1), rows.v[:, :SINKS])
    return share * at_sinks + (1 - share) * prompt.mean_value[:, None, None]


# ---- Sampled attention: priority sampling by 4-bit copies of the keys


def copies(k: Tensor, prompt_tokens: int) -> Tensor:
    """Keys as 4-bit copies say them: less the prompt's mean key, rotated (Hadamard), one step per token."""
    rotation = torch.ones(1, 1)
    while rotation.shape[0] < k.shape[-1]:
        rotation = torch.cat([torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)])
    if rotation.shape[0] != k.shape[-1]:
        raise ValueError(f"head_dim is {k.shape[-1]}; the rotation needs a power of two")
    rotation = rotation / rotation.shape[0] ** 0.5
    mean = k[:, :prompt_tokens].mean(1, keepdim=True)
    rotated = (k - mean) @ rotation
    low, high = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-8)
    return (((rotated - low) / step).round() * step + low) @ rotation + mean


def draws(seed: int, kv_heads: int, group: int, tokens: int) -> Tensor:
    """Gumbel noise of each query head and token, which stays for the token's life. [kv_heads, group, 1, tokens]"""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(tokens, kv_heads, group, generator=generator, dtype=torch.float64)
    noise = -(-uniform.clamp_min(1e-20).log()).log()
    return noise.permute(1, 2, 0)[:, :, None].float()


def sample(estimates: Tensor, far: Tensor, noise: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of each query head's `far` tokens so many without replacement, by their estimated weight.
    :return: which were drawn (bool), and each token's chance, given the others' noise: that it is among the largest;
        1 where the head attends all, 0 where a token is not far"""
    phi = (estimates + noise).masked_fill(~far, -torch.inf)
    tokens = phi.shape[-1]
    values, places = phi.topk(min(count + 1, tokens), -1)
    none = torch.full_like(values[..., :1], -torch.inf)
    least, next_one = (values[..., at : at + 1] if at < tokens else none for at in (count - 1, count))
    drawn = torch.zeros_like(phi, dtype=torch.bool).scatter_(-1, places[..., :count], values[..., :count] > -torch.inf)
    # A drawn token must exceed the best that was not drawn; another one would have had to exceed the least drawn.
    chances = -torch.expm1(-(estimates - next_one.where(drawn, least)).exp())
    return drawn, chances.where(far, torch.zeros_like(chances))


def together(chances: Tensor) -> Tensor:
    """That any query head of a KV head draws a token, as their draws are independent. [kv_heads, rows, tokens]"""
    return 1 - (1 - chances).prod(1)
