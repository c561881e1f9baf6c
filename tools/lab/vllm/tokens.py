#!/usr/bin/env python3
"""Greedy tokens with the policy `full` beside those of vLLM's own attention, by the margin rule: tokens may differ
where vLLM's own best two do not.

    tools/lab/vllm/tokens.py --model DIR --text FILE --near 1GiB --modes decode,eager,default

At the first position where a prompt's tokens differ, vLLM's own margin, the log-probability of its token less that of
ours, must be at most --noise nats. Each --modes is run with all near; the last one also with --small-near near, so that
the CPU attends most tokens (`far`), and with that and little host memory, all running requests being preempted at step
40 (`preempted`). rows: of each prompt, the first position that differs, the margin there, and the largest difference
of a token's log-probability before it. The exit code is 1 if the rule does not hold, or if nothing was preempted, as
answers are too short. Prompts are windows of --text, or random tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lab import (BLOCK_TOKENS, GRAPHS, Engine, Results, configuration, greedy, parser_of, random_ids, size,
                 sluice_options, text_ids, token_bytes, windows)

_LIKELY = 5  # Tokens whose log-probabilities are asked for.
_UNLIKELY = 99.0  # Nats, for one that is not among them.
_PREEMPTED_AT = 40
_MORE_BLOCKS = 300

Told = list[tuple[int, dict[int, float]]]  # Of a prompt: each token, and log-probabilities of the likely ones.


def told(outputs: list[Any]) -> list[Told]:
    return [[(token, {each: value.logprob for each, value in likely.items()})
             for token, likely in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)] for output in outputs]


def difference(own: Told, ours: Told) -> tuple[int | None, float | None, float]:
    """The first position that differs, vLLM's own margin there, and the largest difference before it, in nats."""
    largest = 0.0
    for position, ((token, likely), (other, other_likely)) in enumerate(zip(own, ours)):
        if token != other:
            margin = likely[token] - likely[other] if other in likely else _UNLIKELY
            return position, round(margin, 4), round(largest, 4)
        largest = max(largest, abs(likely[token] - other_likely[token]))
    return None, None, round(largest, 4)


def prompts(wants: argparse.Namespace) -> list[list[int]]:
    if wants.text is None:
        vocabulary = configuration(wants.model)["vocab_size"]
        return [random_ids(tokens, seed, vocabulary) for seed, tokens in enumerate(wants.lengths)]
    ids = text_ids(wants.text, wants.model)
    starts = windows(ids, max(wants.lengths), len(wants.lengths))
    return [list(part[:tokens]) for part, tokens in zip(starts, wants.lengths)]


def host_bytes(wants: argparse.Namespace, answer: int, few: bool) -> int:
    """For all prompts and answers; or `few`: for prompts, and one sequence of the longest."""
    blocks = sum(-(-(tokens + (0 if few else answer)) // BLOCK_TOKENS) for tokens in wants.lengths)
    blocks = max(blocks + 8, wants.max_len // BLOCK_TOKENS + 4) if few else blocks + _MORE_BLOCKS
    return token_bytes(wants.model, wants.dtype) * BLOCK_TOKENS * blocks


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, help="a file of text, or of token ids (.json)")
    parser.add_argument("--lengths", type=lambda text: [int(each) for each in text.split(",")],
                        default=[5, 60, 300, 1000, 2000, 3500], help="of prompts (5,60,300,1000,2000,3500)")
    parser.add_argument("--answer", type=int, default=120, help="tokens (%(default)s)")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["decode", "eager"],
                        help=f"of {', '.join(GRAPHS)} (decode,eager)")
    parser.add_argument("--noise", type=float, default=0.25, help="nats (%(default)s)")
    parser.add_argument("--small-near", type=size, default=8 << 20, help="8MiB")
    wants = parser.parse_args(words)
    if unknown := set(wants.modes) - set(GRAPHS):
        parser.error(f"--modes: there is no {', '.join(sorted(unknown))}; there are {', '.join(GRAPHS)}")
    wants.policy = "full"
    results, given, near = Results("tokens", wants.out), prompts(wants), wants.near
    sampling, right = greedy(wants.answer, logprobs=_LIKELY), True
    wants.graphs = "eager"
    with Engine(wants, None) as engine:
        own = told(engine.run(given, sampling))
        results.add(step="own", different=[len({token for token, _ in each}) for each in own], **engine.about())
    cases = [(mode, "plenty", near) for mode in wants.modes]
    cases += [(wants.modes[-1], kind, wants.small_near) for kind in ("far", "preempted")]
    for wants.graphs, kind, wants.near in cases:
        wants.host = host_bytes(wants, wants.answer, kind == "preempted")
        with Engine(wants, sluice_options(wants)) as engine:
            def before(step: int, engine: Engine = engine, kind: str = kind) -> None:
                if kind == "preempted" and step == _PREEMPTED_AT:
                    engine.preempt_all()

            ours = told(engine.run(given, sampling, before))
            rows = [difference(*each) for each in zip(own, ours)]
            good = all(margin is None or margin <= wants.noise for _, margin, _ in rows)
            good = good and all(len(each) == wants.answer for each in ours)
            good = good and (kind != "preempted" or engine.forwards.preemptions > 0)
            right = right and good
            results.add(step="ours", mode=wants.graphs, kind=kind, ok=good, rows=rows,
                        preemptions=engine.forwards.preemptions, most_under_way=engine.forwards.most_under_way,
                        **engine.about())
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
