"""Answers as OpenAI's protocol has them, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from sluice.serving.requests import Chosen
from sluice.serving.tokens import Offsets, TokenBytes


class Form:
    """How the answers to one request look."""

    def __init__(self, model: str, chat: bool, tokens: TokenBytes, logprobs: bool) -> None:
        self._tokens, self._chat, self._logprobs = tokens, chat, logprobs
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()),
                      "model": model}
        self._characters: dict[int, int] = {}  # Of each choice so far.
        self._offsets: dict[int, Offsets] = {}
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[tuple[str, Sequence[Chosen], str]], usage: dict[str, Any]) -> dict[str, Any]:
        """`choices`: text, tokens and why each ended."""
        kind = "chat.completion" if self._chat else "text_completion"
        told = []
        for index, (text, tokens, finish) in enumerate(choices):
            message = {"role": "assistant", "content": text, "refusal": None}
            body = {"message": message} if self._chat else {"text": text}
            told.append({"index": index, **body, "logprobs": self._probabilities(index, text, tokens),
                         "finish_reason": finish})
        return {**self._head, "object": kind, "choices": told, "usage": usage}

    def piece(self, index: int, text: str, tokens: Sequence[Chosen], finish: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text or not finish else {}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
        body = {"delta": delta} if self._chat else {"text": text}
        return self._pieces([{"index": index, **body, "logprobs": self._probabilities(index, text, tokens),
                              "finish_reason": finish}])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The piece that ends a stream which is to tell it."""
        return {**self._pieces([]), "usage": usage}

    def _pieces(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _probabilities(self, index: int, text: str, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            return {"content": [{**self._entry(each.token, each.logprob),
                                 "top_logprobs": [self._entry(*pair) for pair in each.top]} for each in tokens],
                    "refusal": None}
        characters = self._characters[index] = self._characters.get(index, 0) + len(text)
        offsets = self._offsets.setdefault(index, Offsets(self._tokens))
        return {"tokens": [self._tokens.name(each.token) for each in tokens],
                "token_logprobs": [each.logprob for each in tokens],
                "text_offset": offsets.push([each.token for each in tokens], characters),
                "top_logprobs": [self._likely(each) for each in tokens]}

    def _likely(self, chosen: Chosen) -> dict[str, float]:
        """By name, the one chosen among them. Of tokens that are called alike, others have their numbers."""
        pairs = chosen.top if any(token == chosen.token for token, _ in chosen.top) else (
            *chosen.top, (chosen.token, chosen.logprob))
        own, likely = self._tokens.name(chosen.token), {}
        for token, value in pairs:
            name = self._tokens.name(token)
            taken = name in likely or name == own and token != chosen.token
            likely[f"token_id:{token}" if taken else name] = value
        return likely

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        # Texts have no bytes of tokens that they leave out.
        told = None if self._tokens.is_special(token) else list(self._tokens.of(token))
        return {"token": self._tokens.name(token), "logprob": logprob, "bytes": told}
