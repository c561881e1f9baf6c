"""A model that reads a prompt once, and the tokens behind it by its own attention or by each of several policies."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers

from sluice._transformers_support import longest
from sluice.errors import Error, InternalError, OutOfCapacity
from sluice.evaluation.reading import Reading, audited, prompt_blocks_since, read_since
from sluice.options import Bucket, Features, wanted_by
from sluice.transformers import Enabled, enable_for, options_for

ROWS = 128
"""Tokens behind a prompt that go through the model at once, at most: what an engine has room for grows with them."""


@dataclass(frozen=True)
class Setup:
    """What every attention of a run has in common."""

    model: transformers.PreTrainedModel
    chunk: int  #: tokens of a prompt that go through the model at once
    host_bytes: int
    options: dict[str, Any] = field(default_factory=dict)  #: others of EngineOptions
    audit: bool = False  #: what tokens attend is held against exact attention, see `Reading`


class Subject:
    """A model under its own attention (`enabled` None), or under policies."""

    def __init__(self, setup: Setup, enabled: Enabled | None) -> None:
        self.model, self.chunk, self.enabled = setup.model, setup.chunk, enabled
        self.keeps = "logits_to_keep" in inspect.signature(setup.model.forward).parameters

    @contextlib.contextmanager
    def prefix(self, prompt: Sequence[int]) -> Iterator[Prefix]:
        """A prompt that has been read. It attends everything, whatever the policy."""
        if self.enabled is None:
            yield Prefix(self, transformers.DynamicCache(config=self.model.config), prompt)
            return
        cache = self.enabled.cache()
        try:
            yield Prefix(self, cache, prompt)
        finally:
            cache.reset()  # The engine's sequence ends now, and not when the cache is collected.

    @torch.inference_mode()
    def forward(self, cache: Any, ids: Sequence[int], kept: int) -> torch.Tensor:
        """The logits [kept, vocabulary] of the last of these tokens."""
        options = {"logits_to_keep": kept} if self.keeps else {}
        rows = torch.tensor([list(ids)], device=self.model.device)
        return self.model(input_ids=rows, past_key_values=cache, use_cache=True, **options).logits[0, -kept:]


class Prefix:
    """A prompt in the cache of a subject."""

    def __init__(self, subject: Subject, cache: Any, prompt: Sequence[int]) -> None:
        self._subject, self._cache, self._tokens, self._blocks = subject, cache, len(prompt), 1.0
        before = None if subject.enabled is None else subject.enabled.engine.stats()
        # Parts of equal size: one that is left over would be a single token, and Sluice takes that for a decoded one.
        parts = -(-len(prompt) // subject.chunk)
        for part in range(parts):
            subject.forward(cache, prompt[part * len(prompt) // parts : (part + 1) * len(prompt) // parts], 1)
        if before is not None:
            self._blocks = prompt_blocks_since(subject.enabled.engine, before)

    @contextlib.contextmanager
    def under(self, policy: str) -> Iterator[Session]:
        """What goes on from here, and ends with the context. A subject of its own attention has one such session."""
        if self._subject.enabled is None:
            yield Session(self._subject, self._cache, self._tokens, at_once=ROWS)
            return
        cache = self._cache.fork(policy)
        cache.rows.chooses = True
        try:
            yield Session(self._subject, cache, self._tokens,
                          1 if chooses_on_cpu(policy) else self._subject.enabled.engine.options.largest.decode_rows,
                          self._blocks)
        finally:
            cache.reset()


class Session:
    """A sequence that goes on from a prefix, by tokens that attend what the policy chooses for each of them."""

    def __init__(self, subject: Subject, cache: Any, tokens: int, at_once: int, prompt_blocks: float = 1.0) -> None:
        self._subject, self._cache, self._tokens, self._at_once = subject, cache, tokens, at_once
        self._prompt_blocks = prompt_blocks
        self._seen = 0
        self._before = None if subject.enabled is None else subject.enabled.engine.stats()

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits [len(ids), vocabulary], in f32, of what comes after each of these tokens. Each chooses as if those
        before it had been decoded one by one. They go through the model together, but where a policy chooses on the
        CPU: that is one token at a time."""
        parts = [self._subject.forward(self._cache, part, len(part)).float() for part in
                 (ids[first : first + self._at_once] for first in range(0, len(ids), self._at_once))]
        self._seen += sum(range(self._tokens + 1, self._tokens + len(ids) + 1))
        self._tokens += len(ids)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if logits.isnan().any():
            raise InternalError("the model's logits are not numbers; another --dtype may have room for them")
        return logits

    @property
    def reading(self) -> Reading | None:
        """What the session's tokens have attended and read; None of a model's own attention."""
        if self._before is None or not self._seen:
            return None
        engine = self._subject.enabled.engine
        reading = replace(read_since(engine, self._before, self._seen), prompt_blocks=self._prompt_blocks)
        return audited(engine, self._cache.rows.sequences, reading)


def chooses_on_cpu(policy: str) -> bool:
    """Whether the CPU chooses for it, or learns from what it attends: then one token is planned at a time."""
    return bool(wanted_by(policy).cpu_sequences)


def own_attention(config: Any) -> dict[str, str]:
    """With what a model is to be loaded, for its attention in transformers to be what it was trained with."""
    # The library's sdpa, which most models begin with, leaves a soft-cap out.
    return {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}


@contextlib.contextmanager
def dense(setup: Setup) -> Iterator[Subject]:
    """The model's own attention, with the library's own cache."""
    yield Subject(setup, None)


@contextlib.contextmanager
def under(setup: Setup, policies: Sequence[str], rows: int = ROWS) -> Iterator[Subject]:
    """The model in an engine for these policies, by up to `rows` rows at once."""
    with enable_for(*_arguments(setup, policies, rows)) as enabled:
        yield Subject(setup, enabled)


def _arguments(setup: Setup, policies: Sequence[str], rows: int) -> tuple[Any, ...]:
    # A policy that begins with queries of the prompt finds them if that of the prompt wants some, too.
    ordered = sorted(policies, key=lambda policy: not chooses_on_cpu(policy))
    # No more than go through the decoder at once, and no longer than the model takes: an engine has room for scores of
    # as many rows times as many tokens, which of a small model's 8 GiB would be more than a machine has.
    largest = Bucket(decode_rows=min(rows, ROWS, setup.chunk), prefill_rows=setup.chunk, prefills=1,
                     max_tokens=longest(_config(setup)), features=Features.AUDIT if setup.audit else Features.NONE)
    return setup.model, ordered, setup.host_bytes, largest, 2, dict(setup.options)


def groups(setup: Setup, policies: Sequence[str], rows: int = ROWS) -> list[list[str]]:
    """Policies that one engine serves at a time, so that a prompt is read once for all of them.
    @throws what engines refuse of a policy by itself"""
    made: list[list[str]] = []
    for policy in policies:
        options_for(*_arguments(setup, [policy], rows))
        for group in made:
            try:
                options_for(*_arguments(setup, [*group, policy], rows)).memory_needed()
            except Error:  # Digests of another kind, or no room for both.
                continue
            group.append(policy)
            break
        else:
            made.append([policy])
    return made


def check(setup: Setup, policies: Sequence[str], tokens: int, rows: int = ROWS) -> None:
    """Makes an engine for these policies and gives it back: what is refused is known then, and not after an hour.
    @throws OutOfCapacity if a sequence of as many tokens has no room"""
    with under(setup, policies, rows) as subject:
        for policy in policies:
            # A fork has blocks of its own for what comes behind the prompt.
            if not subject.enabled.engine.can_admit(min(tokens + 2 * rows, longest(_config(setup))), policy):
                raise OutOfCapacity(f'{tokens} tokens under the policy "{policy}" have no room in {setup.host_bytes} '
                                    "bytes of host memory; give a larger --host-bytes")


def _config(setup: Setup) -> Any:
    return setup.model.config.get_text_config(decoder=True)
