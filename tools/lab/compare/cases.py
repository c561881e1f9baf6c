"""Inputs of the kernels that are compared, and what attention of them is."""

from __future__ import annotations

import torch
from shapes import GROUP, HEAD_DIM, KV_HEADS, Q_HEADS, TOKEN_BYTES, Shape

PAGE = 64
COLD_BYTES = 256 << 20  # Copies of keys and values take at least that, more than caches hold.
SCALE = HEAD_DIM**-0.5
# Far more than weights and outputs of bf16 are off by, per query head.
TOLERANCE = 0.02


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one query in float32: q [Q_HEADS, d], k and v [tokens, KV_HEADS, d]."""
    scores = torch.einsum("hgd,thd->hgt", q.float().view(KV_HEADS, GROUP, -1), k.float()) * SCALE
    return torch.einsum("hgt,thd->hgd", scores.softmax(-1), v.float()).reshape(Q_HEADS, -1)


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """Of the worst head of the worst query; not a number counts as infinite."""
    off = (out.float() - want).norm(dim=-1) / want.norm(dim=-1)
    return off.nan_to_num(nan=float("inf")).max().item()


class DecodeCase:
    """One query of each sequence. Keys and values are [rows, capacity, KV_HEADS, d], whole pages; copies take turns.

    The last key of a sequence is much like one query, and values behind it are large, so that a token left out or one
    too many shows at any length."""

    def __init__(self, shape: Shape, device: str = "cuda", cold_bytes: int = COLD_BYTES):
        torch.manual_seed(1)
        self.shape, self.lengths = shape, shape.lengths
        self.capacity = -(-shape.tokens // PAGE) * PAGE
        self.copies = max(1, -(-cold_bytes // (sum(self.lengths) * TOKEN_BYTES)))
        self.q = torch.randn(shape.rows, Q_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        size = shape.rows, self.capacity, KV_HEADS, HEAD_DIM
        self.kv = [tuple(torch.randn(2, *size, device=device, dtype=torch.bfloat16)) for _ in range(self.copies)]
        for k, v in self.kv:
            for row, length in enumerate(self.lengths):
                k[row, length - 1] = self.q[row, ::GROUP] / 2
                v[row, length:] = 1000
        k, v = self.kv[0]
        self.want = torch.stack([attend(q, k[row, :length], v[row, :length])
                                 for row, (q, length) in enumerate(zip(self.q, self.lengths))])

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    def error(self, out: torch.Tensor) -> float:
        """Of [rows, Q_HEADS, d]."""
        return relative_error(out, self.want)


class PromptCase:
    """A prompt: queries [1, tokens, Q_HEADS, d], keys and values [1, tokens, KV_HEADS, d]. A few queries are looked at,
    the first and the last among them."""

    def __init__(self, shape: Shape, device: str = "cuda"):
        torch.manual_seed(1)
        self.shape, self.copies = shape, 1
        tokens = shape.tokens
        self.q = torch.randn(1, tokens, Q_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        self.k, self.v = torch.randn(2, 1, tokens, KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        self.looked = sorted({0, 1, tokens // 3, tokens // 2, tokens - 2, tokens - 1})
        for at in self.looked:
            # Much like this query, and seen by no earlier one.
            self.k[0, at] = self.q[0, at, ::GROUP] / 2
        self.want = torch.stack([attend(self.q[0, at], self.k[0, : at + 1], self.v[0, : at + 1]) for at in self.looked])

    def error(self, out: torch.Tensor) -> float:
        """Of [tokens, Q_HEADS, d]."""
        return relative_error(out[self.looked], self.want)
