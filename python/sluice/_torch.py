"""Torch's tensors on their way to an engine and back, whichever library has the model."""

from __future__ import annotations

import torch

from sluice.errors import Unsupported
from sluice.options import EngineOptions

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""Of a model, and what EngineOptions call them."""


def one_shape(name: str, shapes: set[tuple[int, int, int, int]], remedy: str = "") -> tuple[int, int, int]:
    """Query heads, KV heads and their size, of (query heads, KV heads, size of keys, size of values) of all layers.

    Raises Unsupported, which names the model and ends with `remedy`, if layers differ or keys and values do."""
    if len(shapes) > 1:
        raise Unsupported(f"{name} has layers of different heads {sorted(shapes)}; Sluice serves one shape{remedy}")
    (heads, kv_heads, size, value_size), = shapes
    if value_size != size:
        raise Unsupported(f"{name} has keys of {size} numbers and values of {value_size}; Sluice serves one "
                          f"size{remedy}")
    return heads, kv_heads, size


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
