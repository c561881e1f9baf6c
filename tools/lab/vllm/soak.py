#!/usr/bin/env python3
"""Minutes of requests with aborts and preemptions in one engine: no error, no sequence that is left, flat memory.

    tools/lab/vllm/soak.py --model DIR --seconds 300 --near 64MiB --host-tokens 24000 --sequences 16

Half as many requests again as run at once are under way, of 8 to half of --max-len random tokens, by their logarithm.
Three of ten are aborted, and after every --preempt steps all that run are preempted. A line of results each --every
seconds has the process's memory (RSS), the GPU's and torch's, and what has come of requests. The exit code is 1 if a
request ended with an error or a sequence was left."""

from __future__ import annotations

import math
import random
import time

import torch
from lab import (Engine, Results, configuration, greedy, parser_of, random_ids, resident_bytes, sluice_options,
                 token_bytes)

_ABORTED = 0.3  # Of all requests.
_LATEST_ABORT = 500  # Steps.


class Traffic:
    """Requests that come and go."""

    def __init__(self, engine: Engine, vocabulary: int, longest: int, most: int) -> None:
        """`longest`: tokens of a prompt, and of an answer a quarter of it. `most`: requests under way."""
        self._engine, self._vocabulary, self._longest, self._most = engine, vocabulary, longest, most
        self._chosen = random.Random(3)
        self._left: dict[str, float] = {}  # Steps until a request is aborted.
        self.counts = dict.fromkeys(("steps", "submitted", "done", "aborted", "errors", "tokens"), 0)

    def step(self) -> None:
        while len(self._left) < self._most:
            self._submit()
        for output in self._engine.vllm.step():
            if output.finished and self._left.pop(output.request_id, None) is not None:
                self.counts["done"] += 1
                self.counts["errors"] += output.outputs[0].finish_reason == "error"
                self.counts["tokens"] += len(output.outputs[0].token_ids)
        self.counts["steps"] += 1
        self._left = {name: left - 1 for name, left in self._left.items()}
        self._abort([name for name, left in self._left.items() if left < 0])

    def end(self) -> None:
        """Aborts all, and has the worker told of it."""
        self._abort(list(self._left))
        while self._engine.vllm.has_unfinished_requests():
            self._engine.vllm.step()
        for _ in range(2):  # With the next step, and a forward may be under way.
            self._engine.run([[1]], greedy(1))

    def _submit(self) -> None:
        tokens = int(2 ** self._chosen.uniform(3, math.log2(self._longest)))
        ids = random_ids(tokens, self._chosen.randrange(1 << 30), self._vocabulary)
        name = self._engine.submit(ids, greedy(self._chosen.randrange(1, max(2, self._longest // 4))))
        aborted = self._chosen.random() < _ABORTED
        self._left[name] = self._chosen.randrange(_LATEST_ABORT) if aborted else math.inf
        self.counts["submitted"] += 1

    def _abort(self, names: list[str]) -> None:
        self._engine.vllm.abort_request(names)
        for name in names:
            del self._left[name]
        self.counts["aborted"] += len(names)


def memory() -> dict[str, float]:
    told = {"rss_gib": round(resident_bytes() / 2**30, 3)}
    if torch.cuda.is_available():
        told |= {"gpu_free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 3),
                 "torch_gib": round(torch.cuda.memory_reserved() / 2**30, 3)}
    return told


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--every", type=float, default=10, help="seconds (%(default)s)")
    parser.add_argument("--preempt", type=int, default=1500, help="steps (%(default)s)")
    parser.add_argument("--host-tokens", type=int, default=24_000, help="that host memory has room for (%(default)s)")
    wants = parser.parse_args(words)
    wants.host = wants.host_tokens * token_bytes(wants.model, wants.dtype)
    results, vocabulary = Results("soak", wants.out), configuration(wants.model)["vocab_size"]
    with Engine(wants, sluice_options(wants)) as engine:
        results.add(step="start", **engine.about())
        traffic = Traffic(engine, vocabulary, wants.max_len // 2, wants.sequences * 3 // 2)
        began = told = time.monotonic()
        while time.monotonic() - began < wants.seconds:
            traffic.step()
            if traffic.counts["steps"] % wants.preempt == 0:
                engine.preempt_all()
            if time.monotonic() >= told:
                told += wants.every
                results.add(step="at", seconds=round(time.monotonic() - began), **memory(),
                            preemptions=engine.forwards.preemptions, sequences=len(engine.forwards), **traffic.counts)
        traffic.end()
        left = len(engine.forwards) - 1  # The last one has ended, which the next step would tell.
        results.add(step="end", left=left, preemptions=engine.forwards.preemptions, **memory(), **traffic.counts)
    return 1 if traffic.counts["errors"] or left > 0 else 0


if __name__ == "__main__":
    raise SystemExit(main())
