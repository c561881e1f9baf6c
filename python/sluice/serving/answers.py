"""Answers as OpenAI's protocol has them, whole or in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from sluice.serving.requests import Chosen


class Form:
    """How the answers to one request look."""

    def __init__(self, model: str, chat: bool, tokenizer: Any, logprobs: bool) -> None:
        self._tokenizer, self._chat, self._logprobs = tokenizer, chat, logprobs
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()),
                      "model": model}
        self._texts: dict[int, int] = {}  # Characters of each choice so far, by their tokens.
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[tuple[str, Sequence[Chosen], str]], usage: dict[str, Any]) -> dict[str, Any]:
        """`choices`: text, tokens and why each ended."""
        kind = "chat.completion" if self._chat else "text_completion"
        told = []
        for index, (text, tokens, finish) in enumerate(choices):
            message = {"role": "assistant", "content": text, "refusal": None}
            body = {"message": message} if self._chat else {"text": text}
            told.append({"index": index, **body, "logprobs": self._probabilities(index, tokens),
                         "finish_reason": finish})
        return {**self._head, "object": kind, "choices": told, "usage": usage}

    def piece(self, index: int, text: str, tokens: Sequence[Chosen], finish: str | None) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text or not finish else {}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", **delta}
        body = {"delta": delta} if self._chat else {"text": text}
        return self._pieces([{"index": index, **body, "logprobs": self._probabilities(index, tokens),
                              "finish_reason": finish}])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The piece that ends a stream which is to tell it."""
        return {**self._pieces([]), "usage": usage}

    def _pieces(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def _probabilities(self, index: int, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            return {"content": [{**self._entry(each.token, each.logprob),
                                 "top_logprobs": [self._entry(*pair) for pair in each.top]} for each in tokens],
                    "refusal": None}
        texts, offsets = [self._text(each.token) for each in tokens], []
        for text in texts:
            offsets.append(self._texts.get(index, 0))
            self._texts[index] = offsets[-1] + len(text)
        return {"tokens": texts, "token_logprobs": [each.logprob for each in tokens], "text_offset": offsets,
                "top_logprobs": [self._likely(each) for each in tokens]}

    def _likely(self, chosen: Chosen) -> dict[str, float]:
        """By text; of tokens with the same text the most likely."""
        likely: dict[str, float] = {}
        for token, value in (*chosen.top, (chosen.token, chosen.logprob)):
            likely.setdefault(self._text(token), value)
        return likely

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # Of a part of a character the bytes are not known.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
