"""What is refused before anything of a request's body is read or understood, and how errors look."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sluice.serving.protocol import Refused

OPEN = frozenset({"/health", "/metrics"})  #: routes that need no key
_LEAST_BODY, _BYTES_OF_TOKEN = 4 << 20, 128


def body_limit(context: int) -> int:
    """Bytes of a body, many times what a prompt of all the context takes."""
    return max(_LEAST_BODY, _BYTES_OF_TOKEN * context)


def encoded(body: Any) -> bytes:
    """JSON. A surrogate without its other half, which UTF-8 does not have, stays the escape that it came as."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


class Answer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encoded(content)


class Guard:
    """ASGI middleware that checks the key, and how long bodies are."""

    def __init__(self, app: Any, key: str | None, most: int, refuse: Callable[[Refused], JSONResponse]) -> None:
        """`most`: bytes of a body. `refuse`: the answer to what is refused."""
        self._app, self._key, self._most, self._refuse = app, key, most, refuse

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if scope["path"] not in OPEN and not self._knows(headers.get(b"authorization", b"")):
            refused = Refused(401, "the API key is wrong or missing: send it as Authorization: Bearer KEY",
                              code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            return await self._refuse(refused)(scope, receive, send)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._most:
            return await self._refuse(self._long())(scope, receive, send)
        read = 0

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                refused = self._long()
                raise HTTPException(refused.status, str(refused))
            return message

        await self._app(scope, counted, send)

    def _knows(self, header: bytes) -> bool:
        if self._key is None:
            return True
        kind, _, given = header.partition(b" ")
        # In a time that says nothing of the key.
        return hmac.compare_digest(given.strip(), self._key.encode()) and kind.lower() == b"bearer"

    def _long(self) -> Refused:
        return Refused(413, f"the body is too long; it may have {self._most} bytes", code="body_too_long")
