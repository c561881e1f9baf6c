"""What answers notice of a long prompt that is read beside them, and what it costs the prompt.

`python tools/lab/benchmarks/beside.py --compile`: eight answers of a model of Llama's 8B shape, random weights and
tokens, each after 2,048 tokens, decode alone, and then while a prompt of 130,000 tokens is read; in this process and
without HTTP, once for each of `--slowdowns`. That it runs is shown on the CPU by `--device cpu --layers 2 --hidden 256
--heads 4 --kv-heads 2 --vocabulary 1000 --dtype float32 --prompt 3000`."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch
from serve import Letters, add_model, make_model
from sluice.serving.arguments import size
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from sluice.serving.requests import Request, Sampling

FOREVER = 1 << 20
WARM, ALONE = 8, 16  # Tokens of an answer that are not counted, and that are before the prompt comes.


class Answers:
    """When tokens came, by request, in seconds."""

    def __init__(self, loop: Loop, count: int) -> None:
        self._loop, self.times = loop, {number: [] for number in range(count + 1)}

    def step(self) -> None:
        events, now = self._loop.step(), time.perf_counter()
        for event in events:
            if event.error:
                raise SystemExit(f"a request failed: {event.error}")
            self.times[event.number].append(now)

    def between(self, first: float, last: float) -> list[float]:
        """Milliseconds from each answer's token to its next, of those that came in [first, last]."""
        found = []
        for times in list(self.times.values())[1:]:
            found += [1e3 * (later - sooner) for sooner, later in zip(times, times[1:]) if first <= later <= last]
        return found


def measure(packed: PackedModel, wants: argparse.Namespace, slowdown: float) -> dict[str, object]:
    """Request 0 is the prompt."""
    loop, dice = Loop(packed, Letters(), prefix=False, slowdown=slowdown), random.Random(3)
    answers = Answers(loop, wants.answers)

    def submit(number: int, prompt: int, tokens: int) -> None:
        ids = [dice.randrange(wants.vocabulary) for _ in range(prompt)]
        loop.submit(Request(number, ids, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)))

    for number in range(1, wants.answers + 1):
        submit(number, wants.context, FOREVER)
    while min(len(answers.times[number]) for number in range(1, wants.answers + 1)) <= WARM + ALONE:
        answers.step()
    began = time.perf_counter()
    first = max(answers.times[number][WARM] for number in range(1, wants.answers + 1))
    submit(0, wants.prompt, 4)
    while not answers.times[0] and time.perf_counter() - began < wants.limit:
        answers.step()
    ended = time.perf_counter()
    for _ in range(2):  # The token that waited for the prompt's last chunk is one of those beside it.
        answers.step()
    alone, beside = answers.between(first, began), sorted(answers.between(began, ended))
    for number in range(wants.answers + 1):
        loop.abort(number)
    return {"slowdown": slowdown, "alone_ms": round(statistics.mean(alone), 2),
            "beside_ms": round(statistics.mean(beside), 2), "beside_p50_ms": round(statistics.median(beside), 2),
            "beside_p99_ms": round(beside[int(0.99 * len(beside))], 2),
            "times_as_slow": round(statistics.mean(beside) / statistics.mean(alone), 2),
            "prompt_s": round(ended - began, 2), "prompt_read": bool(answers.times[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--prompt", type=size, default=130_000, help="tokens (%(default)s)")
    add("--answers", type=int, default=8, help="that decode beside it (%(default)s)")
    add("--context", type=size, default=2048, help="tokens before each of them (%(default)s)")
    add("--slowdowns", default="2,0", help="as `sluice serve --slowdown` (%(default)s)")
    add("--prefill-rows", type=size, default=8192)
    add("--limit", type=float, default=180, help="seconds after which a prompt is given up (%(default)s)")
    add("--policy", default="sluice")
    add("--compile", action="store_true", help="as `sluice serve` has it")
    add_model(parser)
    wants = parser.parse_args()
    model, room = make_model(wants), 8192  # Tokens of an answer.
    config, context = model.config, wants.prompt + 1024
    tokens = context + wants.answers * (wants.context + room)
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    packed = PackedModel(model, wants.policy, tokens * numbers * model.dtype.itemsize, context=context,
                         sequences=wants.answers + 1, prefill_rows=wants.prefill_rows, graphs="on",
                         compile=wants.compile, near_bytes=wants.near_bytes)
    try:
        for slowdown in map(float, wants.slowdowns.split(",")):
            print(json.dumps(measure(packed, wants, slowdown)), flush=True)
    finally:
        packed.close()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
