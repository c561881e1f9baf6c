"""What a model says of its attention - scale, soft-cap, windows of layers - arrives at an engine, and is checked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import sluice
from conftest import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, Story, buckets, forward

Make = Callable[..., sluice.Engine]


class SpecStory(Story):
    """Attended as a model says."""

    def __init__(self, seed: int, scale: float, softcap: float, windows: list[int]) -> None:
        super().__init__(seed)
        self.scale, self.softcap, self.windows = scale, softcap, windows

    def want(self, layer: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.empty((count, Q_HEADS, HEAD_DIM)), np.empty((count, Q_HEADS))
        for row in range(count):
            end = first + row + 1
            begin = max(0, end - self.windows[layer]) if self.windows and self.windows[layer] else 0
            for head in range(Q_HEADS):
                k, v = (each[layer, begin:end, head * KV_HEADS // Q_HEADS].astype(np.float64)
                        for each in (self.k, self.v))
                scores = k @ self.q[layer, first + row, head].astype(np.float64) * (self.scale or HEAD_DIM**-0.5)
                if self.softcap:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                lse[row, head] = np.log(np.exp(scores).sum())
                out[row, head] = np.exp(scores - lse[row, head]) @ v
        return out, lse


@pytest.mark.parametrize(("scale", "softcap", "windows"), [
    (0.3, 0.0, []), (0.0, 1.5, []), (0.0, 0.0, [24, 0]), (0.2, 2.0, [0, 70]), (0.0, 0.0, [1, 1000])])
def test_prompts_and_tokens_attend_as_a_model_says(make: Make, scale: float, softcap: float,
                                                   windows: list[int]) -> None:
    engine = make(scale=scale, softcap=softcap, windows=windows or None)
    assert (engine.options.scale, engine.options.softcap) == (pytest.approx(scale), pytest.approx(softcap))
    assert engine.options.windows == (windows or None)
    (mixed, decoding), story = buckets(engine), SpecStory(7, scale, softcap, windows)
    sequence = engine.begin("full")
    forward(engine, mixed, (sequence, story, 0, 60, True))
    forward(engine, mixed, (sequence, story, 60, 40, True))
    for token in range(100, 104):
        forward(engine, decoding, (sequence, story, token, 1, False))


@pytest.mark.parametrize(("changes", "words"), [
    ({"scale": -1.0}, "scale is -1"), ({"scale": float("nan")}, "scale is"), ({"softcap": float("inf")}, "softcap is"),
    ({"windows": [4]}, "window_count is 1"), ({"windows": [4] * (LAYERS + 1)}, "window_count is 3"),
    ({"windows": [-1, 0]}, "windows is -1")])
def test_what_no_model_says(make: Make, changes: dict[str, object], words: str) -> None:
    with pytest.raises(sluice.InvalidArgument, match=words):
        make(**changes)


def test_a_cap_beside_blocks_of_prompts(make: Make) -> None:
    with pytest.raises(sluice.Unsupported, match="softcap"):
        make(softcap=30.0, prefill_mode="flex")
