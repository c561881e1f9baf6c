"""Models of transformers with their keys and values in Sluice's host memory.

    sluice.transformers.enable(model, policy="sluice", host_bytes=8 << 30)
    model.generate(**inputs)  # as before

What cannot be served is refused with the reason. Versions of transformers that this has run with: 5.17 to 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from sluice._transformers_cache import SluiceCache
from sluice.engine import Engine
from sluice.errors import InvalidArgument, Unsupported
from sluice.options import Bucket, EngineOptions

NAME = "sluice"
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def enable(model: transformers.PreTrainedModel, policy: str = "sluice", host_bytes: int = 1 << 30, *,
           sequences: int = 16, prefill_rows: int = 2048, **options: Any) -> Enabled:
    """Has this model attend by `policy`, with keys and values of at most `host_bytes`. `sequences`: rows of a batch, or
    beams, that live at once, in all caches; forks of beams need room for as many again. `prefill_rows`: tokens of a
    prompt, over all rows of a batch, that go through the model at once; `generate` splits longer ones. `options` are
    others of EngineOptions. What is returned takes it back: `close()`, or `with`.

    Several tokens of a row in one call are taken for a part of its prompt and attend all that comes before them; single
    ones choose as the policy says."""
    config = model.config.get_text_config(decoder=True)
    _refuse(model, config)
    device = next(model.parameters()).device
    heads = config.num_attention_heads
    made = EngineOptions(
        layers=config.num_hidden_layers, q_heads=heads, kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}", host_bytes=host_bytes,
        sequences=sequences,
        largest=Bucket(decode_rows=sequences, prefill_rows=prefill_rows, prefills=sequences),
        **{"kv_dtype": _DTYPES[model.dtype], **options})
    made.make_room_for(policy, config.max_position_embeddings)
    return Enabled(model, policy, Engine(made))


def _refuse(model: transformers.PreTrainedModel, config: Any) -> None:
    name = type(model).__name__
    if not model._can_set_attn_implementation() or not getattr(model, "_supports_attention_backend", True):
        raise Unsupported(f"{name} does not call its attention through transformers' AttentionInterface")
    if model.config.is_encoder_decoder or not getattr(config, "is_causal", True):
        raise Unsupported(f"{name} is no decoder: Sluice serves causal self-attention alone")
    others = sorted(set(get_layer_types_and_kwargs(config)[0]) - {"full_attention"})
    if others or getattr(config, "num_kv_shared_layers", None):
        raise Unsupported(f"{name} has layers of {', '.join(others) or 'shared keys'}; Sluice serves models all of "
                          "whose layers are full_attention")
    for option in ("attn_logit_softcapping", "kv_lora_rank"):
        if getattr(config, option, None) is not None:
            raise Unsupported(f"{name} has {option} {getattr(config, option)}, which no kernel of Sluice has")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).partition(":")[0] not in ("cpu", "cuda"):
        raise Unsupported(f"{name} is on {', '.join(sorted(devices))}; Sluice serves the CPU or one CUDA device")
    if model.dtype not in _DTYPES:
        raise Unsupported(f"{name} is of {model.dtype}; convert it to float32, float16 or bfloat16")


class Enabled:
    """What `enable` has done to a model."""

    def __init__(self, model: transformers.PreTrainedModel, policy: str, engine: Engine) -> None:
        self.engine, self.policy = engine, policy
        self._model, self._before = model, model.config._attn_implementation
        # The forward that is not through all layers; it is left behind where a model fails in between.
        self.pending: int | None = None
        transformers.AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)
        model.set_attn_implementation(NAME)
        self._generate = model.generate
        model.generate = self._generate_here

    def cache(self) -> SluiceCache:
        """An empty cache, for `past_key_values` of generate() or of the model: keep it for the next turn."""
        return SluiceCache(self)

    def close(self) -> None:
        """Leaves the model as it was, and gives all memory back. Its caches are of no use any more."""
        if self._model is not None:
            self._model.set_attn_implementation(self._before)
            del self._model.generate
            self._model = None
            self.engine.close()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate_here(self, *inputs: Any, **options: Any) -> Any:
        config = options.get("generation_config") or self._model.generation_config

        def said(name: str) -> Any:
            return options.get(name, getattr(config, name, None))

        if said("use_cache") is False:
            raise Unsupported("use_cache is False, and Sluice is a cache; leave it True, or close() Sluice")
        if said("cache_implementation") is not None:
            raise Unsupported(f"cache_implementation is {said('cache_implementation')}; with Sluice it has to be None")
        if said("output_attentions"):
            raise Unsupported("output_attentions: Sluice computes no weights that it could return")
        given = options.get("past_key_values")
        if given is None:
            options["past_key_values"] = given = self.cache()
            first = next((each for each in (*inputs, options.get("input_ids")) if torch.is_tensor(each)), None)
            if first is not None and said("prefill_chunk_size") is None:
                rows = first.shape[0] * max(said("num_beams") or 1, said("num_return_sequences") or 1)
                chunk = max(1, self.engine.options.largest.prefill_rows // rows)
                if first.shape[1] > chunk:
                    options["prefill_chunk_size"] = chunk
        elif not isinstance(given, SluiceCache):
            raise InvalidArgument(f"past_key_values is a {type(given).__name__}; with Sluice it is what cache() of "
                                  "enable()'s result returns")
        return self._generate(*inputs, **options)


def mask(batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
         mask_function: Any = causal_mask_function, attention_mask: torch.Tensor | None = None,
         **options: Any) -> torch.Tensor | None:
    """transformers' mask interface: of causal attention the two-dimensional mask of padding, else what sdpa gets."""
    if mask_function is causal_mask_function and not options.get("use_vmap"):
        return None if attention_mask is None else attention_mask[:, :kv_length]
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                     kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, **options)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              **options: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Keys that come from no cache of ours are attended by sdpa."""
    cache = getattr(key, "sluice_cache", None)
    if cache is None:
        if attention_mask is None or attention_mask.ndim == 2:
            attention_mask = _causal(query, key, attention_mask)
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      **options)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported("this model's attention mask is more than causal with padding, which Sluice does not serve")
    for name in ("softcap", "s_aux", "position_bias", "sliding_window", "output_attentions"):
        if not (options.get(name) is None or options[name] is False):
            raise Unsupported(f"this model's attention has {name}, which no kernel of Sluice has")
    if dropout:
        raise Unsupported(f"dropout is {dropout}: call model.eval()")
    if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6:
        query = query * (scaling * query.shape[-1] ** 0.5)
    return cache.attend(key.sluice_layer, query, key, value, attention_mask), None


def _causal(query: torch.Tensor, key: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """[batch, 1, n, columns]; what is padding itself attends itself, so that no row is empty."""
    columns, rows = key.shape[-2], query.shape[-2]
    last = torch.arange(columns - rows, columns, device=query.device)[:, None]
    seen = torch.arange(columns, device=query.device)
    allowed = (seen <= last)[None, None]
    return allowed if padding is None else allowed & padding[:, None, None, :columns] | (seen == last)
