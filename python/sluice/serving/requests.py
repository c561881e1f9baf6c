"""What goes into the serving loop and what comes out. Plain values, which may go from one process to another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.errors import InvalidArgument
from sluice.figures import Memory

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class Sampling:
    """What a request wants."""

    max_tokens: int | None = None  #: of the answer; None: until the context is full; 0: only the prompt is read
    min_tokens: int = 0  #: of the answer: before, none that would end it is chosen, and no stop text is looked for
    temperature: float = 1.0  #: 0, or below 1e-5: the most likely token
    top_p: float = 1.0  #: the most likely tokens that have this share together
    top_k: int = 0  #: and at most as many; 0: any
    min_p: float = 0.0  #: and those at least this share as likely as the most likely one
    repetition_penalty: float = 1.0  #: divides positive logits of tokens that are there, the prompt's included
    presence_penalty: float = 0.0  #: taken off the logits of tokens that the answer has
    frequency_penalty: float = 0.0  #: and once more for each time that it has them
    logit_bias: Mapping[int, float] = field(default_factory=dict)  #: added to the logits of these tokens
    seed: int = 0
    logprobs: int | None = None  #: how many most likely tokens are told beside the one chosen; None: not even that
    prompt_logprobs: int | None = None  #: likewise of the prompt's tokens, which is read anew for that
    guide: str | None = None  #: a grammar that the answer follows, as sluice.serving.guides has it
    special: bool = False  #: special tokens are part of the text
    stop: tuple[str, ...] = ()  #: texts that end the answer, and are no part of it
    stop_ids: frozenset[int] = frozenset()  #: tokens likewise
    ignore_eos: bool = False  #: the model's own end does not end the answer

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0, 100), ("top_p", 0, 1), ("presence_penalty", -2, 2),
                                ("frequency_penalty", -2, 2), ("repetition_penalty", 1e-2, 100), ("top_k", 0, 1 << 31),
                                ("logprobs", 0, MOST_LOGPROBS), ("prompt_logprobs", 0, MOST_LOGPROBS), ("min_p", 0, 1),
                                ("max_tokens", 0, 1 << 31), ("min_tokens", 0, 1 << 31)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidArgument(f"{name} is {value}; it must be in [{low}, {high}]")
        if self.top_p == 0:
            raise InvalidArgument("top_p is 0; it must be above 0. For the most likely token set temperature to 0")
        if any(not text for text in self.stop):
            raise InvalidArgument("stop has an empty text; each must have a character")
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise InvalidArgument("logit_bias must be finite numbers")

    @property
    def shapes(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias
                    or self.min_tokens or self.guide)


@dataclass(frozen=True)
class Chosen:
    """A token, with logarithms of probabilities as the model has them, before penalties and temperature."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  #: the most likely tokens


@dataclass(frozen=True)
class Request:
    number: int  #: never used again
    prompt: list[int]
    sampling: Sampling
    after: int | None = None  #: another request with the same prompt: this one waits until it can share that's pages
    salt: int = 0  #: of those whose prompts begin with what is known of each other's


@dataclass(frozen=True)
class Event:
    """News of one request."""

    number: int
    text: str = ""  #: that is added to the answer
    tokens: tuple[Chosen, ...] = ()  #: whose text it is
    count: int = 0  #: of tokens that were chosen, one that ends the answer included
    cached: int | None = None  #: tokens of the prompt that were found; with the first token
    prompt: tuple[Chosen, ...] = ()  #: the prompt's tokens, if their probabilities are wanted; with the first news
    end: Chosen | None = None  #: the token that ended the answer, which is no part of it
    finish: str | None = None  #: "stop" or "length": the answer is complete
    error: str | None = None  #: there is nothing more to come, and why


@dataclass(frozen=True)
class Failed:
    """There is no loop."""

    why: str
    exit_code: int  #: of a command that ends with it


@dataclass(frozen=True)
class Status:
    """Of a loop that runs."""

    running: int = 0  #: requests that have memory
    waiting: int = 0
    forwards: int = 0
    failed_forwards: int = 0
    preemptions: int = 0
    graph_captures: int = 0  #: sizes of forwards that are replayed
    graph_replays: int = 0
    memory: Memory | None = None
    stats: dict[str, int] = field(default_factory=dict)  #: the engine's
    disk: dict[str, int] = field(default_factory=dict)  #: DiskTier.figures, if there is one
