"""What /openapi.json says of answers: each status that a route may give, and what its body has."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_STATUSES = {400: "the request is not served as it is", 401: "the API key is wrong or missing",
             404: "there is no such model", 408: "the request did not come in time", 413: "the body is too long",
             429: "too many answers are under way or waiting: try again later", 500: "the request failed",
             503: "the engine is lost, or the server has as much to do as it may: try again later"}
_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_MAYBE_TEXT = {"anyOf": [_TEXT, {"type": "null"}]}


def _object(**properties: Any) -> dict[str, Any]:
    """All of these are there. There may be others."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _answer(kind: str, **body: Any) -> dict[str, Any]:
    choice = _object(index=_COUNT, finish_reason=_TEXT, **body)
    usage = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
    return _object(id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, choices=_list(choice), usage=usage)


_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT))
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_COUNT, owned_by=_TEXT, max_model_len=_COUNT)
_NUMBERS = {"anyOf": [_list(_TEXT), {"type": "null"}]}
_MESSAGE = _object(role={"const": "assistant"}, content=_MAYBE_TEXT)

_USAGE = _object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT)
_RESPONSE = _object(id=_TEXT, object={"const": "response"}, created_at=_COUNT, model=_TEXT, status=_TEXT,
                    output=_list(_object(type=_TEXT, id=_TEXT, status=_TEXT)), usage=_USAGE)

#: Bodies of 200 by route, and other media types that one may have.
_BODIES: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "/v1/completions": (_answer("text_completion", text=_TEXT), "text/event-stream"),
    "/v1/chat/completions": (_answer("chat.completion", message=_MESSAGE), "text/event-stream"),
    "/v1/responses": (_RESPONSE, "text/event-stream"),
    "/v1/models": (_object(object={"const": "list"}, data=_list(_MODEL)), None),
    "/v1/models/{model}": (_MODEL, None),
    "/tokenize": (_object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_NUMBERS), None),
    "/detokenize": (_object(prompt=_TEXT), None),
    "/health": (_object(status={"const": "ok"}), None),
    "/metrics": (None, "text/plain"),
}


def _statuses(route: str) -> list[int]:
    """Of errors. Any request may be no HTTP, late or too long, and any may find a server that has too much to do."""
    said = [400, 408, 413, 500, 503]
    if route not in ("/health", "/metrics"):
        said.append(401)
    if route not in ("/health", "/metrics", "/v1/models"):
        said.append(404)
    if route.endswith(("completions", "responses")):
        said.append(429)
    return sorted(said)


def describe(app: FastAPI) -> dict[str, Any]:
    """The description of an application's routes. The framework's own has one error, which is never given."""
    if app.openapi_schema is None:
        told = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = told["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas["Error"] = _ERROR
        refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        for route, calls in told["paths"].items():
            body, other = _BODIES[route]
            content: dict[str, Any] = {} if body is None else {"application/json": {"schema": body}}
            if other is not None:
                content[other] = {"schema": _TEXT}
            for call in calls.values():
                call["responses"] = {"200": {"description": "an answer", "content": content}, **{
                    str(status): {"description": _STATUSES[status], "content": refused}
                    for status in _statuses(route)}}
        app.openapi_schema = told
    return app.openapi_schema
