"""What tokens that choose have attended and read, as shares of what dense attention has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from sluice.engine import Engine
from sluice.figures import Stats
from sluice.options import Features

_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8_e4m3": 1}
_DENSE = 1 - 1e-6  # A share from which on everything was attended.


@dataclass(frozen=True)
class Reading:
    """Shares of dense attention's tokens, and of the bytes of its keys and values."""

    attended: float  #: tokens, over all layers and KV heads of the engine
    near: float  #: bytes of keys and values in the device's memory
    far: float  #: in host memory, by the CPU, what it read to choose included
    link: float  #: in host memory, by the device over the link
    choice: float  #: of copies and digests by which the device chose
    #: Of dense attention's blocks of keys, those that the prompt's queries attended where they were chosen; 1: nowhere.
    prompt_blocks: float = 1.0
    #: Shares of query heads that a bypass spared, and of exact attention's softmax that lies on what was attended.
    #: None: not audited.
    bypassed: float | None = None
    coverage: float | None = None

    @property
    def bytes(self) -> float:
        return self.near + self.far + self.link + self.choice

    @property
    def whole(self) -> bool:
        """Whether every token was attended, as of sequences up to `dense_tokens`: then the policy chose nothing."""
        return self.attended >= _DENSE


def read_since(engine: Engine, before: Stats, seen: int) -> Reading:
    """Since `before`, by rows that saw as many tokens together."""
    made, after = engine.options, engine.stats()
    dense = seen * made.layers * made.kv_heads

    def grown(name: str) -> int:
        return getattr(after, name) - getattr(before, name)

    far_row = made.head_dim * _ITEM_BYTES[made.kv_dtype] + (4 if made.kv_dtype == "fp8_e4m3" else 0)
    near_row = made.head_dim * max(2, _ITEM_BYTES[made.kv_dtype])
    memory = engine.memory()
    code = memory.codes * 2 * far_row / memory.far_pages if memory.far_pages else 0.0  # Of each key there is room for.
    whole = 2 * near_row * dense
    near, far, fetched = (grown(f"{name}_tokens") for name in ("near", "far", "fetched"))
    return Reading((near + far + fetched) / dense, 2 * near_row * near / whole,
                   far_row * (2 * far + grown("scored")) / whole, 2 * far_row * fetched / whole,
                   (code * grown("estimated") + 2 * near_row * grown("ranked_pages")) / whole)


def audited(engine: Engine, sequences: Sequence[int], reading: Reading) -> Reading:
    """With what audits have found of these, if there were any."""
    if Features.AUDIT not in engine.options.largest.features:
        return reading
    (found,) = (engine.audit(sequence) for sequence in sequences)
    heads = found.tokens * found.layers * found.q_heads
    return replace(reading, bypassed=found.bypassed_heads / heads if heads else 0.0, coverage=found.coverage_mean)


def prompt_blocks_since(engine: Engine, before: Stats) -> float:
    """Reading.prompt_blocks of a prompt that was read since."""
    after = engine.stats()
    causal = after.causal_blocks - before.causal_blocks
    return (after.kept_blocks - before.kept_blocks) / causal if causal else 1.0


def mean(readings: Sequence[Reading | None]) -> Reading | None:
    """Of sequences of about the same length; None if there is none."""
    known = [each for each in readings if each is not None]
    if not known:
        return None
    columns = ([getattr(each, part.name) for each in known] for part in fields(Reading))
    return Reading(*(None if None in column else sum(column) / len(column) for column in columns))


def told(reading: Reading | None) -> dict[str, float | bool | None]:
    """As JSON has it."""
    if reading is None:
        return {"attended": None}
    return {"attended": reading.attended, "whole": reading.whole, "bytes": reading.bytes,
            **{f"{name}_bytes": getattr(reading, name) for name in ("near", "far", "link", "choice")},
            "prompt_blocks": reading.prompt_blocks,
            **({} if reading.coverage is None else {"bypassed": reading.bypassed, "coverage": reading.coverage})}
