"""What goes into the serving loop and what comes out. Plain values, which may go from one process to another."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.figures import Memory
from sluice.serving.sampling import Chosen, Sampling


@dataclass(frozen=True)
class Request:
    number: int  #: never used again
    prompt: list[int]
    sampling: Sampling
    after: int | None = None  #: another request with the same prompt: this one waits until it can share that's pages


@dataclass(frozen=True)
class Event:
    """News of one request."""

    number: int
    text: str = ""  #: that is added to the answer
    tokens: tuple[Chosen, ...] = ()  #: whose text it is
    count: int = 0  #: of tokens that were chosen, one that ends the answer included
    cached: int | None = None  #: tokens of the prompt that were found; with the first token
    finish: str | None = None  #: "stop" or "length": the answer is complete
    error: str | None = None  #: there is nothing more to come, and why


@dataclass(frozen=True)
class Status:
    """Of a loop that runs."""

    running: int = 0  #: requests that have memory
    waiting: int = 0
    forwards: int = 0
    failed_forwards: int = 0
    preemptions: int = 0
    memory: Memory | None = None
    stats: dict[str, int] = field(default_factory=dict)  #: the engine's
