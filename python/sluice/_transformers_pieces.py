"""Forwards that are longer than an engine takes at once go through a model's decoder in pieces."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers.utils import ModelOutput

from sluice._transformers_cache import SluiceCache
from sluice.errors import Unsupported

_COLUMNS = {"input_ids": 1, "inputs_embeds": 1, "per_layer_inputs": 1, "position_ids": -1, "cache_position": -1}
"""Arguments of decoders that have something for each new token, and in which dimension."""


def in_pieces(forward: Callable[..., Any], cache_of: Callable[[tuple, dict[str, Any]], SluiceCache | None],
              most: int) -> Callable[..., Any]:
    """A decoder's `forward`, which reads at most so many new tokens of all rows at once. Calls without a cache of ours
    are as before."""
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def call(*inputs: Any, **arguments: Any) -> Any:
        cache = cache_of(inputs, arguments)
        named = {**dict(zip(names, inputs)), **arguments}
        new = next((named[name] for name in ("inputs_embeds", "input_ids") if torch.is_tensor(named.get(name))), None)
        if cache is None or new is None:
            return forward(*inputs, **arguments)
        batch, tokens = new.shape[:2]
        columns = min(max(1, most // batch), cache.chunk or tokens)
        if tokens <= columns:
            return forward(*inputs, **arguments)
        if batch > most:
            raise Unsupported(f"a batch of {batch} rows, and the engine was made for {most} tokens of prompts at once; "
                              "give enable() prefill_rows for a token of each row at least")
        strange = _strange(named)
        with cache.rows.reads_in_pieces(strange):
            if strange:
                return forward(*inputs, **arguments)
            outputs = (forward(**piece) for piece in _pieces(named, cache, tokens, columns))
            joined = _joined(outputs, batch, cache.keep or tokens)
        return joined.to_tuple() if named.get("return_dict") is False else joined

    return call


def _strange(named: dict[str, Any]) -> list[str]:
    """Tensors of which it is not known what belongs to which token."""
    def has_tensor(value: Any) -> bool:
        return torch.is_tensor(value) or isinstance(value, (list, tuple)) and any(map(has_tensor, value))

    return sorted(name for name, value in named.items()
                  if name not in _COLUMNS and name != "attention_mask" and has_tensor(value))


def _pieces(named: dict[str, Any], cache: SluiceCache, tokens: int, columns: int) -> Iterator[dict[str, Any]]:
    """What each piece is called with. The cache has those before when it comes."""
    past = cache.get_seq_length()
    for first in range(0, tokens, columns):
        count = min(columns, tokens - first)
        piece = {**named, "return_dict": True}
        for name, dimension in _COLUMNS.items():
            if torch.is_tensor(named.get(name)):
                piece[name] = named[name].narrow(dimension, first, count)
        piece["attention_mask"] = _mask(named.get("attention_mask"), cache, past + first, count, past + tokens)
        yield piece


def _mask(mask: Any, cache: SluiceCache, past: int, count: int, whole: int, kind: str | None = None) -> Any:
    """Of a mask for columns up to `whole`, what `count` new ones behind `past` see. `kind`: the layers' type, of masks
    that have been made for it."""
    if isinstance(mask, dict):
        return {each: _mask(value, cache, past, count, whole, each) for each, value in mask.items()}
    if torch.is_tensor(mask) and mask.ndim == 2:
        return mask[:, :past + count]
    if kind is None and mask is None:
        return None
    seen, _ = cache.layer_of(kind).get_mask_sizes(count)
    if mask is None:  # All that comes before; of a part that is not to be told by the shape alone.
        return None if past == 0 else torch.ones(count, seen, dtype=torch.bool).tril(seen - count)[None, None]
    last = past + count - (whole - mask.shape[-1])
    row = mask.shape[-2] - (whole - past)
    return mask[..., row:row + count, last - seen:last]


def _joined(outputs: Iterator[ModelOutput], batch: int, keep: int) -> ModelOutput:
    """The output of all pieces. If nothing but last hidden states is asked for, those of the `keep` newest tokens."""
    parts: list[ModelOutput] = []
    for output in outputs:
        parts.append(output)
        if parts[0].keys() <= {"last_hidden_state", "past_key_values"}:
            while sum(part.last_hidden_state.shape[1] for part in parts[1:]) >= keep:
                del parts[0]
    joined = parts[-1]
    for name, newest in joined.items():
        if torch.is_tensor(newest):
            joined[name] = _behind_each_other([part[name] for part in parts], batch)
        elif isinstance(newest, tuple):  # One for each layer.
            joined[name] = tuple(_behind_each_other(each, batch) for each in zip(*(part[name] for part in parts)))
    return joined


def _behind_each_other(parts: Sequence[torch.Tensor], batch: int) -> torch.Tensor:
    """[batch, tokens, ...], or [batch * tokens, ...] as routers of experts have them."""
    if parts[0].ndim > 2:
        return torch.cat(list(parts), dim=1)
    return torch.cat([part.view(batch, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)
