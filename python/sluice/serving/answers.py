"""Answers as OpenAI's protocol has them, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.serving.requests import Chosen, Event
from sluice.serving.tokens import Offsets, TokenBytes
from sluice.serving.tools import CallForm, CallText, Tool


@dataclass(frozen=True)
class Shown:
    """What a request wants to see beside text."""

    logprobs: bool = False
    ids: bool = False  #: the tokens' numbers
    echo: Sequence[str] | None = None  #: the prompts' texts, which come first
    prompts: Sequence[Sequence[int]] = ()  #: their tokens
    calls: CallForm | None = None  #: answers may call tools, in this form,
    tools: Sequence[Tool] = ()  #: of these,
    begun: bool = False  #: and do so: the prompt has the call's beginning
    most_calls: int | None = None
    usage: bool = False  #: a stream ends with it


class CallsIn:
    """The calls of tools in one answer, if it may have some."""

    def __init__(self, shown: Shown) -> None:
        self._text = None if shown.calls is None else CallText(shown.calls, shown.tools, shown.begun)
        self._most = shown.most_calls

    def push(self, text: str, finish: str | None) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text that is told now, calls, which come with the end, and why it ends."""
        if self._text is None:
            return text, [], finish
        text, calls = self._text.push(text), []
        if finish is not None:
            left, calls = self._text.end()
            text += left
        return text, [call.told() for call in calls[: self._most]], "tool_calls" if calls and finish == "stop" else finish


def entry(tokens: TokenBytes, chosen: Chosen) -> dict[str, Any]:
    """A token's probability and those of the most likely ones."""
    def one(token: int, logprob: float | None) -> dict[str, Any]:
        # Texts have no bytes of tokens that they leave out.
        told = None if tokens.is_special(token) else list(tokens.of(token))
        return {"token": tokens.name(token), "logprob": logprob, "bytes": told}

    return {**one(chosen.token, chosen.logprob), "top_logprobs": [one(*pair) for pair in chosen.top]}


@dataclass
class _Choice:
    """What has been told of one answer."""

    offsets: Offsets
    calls: CallsIn
    characters: int = 0
    begun: bool = False


class Form:
    """How the answers to one request look."""

    done: bytes | None = b"data: [DONE]\n\n"  #: what ends a stream

    def __init__(self, model: str, chat: bool, tokens: TokenBytes, shown: Shown, choices: int = 1) -> None:
        """`choices`: answers to each prompt."""
        self._tokens, self._chat, self._shown, self._per_prompt = tokens, chat, shown, choices
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()),
                      "model": model}
        self._choices: dict[int, _Choice] = {}

    def whole(self, answers: Sequence[Event], usage: dict[str, Any]) -> dict[str, Any]:
        """`answers`: all of each in one event."""
        told = []
        for index, event in enumerate(answers):
            text, calls, finish = self._said(index, event)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            body = {"message": message} if self._chat else {"text": text}
            told.append({"index": index, **body, **self._beside(index, text, event, True), "finish_reason": finish})
        return {**self._head, "object": "chat.completion" if self._chat else "text_completion", "choices": told,
                "usage": usage}

    def begin(self) -> Iterator[dict[str, Any]]:
        """What a stream begins with."""
        yield from ()

    def pieces(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """What a stream tells of an event."""
        choice = self._choice(index)
        first, choice.begun = not choice.begun, True
        text, calls, finish = self._said(index, event)
        beside = self._beside(index, text, event, first)
        if not (text or calls or finish or event.tokens or first):
            return
        delta: dict[str, Any] = {"content": text} if text or not (finish or calls) else {}
        if calls:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        if first:
            delta = {"role": "assistant", **delta}
        body = {"delta": delta} if self._chat else {"text": text}
        yield self._piece([{"index": index, **body, **beside, "finish_reason": finish}])

    def end(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What a stream ends with."""
        if self._shown.usage:
            yield {**self._piece([]), "usage": usage}

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """What a stream ends with that cannot go on. `error`: as other answers have it."""
        return error

    def _choice(self, index: int) -> _Choice:
        if index not in self._choices:
            self._choices[index] = _Choice(Offsets(self._tokens), CallsIn(self._shown))
        return self._choices[index]

    def _said(self, index: int, event: Event) -> tuple[str, list[dict[str, Any]], str | None]:
        """Text, calls of tools and why it ends."""
        choice, text = self._choice(index), event.text
        if self._shown.echo is not None and not choice.characters and not choice.offsets.begun:
            text = self._shown.echo[index // self._per_prompt] + text
        return choice.calls.push(text, event.finish)

    def _piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _beside(self, index: int, text: str, event: Event, first: bool) -> dict[str, Any]:
        """Probabilities, and numbers of tokens."""
        end = () if event.end is None else (event.end,)
        # Clients that ask for a prompt's probabilities count tokens, also one that ends the answer.
        tokens = (*event.prompt, *event.tokens, *end) if self._shown.echo is not None else event.tokens
        told: dict[str, Any] = {"logprobs": self._probabilities(index, text, tokens)}
        if self._shown.ids:
            if first:
                told["prompt_token_ids"] = list(self._shown.prompts[index // self._per_prompt])
            told["token_ids"] = [each.token for each in (*event.tokens, *end)]
        return told

    def _probabilities(self, index: int, text: str, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
        choice = self._choice(index)
        choice.characters += len(text)
        if not self._shown.logprobs:
            choice.offsets.begun = True
            return None
        if self._chat:
            return {"content": [entry(self._tokens, each) for each in tokens], "refusal": None}
        return {"tokens": [self._tokens.name(each.token) for each in tokens],
                "token_logprobs": [each.logprob for each in tokens],
                "text_offset": choice.offsets.push([each.token for each in tokens], choice.characters),
                "top_logprobs": [self._likely(each) for each in tokens]}

    def _likely(self, chosen: Chosen) -> dict[str, float] | None:
        """By name, the one chosen among them. Of tokens that are called alike, others have their numbers."""
        if chosen.logprob is None:
            return None
        pairs = chosen.top if any(token == chosen.token for token, _ in chosen.top) else (
            *chosen.top, (chosen.token, chosen.logprob))
        own, likely = self._tokens.name(chosen.token), {}
        for token, value in pairs:
            name = self._tokens.name(token)
            taken = name in likely or name == own and token != chosen.token
            likely[f"token_id:{token}" if taken else name] = value
        return likely
