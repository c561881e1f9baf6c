"""Torch's tensors on their way to an engine and back, whichever library has the model."""

from __future__ import annotations

import torch

from sluice.options import EngineOptions

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Of a model, and what EngineOptions call them."""


def same_number(a: float, b: float) -> bool:
    """But for rounding to float32."""
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def scaled(query: torch.Tensor, scaling: float | None, made: EngineOptions) -> torch.Tensor:
    """A query for which the engine's scale is what the call's is for this one."""
    usual = query.shape[-1] ** -0.5
    scale, wanted = made.scale or usual, usual if scaling is None else scaling
    return query if same_number(scale, wanted) else query * (wanted / scale)


def take_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Gives sinks [q_heads], logits without a value, their share of the softmax: out [tokens, q_heads, head_dim] in
    place, lse [tokens, q_heads] in f32."""
    # A sink has exp(sink) / (exp(sink) + exp(lse)), and what is attended has the rest.
    out.copy_(out.float() * torch.sigmoid(lse - sinks.float())[..., None])
