"""Requests that wait for another's prompt, whose pages they will share."""

from __future__ import annotations

import dataclasses

from sluice.serving.requests import Request


class Behind:
    """By the number of the request whose prompt they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, request: Request) -> None:
        self._waiting.setdefault(request.after, []).append(request)

    def remove(self, number: int) -> None:
        """One of them is wanted no longer."""
        for waiting in self._waiting.values():
            waiting[:] = [request for request in waiting if request.number != number]

    def take(self, number: int, read: bool) -> list[Request]:
        """Those that need not wait for this request any longer. If no request has `read` the prompt, the first of them
        does, and the others wait for that."""
        waiting = self._waiting.pop(number, [])
        if read or len(waiting) < 2:
            return waiting
        first = waiting[0]
        self._waiting[first.number] = [dataclasses.replace(request, after=first.number) for request in waiting[1:]]
        return [first]
