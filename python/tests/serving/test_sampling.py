"""Tokens are drawn as often as their probabilities say."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from sluice.serving.requests import Sampling
from sluice.serving.sampling import Past, choose, likelihoods

LOGITS = torch.tensor([2.0, -1.0, 3.0, 0.0, 1.0, 2.5])
DRAWS = 4000


def shares(by: str, **options: object) -> torch.Tensor:
    """How often each token is drawn, by one request at many positions, or by requests with many seeds."""
    if by == "seed":
        rows = [Past(Sampling(seed=seed, **options), []) for seed in range(DRAWS)]
        tokens = [chosen.token for chosen in choose(LOGITS.repeat(DRAWS, 1), rows)]
    else:
        row, tokens = Past(Sampling(**options), []), []
        for _ in range(DRAWS):
            tokens.append(choose(LOGITS[None], [row])[0].token)
            row.answered += 1
    return torch.bincount(torch.tensor(tokens), minlength=6) / DRAWS


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(("options", "scale", "kept"), [
    ({}, 1, [0, 1, 2, 3, 4, 5]),
    ({"temperature": 2.0}, 2, [0, 1, 2, 3, 4, 5]),
    ({"top_k": 2}, 1, [2, 5]),
    # 0.44, 0.27, 0.16, 0.06 of the largest.
    ({"top_p": 0.75}, 1, [2, 5, 0]),
    ({"top_p": 0.70}, 1, [2, 5]),
    ({"top_k": 3, "top_p": 0.85}, 1, [2, 5, 0]),
    ({"top_p": 0.01}, 1, [2]),
    # 1, 0.61, 0.37, 0.14 of the most likely one.
    ({"min_p": 0.3}, 1, [2, 5, 0]),
    ({"min_p": 0.7, "top_k": 4}, 1, [2]),
    ({"min_p": 0.5, "temperature": 2.0}, 2, [2, 5, 0]),
])
def test_frequencies(by: str, options: dict, scale: float, kept: list[int]) -> None:
    want = torch.zeros(6)
    want[kept] = (LOGITS[kept] / scale).softmax(0)
    # Five standard deviations.
    assert ((shares(by, **options) - want).abs() <= 5 * (want * (1 - want) / DRAWS).sqrt()).all()


def test_the_most_likely_token() -> None:
    assert choose(LOGITS[None], [Past(Sampling(temperature=0.0), [])])[0].token == 2
    assert [each and each.token for each in choose(torch.stack([LOGITS, LOGITS * torch.nan]), [
        Past(Sampling(temperature=0.0), []), Past(Sampling(), [])])] == [2, None]


def past(**options: object) -> Past:
    """Prompt 2; answer 5, 5, 0."""
    made = Past(Sampling(temperature=0.0, logprobs=6, **options), [2])
    for token in (5, 5, 0):
        made.add(token)
    return made


@pytest.mark.parametrize(("options", "want"), [
    ({"repetition_penalty": 2.0}, 4),  # 2, 5 and 0 are halved: 1.5, 1.25, 1.
    ({"presence_penalty": 0.4}, 2),
    ({"presence_penalty": -1.0}, 5),
    ({"frequency_penalty": -0.3}, 5),
    ({"frequency_penalty": -0.2}, 2),
    ({"logit_bias": {3: 3.5}}, 3),
    ({"logit_bias": {2: -100.0}}, 5),
])
def test_penalties(options: dict, want: int) -> None:
    logits = LOGITS.clone()
    if "repetition_penalty" in options:
        logits[4] = 1.6
    chosen = choose(logits[None], [past(**options)])[0]
    assert chosen.token == want
    # What is told is the model's, and what is given stays as it is.
    assert chosen.top[0][0] == 2 and dict(chosen.top)[want] == pytest.approx(logits.log_softmax(0)[want].item())


def test_ends_that_come_too_early() -> None:
    row = Past(Sampling(temperature=0.0, min_tokens=2, logprobs=1), [], ends=[2, 5])
    assert [choose(LOGITS[None], [row])[0].token, row.add(0)][0] == 0
    assert [choose(LOGITS[None], [row])[0].token, row.add(0)][0] == 0
    assert choose(LOGITS[None], [row])[0].token == 2


def test_likelihoods() -> None:
    logits = torch.stack([LOGITS, -LOGITS])
    one, other = likelihoods(logits, [1, 1], 2)
    assert [token for token, _ in one.top] == [2, 5] and [token for token, _ in other.top] == [1, 3]
    assert one.logprob == pytest.approx(LOGITS.log_softmax(0)[1].item()) and other.logprob == other.top[0][1]
    assert likelihoods(logits, [3, 3], 0)[0].top == ()


def test_a_temperature_of_next_to_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0 - 1e-6]])
    rows = [Past(Sampling(temperature=1e-6, seed=seed), []) for seed in range(50)]
    assert {each.token for each in choose(logits.repeat(50, 1), rows)} == {1}
    assert choose(logits, [Past(Sampling(temperature=1e-310), [])])[0].token == 1


def test_tokens_that_are_there_are_listed_once() -> None:
    """However long a prompt is, a token of the answer costs only itself."""
    row = Past(Sampling(temperature=0.0, repetition_penalty=2.0), [2, 4, 2])
    first = row.seen(LOGITS.device)
    assert sorted(first.tolist()) == [2, 4] and row.seen(LOGITS.device) is first
    for token in (5, 2, 5, 0):
        row.add(token)
    assert row._unlisted == [5, 0]
    assert sorted(row.seen(LOGITS.device).tolist()) == [0, 2, 4, 5]
    assert Past(Sampling(), [1, 2]).seen(LOGITS.device).tolist() == []


@pytest.mark.parametrize("every", [1, 3, 50])  # Tokens between two looks.
def test_counts_grow_with_the_answer(every: int) -> None:
    row, answer = Past(Sampling(temperature=0.0, frequency_penalty=0.5), [2, 4, 2]), []
    assert [each.tolist() for each in row.counts(LOGITS.device)] == [[], []]
    for step in range(50):
        answer.append(step * step % 7)
        row.add(answer[-1])
        if (step + 1) % every == 0:
            tokens, times = row.counts(LOGITS.device)
            assert dict(zip(tokens.tolist(), times.tolist())) == Counter(answer)
            again, same = row.counts(LOGITS.device)
            assert again is tokens and same is times
    # As if all of the answer had come at once.
    whole = Past(Sampling(temperature=0.0, frequency_penalty=0.5), [])
    for token in answer:
        whole.add(token)
    logits = torch.linspace(-2, 2, 7).repeat(2, 1)
    first, second = choose(logits, [row, whole])
    assert first == second


def test_counts_that_fail_are_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("cat", "ones"):
        row = Past(Sampling(temperature=0.0, presence_penalty=0.5), [])
        row.add(5)
        row.counts(LOGITS.device)
        row.add(5)
        row.add(3)
        with monkeypatch.context() as patch:
            patch.setattr(torch, step, lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
            with pytest.raises(torch.OutOfMemoryError):
                row.counts(LOGITS.device)
        assert [each.tolist() for each in row.counts(LOGITS.device)] == [[5, 3], [2, 1]]


def test_biases_are_copied_once() -> None:
    row = Past(Sampling(temperature=0.0, logit_bias={3: 3.5, 0: -1.0}), [])
    tokens, biases = row.biases(LOGITS.device)
    assert (tokens.tolist(), biases.tolist()) == ([3, 0], [3.5, -1.0]) and row.biases(LOGITS.device)[0] is tokens
