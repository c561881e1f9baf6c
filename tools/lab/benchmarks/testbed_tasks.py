"""Tasks of which the model in tests/data/testbed knows the form (its README has them), as `python -m sluice eval
--tasks` reads them: token ids, a byte being its own.

`python tools/lab/benchmarks/testbed_tasks.py --tasks niah,multikey,kv --lengths 2K,8K --count 8 >tasks.jsonl`. The
same arguments give the same tasks. `--lengths 512,2K --count 1` made those beside the model."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable

BEGIN = 256
ADJECTIVES = ("amber bold calm dusty early fancy gentle hidden icy jolly keen lunar misty noble olive proud quiet "
              "rusty silver tidy urban vivid warm young zesty crimson distant electric frozen golden hollow ivory "
              "lively mellow narrow orange purple rapid silent tiny").split()
NOUNS = ("otter falcon harbor canyon lantern meadow pepper rocket saddle temple anchor basket candle dragon engine "
         "forest garden hammer island jacket kettle ladder magnet needle orchid pillow quarry ribbon shadow tunnel "
         "violin walnut yogurt zipper beacon cactus dolphin ember feather glacier").split()
SENTENCES = ("The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ",
             "There and back again. ")
NEEDLE_SPACING = 600  # Bytes for each needle of multikey.


class Writer:
    """Random words, none of them twice where they are keys."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self._used: set[str] = set()

    def words(self) -> str:
        return f"{self.random.choice(ADJECTIVES)}-{self.random.choice(NOUNS)}"

    def hex(self, digits: int) -> str:
        return f"{self.random.getrandbits(4 * digits):0{digits}x}"

    def value(self) -> str:
        return self.random.choice((lambda: str(self.random.randint(1_000_000, 9_999_999)), self.words,
                                   lambda: self.hex(8)))()

    def key(self, draw: Callable[[], str]) -> str:
        """One that `draw` gives, unless those are nearly used up."""
        drawn = itertools.chain((draw() for _ in range(32)), (self.hex(6) for _ in itertools.count()))
        text = next(text for text in drawn if text not in self._used)
        self._used.add(text)
        return text

    def filler(self, size: int) -> str:
        """As many bytes, and whole sentences but for the last."""
        text = ""
        while len(text) < size:
            text += self.random.choice(SENTENCES)
        return text[:size]


def needles(writer: Writer, size: int, count: int) -> tuple[str, str]:
    """Needles among sentences, each somewhere in its equal part of them; one is asked for."""
    pairs = [(writer.key(writer.words), writer.value()) for _ in range(count)]
    pieces = [f"\nOne of the special magic values for {key} is: {value}.\n" for key, value in pairs]
    key, value = writer.random.choice(pairs)
    question = f"\nQ: What is the special magic value for {key}?\nA:"
    filler = writer.filler(size - len(question) - sum(map(len, pieces)))
    part, done, text = len(filler) // count, 0, ""
    for index, piece in enumerate(pieces):
        at = filler.find(". ", index * part + writer.random.randrange(part)) + 2
        at = max(done, at if at > 1 else len(filler))
        text, done = text + filler[done:at] + piece, at
    return text + filler[done:] + question, f" {value}\n"


def pairs_only(writer: Writer, size: int) -> tuple[str, str]:
    """Nothing but pairs of key and value; one is asked for. Some bytes shorter, as its lines are whole."""
    pairs, text = [], ""
    while True:
        key = writer.key(writer.random.choice((writer.words, lambda: writer.hex(6))))
        value = writer.value()
        line = f"set {key} = {value}\n"
        if len(text) + len(line) + len("get  ->") + 16 > size:  # 16: of the longest key.
            break
        pairs.append((key, value))
        text += line
    key, value = writer.random.choice(pairs)
    return f"{text}get {key} ->", f" {value}\n"


def make(task: str, length: int, seed: int) -> dict[str, object]:
    writer, size = Writer(f"{task} {length} {seed}"), length - 1
    if task == "kv":
        prompt, answer = pairs_only(writer, size)
    else:
        prompt, answer = needles(writer, size, 1 if task == "niah" else max(size // NEEDLE_SPACING, 2))
    return {"task": task, "length": length, "prompt": [BEGIN, *prompt.encode()], "answer": list(answer.encode())}


def tokens(text: str) -> int:
    count = int(text[:-1]) << 10 if text.endswith("K") else int(text)
    if count < 512:
        raise argparse.ArgumentTypeError(f"{text} tokens have no room for a task; give 512 at least")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tasks", default="niah,multikey,kv", help="(%(default)s)")
    parser.add_argument("--lengths", default="2K,8K", help="of prompts, in tokens (%(default)s)")
    parser.add_argument("--count", type=int, default=8, help="for each task and length (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt (%(default)s)")
    wants = parser.parse_args()
    unknown = set(wants.tasks.split(",")) - {"niah", "multikey", "kv"}
    if unknown:
        parser.error(f"no task {', '.join(sorted(unknown))}; there are niah, multikey and kv")
    for task in wants.tasks.split(","):
        for length in map(tokens, wants.lengths.split(",")):
            for index in range(wants.count):
                print(json.dumps(make(task, length, wants.seed + index)))


if __name__ == "__main__":
    main()
