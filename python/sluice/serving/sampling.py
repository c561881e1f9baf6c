"""How tokens are chosen from logits. What a request draws depends on its seed and on how many tokens it has alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from sluice.serving.requests import Chosen, Sampling

if TYPE_CHECKING:
    from sluice.serving.guides import Guide

_GREEDY = 1e-5  # Below such a temperature the most likely token is chosen: logits must stay finite when divided by it.


class Past:
    """What the next token of a request depends on besides logits. What is on the device grows with the answer: a token
    costs what is new with it, copied asynchronously."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], ends: Iterable[int] = (),
                 guide: Guide | None = None) -> None:
        """`ends`: tokens that would end the answer. `guide`: what it is to follow, of its own."""
        self.sampling, self.answered, self.guide = sampling, 0, guide
        self._ends, self._early = sorted(ends), None
        self._places: dict[int, int] = {}  # Of the answer's tokens, each once, in these two.
        self._tokens: torch.Tensor | None = None
        self._times: torch.Tensor | None = None  # How often the answer has them.
        self._uncounted: list[int] = []  # Of its tokens, those that are not in them yet.
        self._biases: tuple[torch.Tensor, torch.Tensor] | None = None
        self._seen: set[int] = set()  # By the penalty for repetitions,
        self._unlisted: list[int] = []  # those of them that are not in this yet.
        self._listed: torch.Tensor | None = None
        self._see(prompt)

    def add(self, token: int) -> None:
        self.answered += 1
        if self.guide is not None:
            self.guide.take(token)
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._uncounted.append(token)
        self._see([token])

    def counts(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The answer's tokens, each once, and how often it has them, in f32; if a penalty counts them."""
        if self._tokens is None:
            self._tokens, self._times = _ids([], device), torch.zeros(0, dtype=torch.float32, device=device)
        if self._uncounted:
            first = len(self._places)
            new = [token for token in dict.fromkeys(self._uncounted) if token not in self._places]
            more = dict(zip(new, range(first, first + len(new))))
            at = _ids([more[token] if token in more else self._places[token] for token in self._uncounted], device)
            tokens = torch.cat([self._tokens, _ids(new, device)]) if new else self._tokens
            times = torch.cat([self._times, torch.zeros(len(new), dtype=torch.float32, device=device)])
            times.index_add_(0, at, torch.ones(len(at), dtype=torch.float32, device=device))
            # Together, as sampling is repeated if a step of it fails.
            self._places.update(more)
            self._tokens, self._times, self._uncounted = tokens, times, []
        return self._tokens, self._times

    def biases(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and what is added to their logits, in f32."""
        if self._biases is None:
            wants = self.sampling.logit_bias
            self._biases = _ids(list(wants), device), torch.tensor(list(wants.values()), dtype=torch.float32,
                                                                   device=device)
        return self._biases

    def early(self, device: torch.device) -> torch.Tensor | None:
        """Tokens that would end the answer too early."""
        if self.answered >= self.sampling.min_tokens:
            return None
        if self._early is None:
            self._early = _ids(self._ends, device)
        return self._early

    def seen(self, device: torch.device) -> torch.Tensor:
        """Each token of prompt and answer once, if they matter."""
        if self._unlisted or self._listed is None:
            new = _ids(self._unlisted, device)
            self._listed = new if self._listed is None else torch.cat([self._listed, new])
            self._unlisted = []
        return self._listed

    def _see(self, tokens: Sequence[int]) -> None:
        if self.sampling.repetition_penalty != 1:
            new = set(tokens) - self._seen
            self._seen |= new
            self._unlisted.extend(new)


def _ids(tokens: Sequence[int], device: torch.device) -> torch.Tensor:
    if len(tokens) == 1:  # A kernel writes it: no copy that has to be waited for.
        return torch.full((1,), tokens[0], dtype=torch.long, device=device)
    return torch.tensor(tokens, dtype=torch.long, device=device)


def choose(logits: torch.Tensor, rows: Sequence[Past]) -> list[Chosen | None]:
    """The next token of each row of logits [rows, vocabulary], f32; None where these are no finite numbers."""
    shaped = logits
    if any(row.sampling.shapes for row in rows):
        shaped = logits.clone()
        for at, row in enumerate(rows):
            if row.sampling.shapes:
                _shape(shaped[at], row)
    tokens = shaped.argmax(-1)
    # Rows that need no order are apart, always: what a row draws must not depend on the others.
    for ordered in (False, True):
        group = [at for at, row in enumerate(rows) if row.sampling.temperature >= _GREEDY
                 and ordered == (row.sampling.top_p < 1 or row.sampling.top_k > 0)]
        if group:
            tokens[group] = _draw(shaped[group], [rows[at] for at in group], ordered)
    # Both in one copy, as each has to be waited for.
    numbers, finite = torch.stack([tokens, logits.isfinite().all(-1).long()]).tolist()
    told = _tell(logits, tokens, numbers, rows)
    return [each if good else None for each, good in zip(told, finite)]


def _shape(logits: torch.Tensor, row: Past) -> None:
    """Penalties and biases on one row's logits [vocabulary], in place."""
    wants = row.sampling
    if wants.repetition_penalty != 1:
        there = row.seen(logits.device)
        old = logits[there]
        logits[there] = torch.where(old > 0, old / wants.repetition_penalty, old * wants.repetition_penalty)
    if wants.presence_penalty or wants.frequency_penalty:
        tokens, times = row.counts(logits.device)
        logits[tokens] -= wants.presence_penalty + wants.frequency_penalty * times
    if wants.logit_bias:
        tokens, biases = row.biases(logits.device)
        logits[tokens] += biases
    if row.guide is not None:
        logits[~row.guide.allowed(len(logits)).to(logits.device)] = -torch.inf
    early = row.early(logits.device)
    if early is not None and len(early):
        kept = logits.clone()
        logits[early] = -torch.inf
        if row.guide is not None:  # Where it has come to its end, nothing else is left.
            logits.copy_(torch.where(logits.isinf().all(), kept, logits))


def _draw(logits: torch.Tensor, rows: Sequence[Past], ordered: bool) -> torch.Tensor:
    """Tokens [rows] by the inverse of the distribution's sum."""
    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = logits / column([row.sampling.temperature for row in rows])
    order = None
    if ordered:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
    shares = scaled.softmax(-1)
    if ordered:
        most = column([row.sampling.top_k or logits.shape[-1] for row in rows])
        shares[torch.arange(logits.shape[-1], device=logits.device) >= most] = 0
        before = shares.cumsum(-1) - shares
        shares[before >= column([row.sampling.top_p for row in rows]) * shares.sum(-1, keepdim=True)] = 0
    least = [row.sampling.min_p for row in rows]
    if any(least):
        shares[shares < column(least) * shares.amax(-1, keepdim=True)] = 0
    total = shares.cumsum(-1)
    at = (total <= column([_uniform(row) for row in rows]) * total[:, -1:]).sum(-1, keepdim=True)
    at = at.clamp(max=logits.shape[-1] - 1)
    return (at if order is None else order.gather(-1, at))[:, 0]


def _uniform(row: Past) -> float:
    """In [0, 1), from seed and position: the same again when a forward is repeated."""
    text = f"{row.sampling.seed} {row.answered}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2.0**64 * (1 - 2.0**-52)


def likelihoods(logits: torch.Tensor, tokens: Sequence[int], most: int) -> list[Chosen]:
    """Of tokens that came anyway: their probabilities, and `most` of the likeliest. logits [tokens, vocabulary]."""
    logs = logits.log_softmax(-1)
    own = logs.gather(-1, _ids(tokens, logits.device)[:, None])[:, 0].tolist()
    values, ids = logs.topk(min(most, logits.shape[-1]), dim=-1)
    return [Chosen(token, value, tuple(zip(top, told)))
            for token, value, top, told in zip(tokens, own, ids.tolist(), values.tolist())]


def _tell(logits: torch.Tensor, tokens: torch.Tensor, numbers: Sequence[int], rows: Sequence[Past]) -> list[Chosen]:
    """`numbers` are the tokens."""
    asked = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
    chosen = [Chosen(token) for token in numbers]
    if asked:
        logs = logits[asked].log_softmax(-1)
        own = logs.gather(-1, tokens[asked][:, None])[:, 0].tolist()
        most = min(max(rows[at].sampling.logprobs for at in asked), logits.shape[-1])
        values, ids = (each.tolist() for each in logs.topk(most, dim=-1)) if most else ([[]] * len(asked),) * 2
        for place, at in enumerate(asked):
            count = rows[at].sampling.logprobs
            chosen[at] = Chosen(chosen[at].token, own[place], tuple(zip(ids[place][:count], values[place][:count])))
    return chosen
