"""How well the next token of a text is foretold, and how far a policy moves that from the model's own attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sluice.evaluation.decoding import Setup, Subject, dense, under
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import Window
from sluice.evaluation.intervals import bootstrap, quantile
from sluice.evaluation.policies import FLOOR
from sluice.evaluation.reading import Reading, mean, told

_KEPT_BYTES = 2 << 30  # Logits of the model's own attention, until all policies have been held against them.


@dataclass(frozen=True)
class Score:
    """One window under one attention, token by token."""

    first: int  #: the window's place in the text
    loss: list[float]  #: minus the log of the text's own token's probability
    kl: list[float]  #: KL(dense || policy) of the next token's distribution, in nats
    same: list[bool]  #: whether the most likely token is that of dense attention
    reading: Reading | None  #: over all decoded tokens; None: not known


def compare(window: Window, wanted: torch.Tensor, got: torch.Tensor, reading: Reading | None) -> Score:
    """Logits [scored, vocabulary] of dense attention and of a policy."""
    scored = len(got)
    ours, theirs = (logits.double().log_softmax(-1) for logits in (got, wanted))
    loss = -ours.gather(1, torch.tensor(window.ids[-scored:], device=got.device)[:, None])[:, 0]
    # Where dense attention gives a token no chance at all, it adds nothing.
    kl = torch.where(theirs.isinf(), 0.0, theirs.exp() * (theirs - ours)).sum(1)
    # Of equal distributions rounding may leave less than 0.
    return Score(window.first, loss.tolist(), kl.clamp(min=0).tolist(),
                 (got.argmax(1) == wanted.argmax(1)).tolist(), reading)


def score_windows(setup: Setup, windows: Sequence[Window], scored: int, groups: Sequence[Sequence[str]],
                  said: Callable[[str], None], failures: Failures) -> dict[str, list[Score]]:
    """All windows under dense attention, by the name "dense", and under every policy that does not fail. Policies of a
    group have an engine in common. Of a window the last tokens are scored: each is foretold by a token that is decoded,
    as policies choose for these alone. Calls `said` after each."""
    scores: dict[str, list[Score]] = {name: [] for name in ("dense", *(name for group in groups for name in group))}
    for part in _parts(windows, scored * setup.model.config.get_text_config(decoder=True).vocab_size * 4):
        wanted = []
        with dense(setup) as subject:
            for window in part:
                for name, logits, reading in _foretold(subject, window, scored, ["dense"], failures):
                    wanted.append(logits)
                    scores[name].append(compare(window, logits, logits, reading))
                    said(name)
        for group in groups:
            with failures.of_all(group), under(setup, group, scored) as subject:
                for window, reference in zip(part, wanted):
                    for name, logits, reading in _foretold(subject, window, scored, group, failures):
                        scores[name].append(compare(window, reference, logits, reading))
                        said(name)
    return {name: given for name, given in scores.items() if name not in failures.reasons}


def _foretold(subject: Subject, window: Window, scored: int, names: Sequence[str], failures: Failures,
              ) -> Iterator[tuple[str, torch.Tensor, Reading | None]]:
    """Under each of these that has not failed, the logits of what comes after the tokens that foretell."""
    before = len(window.ids) - scored - 1
    left = [name for name in names if name not in failures.reasons]
    if not left:
        return
    with subject.prefix(window.ids[:before]) as prefix:
        for name in left:
            with failures.of(name), prefix.under(name) as session:
                yield name, session.read(window.ids[before:-1]), session.reading


def _parts(windows: Sequence[Window], bytes_of_one: int) -> Iterator[Sequence[Window]]:
    """Windows whose logits are kept at once."""
    size = max(1, _KEPT_BYTES // bytes_of_one)
    for first in range(0, len(windows), size):
        yield windows[first : first + size]


def summary(policy: str, scores: Sequence[Score], of_dense: Sequence[Score], seed: int) -> dict[str, Any]:
    """What windows come to. Intervals are of windows drawn again, as tokens of one depend on each other."""
    loss, base = ([_mean(score.loss) for score in each] for each in (scores, of_dense))
    more = [ours - theirs for ours, theirs in zip(loss, base)]
    kl = [value for score in scores for value in score.kl]
    kl_means, same = [_mean(score.kl) for score in scores], [_mean(score.same) for score in scores]
    return {
        "policy": policy,
        "tokens": len(kl),
        "perplexity": math.exp(_mean(loss)),
        "perplexity_95": _exp(bootstrap(loss, seed)),
        "perplexity_ratio": math.exp(_mean(more)),
        "perplexity_ratio_95": _exp(bootstrap(more, seed)),
        "kl_mean": _mean(kl),
        "kl_mean_95": bootstrap(kl_means, seed),
        "kl_p99": quantile(kl, 0.99),
        "kl_max": max(kl),
        "same_token": _mean(same),
        "same_token_95": bootstrap(same, seed),
        **told(mean([score.reading for score in scores])),
        "windows": [{"first": score.first, "loss": score.loss, "kl": score.kl, "same": score.same,
                     "first_other": score.same.index(False) if False in score.same else None,
                     **told(score.reading)} for score in scores],
    }


def summaries(scores: dict[str, list[Score]], seed: int) -> list[dict[str, Any]]:
    """Of all, each with how many times the floor its KL is."""
    made = [summary(policy, given, scores["dense"], seed) for policy, given in scores.items()]
    floor = next((each["kl_mean"] for each in made if each["policy"] == FLOOR), 0.0)
    return [{**each, "kl_over_floor": each["kl_mean"] / floor if floor else None} for each in made]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _exp(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
