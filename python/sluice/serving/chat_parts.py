"""Parts of chat requests: messages, tools, and what answers are to be."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from sluice.serving.fields import Nullable, Refused


class _Schema(Nullable):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Nullable):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


class _Function(Nullable):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolOf(Nullable):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: _Function


class _Named(Nullable):
    name: str


class NamedTool(Nullable):
    type: Literal["function"]
    function: _Named


def texts_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their content as one text each, and calls of tools as templates take them.
    @throws Refused"""
    told = []
    for at, message in enumerate(messages):
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
        if message.get("tool_calls"):
            told[-1]["tool_calls"] = _calls(message["tool_calls"], at)
    return told


def _calls(given: Any, at: int) -> list[dict[str, Any]]:
    """Calls of a message with their arguments as objects, not as the text that the protocol has."""
    try:
        told = [{**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")
                 if isinstance(call["function"]["arguments"], str) else call["function"]["arguments"]}}
                for call in given]
        assert all(isinstance(call["function"]["name"], str) and isinstance(call["function"]["arguments"], dict)
                   for call in told)
        return told
    except (AssertionError, KeyError, TypeError, ValueError, RecursionError):
        raise Refused(400, f"messages[{at}].tool_calls must have functions with a name, and arguments that are an "
                           "object in JSON", param="messages") from None
