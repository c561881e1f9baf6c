"""Tasks of retrieval and tracing in texts, as RULER has them (arXiv 2404.06654)."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.errors import InvalidArgument
from sluice.evaluation.inputs import Vocabulary, prompt_ids

_SPARE = 16  # Tokens that a text may have more of than its parts: tokens change where parts meet.
_WORDS = 200


@dataclass(frozen=True)
class Texts:
    """In which things are hidden."""

    prose: str
    code: str

    def words(self) -> list[str]:
        """Of which names are made.
        @throws InvalidArgument if there are too few"""
        words = sorted({word for word in self.prose.lower().split() if word.isalpha() and word.isascii()
                        and 4 <= len(word) <= 9})
        if len(words) < _WORDS:
            raise InvalidArgument(f"the text of which tasks are made has {len(words)} words of 4 to 9 letters, and "
                                  f"names need {_WORDS}; give a longer --text")
        return words


class Maker:
    """One prompt of about `length` tokens, no more. The same `seed` makes the same one of the same texts, of which it
    gets the tokens."""

    def __init__(self, vocabulary: Vocabulary, prose: Sequence[int], code: Sequence[int], words: Sequence[str],
                 length: int, seed: str) -> None:
        self.prose, self.code, self.length, self.random = prose, code, length, random.Random(seed)
        self._vocabulary, self._words = vocabulary, words

    def key(self) -> str:
        return "-".join(self.random.sample(self._words, 2))

    def names(self, count: int) -> list[str]:
        words = self.random.sample(self._words, 2 * count)
        return ["_".join(pair) for pair in zip(words[::2], words[1::2])]

    def number(self) -> str:
        return str(self.random.randrange(10**6, 10**7))

    def hidden(self, source: Sequence[int], lines: Sequence[str], question: str) -> str:
        """A part of the source with these lines in it, in this order, and the question behind it.
        @throws InvalidArgument if the source is too short"""
        room = self._room("\n".join(lines) + "\n" + question)
        if len(source) < room:
            raise InvalidArgument(f"a text of which tasks are made has {len(source)} tokens, and {room} are needed; "
                                  "give a longer one, or shorter lengths")
        start = self.random.randrange(len(source) - room + 1)
        text = self._vocabulary.decode(source[start : start + room]).split("\n")
        if len(text) < len(lines):
            raise InvalidArgument("a text of which tasks are made has too few lines to hide some between; give another")
        for place, line in zip(sorted(self.random.sample(range(len(text)), len(lines)), reverse=True),
                               reversed(lines)):
            text.insert(place, line)
        return "\n".join(text) + question

    def filled(self, unit: Callable[[], str], question: str) -> str:
        """As many units as there is room for before the question."""
        left, text = self._room(question), ""
        while (left := left - self._size(each := unit())) >= 0:
            text += each
        return text

    def _room(self, text: str) -> int:
        room = self.length - self._size(text) - _SPARE
        if room < self.length // 4:
            raise InvalidArgument(f"a task of {self.length} tokens has no room for anything but its question; make it "
                                  "longer")
        return room

    def _size(self, text: str) -> int:
        return len(self._vocabulary.encode(text))


def _asked(what: str) -> str:
    return f"\n\nQuestion: What {what} mentioned in the text above?\nAnswer: The special magic"


def niah(make: Maker) -> tuple[str, str]:
    """One sentence in prose."""
    key, value = make.key(), make.number()
    question = f"{_asked(f'is the special magic number for {key}')} number for {key} is"
    return make.hidden(make.prose, [_needle(key, value)], question), " " + value


def multikey(make: Maker) -> tuple[str, str]:
    """One sentence among nothing but such sentences."""
    pairs: dict[str, str] = {}

    def unit() -> str:
        key = make.key()
        while key in pairs:
            key = make.key()
        pairs[key] = make.number()
        return _needle(key, pairs[key]) + "\n"

    def question(key: str) -> str:
        return f"{_asked(f'is the special magic number for {key}')[1:]} number for {key} is"

    text = make.filled(unit, question("characters-characters"))
    key = make.random.choice(list(pairs)[:-1])  # The last one did not fit.
    return text + question(key), " " + pairs[key]


def uuids(make: Maker) -> tuple[str, str]:
    """One entry of a dictionary in code, of keys and values that are no words."""
    pairs: dict[str, str] = {}

    def drawn() -> str:
        return str(uuid.UUID(int=make.random.getrandbits(128)))

    def unit() -> str:
        key = drawn()
        pairs[key] = drawn()
        return f'    "{key}": "{pairs[key]}",\n'

    def whole(text: str, key: str) -> str:
        return f'RECORDS = {{\n{text}}}\n\nassert RECORDS["{key}"] == "'

    text = make.filled(unit, whole("", drawn()))
    key = make.random.choice(list(pairs)[:-1])
    return whole(text, key), pairs[key][:13]


def multivalue(make: Maker) -> tuple[str, str]:
    """Four sentences in prose about one thing."""
    key, values = make.key(), [make.number() for _ in range(4)]
    question = _asked(f"are all the special magic numbers for {key}").replace(
        " mentioned in the text above?", " mentioned in the text above, in order?") + f" numbers for {key} are"
    return make.hidden(make.prose, [_needle(key, value) for value in values], question), " " + ", ".join(values)


def constant(make: Maker) -> tuple[str, str]:
    """A constant in code."""
    name, value = make.names(1)[0].upper(), make.number()
    question = f"\n\n# The value of the constant {name} defined above:\nassert {name} == "
    return make.hidden(make.code, [f"{name} = {value}"], question), value


def trace(make: Maker) -> tuple[str, str]:
    """A chain of four assignments in code."""
    names, value = make.names(5), make.number()
    lines = [f"{name} = {source}" for name, source in zip(names, [value, *names])]
    question = f"\n\n# The value of {names[4]}, which was assigned from {names[3]} above:\nassert {names[4]} == "
    return make.hidden(make.code, lines, question), value


def _needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


TASKS: dict[str, Callable[[Maker], tuple[str, str]]] = {
    "niah": niah, "multikey": multikey, "uuid": uuids, "multivalue": multivalue, "constant": constant, "trace": trace}


def made_tasks(vocabulary: Vocabulary, texts: Texts, lengths: Sequence[int], count: int,
               seed: int) -> Iterator[dict[str, Any]]:
    """`count` prompts of each task and length, as lines of a file of tasks. Each is drawn by itself: those of another
    count or of other lengths are the same."""
    words, prose, code = texts.words(), vocabulary.encode(texts.prose), vocabulary.encode(texts.code)
    for length in lengths:
        for index in range(count):
            for name, task in TASKS.items():
                prompt, answer = task(Maker(vocabulary, prose, code, words, length, f"{seed} {name} {length} {index}"))
                yield {"task": name, "length": length, "prompt": prompt, "answer": answer}


def as_ids(line: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The line with prompt and answer as token ids, for programs without the tokenizer. Those of the answer are what
    the text of both has behind the prompt's, where the prompt ends between two tokens."""
    prompt = prompt_ids(line["prompt"], vocabulary, chat=False)
    whole = [*vocabulary.begins, *vocabulary.encode(line["prompt"] + line["answer"])]
    ends = whole[: len(prompt)] == prompt
    return {**line, "prompt": prompt, "answer": whole[len(prompt) :] if ends else vocabulary.encode(line["answer"])}
