"""Batches, and the commands that measure ours of them."""

from __future__ import annotations

import re
from typing import NamedTuple

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
Q_HEADS = KV_HEADS * GROUP
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # A key and a value of each KV head, bf16.


class Shape(NamedTuple):
    rows: int
    tokens: int  # of the longest sequence
    shortest: int = 0  # 0: all are of one length

    @property
    def lengths(self) -> list[int]:
        """As `sluice bench gpu --ragged` has them: each as many times as long as the next."""
        if not 0 < self.shortest < self.tokens or self.rows == 1:
            return [self.tokens] * self.rows
        ratio = self.shortest / self.tokens
        return [int(self.tokens * ratio ** (row / (self.rows - 1)) + 0.5) for row in range(self.rows)]

    def __str__(self) -> str:
        from_shortest = f"{thousands(self.shortest)}-" if self.shortest else ""
        return f"{self.rows}x{from_shortest}{thousands(self.tokens)}"


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def read_shape(text: str) -> Shape:
    """@throws ValueError for what is none"""
    number = r"([1-9][0-9]*)(K?)"
    found = re.fullmatch(rf"(?:([1-9][0-9]*)x)?(?:{number}-)?{number}", text)
    if not found:
        raise ValueError(f"'{text}' is no shape; give ROWSxTOKENS or ROWSxSHORTEST-LONGEST, like 8x32K or 16x1K-128K")
    rows, low, low_unit, high, high_unit = found.groups()
    shortest = int(low or 0) * (1024 if low_unit else 1)
    longest = int(high) * (1024 if high_unit else 1)
    if shortest > longest:
        raise ValueError(f"'{text}': the shortest sequence is longer than the longest; give SHORTEST-LONGEST")
    return Shape(int(rows or 1), longest, shortest)


def commands(what: str, shapes: list[Shape], options: list[str]) -> list[list[str]]:
    """Arguments of `sluice`: one command for all batches of the same lengths, as it makes its keys once for them."""
    if what == "prefill":
        lengths = sorted({shape.tokens for shape in shapes})
        return [["bench", "prefill", "--device", "cuda", "--structures", "vertical_slash", "--gammas", "", "--length",
                 ",".join(map(str, lengths)), "--chunk", str(lengths[-1]), *options]]
    rows: dict[tuple[int, int], list[int]] = {}
    for shape in shapes:
        rows.setdefault((shape.tokens, shape.shortest), []).append(shape.rows)
    return [["bench", "gpu", "--device", "cuda", "--sections", "attention", "--length", str(tokens), "--rows",
             ",".join(map(str, sorted(set(counts)))), *(["--ragged", str(shortest)] if shortest else []),
             *(options or ["--dense-only"])] for (tokens, shortest), counts in rows.items()]
