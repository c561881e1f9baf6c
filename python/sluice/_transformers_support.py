"""Which models of transformers Sluice serves, and with what."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from sluice._near import SHARE, DeviceMemory, settle_near
from sluice._torch import DTYPES, one_shape, same_number
from sluice._transformers_cache import LayerKind
from sluice.errors import InvalidArgument, Unsupported
from sluice.options import DENSE_AUTO, EngineOptions, Features, wanted_by

NAME = "sluice"
_NAMES = (NAME, "sluice_packed")  # The second is sluice.serving's.
# Of other types the layers themselves hold more than keys and values, or choose what they attend.
_LIBRARY_TYPES = ("sliding_attention", "chunked_attention", "linear_attention", "conv", "moe", "mlp", "dummy")

changing = threading.RLock()
"""Whoever gives a model Sluice's attention, or takes it back, holds this: two threads may do it to one model."""


def attention_shape(model: transformers.PreTrainedModel, config: Any, kinds: Sequence[LayerKind]) -> dict[str, int]:
    """Heads and their size, of the layers that are Sluice's; of a model that ranks share, this rank's heads."""
    shapes = set()
    for kind, layer in zip(kinds, _layer_configs(config, len(kinds))):
        if kind.make is None:
            heads = layer.num_attention_heads
            size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
            shapes.add((heads, getattr(layer, "num_key_value_heads", None) or heads, size,
                        getattr(layer, "v_head_dim", None) or size))
    heads, kv_heads, size = one_shape(type(model).__name__, shapes)
    ranks = ranks_of(model)
    if kv_heads % ranks:
        raise Unsupported(f"{type(model).__name__} has {kv_heads} heads of keys and values, which {ranks} ranks cannot "
                          f"share evenly; start torchrun with --nproc-per-node N of which {kv_heads} is a multiple")
    return {"q_heads": heads // ranks, "kv_heads": kv_heads // ranks, "head_dim": size}


def ranks_of(model: transformers.PreTrainedModel) -> int:
    """Processes that share a model by transformers' tensor parallelism, a part of its heads each; 1: it is whole."""
    return getattr(model, "_tp_size", None) or 1


def kv_dtype(model: transformers.PreTrainedModel, wanted: str | None) -> str:
    """Of keys and values in memory: `wanted`, or the model's own."""
    if wanted is not None:
        return wanted
    if model.dtype == torch.float32 and next(model.parameters()).device.type == "cuda":
        raise Unsupported(f"{type(model).__name__} is a float32 model on a GPU, whose kernels keep keys and values as "
                          'float16 or bfloat16: load it with dtype=torch.bfloat16, or give kv_dtype="f16"')
    return DTYPES[model.dtype]


def logit_options(model: transformers.PreTrainedModel, config: Any, kinds: Sequence[LayerKind]) -> dict[str, float]:
    """Scale and soft-cap of the layers that are Sluice's, as EngineOptions have them. A scale is what their attention
    calls so, if that is one number; 0 leaves it to each call."""
    ours = [index for index, kind in enumerate(kinds) if kind.make is None]
    layers = _layer_configs(config, len(kinds))
    caps = {getattr(layers[index], "attn_logit_softcapping", None) or 0.0 for index in ours}
    if len(caps) > 1:
        raise Unsupported(f"{type(model).__name__} has layers of different attn_logit_softcapping {sorted(caps)}; "
                          "Sluice serves one")
    scales = {module.layer_idx: module.scaling for module in model.get_decoder().modules()
              if isinstance(getattr(module, "scaling", None), float) and hasattr(module, "layer_idx")}
    first = scales.get(ours[0], 0.0)
    uniform = first > 0 and all(same_number(scales.get(index, 0.0), first) for index in ours)
    return {"softcap": float(caps.pop()), "scale": first if uniform else 0.0}


def refuse_of_the_model(options: Iterable[str]) -> None:
    """Raises InvalidArgument if options of an engine are given that the model itself says."""
    given = sorted({"scale", "softcap", "windows"}.intersection(options))
    if given:
        raise InvalidArgument(f"{', '.join(given)}: the model itself says that; leave it out")
    if "policies" in options:
        raise InvalidArgument("policies: the engine is for the policy that the model is given; leave it out, and give "
                              "the model another policy")


def dense_tokens(policy: str, device: torch.device, ranks: int) -> int:
    """Of an engine for the default policy on a GPU, what the engine finds best. Others choose however short a sequence
    is; and so do ranks, which might find different lengths best."""
    return DENSE_AUTO if policy == "sluice" and device.type != "cpu" and ranks == 1 else 0


def choose_near(made: EngineOptions, given: int | None, tokens: int, share: float = SHARE) -> None:
    """Sets near_bytes of an engine for sequences of as many tokens: `given`, or by what the GPU has free if that is
    None, as default_near_bytes has it. On the CPU nothing is near unless it is given."""
    if made.device != "cpu":
        settle_near(made, given, tokens, DeviceMemory(*torch.cuda.mem_get_info(made.device)), share)


def _layer_configs(config: Any, layers: int) -> list[Any]:
    """The config of each layer: since 5.23 a model may have different ones."""
    of_layers = getattr(config, "per_layer_config", None)
    return [config] * layers if of_layers is None else [of_layers[index] for index in range(layers)]


def layer_kinds(model: transformers.PreTrainedModel, config: Any, *, windows: bool = False) -> list[LayerKind]:
    """What keeps the tokens of each layer. A window that is not shorter than the longest sequence is none; layers with
    shorter ones are Sluice's if `windows` says so, else the library's."""
    types, options = get_layer_types_and_kwargs(config)
    kinds = []
    for index, kind in enumerate(types):
        # Up to 5.17 one dict of all layers.
        each = options if isinstance(options, dict) else options[index]
        window = each.get("sliding_window") if kind == "sliding_attention" else None
        whole = kind == "full_attention" or window is not None and hides_nothing(window, config)
        if whole or windows and window:
            kinds.append(LayerKind(kind, None, 0 if whole else window))
        else:
            kinds.append(LayerKind(kind, functools.partial(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, dict), **each)))
    name, others = type(model).__name__, sorted({kind.type for kind in kinds if kind.make is not None})
    unknown = [kind for kind in others if kind not in _LIBRARY_TYPES]
    if unknown:
        raise Unsupported(f"{name} has layers of {', '.join(unknown)}, which Sluice does not serve")
    if all(kind.make is not None for kind in kinds):
        raise Unsupported(f"{name} has layers of {', '.join(others)} alone; Sluice is for full_attention, and there "
                          "would be nothing for it to do")
    return kinds


def longest(config: Any) -> int:
    """Tokens of the longest sequence that the model is made for. Positions that are scaled to more than the model was
    trained with count as scaled."""
    most = getattr(config, "max_position_embeddings", None) or 1 << 17
    scaled = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in (scaled, *scaled.values()):  # Of all layers, or by their kind.
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("yarn", "dynamic"):
            trained = rope.get("original_max_position_embeddings") or most
            most = max(most, int(trained * (rope.get("factor") or 1)))
    return most


def hides_nothing(window: int, config: Any) -> bool:
    """Whether no sequence that the model is made for outgrows this window."""
    return window > longest(config.get_text_config(decoder=True))


def refuse_rehearsed(policy: str) -> None:
    """Raises Unsupported if a policy wants queries that nobody makes of a model's layers."""
    if Features.REHEARSED in wanted_by(policy).largest.features:
        raise Unsupported(f"policy {policy} chooses by rehearsed queries, which models of transformers do not hand over; "
                          "leave the stage rehearsed out, or drive a sluice.Engine")


def refuse_options(options: dict[str, Any]) -> None:
    """Raises Unsupported if a model's code gives its attention what Sluice's does not know."""
    for name in ("position_bias", "sinks", "indices", "block_indices", "output_attentions"):
        if not (options.get(name) is None or options[name] is False):
            raise Unsupported(f"this model's attention has {name}, which no kernel of Sluice has")


def refuse(model: transformers.PreTrainedModel, config: Any) -> None:
    """Raises Unsupported with the reason if Sluice cannot serve the model."""
    name = type(model).__name__
    refuse_taken(model)
    if config.num_hidden_layers < 1:
        raise Unsupported(f"{name} has num_hidden_layers {config.num_hidden_layers}; it must have a layer")
    layers = _layer_configs(config, config.num_hidden_layers)
    if not model._can_set_attn_implementation() or not hasattr(layers[0], "num_attention_heads"):
        raise Unsupported(f"{name} does not call its attention through transformers' AttentionInterface")
    if (model.config.is_encoder_decoder or not getattr(config, "is_causal", True)
            or getattr(config, "add_cross_attention", False) or getattr(config, "cross_attention_layers", None)):
        raise Unsupported(f"{name} is no decoder of its own: Sluice serves causal self-attention alone")
    # "vision": tokens of an image alone, which their masks tell.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise Unsupported(f"{name} has use_bidirectional_attention: Sluice serves causal attention alone")
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise Unsupported(f"{name} has layers that share keys and values with others, which Sluice does not serve")
    rank = next((each for layer in layers if (each := getattr(layer, "kv_lora_rank", None)) is not None), None)
    if rank is not None:
        raise Unsupported(f"{name} has kv_lora_rank {rank}, latent attention, which is not served")
    _refuse_placement(model, name)


def implementations(config: Any) -> str | dict[str, str]:
    """The attention of a model and of its parts, as set_attn_implementation takes them."""
    parts = {name: getattr(config, name)._attn_implementation for name in config.sub_configs
             if getattr(config, name, None) is not None}
    return {"": config._attn_implementation, **parts} if parts else config._attn_implementation


def refuse_taken(model: transformers.PreTrainedModel) -> None:
    """Raises InvalidArgument if the model, or a part of it, has an attention of Sluice's."""
    now = implementations(model.config)
    taken = [each for each in (now.values() if isinstance(now, dict) else (now,)) if each in _NAMES]
    if taken:
        by = "what enable() has returned" if taken[0] == NAME else "the PackedModel that serves it"
        raise InvalidArgument(f"{type(model).__name__} is enabled already; close() {by} first")


def install(model: transformers.PreTrainedModel, name: str) -> str | dict[str, str]:
    """Gives the model the attention of that name, unless it has one of Sluice's already: then raises InvalidArgument.
    Returns what set_attn_implementation() takes to bring back what was before."""
    with changing:
        refuse_taken(model)
        before = implementations(model.config)
        model.set_attn_implementation(name)
        return before


def _refuse_placement(model: transformers.PreTrainedModel, name: str) -> None:
    if ranks_of(model) > 1 and not _splits_heads(model):
        raise Unsupported(f"{name} is shared by {ranks_of(model)} ranks, and its plan of tensor parallelism leaves the "
                          "heads of its attention whole; Sluice serves plans with a k_proj that is colwise. Start one "
                          "process")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).partition(":")[0] not in ("cpu", "cuda"):
        raise Unsupported(f"{name} is on {', '.join(sorted(devices))}; Sluice serves the CPU or one CUDA device")
    if model.dtype not in DTYPES:
        raise Unsupported(f"{name} is of {model.dtype}; convert it to float32, float16 or bfloat16")


def _splits_heads(model: transformers.PreTrainedModel) -> bool:
    return any(name.rpartition(".")[2] == "k_proj" and style == "colwise" for name, style in model.tp_plan.items())
