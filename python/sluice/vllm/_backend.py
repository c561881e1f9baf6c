"""Attention as vLLM calls it: metadata for a step, which is the forward's plan, and each layer's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder,
                                       AttentionType, MultipleOf)

from sluice._torch import scaled, take_sinks
from sluice.errors import InvalidArgument, Unsupported
from sluice.options import Bucket
from sluice.vllm._config import Settings, settings_of
from sluice.vllm._forwards import Forwards, Rows


@dataclass
class Link:
    """What a worker, its model's layers and their builders of metadata know of each other. vLLM makes each of them by
    itself."""

    settings: Settings
    requests: Callable[[], Sequence[str]]  #: of the step at hand, in the order of its rows
    forwards: Forwards | None = None  #: None: there is no engine yet
    layers: dict[str, int] = field(default_factory=dict)  #: the engine's number of each layer

    def planned(self, common: Any) -> Metadata:
        """For what vLLM builds metadata. Layers of different windows have different builders, and share a plan."""
        forwards = self.forwards
        if forwards is None or not forwards.running:
            return Metadata(Bucket(decode_rows=common.num_actual_tokens), False)
        if forwards.planned is None:
            # On the host, and exact: only speculation would make them bounds.
            ends, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
            reads = common.is_prefilling.tolist()
            single = common.max_query_len == 1
            rows = []
            for index, request in enumerate(self.requests()[: common.num_reqs]):
                tokens = ends[index + 1] - ends[index]
                if tokens:
                    rows.append(Rows(request, tokens, lengths[index] - tokens,
                                     not single and (tokens > 1 or reads[index])))
            forwards.plan(rows, common.num_actual_tokens if single else 0, _stream(common.query_start_loc))
        return Metadata(forwards.planned, True)


# By the part of a configuration that all of a model's layers share; vLLM copies the rest for parts of a model.
_links: dict[int, tuple[Any, Link]] = {}


def link(config: Any, settings: Settings, requests: Callable[[], Sequence[str]]) -> Link:
    """Of a new worker with this configuration: the model and the builders that are made with it find it."""
    shared = config.compilation_config
    _links[id(shared)] = shared, Link(settings, requests)  # Held, so that no other one has its number.
    return _links[id(shared)][1]


def unlink(config: Any) -> None:
    """Of a worker that has ended."""
    _links.pop(id(config.compilation_config), None)


def forwards_of(config: Any) -> Forwards | None:
    """Of the worker with this configuration, if that is in this process and has an engine."""
    found = _links.get(id(config.compilation_config))
    return None if found is None else found[1].forwards


def _link_of(config: Any) -> Link:
    found = _links.get(id(config.compilation_config))
    if found is None:
        raise InvalidArgument("--attention-backend CUSTOM is Sluice's, which needs its worker: give --worker-cls "
                              "sluice.vllm.Worker, too")
    return found[1]


@dataclass
class Metadata:
    """Of a step, or of a trial of vLLM's, for which nothing is planned."""

    bucket: Bucket
    planned: bool


class Builder(AttentionMetadataBuilder[Metadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._link = _link_of(vllm_config)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        # A thread that waits in each layer cannot be captured.
        waits = settings_of(vllm_config).options.get("handover") == "host"
        return AttentionCGSupport.NEVER if waits else cls._cudagraph_support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        return self._link.planned(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        forwards, rows = self._link.forwards, common_attn_metadata.num_actual_tokens
        if forwards is None:
            return Metadata(Bucket(decode_rows=rows), False)
        largest = forwards.engine.options.largest
        return Metadata(Bucket(decode_rows=rows, max_tokens=largest.max_tokens, features=largest.features), False)

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        return False


class Attention(AttentionImpl):
    """One layer's."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
                 sinks: torch.Tensor | None = None, **others: Any) -> None:
        unknown = sorted(name for name, value in others.items() if value is not None and value is not False)
        for wrong, what in (
            (alibi_slopes is not None, "ALiBi"),
            (attn_type != AttentionType.DECODER, f"attention of the type {attn_type}"),
            (kv_sharing_target_layer_name is not None, f"keys and values of {kv_sharing_target_layer_name}"),
            (bool(logits_soft_cap) and sinks is not None, "both a soft-cap and sinks"),
            (bool(unknown), ", ".join(unknown)),
        ):
            if wrong:
                raise Unsupported(f"a layer of the model has {what}, which Sluice does not serve: serve it without "
                                  "--worker-cls")
        self._link = _link_of(get_current_vllm_config())
        # vLLM's own names.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.softcap = float(logits_soft_cap or 0.0)

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Metadata | None, output: torch.Tensor, output_scale: torch.Tensor | None = None,
                output_block_scale: torch.Tensor | None = None) -> torch.Tensor:
        """query, output [rows, num_heads, head_size], key and value alike of num_kv_heads; rows behind those of the
        bucket are padding. Without a plan all attention is 0, unless it is captured."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("outputs of attention that are quantized: leave pass_config's fuse_attn_quant out")
        forwards = self._link.forwards
        if attn_metadata is None or forwards is None or not (attn_metadata.planned or _captures(query)):
            return output.zero_()
        bucket = attn_metadata.bucket
        query, key, value, out = (each[: bucket.rows] for each in (query, key, value, output))
        query = scaled(query, self.scale, forwards.engine.options)
        lse = None if self.sinks is None else torch.zeros(query.shape[:2], dtype=torch.float32, device=query.device)
        forwards.attend(bucket, self._link.layers[layer.layer_name], query, key, value, out, lse, _stream(query))
        if lse is not None:
            take_sinks(out, lse, self.sinks)
        return output


def _stream(tensor: torch.Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _captures(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Backend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Attention]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        return [MultipleOf(8)]

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto") -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False
