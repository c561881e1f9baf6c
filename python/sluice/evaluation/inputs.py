"""Texts and tasks as tokens of a model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.errors import InvalidArgument
from sluice.evaluation.sources import text_of

BYTES = "bytes"


class Vocabulary(Protocol):
    """How a model's tokens are written."""

    begins: list[int]  #: tokens with which every text begins

    def encode(self, text: str) -> list[int]:
        """Without those."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, text: str) -> list[int]:
        """The tokens of a conversation that this text opens and the model is to go on with."""


class Bytes:
    """Of a model whose tokens are bytes, the id being the byte."""

    def __init__(self, begins: int | None) -> None:
        self.begins = [] if begins is None else [begins]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def chat(self, text: str) -> list[int]:
        raise InvalidArgument("--chat: bytes have no chat template; leave it out")


class Tokenizer:
    """Of a model with a tokenizer of transformers."""

    def __init__(self, name: str, trust_remote_code: bool = False) -> None:
        """@throws CannotLoad if there is none"""
        from sluice.serving.arguments import CannotLoad
        from sluice.serving.load import load_tokenizer

        try:
            self.tokenizer = load_tokenizer(name, trust_remote_code)
        except CannotLoad as error:
            raise CannotLoad(f"{error}. --tokenizer DIR names another folder, and --tokenizer bytes is for models "
                             "whose tokens are bytes; tasks of token ids need none") from None
        begin = self.tokenizer.bos_token_id
        self.begins: list[int] = [begin] if begin is not None and self._ids("", True)[:1] == [begin] else []

    def encode(self, text: str) -> list[int]:
        return self._ids(text, False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, text: str) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidArgument("--chat: this model's tokenizer has no chat template; leave it out")
        return self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                                   tokenize=True, return_dict=False)

    def _ids(self, text: str, special: bool) -> list[int]:
        # verbose: a text may be longer than the model's context, only windows of it run.
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]


def prompt_ids(text: str, vocabulary: Vocabulary, chat: bool) -> list[int]:
    """The tokens of a task's prompt that is text."""
    return vocabulary.chat(text) if chat else [*vocabulary.begins, *vocabulary.encode(text)]


@dataclass(frozen=True)
class Window:
    """A part of a text."""

    first: int  #: its first token's place in the text
    ids: list[int]  #: what every text begins with included


def read_windows(path: str, vocabulary: Vocabulary, tokens: int, count: int, seed: int) -> list[Window]:
    """Windows of as many tokens at random places that do not overlap.
    @throws InvalidArgument if the text is too short"""
    ids, begins = vocabulary.encode(text_of(path)), vocabulary.begins
    each = tokens - len(begins)
    spare = len(ids) - count * each
    if spare < 0:
        fits = len(ids) // each
        remedy = f"--windows {fits}" if fits else f"--tokens {len(ids) + len(begins)} --windows 1"
        raise InvalidArgument(f"{path} has {len(ids)} tokens, and {count} windows of {tokens} need {count * each}; "
                              f"give a longer text, or {remedy} at most")
    gaps = sorted(random.Random(seed).randint(0, spare) for _ in range(count))
    firsts = [gap + index * each for index, gap in enumerate(gaps)]
    return [Window(first, begins + ids[first : first + each]) for first in firsts]


@dataclass(frozen=True)
class Task:
    """A prompt with one right answer."""

    line: int  #: of the file
    name: str
    length: int  #: that the file says, or the prompt's rounded up to a power of two
    prompt: list[int]
    answer: str | list[int]  #: judged as text, or as token ids


def read_tasks(path: str, vocabulary: Any, chat: bool) -> list[Task]:
    """The tasks of a file, a JSON object on each line. `vocabulary`: a function that loads it, if a line needs it.
    @throws InvalidArgument with the line that is wrong"""
    tasks = [_task(f"{path}, line {number}", number, line, vocabulary, chat)
             for number, line in enumerate(text_of(path).split("\n"), 1) if line.strip()]
    if not tasks:
        raise InvalidArgument(f'{path} has no tasks; write one on each line, as {{"prompt": "...", "answer": "..."}}')
    return tasks


def _task(where: str, number: int, line: str, vocabulary: Any, chat: bool) -> Task:
    try:
        said = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{where} is no JSON: {error}") from None
    unknown = sorted(set(said) - {"task", "length", "prompt", "answer"}) if isinstance(said, dict) else []
    if not isinstance(said, dict) or unknown:
        raise InvalidArgument(f"{where} has {', '.join(unknown) or 'no object'}; a task is an object of prompt and "
                              "answer, each a text or a list of token ids, and if you like task (a name) and length")
    prompt, answer = (_text_or_ids(where, name, said.get(name)) for name in ("prompt", "answer"))
    name, length = said.get("task", "task"), said.get("length")
    if not isinstance(name, str) or not (length is None or type(length) is int and length > 0):
        raise InvalidArgument(f"{where}: task must be a text, and length a whole number above 0")
    if isinstance(prompt, str):
        prompt = prompt_ids(prompt, vocabulary(), chat)
    elif chat:
        raise InvalidArgument(f"{where}: --chat is for prompts that are text, and this one is token ids; leave it out")
    if isinstance(answer, str) and not answer.strip():
        raise InvalidArgument(f"{where}: the answer is blank, so that any would be right")
    return Task(number, name, length or 1 << (len(prompt) - 1).bit_length(), prompt, answer)


def _text_or_ids(where: str, name: str, value: Any) -> str | list[int]:
    ids = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
    if not value or not (isinstance(value, str) or ids):
        raise InvalidArgument(f"{where}: {name} must be a text or a list of token ids, and not empty")
    return value
