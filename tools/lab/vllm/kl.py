#!/usr/bin/env python3
"""KL divergence of decoded tokens' distributions with Sluice from those with vLLM's own attention.

    tools/lab/vllm/kl.py --model DIR --text FILE --max-len 8192 --host 4GiB "full" "sluice; dense_tokens=0" \\
      "sluice; dense_tokens=0; near_bytes=64MiB"

Each argument is a policy, and options of Sluice's behind it. Behind a prompt of --prompt tokens of the text its own
next tokens are forced, one by one, so that both engines see the same; the whole vocabulary's log-probabilities are
kept, as float16 on the host. The first token behind a prompt is left out, as its row is the prompt's own. The floor is
what `full` has. A line of results has KL(own || ours) in nats, and the share of positions with the same most likely
token."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lab import Engine, Results, greedy, option, parser_of, size, sluice_options, text_ids, windows
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

_TEXT = "text"  # In a request's extra_args: its number.
Kept = list[list[torch.Tensor]]  # Of each text, log-probabilities [vocabulary] of its positions.


class Forced(AdapterLogitsProcessor):
    """Keeps what the model says, and lets the text's own token be the only one that is sampled."""

    texts: ClassVar[list[Sequence[int]]] = []  #: what is behind the prompts
    kept: ClassVar[list[dict[int, torch.Tensor]]] = []  #: of each text, by position behind the prompt

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., torch.Tensor] | None:
        number = (params.extra_args or {}).get(_TEXT)
        if number is None:
            return None

        def force(answered: list[int], logits: torch.Tensor) -> torch.Tensor:
            position = len(answered)
            # A prompt in chunks comes here with each of them, and the last one counts.
            self.kept[number][position] = torch.log_softmax(logits.float(), -1).half().cpu()
            forced = torch.full_like(logits, -torch.inf)
            forced[self.texts[number][position]] = 0.0
            return forced

        return force


def said(engine: Engine, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Kept:
    """Log-probabilities of each text behind its prompt.  @throws RuntimeError if other tokens were sampled"""
    Forced.texts, Forced.kept = list(texts), [{} for _ in texts]
    sampling = [greedy(len(text), extra_args={_TEXT: number}) for number, text in enumerate(texts)]
    outputs = engine.run(prompts, sampling)
    if [list(output.outputs[0].token_ids) for output in outputs] != [list(text) for text in texts]:
        raise RuntimeError("vLLM has sampled other tokens than the text's")
    return [[kept[position] for position in range(1, len(text))] for kept, text in zip(Forced.kept, texts)]


def divergence(own: Kept, ours: Kept) -> dict[str, float]:
    """Of the second one from the first one, in nats.  @throws RuntimeError of NaN"""
    found, same = [], 0
    for texts in zip(own, ours):
        for one, other in ((one.double(), other.double()) for one, other in zip(*texts)):
            if one.isnan().any() or other.isnan().any():
                raise RuntimeError("a log-probability is NaN: there is no divergence of it")
            found.append(float((one.exp() * (one - other))[one.isfinite()].sum()))
            same += int(one.argmax() == other.argmax())
    found.sort()
    return {"positions": len(found), "mean": sum(found) / len(found), "p50": found[len(found) // 2],
            "p99": found[int(len(found) * 0.99)], "max": found[-1], "same_top": same / len(found)}


def options_of(word: str) -> tuple[str, dict[str, Any]]:
    """A policy and Sluice's options: "sluice; dense_tokens=0; near_bytes=64MiB".  @throws ValueError"""
    policy, *changes = (part.strip() for part in word.split(";"))
    found = {}
    for change in changes:
        try:
            name, value = option(change)
            found[name] = size(value) if name.endswith("_bytes") and isinstance(value, str) else value
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{word}: {error}") from None
    return policy, found


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="+", metavar="POLICY[; NAME=VALUE]...")
    parser.add_argument("--text", type=Path, required=True, help="a file of text, or of token ids (.json)")
    parser.add_argument("--prompt", type=size, default=7424, help="tokens (%(default)s)")
    parser.add_argument("--forced", type=int, default=128, help="tokens behind it (%(default)s)")
    parser.add_argument("--texts", type=int, default=4, help="parts of the file (%(default)s)")
    wants = parser.parse_args(words)
    if wants.forced < 2:
        parser.error(f"--forced is {wants.forced}: the first token behind a prompt is left out; give 2 or more")
    try:
        cases = [options_of(word) for word in wants.cases]
        parts = list(windows(text_ids(wants.text, wants.model), wants.prompt + wants.forced, wants.texts))
    except ValueError as error:
        parser.error(str(error))
    prompts, texts = [part[: wants.prompt] for part in parts], [part[wants.prompt :] for part in parts]
    results = Results("kl", wants.out)
    # A step that is planned before the one at hand has been sampled does not know what was forced.
    engine_options = {"logits_processors": [Forced], "async_scheduling": False}
    with Engine(wants, None, **engine_options) as engine:
        own = said(engine, prompts, texts)
    for word, (policy, changes) in zip(wants.cases, cases):
        ours = sluice_options(wants, **changes, policy=policy)
        with Engine(wants, ours, **engine_options) as engine:
            results.add(label=word, **divergence(own, said(engine, prompts, texts)), **engine.about())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
