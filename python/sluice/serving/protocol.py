"""Requests of OpenAI's protocol, and how they are refused. Fields that would change an answer and are not served are
errors; others are ignored."""

from __future__ import annotations

import dataclasses
import re
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, Strict,
                      StringConstraints, TypeAdapter, ValidationError, model_validator)
from pydantic_core import PydanticCustomError

from sluice.errors import InvalidArgument
from sluice.serving.chat_parts import NamedTool, ResponseFormat, ToolOf, texts_of
from sluice.serving.fields import Nullable, Refused, written
from sluice.serving.requests import MOST_LOGPROBS, Sampling

MOST_CHOICES = MOST_TOOLS = 128
_MOST_TOKENS = 1 << 24  # Longer than any context; the model's own is known later.
_MOST_BIASES = 300
_Stop = Annotated[str, StringConstraints(max_length=1024)]
_Stops = Annotated[list[_Stop], Field(max_length=16), FailFast(),
                   BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
# What others call so changes answers, and is not served; other fields that are not known are ignored.
_REFUSED = frozenset({
    "audio", "function_call", "functions", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "json_schema", "length_penalty", "logits_processors", "lora", "prediction", "prompt_embeds", "prompt_logprobs",
    "regex", "structured_outputs", "typical_p", "use_beam_search", "web_search_options"})
_Biases = dict[int, Annotated[float, Strict(), Field(ge=-100, le=100)]]
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_Token = Annotated[int, Strict(), Field(ge=0, lt=1 << 31)]
_Tokens = Annotated[list[_Token], Field(max_length=_MOST_TOKENS), FailFast()]
_Tools = Annotated[list[ToolOf], Field(max_length=MOST_TOOLS), FailFast()]
_Texts = Annotated[list[Annotated[str, Strict()]], FailFast()]
_PROMPTS = {str: TypeAdapter(_Texts), int: TypeAdapter(_Tokens),
            list: TypeAdapter(Annotated[list[_Tokens], FailFast()])}


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


class StreamOptions(Nullable):
    include_usage: bool = False
    include_obfuscation: bool = False


class Common(Nullable):
    """What all kinds have. The second half are extensions that other servers have, too."""

    model_config = ConfigDict(extra="allow", strict=True)

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
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    return_token_ids: bool = False
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: Annotated[list[_Token], Field(max_length=128), FailFast()] = []
    ignore_eos: bool = False

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _served(self) -> Any:
        refused = sorted(_REFUSED & (self.model_extra or {}).keys())
        if refused:
            raise PydanticCustomError("unsupported", "{name}", {"name": refused[0]})
        return self

    def unknown(self) -> list[str]:
        """Names of fields that are not known."""
        return list(self.model_extra or {})

    @property
    def ends_with_usage(self) -> bool:
        """Of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _tells(self) -> int | None:
        raise NotImplementedError

    def most(self) -> int | None:
        """Tokens of the answer."""
        return self.max_tokens

    def samplings(self, defaults: dict[str, Any], choices: int, **more: Any) -> list[Sampling]:
        """One for each choice, with seeds in a row. `defaults`: the model's own. `more`: of Sampling."""
        said = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        wants = {**defaults, **{name: value for name, value in said.items() if value is not None}, **more}
        wants["top_k"] = max(wants.get("top_k", 0), 0)  # Others' word for any is -1.
        seed = secrets.randbits(63) if self.seed is None else self.seed
        try:
            first = Sampling(max_tokens=self.most(), min_tokens=self.min_tokens, stop=tuple(filter(None, self.stop)),
                             stop_ids=frozenset(self.stop_token_ids), ignore_eos=self.ignore_eos,
                             presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
                             logit_bias=self.logit_bias, logprobs=self._tells(), **wants)
        except InvalidArgument as error:
            raise Refused(400, str(error)) from None
        return [dataclasses.replace(first, seed=seed + choice) for choice in range(choices)]


class CompletionRequest(Common):
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[Any, PlainValidator(_prompt)]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: Literal[1] | None = None
    suffix: None = None
    echo: bool = False

    def _tells(self) -> int | None:
        return self.logprobs

    def samplings(self, defaults: dict[str, Any], choices: int, **more: Any) -> list[Sampling]:
        told = self.logprobs if self.echo else None
        return super().samplings(defaults, choices, prompt_logprobs=told, **more)


class ChatRequest(Common):
    prompt_field: ClassVar[str] = "messages"
    format_field: ClassVar[str] = "response_format"

    messages: Annotated[list[dict[str, Any]], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], FailFast()] = []
    tools: _Tools = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def _tells(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def texts(self) -> list[dict[str, Any]]:
        """The messages with their content as one text each, and calls of tools as templates take them."""
        return texts_of(self.messages)

    def told_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def schema(self) -> dict[str, Any] | None:
        """Of the JSON that answers are to be."""
        wants = self.response_format
        if wants is None or wants.type == "text":
            return None
        if wants.type == "json_object":
            return {"type": "object"}
        if wants.json_schema is None:
            raise Refused(400, "response_format of type json_schema needs json_schema", param="response_format")
        return wants.json_schema.schema_ or {"type": "object"}

    def forced(self) -> list[dict[str, Any]] | None:
        """The tools of which one is to be called; None if none has to be."""
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise Refused(400, "tool_choice wants a tool, and there are no tools", param="tool_choice")
            return None
        if self.tool_choice == "required":
            return self.told_tools()
        if not isinstance(self.tool_choice, NamedTool):
            return None
        name = self.tool_choice.function.name
        found = [tool for tool in self.told_tools() if tool["function"]["name"] == name]
        if not found:
            raise Refused(400, f"tool_choice wants {name}, which is none of the tools", param="tool_choice")
        return found


class TokenizeRequest(Nullable):
    """As vLLM has it: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], FailFast()] = []
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> Any:
        if (self.prompt is None) != bool(self.messages):
            raise ValueError("it must have either prompt or messages")
        return self


class DetokenizeRequest(Nullable):
    model: str | None = None
    tokens: _Tokens
