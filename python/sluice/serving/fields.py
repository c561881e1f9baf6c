"""What all bodies of requests have in common, and how they are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

_LONGEST = 500  # Characters of an error: what was sent is no more than named.
_MOST_FIELDS = 64


def written(text: str) -> str:
    """A part of an error, which must be text: a surrogate without its other half is the escape that it came as."""
    return clipped(text).encode(errors="backslashreplace").decode()


def clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST // 2]} ... {text[-_LONGEST // 2:]}"


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str | None = None,
                 param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message := written(message))
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param and written(param), "code": code}}


class Nullable(BaseModel):
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
