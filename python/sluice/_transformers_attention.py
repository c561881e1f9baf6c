"""What transformers calls for masks and attention of a model that Sluice serves."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import dropout as dropped_out
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from sluice._torch import same_number, scaled
from sluice._transformers_cache import SluiceLayer, take_handed
from sluice._transformers_support import hides_nothing, refuse_options
from sluice.errors import InvalidArgument, Unsupported


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
         mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None,
         **options: Any) -> torch.Tensor | None:
    """transformers' mask interface. Of causal attention that sees all tokens from the first on: the mask of padding
    [batch, kv_length], or None where that and the shapes say all. Of any other: what sdpa gets, [batch, 1, q_length,
    kv_length] or None."""
    window, config = options.get("local_size"), options.get("config")
    # The library lets masks be left out only of what is causal, within the window.
    causal = options.get("allow_is_causal_skip", True) and (
        window is None or window > kv_length and config is not None and hides_nothing(window, config))
    # Caches of a fixed size have columns behind the newest token, and offsets that are tensors.
    if not causal or torch.is_tensor(q_offset) or kv_offset or kv_length != q_offset + q_length:
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                         kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, **options)
    if attention_mask is not None:
        return attention_mask[:, :kv_length]
    if q_length in (1, kv_length):
        return None
    return torch.ones(batch_size, kv_length, dtype=torch.bool, device=options.get("device"))


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              **options: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [batch, q_heads, n, head_dim], key and value [batch, kv_heads, columns,
    head_dim]; returns [batch, n, q_heads, head_dim]. Keys that come from no layer of ours are attended by sdpa."""
    layer = take_handed(key, value)
    if layer is None:
        return _library_attention(module, query, key, value, attention_mask, scaling, dropout, options), None
    _refuse_call(layer, query, key, value, attention_mask, options)
    if dropout:
        raise Unsupported(f"dropout is {dropout}: call model.eval()")
    query = scaled(query, scaling, layer.engine.options)
    return layer.rows.attend(layer.index, query, key, value, attention_mask, options.get("s_aux")), None


def _refuse_call(layer: SluiceLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                 attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    n, columns = query.shape[-2], layer.rows.columns + query.shape[-2]
    window = options.get("sliding_window")
    if window is not None and columns >= window:
        raise Unsupported(f"{columns} tokens of a layer with a window of {window}, which Sluice serves only while it "
                          "hides nothing")
    if attention_mask is not None and attention_mask.ndim != 2 or options.get("is_causal") is False and n > 1:
        raise Unsupported("this model's attention mask is more than causal with padding, as where tokens of an image "
                          "or a prefix see each other; Sluice does not serve that")
    refuse_options(options)
    cap, made_cap = options.get("softcap") or 0.0, layer.engine.options.softcap or 0.0
    if not same_number(cap, made_cap):
        raise Unsupported(f"attention layer {layer.index} has softcap {cap}, and Sluice was enabled for {made_cap}")
    if key.shape[-2] != n:
        raise Unsupported(f"attention of {n} queries over {key.shape[-2]} new keys: cross-attention is not served")
    made = layer.engine.options
    if value.shape != key.shape or (query.shape[1], *key.shape[1:4:2]) != (made.q_heads, made.kv_heads, made.head_dim):
        raise InvalidArgument(
            f"attention layer {layer.index} has query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)}; Sluice was enabled for {made.q_heads} query heads and {made.kv_heads} of keys, of "
            f"{made.head_dim} numbers")


def _library_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                       attention_mask: torch.Tensor | None, scaling: float | None, dropout: float,
                       options: dict[str, Any]) -> torch.Tensor:
    if attention_mask is not None and attention_mask.ndim == 2:
        attention_mask = sdpa_mask(query.shape[0], query.shape[-2], key.shape[-2],
                                   q_offset=key.shape[-2] - query.shape[-2], attention_mask=attention_mask.bool(),
                                   device=query.device)
    sinks = options.get("s_aux")
    if options.get("softcap"):
        if sinks is not None:
            raise Unsupported("this model's attention has both softcap and sinks")
        return _with_softcap(query, key, value, attention_mask, options["softcap"], scaling, dropout)
    if sinks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      **options)[0]
    return _with_sinks(query, key, value, attention_mask, sinks, scaling, dropout)


def _with_softcap(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
                  softcap: float, scaling: float | None, dropout: float) -> torch.Tensor:
    """sdpa has no soft-cap."""
    heads, n, columns = query.shape[1], query.shape[-2], key.shape[-2]
    key, value = (repeat_kv(each, heads // each.shape[1]) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is None:
        attention_mask = torch.ones(n, columns, dtype=torch.bool, device=query.device).tril(columns - n)
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (dropped_out(weights, dropout) @ value).transpose(1, 2).contiguous()


def _with_sinks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
                sinks: torch.Tensor, scaling: float | None, dropout: float) -> torch.Tensor:
    """sdpa has no sinks: each is one more column, a key and a value of zeros, with the sink as what its mask adds."""
    batch, heads, n, _ = query.shape
    columns = key.shape[-2]
    if attention_mask is None:
        attention_mask = torch.ones(n, columns, dtype=torch.bool, device=query.device).tril(columns - n)[None, None]
    if attention_mask.dtype == torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, float("-inf")).to(query.dtype)
    column = sinks.to(query.dtype).reshape(1, -1, 1, 1).expand(batch, heads, n, 1)
    added = torch.cat([attention_mask.expand(batch, heads, n, columns), column], dim=-1)
    key, value = (repeat_kv(pad(each, (0, 0, 0, 1)), heads // each.shape[1]) for each in (key, value))
    out = scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous()
