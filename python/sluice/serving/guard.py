"""What is refused before anything of a request's body is read or understood, and how errors look."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sluice.serving.protocol import Refused

KEY_NUMBER = "sluice.key"  #: where the scope of a request has the number of the client's key
OPEN = frozenset({"/health", "/metrics"})  #: routes that need no key
_LEAST_BODY, _BYTES_OF_TOKEN, _LEAST_HELD = 4 << 20, 128, 256 << 20


def body_limit(context: int) -> int:
    """Bytes of a body, many times what a prompt of all the context takes."""
    return max(_LEAST_BODY, _BYTES_OF_TOKEN * context)


def encoded(body: Any) -> bytes:
    """JSON. A surrogate without its other half, which UTF-8 does not have, stays the escape that it came as."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


class Answer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encoded(content)


def origin_form(target: str) -> str:
    """A path; of an absolute form, as proxies may send it, without scheme and authority (RFC 9112, 3.2.2)."""
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return target
    return "/" + rest.partition("/")[2]


class BodyRefused(HTTPException):
    """While a body is read, where the web framework lets no other error pass."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.status, str(refused))
        self.refused = refused


class Guard:
    """ASGI middleware that checks the key, and how long bodies are, each and all together."""

    def __init__(self, app: Any, keys: Sequence[str], most: int, refuse: Callable[[Refused], JSONResponse]) -> None:
        """`keys`: of which clients must have one; none: all are served. `most`: bytes of a body. `refuse`: the answer
        to what is refused."""
        self._app, self._keys, self._most, self._refuse = app, [key.encode() for key in keys], most, refuse
        self._most_held, self._held = max(_LEAST_HELD, 4 * most), 0  # Of bodies that are not whole yet.

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = origin_form(scope["path"])
        if path != scope["path"]:
            scope = {**scope, "path": path, "raw_path": origin_form(scope["raw_path"].decode("latin-1")).encode(
                "latin-1")}
        headers = dict(scope["headers"])
        # What refuses a body without reading it ends the connection.
        ends = {"Connection": "close"} if self._has_body(headers) else {}
        number = self._number(headers.get(b"authorization", b""))
        scope = {**scope, KEY_NUMBER: number}
        if path not in OPEN and self._keys and number is None:
            refused = Refused(401, "the API key is wrong or missing: send it as Authorization: Bearer KEY",
                              code="invalid_api_key", headers={"WWW-Authenticate": "Bearer", **ends})
            return await self._refuse(refused)(scope, receive, send)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > self._most:
            return await self._refuse(self._long())(scope, receive, send)
        read = 0

        async def counted() -> Any:
            nonlocal read
            message = await receive()
            new = len(message.get("body", b""))
            read, self._held = read + new, self._held + new
            if read > self._most:
                raise BodyRefused(self._long())
            if self._held > self._most_held:
                raise BodyRefused(Refused(503, "too many bodies are being read; try again later", "server_error",
                                          "busy", headers={"Retry-After": "1", "Connection": "close"}))
            if not message.get("more_body"):
                self._held, read = self._held - read, 0
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= read

    @staticmethod
    def _has_body(headers: dict[bytes, bytes]) -> bool:
        return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"

    def _number(self, header: bytes) -> int | None:
        """Of the key that a client has; None: it has none of them."""
        kind, _, given = header.partition(b" ")
        # In a time that says nothing of the keys.
        same = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return same.index(True) if any(same) and kind.lower() == b"bearer" else None

    def _long(self) -> Refused:
        return Refused(413, f"the body is too long; it may have {self._most} bytes", code="body_too_long",
                       headers={"Connection": "close"})
