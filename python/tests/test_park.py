"""Sequences leave an engine and come back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sluice
from conftest import POLICIES, Story, buckets, forward

Make = Callable[..., sluice.Engine]


def parked(engine: sluice.Engine, sequence: int, model: str = "") -> bytearray:
    area = bytearray(engine.park_bytes(sequence, model))
    assert engine.park(sequence, area, model) == len(area)
    return area


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 90])
def test_memory(make: Make, policy: str, tokens: int) -> None:
    engine, other = make(policy), make(policy, host_bytes=4 << 20)
    mixed, decode = buckets(engine)
    a, story = engine.begin(policy), Story(11)
    for first in range(0, tokens, 60):
        forward(engine, mixed, (a, story, first, min(60, tokens - first), True))
    area = parked(engine, a, "model 1")
    engine.end(a)
    kinds: list[object] = [area, bytes(area), memoryview(area), memoryview(area).toreadonly(),
                           np.frombuffer(area, np.uint8)]
    for buffer in kinds:
        b = other.resume(buffer, "model 1")
        assert other.tokens(b) == tokens
        forward(other, decode, (b, story, tokens, 2, False))
        other.end(b)
    larger = np.zeros(len(area) + 10, np.uint8)
    b = other.resume(area, "model 1")
    assert other.park(b, larger, "model 1") == len(area) and larger[: len(area)].tobytes() == area
    del kinds, buffer
    area.append(0)  # Nothing holds it any more.


def test_file(make: Make, tmp_path: Path) -> None:
    engine = make()
    mixed, decode = buckets(engine)
    a, story = engine.begin("full", range(33), salt=3), Story(12)
    forward(engine, mixed, (a, story, 0, 33, True))
    for name in (tmp_path / "parked", str(tmp_path / "other")):
        assert engine.park(a, name) == os.path.getsize(name) == engine.park_bytes(a)
        other = make()
        b = other.resume(name)
        assert other.match_prefix("full", [*range(33), 0], salt=3) == 32
        forward(other, decode, (b, story, 33, 1, False))
    assert sorted(os.listdir(tmp_path)) == ["other", "parked"]


def test_what_is_refused(make: Make, tmp_path: Path) -> None:
    engine = make()
    a = engine.begin("full")
    area = parked(engine, a, "model 1")
    with pytest.raises(sluice.InvalidArgument, match="model 2"):
        engine.resume(area, "model 2")
    with pytest.raises(sluice.OutOfCapacity, match="park_bytes"):
        engine.park(a, bytearray(10))
    with pytest.raises(sluice.InvalidArgument, match="written to"):
        engine.park(a, bytes(1000))
    for wrong in (7, None, 1.5):
        with pytest.raises(sluice.InvalidArgument, match="file's name"):
            engine.resume(wrong)
    with pytest.raises(sluice.InvalidArgument, match="null character"):
        engine.park(a, "a\0b")
    with pytest.raises(sluice.NotFound):
        engine.resume(tmp_path / "none")
    with pytest.raises(sluice.Error, match="none"):
        engine.park(a, tmp_path / "none" / "parked")
    with pytest.raises(sluice.NotFound):
        engine.park(99, area)
    for damaged in (b"", bytes(100), area[:-1], area + b"x"):
        with pytest.raises(sluice.Corrupt):
            engine.resume(damaged, "model 1")
    area[-1] ^= 1
    with pytest.raises(sluice.Corrupt):
        engine.resume(area, "model 1")
