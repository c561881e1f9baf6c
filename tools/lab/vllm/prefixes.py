#!/usr/bin/env python3
"""Prompts that begin like known ones: from memory, from a folder, and from that folder in an engine that comes later.

    tools/lab/vllm/prefixes.py --model DIR --text FILE --near 64MiB --max-len 4096 --disk DIR

`memory` has room for all prompts; `disk` for a part of them, and the folder for all; `later` is `disk` anew. Each
prompt is asked by itself, `memory` and `disk` go through all of them twice. A line of results has, of one time through
them: tokens that were known of each prompt, seconds, what the folder did, and where tokens differ from those of the
first time by the margin rule of tokens.py. The exit code is 1 if that does not hold, if less is known than should be
(from the folder of at least half of the prompts all whole pages), or if a file was refused. --disk has to be empty."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lab import (BLOCK_TOKENS, Engine, Results, configuration, greedy, parser_of, random_ids, sluice_options, text_ids,
                 token_bytes, windows)
from tokens import difference, told

_LIKELY = 5  # Tokens whose log-probabilities are asked for.
_FOLDER_TOKENS = 4  # Times those of all prompts.


class Asked:
    """What prompts are, and what they were answered at first."""

    def __init__(self, given: list[list[int]], answer: int, noise: float, results: Results) -> None:
        self._given, self._sampling, self._noise = given, greedy(answer, logprobs=_LIKELY), noise
        self._results = results
        self._first: list[Any] | None = None

    def ask(self, engine: Engine, step: str, least: int) -> bool:
        """Each prompt by itself. Returns whether tokens are right, and of `least` prompts all whole pages known."""
        began, known, answers = time.perf_counter(), [], []
        for ids in self._given:
            output, = engine.run([ids], self._sampling)
            known.append(output.num_cached_tokens or 0)
            answers += told([output])
        seconds = time.perf_counter() - began
        self._first = self._first or answers
        page = engine.forwards.engine.options.page_tokens
        rows = [difference(*each) for each in zip(self._first, answers)]
        whole = [(len(ids) - 1) // page * page for ids in self._given]
        files = {} if engine.forwards.disk is None else dict(engine.forwards.disk.figures)
        good = all(margin is None or margin <= self._noise for _, margin, _ in rows)
        good = good and sum(each == most for each, most in zip(known, whole)) >= least and not files.get("refused")
        self._results.add(step=step, ok=good, known=known, prompts=[len(ids) for ids in self._given],
                          seconds=round(seconds, 2), rows=rows, disk=files)
        return good


def prompts(given: Path | None, model: Path, tokens: int, count: int) -> list[list[int]]:
    if given is None:
        vocabulary = configuration(model)["vocab_size"]
        return [random_ids(tokens, seed, vocabulary) for seed in range(count)]
    return [list(part) for part in windows(text_ids(given, model), tokens, count)]


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, help="a file of text, or of token ids (.json); random tokens without")
    parser.add_argument("--disk", type=Path, required=True, help="an empty folder, or one to be made")
    parser.add_argument("--prompts", type=int, default=8, help="how many (%(default)s)")
    parser.add_argument("--length", type=int, default=2000, help="of a prompt (%(default)s)")
    parser.add_argument("--answer", type=int, default=16, help="tokens (%(default)s)")
    parser.add_argument("--noise", type=float, default=0.25, help="nats (%(default)s)")
    wants = parser.parse_args(words)
    if wants.disk.exists() and any(wants.disk.iterdir()):
        parser.error(f"--disk {wants.disk} is not empty")
    wants.policy, wants.graphs, wants.sequences = "full", "eager", 2
    token, blocks = token_bytes(wants.model, wants.dtype), wants.length // BLOCK_TOKENS + 4
    least = max(wants.max_len // BLOCK_TOKENS + 4, wants.prompts * blocks // 4)  # For one of the longest, at least.
    many, few = (each * BLOCK_TOKENS * token for each in (least + wants.prompts * blocks, least))
    given = prompts(wants.text, wants.model, wants.length, wants.prompts)
    asked = Asked(given, wants.answer, wants.noise, Results("prefixes", wants.out))
    folder = {"disk": str(wants.disk), "disk_bytes": _FOLDER_TOKENS * wants.prompts * wants.length * token}
    right = True
    for name, options, times in (("memory", {"host_bytes": many}, (0, wants.prompts)),
                                 ("disk", {"host_bytes": few, **folder}, (0, wants.prompts // 2)),
                                 ("later", {"host_bytes": few, **folder}, (wants.prompts // 2,))):
        with Engine(wants, sluice_options(wants, **options), enable_prefix_caching=True) as engine:
            for time_, least_known in enumerate(times):
                right = asked.ask(engine, f"{name} {time_ + 1}", least_known) and right
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
