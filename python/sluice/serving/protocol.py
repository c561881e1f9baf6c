"""Requests of OpenAI's protocol, and how they are refused. Fields that would change an answer and are not served are
errors; those that would not are taken and ignored."""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import Annotated, Any, Literal

from pydantic import (BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, Strict,
                      StringConstraints, TypeAdapter, ValidationError, model_validator)
from pydantic_core import PydanticCustomError

from sluice.errors import InvalidArgument
from sluice.serving.requests import MOST_LOGPROBS, Sampling

MOST_CHOICES = 128
_MOST_TOKENS = 1 << 24  # Longer than any context; the model's own is known later.
_MOST_FIELDS, _MOST_BIASES = 64, 300
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Stops = Annotated[list[_Stop], Field(max_length=4), FailFast(),
                   BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
_Biases = dict[int, Annotated[float, Strict(), Field(ge=-100, le=100)]]
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_LONGEST = 500  # Characters of an error: what was sent is no more than named.
_Token = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
_Tokens = Annotated[list[_Token], Field(max_length=_MOST_TOKENS), FailFast()]
_Texts = Annotated[list[Annotated[str, Strict()]], FailFast()]
_PROMPTS = {str: TypeAdapter(_Texts), int: TypeAdapter(_Tokens),
            list: TypeAdapter(Annotated[list[_Tokens], FailFast()])}


def written(text: str) -> str:
    """A part of an error, which must be text: a surrogate without its other half is the escape that it came as."""
    return clipped(text).encode(errors="backslashreplace").decode()


def clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST // 2]} ... {text[-_LONGEST // 2:]}"


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
        raise PydanticCustomError("logit_bias", "{count} tokens; at most {most} may have one",
                                  {"count": len(biases), "most": _MOST_BIASES})
    if not isinstance(biases, dict):
        return biases
    strange = next((key for key in biases if not _NUMBER.fullmatch(key)), None)
    if strange is not None:
        raise PydanticCustomError("logit_bias", '"{key}" is no token', {"key": written(strange)})
    return {int(key): bias for key, bias in biases.items()}


def _prompt(given: Any) -> Any:
    """Read in one way alone, by the first element."""
    if isinstance(given, str):
        return given
    first = int if given == [] else type(given[0]) if isinstance(given, list) else None
    if first not in _PROMPTS:
        raise PydanticCustomError("prompt", "it must be a text, tokens, or a list of either")
    if first is not int and len(given) > MOST_CHOICES:
        raise PydanticCustomError("prompt", "{count} prompts are too many", {"count": len(given)})
    try:
        return _PROMPTS[first].validate_python(given)
    except ValidationError as error:
        what = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in what["loc"])
        raise PydanticCustomError("prompt", "{what}", {"what": f"{place}: {what['msg']}" if place else what["msg"]}) \
            from None


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message := clipped(message))
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param and clipped(param), "code": code}}


class _Nullable(BaseModel):
    """Null means the default. Types are JSON's: "1" is no number, and neither is true."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > _MOST_FIELDS:
            raise ValueError(f"a request of {len(given)} fields; it may have {_MOST_FIELDS}")
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(_Nullable):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Request(_Nullable):
    """What both kinds have. The second half are extensions that other servers have, too."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: _Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[_Biases, BeforeValidator(_few)] = {}

    top_k: int | None = Field(None, ge=-1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: Annotated[list[_Token], Field(max_length=128), FailFast()] = []
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
        seed = secrets.randbits(63) if self.seed is None else self.seed
        try:
            first = Sampling(max_tokens=self._most(), stop=tuple(self.stop), stop_ids=frozenset(self.stop_token_ids),
                             ignore_eos=self.ignore_eos, presence_penalty=self.presence_penalty,
                             frequency_penalty=self.frequency_penalty, logit_bias=self.logit_bias,
                             logprobs=self._tells(), **wants)
        except InvalidArgument as error:
            raise Refused(400, str(error)) from None
        return [dataclasses.replace(first, seed=seed + choice) for choice in range(choices)]


class CompletionRequest(_Request):
    prompt: Annotated[Any, PlainValidator(_prompt)]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: None = None
    suffix: None = None
    echo: Literal[False] | None = None

    def _tells(self) -> int | None:
        return self.logprobs


class ChatRequest(_Request):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    response_format: dict[Literal["type"], Literal["text"]] | None = Field(None, max_length=1)
    modalities: Annotated[list[Literal["text"]], FailFast()] = []
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

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
