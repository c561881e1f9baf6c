"""Requests of OpenAI's responses, which become chats."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, StringConstraints

from sluice.serving.chat_parts import NamedTool, ResponseFormat, ToolOf
from sluice.serving.fields import Nullable, Refused
from sluice.serving.protocol import MOST_TOOLS, ChatRequest, Common
from sluice.serving.requests import MOST_LOGPROBS

_LOGPROBS = "message.output_text.logprobs"
# Of parts of a message, the ones that are text.
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
# These need a store of responses, another model or a tool of the server's own. Absent or off they change nothing.
_OFF = {"store": (False,), "background": (False,), "truncation": ("disabled",), "previous_response_id": (),
        "conversation": (), "prompt": (), "moderation": (), "context_management": ([],), "return_token_ids": (False,)}
_STORED = ("store", "previous_response_id", "conversation")
# What other routes have, and these have under other names.
_MOVED = {"max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens", "messages": "input",
          "response_format": "text.format", "logprobs": f"include with {_LOGPROBS}"}


class FunctionTool(Nullable):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Nullable):
    type: Literal["function"]
    name: str


class TextFormat(Nullable):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextWanted(Nullable):
    model_config = ConfigDict(extra="ignore", strict=True)

    format: TextFormat = TextFormat(type="text")


class InputChat(ChatRequest):
    """A chat that came as a request for a response."""

    prompt_field: ClassVar[str] = "input"
    format_field: ClassVar[str] = "text"


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesRequest(Common):
    n: Literal[1] = 1
    max_tokens: Any = None
    input: Annotated[list[dict[str, Any]], Field(min_length=1), FailFast(), BeforeValidator(_items)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextWanted = TextWanted()
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS), FailFast()] = []
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    include: Annotated[list[str], Field(max_length=16), FailFast()] = []
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    background: Any = None
    truncation: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None

    @property
    def logprobs(self) -> bool:
        return _LOGPROBS in self.include

    def chat(self) -> ChatRequest:
        """The same as a chat. Values are checked already.
        @throws Refused"""
        self._refuse()
        shared = {name: getattr(self, name) for name in Common.model_fields
                  if name in self.model_fields_set and name not in ("n", "max_tokens")}
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        chosen = self.tool_choice
        return InputChat.model_construct(
            **shared, messages=messages + messages_of(self.input), chat_template_kwargs=self.chat_template_kwargs,
            max_completion_tokens=self.max_output_tokens, response_format=self._format(),
            logprobs=self.logprobs, top_logprobs=self.top_logprobs if self.logprobs else None,
            tools=[ToolOf(type="function", function=tool.model_dump(include={"name", "description", "parameters"}))
                   for tool in self.tools],
            tool_choice=NamedTool(type="function", function={"name": chosen.name})
            if isinstance(chosen, FunctionChoice) else chosen, parallel_tool_calls=self.parallel_tool_calls)

    def _refuse(self) -> None:
        for name, off in _OFF.items():
            value = getattr(self, name)
            if value is not None and value not in off:
                why = ": nothing is stored, and input has the whole conversation" if name in _STORED else ""
                raise Refused(400, f"{name} is not served{why}", param=name, code="unsupported_parameter")
        moved = next((name for name in _MOVED if name in self.model_fields_set), None)
        if moved is not None:
            raise Refused(400, f"{moved} is not of this route; give {_MOVED[moved]}", param=moved,
                          code="unsupported_parameter")
        other = next((each for each in self.include if each not in (_LOGPROBS, "reasoning.encrypted_content")), None)
        if other is not None:
            raise Refused(400, f"include may not have {other}", param="include", code="unsupported_parameter")

    def _format(self) -> ResponseFormat:
        wants = self.text.format
        if wants.type == "json_schema" and wants.schema_ is None:
            raise Refused(400, "text.format of type json_schema needs schema", param="text.format.schema",
                          code="missing_required_parameter")
        schema = {"name": wants.name, "schema": wants.schema_} if wants.type == "json_schema" else None
        return ResponseFormat(type=wants.type, json_schema=schema)


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of an input as messages of a chat. Calls belong to the assistant's message before them.
    @throws Refused"""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind == "message":
            role = item.get("role")
            if not isinstance(role, str):
                raise _wrong(at, "must have a role")
            messages.append({"role": role, "content": _text(item.get("content"), at)})
        elif kind == "function_call":
            if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
                raise _wrong(at, "must have call_id, name and arguments, which are texts")
            if not _is_object(item["arguments"]):
                raise _wrong(at, "must have arguments that are an object in JSON")
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append({
                "id": item["call_id"], "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]}})
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise _wrong(at, "must have call_id, which is a text")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"), at)})
        else:
            raise _wrong(at, f"is of type {kind}; served are message, function_call and function_call_output")
    return messages


def _is_object(text: str) -> bool:
    """In JSON. No text is none of the arguments."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _text(content: Any, at: int) -> str:
    """One text of a content, which may have parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(at, "must have a text, or a list of its parts")
    told = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get(_PARTS[kind]) if isinstance(kind, str) and kind in _PARTS else None
        if not isinstance(text, str):
            raise _wrong(at, f"has a part of type {kind}; only text is served")
        told.append(text)
    return "".join(told)


def _wrong(at: int, what: str) -> Refused:
    return Refused(400, f"input[{at}] {what}", param="input")
