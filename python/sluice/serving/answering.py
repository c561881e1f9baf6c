"""From requests of the protocol to answers of the engine."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from sluice.errors import InvalidArgument
from sluice.serving.answers import Form
from sluice.serving.arguments import in_arguments
from sluice.serving.guard import KEY_NUMBER, Answer, encoded
from sluice.serving.metrics import Metrics
from sluice.serving.process import Answers, EngineLost, EngineProcess, Ready
from sluice.serving.protocol import MOST_CHOICES, ChatRequest, CompletionRequest, Refused
from sluice.serving.requests import Chosen, Event
from sluice.serving.template import rendered
from sluice.serving.tokens import TokenBytes

_LEAST_LONGEST = 16  # Characters: some texts become shorter before they become tokens.
_T = TypeVar("_T")


@dataclass(frozen=True)
class Front:
    """Of the web server."""

    name: str  #: the model's, for clients
    queue: int = 256  #: answers that may wait beside those that run; more are refused with 429
    api_keys: tuple[str, ...] = ()  #: of which clients must have one; none: all are served
    max_body: int | None = None  #: bytes of a request; None: by the model's context
    shared_prefixes: bool = False  #: prompts begin with what is known of any client's


class Answering:
    """Requests to answers."""

    def __init__(self, engine: EngineProcess, ready: Ready, tokenizer: Any, front: Front) -> None:
        self.engine, self.metrics = engine, Metrics(lambda: engine.status, lambda: engine.lost)
        self._ready, self._tokenizer, self._front = ready, tokenizer, front
        self._tokens = TokenBytes(tokenizer)
        # One thread: tokenizers are not to be used by two at once.
        self._reader = ThreadPoolExecutor(1, "sluice-tokenizer")
        self._secret = secrets.token_bytes(32)
        self._places = 0  # Of requests whose prompts are being read.
        # No text of more characters fits: a token has no more than the longest.
        longest = max(map(len, tokenizer.get_vocab()), default=0)
        self._characters = ready.limit * max(longest, _LEAST_LONGEST)

    def close(self) -> None:
        """Nothing more is read."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def complete(self, wants: CompletionRequest, request: Request) -> Response:
        given = wants.prompt
        several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        prompts = given if several else [given]
        if len(prompts) * wants.n > MOST_CHOICES:
            raise Refused(400, f"{len(prompts)} prompts with n {wants.n} are too many; {MOST_CHOICES} answers may be "
                               "asked for at once", param="prompt")
        for each in prompts:
            self._check_length(each, "prompt")

        async def read() -> list[list[int]]:
            return [await self._read(self._tokenizer.encode, each) if isinstance(each, str) else each
                    for each in prompts]

        return await self._answer(wants, request, read, len(prompts), chat=False)

    async def chat(self, wants: ChatRequest, request: Request) -> Response:
        if not getattr(self._tokenizer, "chat_template", None):
            raise Refused(400, "this model's tokenizer has no chat template; use /v1/completions", param="messages")
        messages = wants.texts()
        # Templates have variables; the function's own arguments, such as another template, are not for clients.
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() & wants.chat_template_kwargs
        if own:
            raise Refused(400, f"chat_template_kwargs may not have {', '.join(sorted(own))}",
                          param="chat_template_kwargs")

        def tokens() -> list[int]:
            text = rendered(self._tokenizer, messages, **wants.chat_template_kwargs)
            self._check_length(text, "messages")
            return self._tokenizer.encode(text, add_special_tokens=False)

        async def read() -> list[list[int]]:
            try:
                return [await self._read(tokens)]
            except Refused:
                raise
            except InvalidArgument as error:
                raise Refused(400, str(error), param="messages") from None
            except Exception as error:  # Templates are programs, and refuse messages by raising what they like.
                raise Refused(400, f"the model's chat template does not take these messages: {error}",
                              param="messages") from None

        return await self._answer(wants, request, read, 1, chat=True)

    async def _read(self, call: Callable, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, call, *arguments)

    async def _answer(self, wants: CompletionRequest | ChatRequest, request: Request,
                      read: Callable[[], Coroutine[Any, Any, list[list[int]]]], prompts: int, chat: bool) -> Response:
        """`read`: makes the tokens of as many prompts."""
        self.check_model(wants.model)
        most = self.engine.settings.sequences + self._front.queue
        if prompts * wants.n > most:
            raise Refused(400, f"{prompts * wants.n} answers to one request are more than this server takes at once, "
                               f"{most} (its --sequences and --queue)", param="n")
        samplings = [wants.samplings(self._ready.defaults, wants.n) for _ in range(prompts)]
        with self._place(prompts * wants.n):
            tokens = await unless_gone(request, read())
            if tokens is None:
                self.metrics.requests.labels("given_up").inc()
                return Response(status_code=499)  # Which nobody gets.
            self._check(wants, tokens)
            try:
                answers = self.engine.answer(tokens, samplings, self._salt(wants, request))
            except EngineLost:
                self.metrics.requests.labels("failed").inc()
                raise
        form = Form(self._front.name, chat, self._tokens, samplings[0][0].logprobs is not None)
        counted = Counted(self.metrics, tokens, wants.n)
        if not wants.stream:
            return await unless_gone(request, whole(answers, form, counted)) or Response(status_code=499)
        usage = wants.stream_options is not None and wants.stream_options.include_usage
        return Stream(answers, counted, pieces(answers, form, counted, usage))

    def _salt(self, wants: CompletionRequest | ChatRequest, request: Request) -> int:
        """Whose prompts begin with what is known of each other's: what is found tells of prompts that others sent, by
        `cached_tokens` and by how soon an answer comes. It cannot be guessed."""
        if self._front.shared_prefixes:
            return 0
        who = [request.scope.get(KEY_NUMBER), wants.user, wants.safety_identifier, wants.prompt_cache_key]
        digest = hashlib.blake2b(json.dumps(who).encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "big")

    @contextmanager
    def _place(self, answers: int) -> Iterator[None]:
        """Room for answers while their prompts are read; then they are the engine's."""
        under_way = self.engine.outstanding + self._places
        room = self.engine.settings.sequences + self._front.queue - under_way
        if answers > room:
            raise Refused(429, f"{under_way} answers are under way or waiting, and {max(room, 0)} more may be; try "
                               "again later", "rate_limit_error", "queue_full", headers={"Retry-After": "1"})
        self._places += answers
        try:
            yield
        finally:
            self._places -= answers

    def check_model(self, name: str) -> None:
        if name != self._front.name:
            raise Refused(404, f'there is no model "{name}"; this server has "{self._front.name}"',
                          code="model_not_found", param="model")

    def _check_length(self, prompt: str | list[int], param: str) -> None:
        """Refuses what cannot fit, before it is made tokens of."""
        if not isinstance(prompt, str):
            return
        if len(prompt) > self._characters:
            raise Refused(400, f"the prompt has {len(prompt)} characters, which are more than the model's "
                               f"{self._ready.limit} tokens", code="context_length_exceeded", param=param)
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise Refused(400, "the prompt has a surrogate without its other half, which is no text", param=param) \
                from None

    def _check(self, wants: CompletionRequest | ChatRequest, prompts: list[list[int]]) -> None:
        """Refuses what the engine would, before anything is sent."""
        param = "messages" if isinstance(wants, ChatRequest) else "prompt"
        limit = self._ready.limit
        for ids in prompts:
            if not ids:
                raise Refused(400, "the prompt has no tokens; it must have one", param=param)
            # A limit that the request did not set is cut to the room that there is.
            most = wants._most() if wants.model_fields_set & {"max_tokens", "max_completion_tokens"} else None
            if len(ids) + (most or 1) > limit and (len(ids) >= limit or most is not None):
                asked = f", and {most} more are asked for" if most else ""
                raise Refused(400, f"the prompt has {len(ids)} tokens{asked}; prompt and answer together may have "
                                   f"{limit}", code="context_length_exceeded", param=param)
            self._check_tokens(ids, param)
        self._check_tokens(wants.logit_bias, "logit_bias")

    def _check_tokens(self, ids: Collection[int], param: str) -> None:
        last = self._ready.vocabulary - 1
        strange = [token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token <= last]
        if strange:
            raise Refused(400, f"token {strange[0]} is none of the model's, which are in [0, {last}]", param=param)


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


async def whole(answers: Answers, form: Form, counted: Counted) -> Response:
    """One answer when all are complete."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[Chosen]] = {}
    ends: dict[int, str] = {}
    try:
        async for index, event in answers:
            counted.take(index, event)
            texts[index] = texts.get(index, "") + event.text
            tokens.setdefault(index, []).extend(event.tokens)
            if event.finish:
                ends[index] = event.finish
        counted.end("done")
        return Answer(form.whole([(texts[index], tokens[index], ends[index]) for index in sorted(ends)],
                                 counted.usage()))
    except (Refused, EngineLost):
        counted.end("failed")
        raise
    finally:
        counted.end("given_up")
        answers.close()


async def pieces(answers: Answers, form: Form, counted: Counted, usage: bool) -> AsyncIterator[bytes]:
    """Events of a stream as they come."""
    try:
        async for index, event in answers:
            counted.take(index, event)
            if event.text or event.tokens or event.finish:
                yield said(form.piece(index, event.text, event.tokens, event.finish))
        counted.end("done")
        if usage:
            yield said(form.usage(counted.usage()))
    except (Refused, EngineLost) as error:
        counted.end("failed")
        yield said((lost(error) if isinstance(error, EngineLost) else error).body)
    yield b"data: [DONE]\n\n"


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
    return b"data: " + encoded(body) + b"\n\n"


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
