"""Loops over tiny models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from tiny import bare_model, tokenizer


@pytest.fixture
def make_loop() -> Iterator[Callable[..., Loop]]:
    """Loops over copies of tiny models; closed after the test."""
    models_made: list[PackedModel] = []

    def make(kind: str = "llama", policy: str = "full", prefix: bool = True, end_ids: Sequence[int] = (0,),
             **options: object) -> Loop:
        models_made.append(PackedModel(copy.deepcopy(bare_model(kind)), policy, **{
            "host_bytes": 8 << 20, "threads": 1, "pin_threads": False, "answer_timeout_ms": 30_000, "sequences": 8,
            "prefill_rows": 64, **options}))
        return Loop(models_made[-1], tokenizer(), end_ids=end_ids, prefix=prefix)

    yield make
    for model in models_made:
        model.close()
