"""Answers as OpenAI's responses have them: an object of items, or events that tell how it grows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from sluice.serving.answers import CallsIn, Shown, entry
from sluice.serving.requests import Event
from sluice.serving.responses import ResponsesRequest
from sluice.serving.tokens import TokenBytes

Item = dict[str, Any]


class ResponseForm:
    """How the answer to one request looks. All of it stays here until the end, as the last event has it again."""

    done: bytes | None = None  #: what ends a stream

    def __init__(self, model: str, tokens: TokenBytes, shown: Shown, wants: ResponsesRequest) -> None:
        self._tokens, self._shown, self._wants, self._model = tokens, shown, wants, model
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._calls = CallsIn(shown)
        self._output: list[Item] = []
        self._waiting: list[Item] = []  # Probabilities of tokens whose text is not told yet.
        self._length = self._message = False  # It ended for its length; its first item is a message.
        self._number = 0

    def whole(self, answers: Sequence[Event], usage: dict[str, Any]) -> Item:
        """`answers`: all of the answer in one event."""
        for _ in self.pieces(0, answers[0]):
            pass
        return self._response("incomplete" if self._length else "completed", usage)

    def begin(self) -> Iterator[Item]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress"))

    def pieces(self, index: int, event: Event) -> Iterator[Item]:
        text, calls, finish = self._calls.push(event.text, event.finish)
        if self._shown.logprobs:
            self._waiting += [entry(self._tokens, each) for each in event.tokens]
        if text or finish is not None and not calls and (self._waiting or not self._message):
            yield from self._more(text)
        if finish is None:
            return
        self._length = finish == "length"
        if self._message:
            yield from self._end_message()
        for call in calls:
            yield from self._call(call)

    def end(self, usage: dict[str, Any]) -> Iterator[Item]:
        status = "incomplete" if self._length else "completed"
        yield self._event(f"response.{status}", response=self._response(status, usage))

    def failed(self, error: dict[str, Any]) -> Item:
        """`error`: as other answers have it."""
        told = {**self._response("failed"), "error": {"code": "server_error", "message": error["error"]["message"]}}
        return self._event("response.failed", response=told)

    def _event(self, kind: str, **body: Any) -> Item:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **body}

    def _more(self, text: str) -> Iterator[Item]:
        """More of the message, which is the first item."""
        if not self._message:
            self._message = True
            message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": [],
                       "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=0, item=message)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._output.append({**message, "content": [part]})
            yield self._event("response.content_part.added", **self._place(), part=dict(part, logprobs=[]))
        part, logprobs = self._output[0]["content"][0], self._waiting
        self._waiting = []
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _end_message(self) -> Iterator[Item]:
        message = self._output[0]
        message["status"] = "incomplete" if self._length else "completed"
        part = message["content"][0]
        yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)

    def _place(self) -> Item:
        return {"item_id": self._output[0]["id"], "output_index": 0, "content_index": 0}

    def _call(self, told: Item) -> Iterator[Item]:
        call, at = told["function"], len(self._output)
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": told["id"], "name": call["name"],
                "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=at, item=item)
        self._output.append({**item, "arguments": call["arguments"], "status": "completed"})
        place = {"item_id": item["id"], "output_index": at}
        yield self._event("response.function_call_arguments.delta", **place, delta=call["arguments"])
        yield self._event("response.function_call_arguments.done", **place, name=call["name"],
                          arguments=call["arguments"])
        yield self._event("response.output_item.done", output_index=at, item=self._output[at])

    def _response(self, status: str, usage: dict[str, Any] | None = None) -> Item:
        wants = self._wants
        return {"id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
                "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
                "model": self._model, "output": list(self._output), "usage": None if usage is None else _usage(usage),
                **{name: getattr(wants, name) for name in ("instructions", "max_output_tokens", "metadata",
                                                           "parallel_tool_calls", "temperature", "top_p",
                                                           "top_logprobs", "user")},
                "text": wants.text.model_dump(exclude_none=True, by_alias=True),
                "tools": [tool.model_dump() for tool in wants.tools],
                "tool_choice": wants.tool_choice if isinstance(wants.tool_choice, str) else
                wants.tool_choice.model_dump(),
                "background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}


def _usage(told: dict[str, Any]) -> Item:
    return {"input_tokens": told["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": told["prompt_tokens_details"]["cached_tokens"],
                                     "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"]}
