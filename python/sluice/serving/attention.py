"""The attention of a model that runs over packed rows, as transformers calls it: the engine's, layer by layer."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from sluice._torch import same_number, scaled, take_sinks
from sluice._transformers_support import refuse_options
from sluice.engine import Engine
from sluice.errors import InvalidArgument, Unsupported
from sluice.options import Bucket, EngineOptions

NAME = "sluice_packed"


@dataclasses.dataclass
class Forward:
    """What the attention function needs to know of the forward that runs."""

    engine: Engine | None  #: None: nothing is planned, and all attention is 0
    made: EngineOptions  #: the engine's
    context: int  #: tokens of a sequence, at most
    bucket: Bucket
    stream: Any
    layer: int = 0  #: the next one
    compiled: int = 0  #: how many of those before it attended in what torch has compiled
    goes_on: bool = False  #: after an error the model runs to its end, with attention of 0
    error: Exception | None = None  #: the first of such a forward

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
               lse: torch.Tensor | None) -> None:
        """The next layer."""
        if self.engine is None or self.error is not None:
            out.zero_()
            return
        try:
            self.engine.attend(self.bucket, self.layer, q, k, v, out, lse, stream=self.stream)
        except Exception as error:
            if not self.goes_on:
                raise
            self.error = error
            out.zero_()


_running: contextvars.ContextVar[Forward | None] = contextvars.ContextVar("sluice_packed", default=None)


@contextlib.contextmanager
def running_as(forward: Forward) -> Iterator[None]:
    """What the model attends is of this forward."""
    before = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(before)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              **options: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, q_heads, rows, head_dim], key, value alike of kv_heads; returns [1,
    rows, q_heads, head_dim]."""
    refuse_options(options)
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise Unsupported("this model's attention is more than causal, which is not served")
    if dropout:
        raise Unsupported(f"dropout is {dropout}: call model.eval()")
    attends = _compiled if torch.compiler.is_compiling() else _attend
    return attends(query, key, value, options.get("s_aux"), module.layer_idx, scaling, options.get("sliding_window"),
                   options.get("softcap")), None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, layer: int,
            scaling: float | None, window: int | None, softcap: float | None) -> torch.Tensor:
    running = _running.get()
    if running is None:
        raise InvalidArgument("this model is served by sluice.serving: it runs through that alone until close()")
    if layer != running.layer:
        raise Unsupported(f"layer {layer} attends where layer {running.layer} should: models whose layers do not "
                          "attend once each, in order, are not served")
    _refuse_another_shape(running, query, key, value)
    _refuse_another_spec(running, window, softcap or 0.0, sinks is not None)
    q, k, v = (each[0].transpose(0, 1) for each in (scaled(query, scaling, running.made), key, value))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = None if sinks is None else torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    running.attend(q, k, v, out, lse)
    if sinks is not None:
        take_sinks(out, lse, sinks)
    running.layer += 1
    return out[None]


# torch.compile does not look into it. All that it depends on besides its arguments is there when it runs.
@torch.library.custom_op("sluice::packed_attention", mutates_args=())
def _compiled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, layer: int,
              scaling: float | None, window: int | None, softcap: float | None) -> torch.Tensor:
    out = _attend(query, key, value, sinks, layer, scaling, window, softcap)
    _running.get().compiled += 1
    return out


@_compiled.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _refuse_another_shape(running: Forward, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises Unsupported if a call has other heads than the engine was made for."""
    made = running.made
    have, wanted = (query.shape[1], *key.shape[1:4:2]), (made.q_heads, made.kv_heads, made.head_dim)
    if have != wanted or value.shape != key.shape:
        raise Unsupported(f"attention layer {running.layer} has (query heads, KV heads, head_dim) {have} and values of "
                          f"{value.shape[3]}, and the model's configuration says {wanted}")


def _refuse_another_spec(running: Forward, window: int | None, softcap: float, sinks: bool) -> None:
    """Raises Unsupported if a call has another window or soft-cap than the configuration says."""
    made, layer = running.made, running.layer
    made_window = made.windows[layer] if made.windows else 0
    hides = window is not None and window < running.context
    if (window if hides else 0) != made_window:
        raise Unsupported(f"attention layer {layer} has a window of {window or 'all'} tokens, and the model's "
                          f"configuration says {made_window or 'all'}")
    made_cap = made.softcap or 0.0
    if not same_number(softcap, made_cap):
        raise Unsupported(f"attention layer {layer} has softcap {softcap}, and the model's configuration says "
                          f"{made_cap}")
    if softcap and sinks:
        raise Unsupported("this model's attention has both a softcap and sinks, which is not served")
