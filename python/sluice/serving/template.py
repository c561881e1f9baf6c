"""Chat templates: what becomes of messages, and how turns end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sluice.errors import InvalidArgument
from sluice.serving.tokens import TokenBytes

Message = dict[str, Any]


def rendered(tokenizer: Any, messages: Sequence[Message], asks: bool = True, **options: Any) -> str:
    """The text of messages; if it `asks`, up to where an answer begins. `options`: the template's variables. Developer
    messages are system messages where the template has no others.
    @throws InvalidArgument if the template leaves a message out, or what the template itself raises"""
    def apply(told: Sequence[Message]) -> str:
        return tokenizer.apply_chat_template(told, add_generation_prompt=asks, tokenize=False, **options)

    older = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    try:
        text, lost = apply(messages), _left_out(apply, messages)
    except Exception:  # Templates are programs, and refuse messages by raising what they like.
        if older == list(messages):
            raise
        return rendered(tokenizer, older, asks, **options)
    if any(messages[at]["role"] == "developer" for at in lost):
        return rendered(tokenizer, older, asks, **options)
    if lost:
        raise InvalidArgument(f"the model's chat template leaves out messages[{lost[0]}], of role "
                              f"{messages[lost[0]]['role']}; give its content to a role that the template has")
    return text


def _left_out(apply: Any, messages: Sequence[Message]) -> list[int]:
    """Which messages have a content that does not get into the text. Contents are marks meanwhile: templates may change
    them, as by taking thoughts out or by writing them as JSON."""
    marks = {at: f"mark{at}." for at, message in enumerate(messages)
             if message["content"].strip() and not message.get("tool_calls")}
    marked = [{**message, "content": marks[at]} if at in marks else message for at, message in enumerate(messages)]
    try:
        text = apply(marked)
    except Exception:  # It wants certain contents, and says so.
        return []
    return [at for at, mark in marks.items() if mark not in text]


def turn_ends(tokenizer: Any) -> set[int]:
    """The special token that ends an answer's turn in the chat template, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "mark."}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:
        return set()
    _, found, end = text.rpartition("mark.")
    ids = tokenizer.encode(end.lstrip(), add_special_tokens=False) if found else []
    return {each for each in ids[:1] if TokenBytes(tokenizer).is_special(each)}
