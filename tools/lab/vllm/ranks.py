#!/usr/bin/env python3
"""Greedy tokens of ranks that share a model, with the policy `full`, beside those of vLLM by itself on one, by the
margin rule of tokens.py.

    tools/lab/vllm/ranks.py --model DIR --text FILE --near 64MiB --shapes 2x1,1x2

Each of --shapes is tensor x pipeline parallelism, on as many GPUs. Prompts are asked twice, and the second time is
measured: a line of results has its seconds, and of both times where tokens differ. The exit code is 1 if the rule does
not hold. Prompts are windows of --text, or random tokens."""

from __future__ import annotations

import time
from pathlib import Path

from lab import Engine, Results, greedy, parser_of, sluice_options
from tokens import difference, prompts, told

_LIKELY = 5  # Tokens whose log-probabilities are asked for.


def shapes_of(text: str) -> list[tuple[int, int]]:
    """@throws ValueError"""
    found = []
    for word in text.split(","):
        tensor, pipeline = (int(each) for each in word.split("x"))
        found.append((tensor, pipeline))
    return found


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, help="a file of text, or of token ids (.json)")
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")],
                        default=[5, 60, 300, 1000, 2000, 3500], help="of prompts (5,60,300,1000,2000,3500)")
    parser.add_argument("--answer", type=int, default=60, help="tokens (%(default)s)")
    parser.add_argument("--shapes", type=shapes_of, default=shapes_of("2x1,1x2"), help="2x1,1x2")
    parser.add_argument("--noise", type=float, default=0.25, help="nats (%(default)s)")
    wants = parser.parse_args(words)
    wants.policy = "full"
    results, given, sampling = Results("ranks", wants.out), prompts(wants), greedy(wants.answer, logprobs=_LIKELY)
    with Engine(wants, None) as engine:
        own, right = told(engine.run(given, sampling)), True
    for tensor, pipeline in wants.shapes:
        with Engine(wants, sluice_options(wants), tensor_parallel_size=tensor, pipeline_parallel_size=pipeline,
                    distributed_executor_backend="mp") as engine:
            answers = told(engine.run(given, sampling))
            began = time.perf_counter()
            answers += told(engine.run(given, sampling))
            seconds = time.perf_counter() - began
            rows = [difference(*each) for each in zip(own * 2, answers)]
            good = all(margin is None or margin <= wants.noise for _, margin, _ in rows)
            right = right and good
            results.add(tensor=tensor, pipeline=pipeline, ok=good, seconds=round(seconds, 2), rows=rows,
                        **engine.about())
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
