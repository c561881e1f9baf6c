"""Requests of OpenAI's protocol, and how they are refused. Fields that would change an answer and are not served are
errors; those that would not are taken and ignored."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sluice.errors import InvalidArgument
from sluice.serving.requests import MOST_LOGPROBS, Sampling

MOST_CHOICES = 128
_Stop = Annotated[str, StringConstraints(min_length=1)]


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Request(BaseModel):
    """What both kinds have. The second half are extensions that other servers have, too."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: _Stop | list[_Stop] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None

    top_k: int | None = Field(None, ge=-1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: list[int] = []
    ignore_eos: bool = False

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def _tells(self) -> int | None:
        raise NotImplementedError

    def _most(self) -> int | None:
        return self.max_tokens

    def samplings(self, defaults: dict[str, Any], choices: int) -> list[Sampling]:
        """One for each choice, with seeds in a row. `defaults`: the model's own."""
        said = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        wants = {**defaults, **{name: value for name, value in said.items() if value is not None}}
        wants["top_k"] = max(wants.get("top_k", 0), 0)  # Others' word for any is -1.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        seed = secrets.randbits(63) if self.seed is None else self.seed
        try:
            first = Sampling(max_tokens=self._most(), stop=stop, stop_ids=frozenset(self.stop_token_ids),
                             ignore_eos=self.ignore_eos, presence_penalty=self.presence_penalty,
                             frequency_penalty=self.frequency_penalty, logit_bias=self.logit_bias or {},
                             logprobs=self._tells(), **wants)
        except InvalidArgument as error:
            raise Refused(400, str(error)) from None
        return [dataclasses.replace(first, seed=seed + choice) for choice in range(choices)]


class CompletionRequest(_Request):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: None = None
    suffix: None = None
    echo: Literal[False] | None = None

    def _tells(self) -> int | None:
        return self.logprobs


class ChatRequest(_Request):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    def _tells(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def texts(self) -> list[dict[str, Any]]:
        """The messages with their content as one text each."""
        told = []
        for at, message in enumerate(self.messages):
            content = message.get("content")
            if isinstance(content, list):
                for part in content:
                    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                    if kind != "text" or not isinstance(part.get("text"), str):
                        raise Refused(400, f"messages[{at}] has a part of type {kind}; only text is served",
                                      param="messages")
                content = "".join(part["text"] for part in content)
            if not isinstance(message.get("role"), str) or not isinstance(content, (str, type(None))):
                raise Refused(400, f"messages[{at}] must have a role and a content of text", param="messages")
            told.append({**message, "content": content or ""})
        return told
