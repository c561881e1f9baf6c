#!/usr/bin/env python3
"""Time of a step in which all sequences decode, by batch and context, and time to the first token.

    tools/lab/vllm/speed.py --model DIR --random-weights --near 16GiB --host 68GiB --max-len 131584 --sequences 64 \\
      --batched 8192 8064:1,16,64 32640:1,4,16 130944:1,4
    tools/lab/vllm/speed.py --model DIR --random-weights --own --max-len 131584 --sequences 64 --batched 8192 ...

Each argument is a length of prompts and batches, which grow: sequences of the batch before stay, so that a batch costs
the prompts of its new sequences alone. Prompts are of random tokens. A line of results has, of `batch` sequences of
`length` tokens: ms_per_step over --steps steps, and ms_median; tokens_per_s; prompt_s, the prompts of the sequences
that were added; ttft_s, of the first sequence, until its first token is known. --own: vLLM without Sluice."""

from __future__ import annotations

import statistics
import time

from lab import Engine, Results, configuration, greedy, parser_of, random_ids, sluice_options

_UNCOUNTED = 6  # Steps behind the prompts.
_WARM_TOKENS = 512


class Batch:
    """Sequences of one length that decode."""

    def __init__(self, engine: Engine, length: int, vocabulary: int) -> None:
        self._engine, self._length, self._vocabulary = engine, length, vocabulary
        self._tokens: dict[str, int] = {}  # Told, by request.

    def __len__(self) -> int:
        return len(self._tokens)

    def grow(self, to: int) -> float:
        """Seconds until all have their first token."""
        began = time.perf_counter()
        while len(self) < to:
            ids = random_ids(self._length, len(self), self._vocabulary)
            self._tokens[self._engine.submit(ids, greedy(1 << 20))] = 0
        while not all(self._tokens.values()):
            self.step()
        return time.perf_counter() - began

    def step(self) -> tuple[float, int]:
        """Seconds, and tokens."""
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


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("plan", nargs="+", metavar="LENGTH:BATCH,...")
    parser.add_argument("--own", action="store_true", help="vLLM without Sluice")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--label", help="of the results (sluice or own)")
    wants = parser.parse_args(words)
    try:
        plan = plan_of(wants.plan)
    except ValueError as error:
        parser.error(str(error))
    label = wants.label or ("own" if wants.own else "sluice")
    results, vocabulary = Results("speed", wants.out), configuration(wants.model)["vocab_size"]
    with Engine(wants, None if wants.own else sluice_options(wants)) as engine:
        results.add(label=label, step="start", **engine.about())
        warm = Batch(engine, min(_WARM_TOKENS, wants.max_len // 2), vocabulary)
        warm.grow(1)
        for _ in range(_UNCOUNTED):
            warm.step()
        warm.end()
        for length, batches in plan:
            batch = Batch(engine, length, vocabulary)
            for size in batches:
                prompt_s = batch.grow(size)
                first = {"ttft_s": round(prompt_s, 3)} if size == 1 else {}
                results.add(label=label, step="decode", length=length, batch=size, prompt_s=round(prompt_s, 3), **first,
                            **measured(batch, wants.steps))
            batch.end()
    return 0


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
    raise SystemExit(main())
