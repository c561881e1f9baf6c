"""Tools that a model may call: how its chat template writes calls, and the calls in what the model writes."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.errors import Unsupported
from sluice.serving.text import StopTexts

Tool = dict[str, Any]

_NAME, _ARGUMENTS = "mark_name", {"mark_key": "mark_value"}
_TOOL = {"type": "function", "function": {"name": "mark_tool", "description": "A mark.", "parameters": {
    "type": "object", "properties": {"mark_key": {"type": "string", "description": "A mark."}}}}}
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  #: JSON

    def told(self) -> dict[str, Any]:
        """As answers have it."""
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class CallForm:
    """How calls are written: `begin`, then an object of JSON, or a list of some."""

    begin: str  #: without spaces around it; "": nothing, and an answer that is a call begins with its object
    before: str  #: the same with the spaces, behind what asks for an answer
    name: str  #: the object's key that has the tool's name,
    arguments: str  #: and the one that has the arguments
    listed: bool

    def calls(self, text: str, tools: Sequence[Tool]) -> list[Call]:
        """Those in a text that begins with a call. Names of other tools are none."""
        names = {tool["function"]["name"] for tool in tools}
        found: list[Call] = []
        place = text.find("{", len(self.begin))
        while place >= 0:
            try:
                told, place = _DECODER.raw_decode(text, place)
            except ValueError:
                break
            arguments = told.get(self.arguments, {})
            if told.get(self.name) not in names or not isinstance(arguments, (dict, str)):
                break
            found.append(Call(told[self.name], arguments if isinstance(arguments, str) else
                              json.dumps(arguments, ensure_ascii=False)))
            place = text.find("{", place)
        return found

    def schema(self, tools: Sequence[Tool]) -> dict[str, Any]:
        """Of one call of one of these."""
        calls = [{"type": "object", "additionalProperties": False, "required": [self.name, self.arguments],
                  "properties": {self.name: {"const": tool["function"]["name"]},
                                 self.arguments: tool["function"].get("parameters") or {"type": "object"}}}
                 for tool in tools]
        one = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {"type": "array", "items": one, "minItems": 1, "maxItems": 1} if self.listed else one


def call_form(tokenizer: Any) -> CallForm:
    """How a model calls tools, which its own template shows.
    @throws Unsupported if that knows no tools, or writes calls in another way"""
    question = {"role": "user", "content": "question"}
    call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    try:
        asks = tokenizer.apply_chat_template([question], tools=[_TOOL], add_generation_prompt=True, tokenize=False)
        text = tokenizer.apply_chat_template([question, {"role": "assistant", "content": "", "tool_calls": [call]}],
                                             tools=[_TOOL], tokenize=False)
    except Exception as error:  # Templates are programs.
        raise Unsupported(f"the model's chat template takes no tools: {error}") from None
    if "mark_tool" not in asks or _NAME not in text:
        raise Unsupported("the model's chat template has no tools")
    answer = text[len(os.path.commonprefix([asks, text])):]
    place = answer.find("{")
    while place >= 0:
        try:
            told, _ = _DECODER.raw_decode(answer, place)
        except ValueError:
            told = {}
        keys = {name: next((key for key, value in told.items() if value in wanted), None)
                for name, wanted in (("name", [_NAME]), ("arguments", [_ARGUMENTS, json.dumps(_ARGUMENTS)]))}
        if None not in keys.values():
            before = answer[:place].rstrip()
            listed = before.endswith("[")
            before = before[:-1] if listed else answer[:place]
            return CallForm(before.strip(), before, keys["name"], keys["arguments"], listed)
        place = answer.find("{", place + 1)
    raise Unsupported("the model's chat template writes calls of tools in a form that is no JSON, which is not read")


class CallText:
    """Tells the text before the first call at once, and keeps the calls until they are complete."""

    def __init__(self, form: CallForm, tools: Sequence[Tool], begun: bool) -> None:
        """`begun`: the prompt has the beginning of a call."""
        self._form, self._tools = form, tools
        self._begin = StopTexts([form.begin] if form.begin else [])
        self._kept = form.begin if begun else None  # From the first call on.
        self._text = ""
        self._spaces = ""  # That are told with what comes behind them, unless that is a call.

    def push(self, piece: str) -> str:
        """What may be told now."""
        if self._kept is not None:
            self._kept += piece
            return ""
        self._text += piece
        if not self._form.begin and self._text.lstrip()[:1] in ("{", "["):
            self._kept, self._spaces = self._text, ""
            return ""
        place = self._text.find(self._form.begin) if self._form.begin else -1
        if place >= 0:
            self._kept = self._text[place:]
        told = self._spaces + self._begin.push(piece)
        self._spaces = told[len(told.rstrip()):]
        return told.rstrip()

    def end(self) -> tuple[str, list[Call]]:
        """What is left of the text, and the calls."""
        calls = self._form.calls(self._kept, self._tools) if self._kept is not None else []
        return ("" if calls else self._spaces + self._begin.end() + (self._kept or "")), calls
