"""A model that reads a prompt and then token after token, by its own attention or by a policy."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from sluice.engine import Engine
from sluice.errors import InternalError, OutOfCapacity
from sluice.transformers import enable


@dataclass(frozen=True)
class Setup:
    """What every attention of a run has in common."""

    model: transformers.PreTrainedModel
    chunk: int  #: tokens of a prompt that go through the model at once
    host_bytes: int
    options: dict[str, Any] = field(default_factory=dict)  #: others of EngineOptions


class Subject:
    """A model under one kind of attention."""

    def __init__(self, setup: Setup, new_cache: Callable[[], Any], engine: Engine | None) -> None:
        self.model, self.chunk, self.new_cache, self.engine = setup.model, setup.chunk, new_cache, engine
        self.keeps = "logits_to_keep" in inspect.signature(setup.model.forward).parameters

    @contextlib.contextmanager
    def session(self, prompt: Sequence[int]) -> Iterator[Session]:
        """A sequence that has read a prompt, and ends with the context."""
        cache = self.new_cache()
        try:
            yield Session(self, cache, prompt)
        finally:
            if self.engine is not None:
                cache.reset()  # The engine's sequence ends now, and not when the cache is collected.


class Session:
    """One sequence. Its prompt attends everything; what `decode` reads attends what the policy chooses."""

    def __init__(self, subject: Subject, cache: Any, prompt: Sequence[int]) -> None:
        self._subject, self._cache, self._tokens, self._seen = subject, cache, 0, 0
        # Parts of equal size: one that is left over would be a single token, and Sluice takes that for a decoded one.
        parts = -(-len(prompt) // subject.chunk)
        for part in range(parts):
            self._forward(prompt[part * len(prompt) // parts : (part + 1) * len(prompt) // parts])
        self._attended_before = self._attended()

    def decode(self, token: int) -> torch.Tensor:
        """The logits [vocabulary], in f32 on the CPU, of what comes after this token."""
        logits = self._forward([token])
        self._seen += self._tokens
        last = logits[0, -1].float().cpu()
        if last.isnan().any():
            raise InternalError("the model's logits are not numbers; another --dtype may have room for them")
        return last

    @property
    def share(self) -> float | None:
        """Of the tokens that there were, those that decoded ones have attended, over all layers and KV heads of the
        engine; None without an engine."""
        engine = self._subject.engine
        if engine is None or not self._seen:
            return None
        whole = self._seen * engine.options.layers * engine.options.kv_heads
        return (self._attended() - self._attended_before) / whole

    def _attended(self) -> int:
        if self._subject.engine is None:
            return 0
        stats = self._subject.engine.stats()
        return stats.near_tokens + stats.far_tokens + stats.fetched_tokens

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        model = self._subject.model
        options = {"logits_to_keep": 1} if self._subject.keeps else {}
        rows = torch.tensor([list(ids)], device=model.device)
        self._tokens += len(ids)
        return model(input_ids=rows, past_key_values=self._cache, use_cache=True, **options).logits


@contextlib.contextmanager
def dense(setup: Setup) -> Iterator[Subject]:
    """The model's own attention, with the library's own cache."""
    yield Subject(setup, lambda: transformers.DynamicCache(config=setup.model.config), None)


@contextlib.contextmanager
def under(setup: Setup, policy: str) -> Iterator[Subject]:
    """The model as `sluice.transformers.enable` has it attend."""
    with enable(setup.model, policy, setup.host_bytes, sequences=1, prefill_rows=setup.chunk,
                **setup.options) as enabled:
        yield Subject(setup, enabled.cache, enabled.engine)


def check(setup: Setup, policy: str, tokens: int) -> None:
    """Makes an engine for this policy and gives it back: what it is refused for is known then, and not after an hour.
    @throws OutOfCapacity if a sequence of as many tokens has no room"""
    with under(setup, policy) as subject:
        if not subject.engine.can_admit(tokens, policy):
            raise OutOfCapacity(f'{tokens} tokens under the policy "{policy}" have no room in {setup.host_bytes} bytes '
                                "of host memory; give a larger --host-bytes")
