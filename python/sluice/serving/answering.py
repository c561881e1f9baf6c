"""From requests of the protocol to answers of the engine."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from sluice.errors import InvalidArgument, Unsupported
from sluice.serving.answers import Form, Shown
from sluice.serving.chat_parts import texts_of
from sluice.serving.guard import KEY_NUMBER, Answer
from sluice.serving.guides import grammar_of
from sluice.serving.limits import Limits
from sluice.serving.metrics import Metrics
from sluice.serving.process import EngineLost, EngineProcess, Ready
from sluice.serving.protocol import (MOST_CHOICES, ChatRequest, Common, CompletionRequest, DetokenizeRequest,
                                     Refused, TokenizeRequest)
from sluice.serving.response_form import ResponseForm
from sluice.serving.responses import ResponsesRequest
from sluice.serving.sending import AnyForm, Counted, Stream, pieces, unless_gone, whole
from sluice.serving.template import rendered
from sluice.serving.tokens import TokenBytes
from sluice.serving.tools import CallForm, call_form

_MOST_NOTED = 64  # Names of fields, each of which is noted once.
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Front:
    """Of the web server."""

    name: str  #: the model's, for clients
    queue: int = 256  #: answers that may wait beside those that run; more are refused with 429
    api_keys: tuple[str, ...] = ()  #: of which clients must have one; none: all are served
    max_body: int | None = None  #: bytes of a request; None: by the model's context
    shared_prefixes: bool = False  #: prompts begin with what is known of any client's
    secret: bytes | None = None  #: by which they are kept apart, if others have it, too


class Answering:
    """Requests to answers."""

    def __init__(self, engine: EngineProcess, ready: Ready, tokenizer: Any, front: Front) -> None:
        self.engine, self.metrics = engine, Metrics(lambda: engine.status, lambda: engine.lost)
        self._ready, self._tokenizer, self._front = ready, tokenizer, front
        self._tokens = TokenBytes(tokenizer)
        # One thread: tokenizers are not to be used by two at once.
        self._reader = ThreadPoolExecutor(1, "sluice-tokenizer")
        self._secret = front.secret or secrets.token_bytes(32)
        self._noted: set[str] = set()
        self._call_form: CallForm | Unsupported | None = None  # Found when the first tool comes.
        self._places = 0  # Of requests whose prompts are being read.
        self._limits = Limits(ready, tokenizer)

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
            self._limits.check_length(each, "prompt")

        async def read() -> list[list[int]]:
            return [await self._read(self._tokenizer.encode, each) if isinstance(each, str) else each
                    for each in prompts]

        def shown(ids: list[list[int]]) -> Shown:
            texts = [each if isinstance(each, str) else self._tokenizer.decode(
                each, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                     for each in prompts] if wants.echo else None
            return Shown(wants.logprobs is not None, wants.return_token_ids, texts, ids, usage=wants.ends_with_usage)

        return await self._answer(wants, request, read, len(prompts), shown)

    async def respond(self, wants: ResponsesRequest, request: Request) -> Response:
        chat = wants.chat()
        self._note_unknown(wants)
        return await self.chat(chat, request, lambda shown: ResponseForm(self._front.name, self._tokens, shown, wants))

    async def chat(self, wants: ChatRequest, request: Request,
                   form_of: Callable[[Shown], AnyForm] | None = None) -> Response:
        """`form_of`: how the answer looks, if not as chats do."""
        param = wants.prompt_field
        if not getattr(self._tokenizer, "chat_template", None):
            raise Refused(400, "this model's tokenizer has no chat template; use /v1/completions", param=param)
        messages = wants.texts()
        # Templates have variables; the function's own arguments, such as another template, are not for clients.
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() & wants.chat_template_kwargs
        if own:
            raise Refused(400, f"chat_template_kwargs may not have {', '.join(sorted(own))}",
                          param="chat_template_kwargs")

        schema = wants.schema()
        guide = None if schema is None else self._grammar(schema, wants.format_field)
        options, begun = dict(wants.chat_template_kwargs), ""
        form, forced = None, wants.forced()
        if wants.tools and wants.tool_choice != "none":
            options["tools"] = wants.told_tools()
            form = await self._read(self._form_of_calls)
            if forced is not None:
                guide, begun = self._grammar(form.schema(forced), "tools"), form.before

        def tokens() -> list[int]:
            text = rendered(self._tokenizer, messages, **options) + begun
            self._limits.check_length(text, param)
            return self._tokenizer.encode(text, add_special_tokens=False)

        async def read() -> list[list[int]]:
            try:
                return [await self._read(tokens)]
            except Refused:
                raise
            except InvalidArgument as error:
                raise Refused(400, str(error), param=param) from None
            except Exception as error:  # Templates are programs, and refuse messages by raising what they like.
                raise Refused(400, f"the model's chat template does not take these messages: {error}",
                              param=param) from None

        def shown(ids: list[list[int]]) -> Shown:
            most = 1 if wants.parallel_tool_calls is False else None
            return Shown(bool(wants.logprobs), wants.return_token_ids, None, ids, form, wants.told_tools(),
                         forced is not None, most, wants.ends_with_usage)

        return await self._answer(wants, request, read, 1, shown, form_of, guide=guide, special=form is not None)

    def _form_of_calls(self) -> CallForm:
        """@throws Refused if the model calls no tools"""
        if self._call_form is None:
            try:
                self._call_form = call_form(self._tokenizer)
            except Unsupported as error:
                self._call_form = error
        if isinstance(self._call_form, Unsupported):
            raise Refused(400, f"tools are not served: {self._call_form}", code="unsupported_parameter", param="tools")
        return self._call_form

    @staticmethod
    def _grammar(schema: Any, param: str) -> str:
        try:
            return grammar_of(schema)
        except Unsupported as error:
            raise Refused(400, str(error), code="unsupported_parameter", param=param) from None
        except InvalidArgument as error:
            raise Refused(400, str(error), param=param) from None

    async def tokenize(self, wants: TokenizeRequest) -> Response:
        self.check_model(wants.model or self._front.name)

        def read() -> list[int]:
            if not wants.messages:
                return self._tokenizer.encode(wants.prompt, add_special_tokens=wants.add_special_tokens)
            text = rendered(self._tokenizer, texts_of(wants.messages), wants.add_generation_prompt)
            return self._tokenizer.encode(text, add_special_tokens=False)

        if wants.messages and not getattr(self._tokenizer, "chat_template", None):
            raise Refused(400, "this model's tokenizer has no chat template", param="messages")
        self._limits.check_length(wants.prompt or "", "prompt")
        try:
            ids = await self._read(read)
        except Refused:
            raise
        except Exception as error:
            raise Refused(400, f"this cannot be made tokens of: {error}") from None
        names = [self._tokens.name(token) for token in ids] if wants.return_token_strs else None
        return Answer({"count": len(ids), "max_model_len": self._ready.limit, "tokens": ids, "token_strs": names})

    async def detokenize(self, wants: DetokenizeRequest) -> Response:
        self.check_model(wants.model or self._front.name)
        self._limits.check_tokens(wants.tokens, "tokens")
        return Answer({"prompt": await self._read(lambda: self._tokenizer.decode(
            wants.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))})

    def _note_unknown(self, wants: Common) -> None:
        """Fields of other servers are ignored, each with a note the first time."""
        for name in wants.unknown():
            name = ascii(name[:80])
            if name not in self._noted and len(self._noted) < _MOST_NOTED:
                self._noted.add(name)
                _log.warning("sluice: requests have a field %s, which is not known and is ignored", name)

    async def _read(self, call: Callable, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, call, *arguments)

    async def _answer(self, wants: CompletionRequest | ChatRequest, request: Request,
                      read: Callable[[], Coroutine[Any, Any, list[list[int]]]], prompts: int,
                      shown: Callable[[list[list[int]]], Shown],
                      form_of: Callable[[Shown], AnyForm] | None = None, **sampling: Any) -> Response:
        """`read`: makes the tokens of as many prompts. `sampling`: more of Sampling."""
        self.check_model(wants.model)
        self._note_unknown(wants)
        most = self.engine.settings.sequences + self._front.queue
        if prompts * wants.n > most:
            raise Refused(400, f"{prompts * wants.n} answers to one request are more than this server takes at once, "
                               f"{most} (its --sequences and --queue)", param="n")
        samplings = [wants.samplings(self._ready.defaults, wants.n, **sampling) for _ in range(prompts)]
        with self._place(prompts * wants.n):
            tokens = await unless_gone(request, read())
            if tokens is None:
                self.metrics.requests.labels("given_up").inc()
                return Response(status_code=499)  # Which nobody gets.
            self._limits.check(wants, tokens)
            try:
                answers = self.engine.answer(tokens, samplings, self._salt(wants, request))
            except EngineLost:
                self.metrics.requests.labels("failed").inc()
                raise
        told = shown(tokens)
        form = Form(self._front.name, isinstance(wants, ChatRequest), self._tokens, told, wants.n) \
            if form_of is None else form_of(told)
        counted = Counted(self.metrics, tokens, wants.n)
        if not wants.stream:
            return await unless_gone(request, whole(answers, form, counted)) or Response(status_code=499)
        return Stream(answers, counted, pieces(answers, form, counted))

    def _salt(self, wants: CompletionRequest | ChatRequest, request: Request) -> int:
        """Whose prompts begin with what is known of each other's: what is found tells of prompts that others sent, by
        `cached_tokens` and by how soon an answer comes. It cannot be guessed."""
        if self._front.shared_prefixes:
            return 0
        number = request.scope.get(KEY_NUMBER)
        key = None if number is None else self._front.api_keys[number]
        who = [key, wants.user, wants.safety_identifier, wants.prompt_cache_key]
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
