"""What of a model of transformers the server serves, and the options of its engine that the model decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers

from sluice._transformers_cache import LayerKind
from sluice._transformers_support import attention_shape, kv_dtype, layer_kinds, logit_options, refuse
from sluice.errors import Unsupported
from sluice.options import EngineOptions


def engine_options(model: transformers.PreTrainedModel, config: Any, kinds: Sequence[LayerKind],
                   **options: Any) -> EngineOptions:
    """`options`: others of EngineOptions."""
    device = next(model.parameters()).device
    return EngineOptions(
        layers=config.num_hidden_layers, **attention_shape(model, config, kinds), **logit_options(model, config, kinds),
        device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
        **{**options, "kv_dtype": kv_dtype(model, options.get("kv_dtype"))})


def served_layers(model: transformers.PreTrainedModel, config: Any) -> list[LayerKind]:
    """All layers; raises Unsupported with the reason if the server cannot serve the model."""
    refuse(model, config)
    name, kinds = type(model).__name__, layer_kinds(model, config, windows=True)
    others = sorted({kind.type for kind in kinds if kind.make is not None})
    if others:
        raise Unsupported(f"{name} has layers of {', '.join(others)}; the server takes full_attention and "
                          "sliding_attention alone. sluice.transformers.enable() has generate() serve the others")
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(part for part in parameters.values() if isinstance(part, dict))):
        if each.get("rope_type") in ("dynamic", "longrope"):
            raise Unsupported(f"{name} has rope_type {each['rope_type']}: its positions depend on the longest sequence "
                              "of a forward, so that answers would depend on other requests; choose linear, yarn or "
                              "llama3 in its configuration")
    return kinds
