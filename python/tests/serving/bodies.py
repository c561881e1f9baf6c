"""Requests at random by the server's own description of itself, app.openapi(): half of them keep to it in all but one
place, others are anything."""

from __future__ import annotations

import json
import random
from typing import Any

_TEXTS = ("", "a", "the cat sat on the mat", "\ud800", "\0", "x" * 3000, "\u0661", "1", "1_0", "-1", "<|end|>", "{{",
          "a\r\nb")
_NUMBERS = (0, 1, -1, 2, 0.5, 1.0, -0.0, 3.5, 127, 128, 129, 1 << 31, 1 << 63, -(1 << 63), 1 << 64,
            10**40, 1e308, 1e-320)

#: What makes a request of each kind one that is answered.
_ASKS = {"CompletionRequest": ("prompt", "a"), "ChatRequest": ("messages", [{"role": "user", "content": "a"}]),
         "ResponsesRequest": ("input", "a")}


class Bodies:
    """Of one seed."""

    def __init__(self, description: dict[str, Any], seed: int) -> None:
        self._schemas, self._draw = description["components"]["schemas"], random.Random(seed)

    def of(self, name: str) -> bytes:
        """A body for a schema."""
        draw = self._draw
        value = self._like({"$ref": f"#/components/schemas/{name}"}, 0)
        if isinstance(value, dict) and draw.random() < 0.5:  # So that most get as far as the engine.
            value = {"model": "tiny", **{key: each for key, each in value.items() if draw.random() < 0.2}}
            value.setdefault(*_ASKS[name])
            if draw.random() < 0.5:
                value["model"] = "tiny"
        if isinstance(value, dict) and draw.random() < 0.5:
            value[draw.choice([*value, "other"])] = self._anything(0)
        text = json.dumps(value).encode()
        return self._damaged(text) if draw.random() < 0.15 else text

    def _damaged(self, text: bytes) -> bytes:
        draw, at = self._draw, self._draw.randrange(len(text) + 1)
        return draw.choice([text[:at], text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :], text + text,
                            text[:at] + b"[" * draw.choice([1, 100_000]) + text[at:], b""])

    def _like(self, schema: dict[str, Any], depth: int) -> Any:
        draw = self._draw
        if "$ref" in schema:
            return self._like(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self._like(draw.choice(schema["anyOf"]), depth)
        if "enum" in schema or "const" in schema:
            return draw.choice(schema.get("enum") or [schema["const"]])
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            wanted = schema.get("required", ())
            return {key: self._like(each, depth + 1) for key, each in schema["properties"].items()
                    if key in wanted or draw.random() < 0.3}
        if kind == "object":
            return {draw.choice(_TEXTS): self._anything(depth + 1) for _ in range(draw.randrange(3))}
        if kind == "array":
            return [self._like(schema.get("items", {}), depth + 1) for _ in range(draw.randrange(4))]
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", 0), schema.get("maximum", 20)
            return draw.randint(int(low), int(high)) if kind == "integer" else draw.uniform(low, high)
        return {"string": lambda: draw.choice(_TEXTS), "boolean": lambda: draw.random() < 0.5,
                "null": lambda: None}.get(kind, lambda: self._anything(depth))()

    def _anything(self, depth: int) -> Any:
        draw = self._draw
        kind = draw.randrange(4 if depth > 3 else 7)
        if kind == 4:
            return [self._anything(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 5:
            return {draw.choice(_TEXTS): self._anything(depth + 1) for _ in range(draw.randrange(4))}
        if kind == 6:
            return [draw.choice(_NUMBERS)] * draw.choice([1, 5, 200])
        return (draw.choice(_TEXTS), draw.choice(_NUMBERS), draw.random() < 0.5, None)[kind]


def fits(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> bool:
    """Whether a value is as a schema of the description says, of the words that are used there."""
    if "$ref" in schema:
        return fits(value, schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return any(fits(value, each, schemas) for each in schema["anyOf"])
    if "const" in schema:
        return value == schema["const"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
    if not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool):
        return False
    if schema["type"] == "object":
        return value.keys() >= set(schema["required"]) and all(
            fits(value[key], each, schemas) for key, each in schema["properties"].items())
    if schema["type"] == "array":
        return all(fits(each, schema["items"], schemas) for each in value)
    return schema["type"] != "integer" or value >= schema["minimum"]


def check(description: dict[str, Any], path: str, status: int, content: bytes) -> None:
    """What holds of every answer but a stream."""
    told, documented = json.loads(content), description["paths"][path]["post"]["responses"]
    assert str(status) in documented and status < 500, (path, status, content[:500])
    schema = documented[str(status)]["content"]["application/json"]["schema"]
    assert fits(told, schema, description["components"]["schemas"]), (path, status, content[:500])
    if status != 200:
        error = told["error"]
        assert error.keys() == {"message", "type", "param", "code"} and len(content) < 4000, content[:500]
        assert isinstance(error["message"], str) and error["type"] == "invalid_request_error", error
