"""Routing by head: one look at a prompt gives each query head the cheapest policy that is near enough for it.

    python tools/lab/routing/measure.py --model smollm2=DIR --text prose --tokens 4096 --out routing.jsonl

A query head gets, in this order, the first policy whose error bar is at most a bound; or all query heads of a KV head
get one policy, by the largest of their bars:

| policy | a query head attends | source |
|---|---|---|
| bypass | the 4 sinks; the mean value stands for the others | LFPS, arXiv 2506.15704, section 4.3 |
| streaming | sinks and the 128 newest tokens | StreamingLLM, arXiv 2309.17453 |
| history | these and the best of what score tables propose | LFPS, section 4 |
| sample | these and drawn tokens, with the weight that makes the sum unbiased | policies.py |

The error bar of the first three is their distance to dense attention for the newest 32 queries of the prompt, relative
to its norm; a head that none of them suits samples. The 32 queries before those fill the tables that are judged.

It emulates: the model is one of transformers in bf16, reads its prompt densely, and the last `--rows` tokens of a
window attend as a choice says, in one forward. KL is KL(dense || choice) of the next token, of the model's own
attention; the floor is dense attention in float32, in another order of sums. Tokens and bytes are those of a KV head in
a step: the union of its query heads; bytes leave out the score tables of `history`. Time is that of the look alone; a
step is not timed, as no kernel has policies by head.

A line of --out is a window: every bound, each policy for all heads at several budgets and at as many tokens as each
bound reads, and what a choice made 512 tokens earlier is worth. report.py prints means over windows."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from emulation import Emulation, Work, everywhere
from policies import BYPASS, HISTORY, NAMES, RECENT, SAMPLE, SINKS, STREAMING
from router import LOOK, Budgets, Look
from sluice.evaluation.inputs import Tokenizer, read_windows
from torch import Tensor

LATER = 512  #: tokens behind an earlier choice
SWEEPS = {SAMPLE: (16, 64, 256), HISTORY: (16, 128, 1024)}


def budgets_of(policy: int, count: int) -> Budgets:
    """With which a policy, alone, reads about so many tokens per query head."""
    return {SAMPLE: Budgets(sample=count), HISTORY: Budgets(history=count), STREAMING: Budgets(recent=count),
            BYPASS: Budgets()}[policy]


def matched(points: Sequence[tuple[int, float]], tokens: float) -> int:
    """The budget that reads so many tokens, from budgets that were measured: (budget, tokens). Between them the
    logarithms of the budget and of what is read beside sinks and newest tokens lie on a line."""
    def log(count: float) -> float:
        return math.log(max(count - SINKS - RECENT, 1.0))

    below, above = points[-2:]
    for lower, upper in zip(points, points[1:]):
        if tokens <= upper[1]:
            below, above = lower, upper
            break
    if log(above[1]) - log(below[1]) < 1e-6:
        return above[0]
    along = (log(tokens) - log(below[1])) / (log(above[1]) - log(below[1]))
    return max(1, round(math.exp(math.log(below[0]) + along * math.log(above[0] / below[0]))))


class Window:
    """What is predicted behind a prompt, under one choice after another."""

    def __init__(self, emulation: Emulation, looks: list[Look], tokens: Tensor) -> None:
        self.emulation, self.looks, self.tokens = emulation, looks, tokens
        self.dense = emulation.predict(tokens)

    def kl(self, predicted: Tensor) -> float:
        return (self.dense.exp() * (self.dense - predicted)).sum(-1).mean().item()

    def floor(self) -> float:
        return self.kl(self.emulation.predict(self.tokens, Work(looks=self.looks)))

    def under(self, choices: list[Tensor], budgets: Budgets) -> dict[str, float]:
        work = Work(budgets, choices, self.looks)
        kl = self.kl(self.emulation.predict(self.tokens, work))
        mean: Callable[[str], float] = lambda key: sum(getattr(cost, key) for cost in work.costs) / len(work.costs)
        return {"kl": kl, "tokens": mean("tokens"), "bytes": mean("bytes")}


def single_policies(window: Window) -> Iterator[dict[str, Any]]:
    for policy, counts in {BYPASS: (1,), STREAMING: (RECENT,), **SWEEPS}.items():
        for count in counts:
            found = window.under(everywhere(policy, window.looks), budgets_of(policy, count))
            yield {"policy": NAMES[policy], "budget": count, **found}


def at_equal_tokens(window: Window, singles: list[dict[str, Any]], tokens: float) -> Iterator[dict[str, Any]]:
    for policy in (STREAMING, HISTORY, SAMPLE):
        points = [(row["budget"], row["tokens"]) for row in singles if row["policy"] == NAMES[policy]]
        count = max(1, round(tokens) - SINKS) if policy == STREAMING else matched(points, tokens)
        found = window.under(everywhere(policy, window.looks), budgets_of(policy, count))
        yield {"policy": NAMES[policy], "budget": count, **found}


def shares(choices: list[Tensor]) -> dict[str, float]:
    whole = torch.stack(choices)
    found = {name: (whole == policy).float().mean().item() for policy, name in enumerate(NAMES)}
    return {**found, "kv_heads_without_samples": (whole != SAMPLE).all(-1).float().mean().item()}


def bounded(window: Window, earlier: list[Look], singles: list[dict[str, Any]], bound: float,
            together: bool) -> dict[str, Any]:
    """One bound on the error bar: the router, an earlier choice, and each policy alone at as many tokens."""
    now, before = ([each.route(bound, together) for each in looks] for looks in (window.looks, earlier))
    found = window.under(now, Budgets())
    return {"by": "kv head" if together else "query head", "bound": bound, **found, "shares": shares(now),
            "alone": list(at_equal_tokens(window, singles, found["tokens"])),
            "same_policy_later": (torch.stack(now) == torch.stack(before)).float().mean().item(),
            "earlier_choice": window.under(before, Budgets())}


def measure(emulation: Emulation, tokens: Tensor, rows: int, bounds: Iterable[float]) -> dict[str, Any]:
    """:param tokens: of one window; its last `rows` are predicted behind the others"""
    emulation.start()
    prompt = len(tokens) - rows
    earlier = emulation.read(tokens[: prompt - LATER])
    looks = emulation.read(tokens[prompt - LATER : prompt])
    seconds = sum(each.seconds for each in looks)
    window = Window(emulation, looks, tokens[prompt:])
    singles = list(single_policies(window))
    bars = {name: [each.bars[policy].flatten() for each in looks] for policy, name in enumerate(NAMES[:SAMPLE])}
    return {"floor": window.floor(), "prompt_s": emulation.seconds, "look_s": seconds,
            "bars": {name: torch.cat(found).quantile(torch.tensor([.1, .25, .5, .75, .9])).tolist()
                     for name, found in bars.items()},
            "singles": singles, "bounds": [bounded(window, earlier, singles, bound, together)
                                           for together in (False, True) for bound in bounds]}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="NAME=DIR", required=True, help="a folder as tools/models.sh makes it")
    parser.add_argument("--text", default="prose", help="prose, code or a file (default: prose)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a window (default: 4096)")
    parser.add_argument("--windows", type=int, default=1, help="(default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the windows' places in the text (default: 1)")
    parser.add_argument("--rows", type=int, default=64, help="tokens of a window that are predicted (default: 64)")
    parser.add_argument("--bounds", default="0.1,0.2,0.4", help="on the error bar (default: 0.1,0.2,0.4)")
    parser.add_argument("--out", type=Path, required=True, help="lines are added to this file")
    given = parser.parse_args(words)
    if "=" not in given.model:
        parser.error(f"--model {given.model}: give NAME=DIR")
    least = given.rows + LATER + LOOK + 1
    if given.tokens < least or given.rows < 1:
        parser.error(f"--tokens {given.tokens} with --rows {given.rows}: a window has {least} or more tokens and a row")
    try:
        given.bounds = [float(bound) for bound in given.bounds.split(",")]
    except ValueError:
        parser.error(f"--bounds {given.bounds}: give numbers, such as 0.1,0.2")
    return given


def main() -> None:
    given = arguments()
    name, _, folder = given.model.partition("=")
    windows = read_windows(given.text, Tokenizer(folder), given.tokens, given.windows, given.seed)
    emulation = Emulation(folder)
    for window in windows:
        found = measure(emulation, torch.tensor(window.ids), given.rows, given.bounds)
        row = {"model": name, "text": given.text, "tokens": given.tokens, "first": window.first, "rows": given.rows,
               **found}
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name} {given.text} {given.tokens}: a window is done", file=sys.stderr)


if __name__ == "__main__":
    main()
