#!/usr/bin/env python3
"""Time of a step in which all sequences decode, by batch and context, and time to the first token.

    tools/lab/vllm/speed.py --model DIR --random-weights --near 16GiB --host 68GiB --max-len 131584 --sequences 64 \\
      --batched 8192 8064:1,16,64 32640:1,4,16 130944:1,4
    tools/lab/vllm/speed.py --model DIR --random-weights --own --max-len 131584 --sequences 64 --batched 8192 ...
    tools/lab/vllm/speed.py --model DIR --random-weights --memory all --host 68GiB ... 8064:64 32640:16 130944:4

Each argument is a length of prompts and batches, which grow: sequences of the batch before stay, so that a batch costs
the prompts of its new sequences alone. Prompts are of random tokens. A line of results has, of `batch` sequences of
`length` tokens: ms_per_step over --steps steps, and ms_median; tokens_per_s; prompt_s, the prompts of the sequences
that were added; ttft_s, of the first sequence, until its first token is known. While prompts are read, a line each
--every seconds has how many of their tokens were. --own: vLLM without Sluice. --memory all: near memory for all that
--host holds. After --limit seconds, which begin with the command, the last line says so, and the exit code is 1."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from lab import BEGAN, Engine, Limit, Results, configuration, greedy, parser_of, random_ids, sluice_options

_UNCOUNTED = 6  # Steps behind the prompts.
_WARM_TOKENS = 512


class Over(Exception):
    """The limit of a command."""


class Batch:
    """Sequences of one length that decode."""

    def __init__(self, engine: Engine, length: int, vocabulary: int, limit: Limit) -> None:
        self._engine, self._length, self._vocabulary, self._limit = engine, length, vocabulary, limit
        self._tokens: dict[str, int] = {}  # Told, by request.

    def __len__(self) -> int:
        return len(self._tokens)

    def grow(self, to: int, every: float, tell: Callable[[float, int], None]) -> float:
        """Seconds until all have their first token. After each `every` of them `tell` gets them, and the tokens of all
        prompts that were read."""
        given = [random_ids(self._length, at, self._vocabulary) for at in range(len(self), to)]
        began, told = time.perf_counter(), every
        for ids in given:
            self._tokens[self._engine.submit(ids, greedy(1 << 20))] = 0
        while not all(self._tokens.values()):
            self.step()
            spent = time.perf_counter() - began
            if spent >= told:
                tell(spent, self._read())
                told = spent + every
        return time.perf_counter() - began

    def _read(self) -> int:
        """With those that are under way. There are no other requests, and the scheduler has other names of them."""
        requests = self._engine.core.scheduler.requests.values()
        return sum(min(each.num_computed_tokens, self._length) for each in requests)

    def step(self) -> tuple[float, int]:
        """Seconds, and tokens.  @throws Over"""
        if self._limit.left() < 0:
            raise Over
        began, tokens = time.perf_counter(), 0
        for output in self._engine.vllm.step():
            told = len(output.outputs[0].token_ids)
            tokens += told - self._tokens[output.request_id]
            self._tokens[output.request_id] = told
            if output.finished:
                raise RuntimeError(f"a sequence has ended, by {output.outputs[0].finish_reason}, while it was "
                                   "measured: give a larger --max-len, or fewer --steps")
        return time.perf_counter() - began, tokens

    def end(self) -> None:
        self._engine.vllm.abort_request(list(self._tokens))
        while self._engine.vllm.has_unfinished_requests():
            self._engine.vllm.step()
        self._engine.run([[1]], greedy(1))  # The worker is told of what has ended with the next step.


def plan_of(words: list[str]) -> list[tuple[int, list[int]]]:
    """Lengths and batches.  @throws ValueError"""
    found = []
    for word in words:
        length, _, batches = word.partition(":")
        found.append((int(length), [int(each) for each in batches.split(",")]))
        if sorted(set(found[-1][1])) != found[-1][1]:
            raise ValueError(f"{word}: batches must grow, such as 8064:1,16,64")
    return found


def main(words: list[str] | None = None, began: float | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("plan", nargs="+", metavar="LENGTH:BATCH,...")
    parser.add_argument("--own", action="store_true", help="vLLM without Sluice")
    parser.add_argument("--memory", choices=("near", "all"), default="near", help="near memory of --near, or as much "
                        "as --host (%(default)s)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=float, default=60, help="seconds (%(default)s)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for all (%(default)s)")
    parser.add_argument("--label", help="of the results (sluice, all or own)")
    wants = parser.parse_args(words)
    try:
        plan = plan_of(wants.plan)
    except ValueError as error:
        parser.error(str(error))
    if wants.memory == "all":
        if wants.own or wants.near is not None:
            parser.error("--memory all is Sluice's, and says what --near does: leave --own and --near out")
        wants.near = wants.host
    label = wants.label or ("own" if wants.own else {"near": "sluice", "all": "all"}[wants.memory])
    results, limit = Results("speed", wants.out), Limit(wants.limit, began)
    with Engine(wants, None if wants.own else sluice_options(wants)) as engine:
        results.add(label=label, step="start", **engine.about())
        try:
            measure(engine, wants, plan, limit, lambda **told: results.add(label=label, **told))
        except Over:
            results.add(label=label, step="limit", seconds=wants.limit)
            return 1
    return 0


def measure(engine: Engine, wants: argparse.Namespace, plan: list[tuple[int, list[int]]], limit: Limit,
            add: Callable[..., None]) -> None:
    """@throws Over"""
    vocabulary = configuration(wants.model)["vocab_size"]
    warm = Batch(engine, min(_WARM_TOKENS, wants.max_len // 2), vocabulary, limit)
    warm.grow(1, wants.every, lambda seconds, tokens: None)
    for _ in range(_UNCOUNTED):
        warm.step()
    warm.end()
    for length, batches in plan:
        batch = Batch(engine, length, vocabulary, limit)
        for size in batches:
            about = {"length": length, "batch": size}
            prompt_s = batch.grow(size, wants.every, lambda seconds, tokens, about=about: add(
                step="prompt", **about, seconds=round(seconds, 1), tokens_read=tokens))
            first = {"ttft_s": round(prompt_s, 3)} if size == 1 else {}
            add(step="decode", **about, prompt_s=round(prompt_s, 3), **first, **measured(batch, wants.steps))
        batch.end()


def measured(batch: Batch, steps: int) -> dict[str, float]:
    """@throws RuntimeError if not all sequences have decoded in each step"""
    for _ in range(_UNCOUNTED):
        batch.step()
    began, took = time.perf_counter(), [batch.step() for _ in range(steps)]
    all_s, tokens = time.perf_counter() - began, sum(tokens for _, tokens in took)
    if tokens != steps * len(batch):
        raise RuntimeError(f"{len(batch)} sequences had {tokens} tokens in {steps} steps: some waited for memory, so "
                           "that these are no times of steps in which all decode; give more --host or --kv, or smaller "
                           "batches")
    return {"ms_per_step": round(1000 * all_s / steps, 3),
            "ms_median": round(1000 * statistics.median(seconds for seconds, _ in took), 3),
            "tokens_per_s": round(tokens / all_s, 2), "tokens": tokens, "steps": steps}


if __name__ == "__main__":
    raise SystemExit(main(began=BEGAN))
