"""Keys of a model made even, so that 4-bit copies of them tell more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers

from sluice._transformers_support import NAME
from sluice.errors import InvalidArgument, Unsupported

_MOST = 8  # Of an exponent: a model whose pairs differ by more has other troubles.


@dataclass
class _Layer:
    """Where a layer's queries and keys can be scaled: the projections, or the norms behind them."""

    queries: torch.nn.Module
    keys: torch.nn.Module
    head_dim: int
    kv_heads: int
    q_heads: int
    rotated: int  # channels of a head that positions rotate: c together with c + rotated / 2

    def paired(self, energy: torch.Tensor) -> torch.Tensor:
        """Of [..., head_dim] values the sums of each pair, at both of its channels."""
        half = self.rotated // 2
        pairs = energy[..., :half] + energy[..., half:self.rotated]
        return torch.cat([pairs, pairs, 2 * energy[..., self.rotated:]], -1)

    def scale(self, exponents: torch.Tensor) -> None:
        """Keys by 2^exponents [kv_heads or 1, head_dim], queries by the inverse."""
        _scale(self.keys, exponents, self.kv_heads)
        _scale(self.queries, -exponents, self.q_heads)


def _scale(module: torch.nn.Module, exponents: torch.Tensor, heads: int) -> None:
    head_dim = exponents.shape[-1]
    for values in (module.weight, getattr(module, "bias", None)):
        if values is None:
            continue
        own = values.shape[0] // head_dim  # 1: a norm that all heads share
        each = exponents.repeat_interleave(max(1, own // exponents.shape[0]), 0)
        factors = torch.exp2(each.to(values.device)).to(values.dtype)
        values.data.view(own, head_dim, -1).mul_(factors[:, :, None])


def _layer_of(name: str, module: torch.nn.Module, config: transformers.PretrainedConfig) -> _Layer:
    head_dim = getattr(module, "head_dim", config.hidden_size // config.num_attention_heads)
    chosen = []
    for which in "qk":
        projection = getattr(module, f"{which}_proj")
        norm = getattr(module, f"{which}_norm", None)
        for each in (projection, norm):
            if each is None:
                continue
            weight = getattr(each, "weight", None)
            if type(weight) is not torch.nn.Parameter or weight.dtype not in (torch.float32, torch.float16,
                                                                               torch.bfloat16):
                raise Unsupported(f"the weights of {which}_proj or {which}_norm of {name} are no plain floats; balance "
                                  "the model before it is quantized, sharded or given adapters")
        chosen.append((norm if norm is not None else projection, projection.weight.shape[0] // head_dim))
    rotated = int(head_dim * (getattr(config, "partial_rotary_factor", None) or 1)) // 2 * 2
    (queries, q_heads), (keys, kv_heads) = chosen
    return _Layer(queries, keys, head_dim, kv_heads, q_heads, rotated)


def _layers_of(model: transformers.PreTrainedModel) -> list[_Layer]:
    config = model.config.get_text_config(decoder=True)
    found = [_layer_of(name, module, config) for name, module in model.get_decoder().named_modules()
             if hasattr(module, "q_proj") and hasattr(module, "k_proj")]
    if not found:
        raise Unsupported(f"{type(model).__name__} has no layer with q_proj and k_proj, whose weights could be scaled")
    return found


def _exponents(layers: list[_Layer], model: transformers.PreTrainedModel,
               ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """By which to scale each layer's keys, [kv_heads or 1, head_dim], and the logits."""
    seen: dict[int, torch.Tensor] = {}

    def look(layer: _Layer, output: torch.Tensor) -> None:
        keys = output.detach().float()
        energy = layer.paired(keys.reshape(-1, layer.keys.weight.shape[0] // layer.head_dim, layer.head_dim) ** 2)
        # The median, as a text's first token often has keys unlike all others.
        wanted = -0.25 * torch.log2(energy.median(0).values.clamp(min=1e-30))
        seen[id(layer)] = (wanted - wanted.mean(-1, keepdim=True)).round().clamp(-_MOST, _MOST)

    hooks = [layer.keys.register_forward_hook(lambda _, __, output, layer=layer: look(layer, output))
             for layer in layers]
    try:
        logits = model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return [seen[id(layer)] for layer in layers], logits


@torch.no_grad()
def balance(model: transformers.PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Scales channels of queries and keys in the model's weights, so that keys are about as large in all of them: then
    a 4-bit copy of a key (policies with `int4`, the default among them) loses less of what decides its rank. Factors
    are powers of two, one for both channels that positions rotate together, for keys, and its inverse for queries: the
    model's outputs stay bit by bit what they are, and it takes no longer. It has to be done once; `save_pretrained`
    writes a model that every program can load, Sluice's own or another one.

    `ids` [rows, tokens]: some text, by which the size of keys is judged; 1,000 tokens are enough. Both before and after
    the model is run on them, and what it returns compared.

    Returns the exponents of keys, [KV heads, or 1 where a norm is shared by them, head_dim] for each layer.

    Raises Unsupported if the weights are quantized, sharded or fused, or if the outputs would not stay what they are,
    as positions rotate other channels together; InvalidArgument while Sluice serves the model. The model is then as it
    was."""
    if getattr(model.config, "_attn_implementation", None) == NAME:
        raise InvalidArgument("Sluice serves this model; balance it before enable(), or behind close()")
    layers = _layers_of(model)
    exponents, before = _exponents(layers, model, ids)
    for layer, own in zip(layers, exponents, strict=True):
        layer.scale(own)
    after = model(ids, use_cache=False).logits
    if (after - before).abs().max() <= 1e-3 * before.abs().max():
        return exponents
    for layer, own in zip(layers, exponents, strict=True):
        layer.scale(-own)
    raise Unsupported(f"{type(model).__name__} gives other outputs when channels c and c + head_dim / 2 of queries and "
                      "keys are scaled; it is as it was")
