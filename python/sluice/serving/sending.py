"""How answers are sent: whole or in pieces, counted, and given up when the client goes away."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from sluice.serving.answers import Form
from sluice.serving.arguments import in_arguments
from sluice.serving.guard import Answer, encoded
from sluice.serving.metrics import Metrics
from sluice.serving.process import Answers, EngineLost
from sluice.serving.protocol import Refused
from sluice.serving.requests import Event
from sluice.serving.response_form import ResponseForm

AnyForm = Form | ResponseForm
_T = TypeVar("_T")


class Counted:
    """The answers to one request, as metrics and usage count them."""

    def __init__(self, metrics: Metrics, prompts: Sequence[Sequence[int]], choices: int) -> None:
        self._metrics, self._choices, self._open = metrics, choices, True
        self._prompt = sum(map(len, prompts))
        self._cached: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._began = time.monotonic()
        self._heard: dict[int, float] = {}
        metrics.prompt_tokens.inc(self._prompt)

    def take(self, index: int, event: Event) -> None:
        """@throws Refused if the event is an error"""
        metrics, now = self._metrics, time.monotonic()
        if event.error:
            raise Refused(500, f"the request failed: {in_arguments(event.error)}", "server_error")
        if index in self._heard:
            metrics.next_token.observe(now - self._heard[index])
        else:
            metrics.first_token.observe(now - self._began)
            metrics.cached_tokens.inc(event.cached or 0)
            self._cached[index] = event.cached or 0
        metrics.answer_tokens.inc(event.count - self._counts.get(index, 0))
        self._heard[index], self._counts[index] = now, event.count

    def end(self, outcome: str) -> None:
        """The first call counts."""
        if self._open:
            self._open = False
            self._metrics.requests.labels(outcome).inc()

    def usage(self) -> dict[str, Any]:
        answer = sum(self._counts.values())
        # A prompt counts once, however many answers it gets; what was known of it is what the first one found.
        cached = sum(count for index, count in self._cached.items() if index % self._choices == 0)
        return {"prompt_tokens": self._prompt, "completion_tokens": answer, "total_tokens": self._prompt + answer,
                "prompt_tokens_details": {"cached_tokens": cached}}


async def whole(answers: Answers, form: AnyForm, counted: Counted) -> Response:
    """One answer when all are complete."""
    heard: dict[int, list[Event]] = {}
    try:
        async for index, event in answers:
            counted.take(index, event)
            heard.setdefault(index, []).append(event)
        counted.end("done")
        return Answer(form.whole([together(heard[index]) for index in sorted(heard)], counted.usage()))
    except (Refused, EngineLost):
        counted.end("failed")
        raise
    finally:
        counted.end("given_up")
        answers.close()


def together(events: Sequence[Event]) -> Event:
    """All of an answer as one event."""
    last = events[-1]
    return dataclasses.replace(last, text="".join(event.text for event in events), prompt=events[0].prompt,
                               tokens=tuple(token for event in events for token in event.tokens))


async def pieces(answers: Answers, form: AnyForm, counted: Counted) -> AsyncIterator[bytes]:
    """Events of a stream as they come."""
    try:
        for piece in form.begin():
            yield said(piece)
        async for index, event in answers:
            counted.take(index, event)
            for piece in form.pieces(index, event):
                yield said(piece)
        counted.end("done")
        for piece in form.end(counted.usage()):
            yield said(piece)
    except (Refused, EngineLost) as error:
        counted.end("failed")
        yield said(form.failed((lost(error) if isinstance(error, EngineLost) else error).body))
    if form.done is not None:
        yield form.done


class Stream(StreamingResponse):
    """Gives up its answers as soon as the client is gone."""

    def __init__(self, answers: Answers, counted: Counted, content: AsyncIterator[bytes]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers, self._counted = answers, counted

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._counted.end("given_up")
            self._answers.close()


def said(body: dict[str, Any]) -> bytes:
    """An event of a stream; those of responses have names."""
    name = f"event: {body['type']}\n".encode() if "type" in body else b""
    return name + b"data: " + encoded(body) + b"\n\n"


def lost(error: EngineLost) -> Refused:
    return Refused(503, f"{error}; try again when the server has been started again", "server_error", "engine_lost")


async def unless_gone(request: Request, answer: Coroutine[Any, Any, _T]) -> _T | None:
    """The answer; it is given up, and None, if the client goes away."""
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, watch = asyncio.create_task(answer), asyncio.create_task(gone())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        for task in (work, watch):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
