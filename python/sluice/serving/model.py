"""A model of transformers that runs over packed rows: one forward has rows of many sequences behind each other."""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from sluice._transformers_support import DTYPES, attention_shape, layer_kinds, longest, refuse
from sluice.engine import Engine
from sluice.errors import Error, InvalidArgument, Unsupported
from sluice.options import Bucket, EngineOptions, PlanItem

NAME = "sluice_packed"
_NOT_SERVED = ("softcap", "s_aux", "position_bias", "sinks", "indices", "block_indices", "output_attentions")


@dataclasses.dataclass
class _Forward:
    """What the attention function needs to know of the forward that runs."""

    engine: Engine
    bucket: Bucket
    stream: Any
    layer: int = 0  #: the next one


_running: contextvars.ContextVar[_Forward | None] = contextvars.ContextVar("sluice_packed", default=None)


class PackedModel:
    """A model and the engine that keeps its keys and values. Not to be used by two threads at once."""

    def __init__(self, model: transformers.PreTrainedModel, policy: str = "sluice", host_bytes: int = 1 << 30, *,
                 context: int | None = None, sequences: int = 16, prefill_rows: int = 2048, **options: Any) -> None:
        """`host_bytes`: for keys and values. `context`: tokens of a sequence, at most; None: the model's. `sequences`:
        that live at once. `prefill_rows`: tokens of prompts that one forward takes. `options` are others of
        EngineOptions.
        @throws Unsupported naming what the model has that is not served"""
        config = model.config.get_text_config(decoder=True)
        _refuse(model, config)
        self.policy, self._model = policy, model.eval()
        self.context: int = min(context or longest(config), longest(config))
        """Tokens of a sequence, prompt and answer, at most."""

        self.vocabulary: int = config.vocab_size
        """Ids of tokens are below this."""

        device = next(model.parameters()).device
        made = EngineOptions(
            layers=config.num_hidden_layers, **attention_shape(model, config, layer_kinds(model, config)),
            device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}", host_bytes=host_bytes,
            sequences=sequences,
            largest=Bucket(decode_rows=sequences, prefill_rows=prefill_rows, prefills=sequences),
            **{"kv_dtype": DTYPES[model.dtype], **options})
        made.make_room_for(policy, self.context)
        if made.cpu_sequences:
            made.cpu_sequences = sequences
        self._device, self._before = device, model.config._attn_implementation
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        # No mask is registered for this name, and so none is made: the engine knows which rows are whose.
        transformers.AttentionInterface.register(NAME, attention)
        self.engine = Engine(made)
        try:
            model.set_attn_implementation(NAME)
        except BaseException:
            self.engine.close()
            raise

    def close(self) -> None:
        """Leaves the model as it was, and gives all memory back."""
        self._model.set_attn_implementation(self._before)
        self.engine.close()

    def run(self, items: Sequence[PlanItem], ids: Sequence[int], kept: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Plans and enqueues a forward: its number, which is to be finished before anything of it is used, and the
        logits [len(kept), vocabulary] in f32 of the rows `kept`. `ids` are those of all items' tokens, in their order.
        If it fails, nothing is under way."""
        bucket = self._bucket(items)
        positions = []
        for item in items:
            first = self.engine.tokens(item.sequence)
            positions.extend(range(first, first + item.tokens))
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        number = self.engine.plan(items, bucket, stream)
        running = _Forward(self.engine, bucket, stream)
        before = _running.set(running)
        try:
            logits = self._logits(ids, positions, kept)
            if running.layer != self.engine.options.layers:
                raise Unsupported(f"the model attended in {running.layer} layers, and its configuration says "
                                  f"{self.engine.options.layers}")
        except BaseException:
            self.cancel(number)
            raise
        finally:
            _running.reset(before)
        return number, logits

    def cancel(self, number: int) -> None:
        """Takes a forward back, if it is still there."""
        try:
            self.engine.cancel(number)
        except Error:
            pass  # It was taken back when it failed.

    def _bucket(self, items: Sequence[PlanItem]) -> Bucket:
        largest = self.engine.options.largest
        decoded = sum(item.tokens for item in items if not item.prefill)
        prompts = [item.tokens for item in items if item.prefill]
        return Bucket(decode_rows=decoded, prefill_rows=sum(prompts), prefills=len(prompts),
                      features=largest.features if decoded else 0)

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int], positions: Sequence[int], kept: Sequence[int]) -> torch.Tensor:
        def row(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=self._device)

        rows = row(kept)
        options = {"logits_to_keep": rows} if self._keeps else {}
        logits = self._model(input_ids=row(ids)[None], position_ids=row(positions)[None], use_cache=False,
                             **options).logits[0]
        return (logits if self._keeps else logits[rows]).float()


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              **options: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, q_heads, rows, head_dim], key, value alike of kv_heads; returns [1,
    rows, q_heads, head_dim]."""
    running = _running.get()
    if running is None:
        raise InvalidArgument("this model is served by sluice.serving: it runs through that alone until close()")
    for name in _NOT_SERVED:
        if not (options.get(name) is None or options[name] is False):
            raise Unsupported(f"this model's attention has {name}, which is not served")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise Unsupported("this model's attention is more than causal, which is not served")
    if dropout:
        raise Unsupported(f"dropout is {dropout}: call model.eval()")
    if module.layer_idx != running.layer:
        raise Unsupported(f"layer {module.layer_idx} attends where layer {running.layer} should: models whose layers "
                          "do not attend once each, in order, are not served")
    if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6:
        query = query * (scaling * query.shape[-1] ** 0.5)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    running.engine.attend(running.bucket, running.layer, q, k, v, out, stream=running.stream)
    running.layer += 1
    return out[None], None


def _refuse(model: transformers.PreTrainedModel, config: Any) -> None:
    refuse(model, config)
    name = type(model).__name__
    others = sorted({kind.type for kind in layer_kinds(model, config) if kind.make is not None})
    if others:
        raise Unsupported(f"{name} has layers of {', '.join(others)}; models are served all of whose layers are "
                          "full_attention")
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(part for part in parameters.values() if isinstance(part, dict))):
        if each.get("rope_type") in ("dynamic", "longrope"):
            raise Unsupported(f"{name} has rope_type {each['rope_type']}: its positions depend on the longest sequence "
                              "of a forward, so that answers would depend on other requests; choose linear, yarn or "
                              "llama3 in its configuration")
