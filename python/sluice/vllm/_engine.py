"""The engine for a model that vLLM has loaded, and how many of vLLM's blocks its host memory is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from sluice._near import SERVED_SHARE, DeviceMemory, settle_near
from sluice._torch import DTYPES, one_shape, same_number
from sluice.admission import AdmissionOptions
from sluice.engine import Engine
from sluice.errors import Error, InvalidArgument, OutOfCapacity, Unsupported
from sluice.options import DENSE_AUTO, Bucket, EngineOptions, Features, _refuse_scores, wanted_by
from sluice.vllm._config import OWNER, Settings, settings_of


def in_order(specs: Mapping[str, Any]) -> list[str]:
    """Names of a model's attention layers, in the order in which they attend.
    @throws Unsupported naming a layer that is not served"""
    if not specs:
        raise Unsupported("this rank has no layer that attends: give a smaller --pipeline-parallel-size, or each rank "
                          "some layers by VLLM_PP_LAYER_PARTITION")
    for name, spec in specs.items():
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise Unsupported(f"layer {name} has a cache of the kind {type(spec).__name__}; Sluice serves full "
                              "attention and windows of the newest tokens: serve the model without --worker-cls")
    indices = {name: extract_layer_index(name) for name in specs}
    if len(set(indices.values())) != len(indices):
        raise Unsupported(f"layers {', '.join(sorted(indices))} have the same numbers; Sluice serves models whose "
                          "layers attend once each: serve the model without --worker-cls")
    return sorted(indices, key=indices.__getitem__)


def make_engine(config: Any, layers: Sequence[Any], settings: Settings, device: torch.device,
                device_bytes: int | None) -> Engine:
    """`layers`: vLLM's, in order, with Sluice's attention. `device_bytes`: most that is taken of a GPU's memory."""
    try:
        made = engine_options(config, layers, settings, device)
        if device.type != "cpu":
            made.device_bytes = made.device_bytes or device_bytes
            settle_near(made, settings.near_bytes, config.model_config.max_model_len,
                        DeviceMemory(*torch.cuda.mem_get_info(device)), SERVED_SHARE)
        return Engine(made, owner=OWNER)
    except Error as error:
        raise type(error)(str(error).replace("EngineOptions.", OWNER)) from None


def engine_options(config: Any, layers: Sequence[Any], settings: Settings, device: torch.device) -> EngineOptions:
    """All but `near_bytes`, which depends on the memory that a GPU has."""
    scheduler, context = config.scheduler_config, config.model_config.max_model_len
    windows = [each.sliding_window if each.sliding_window and each.sliding_window < context else 0 for each in layers]
    options = {"dense_tokens": DENSE_AUTO if settings.policy == "sluice" and device.type != "cpu" else 0,
               "kv_dtype": kv_dtype(layers, device), **settings.options}
    made = EngineOptions(
        layers=len(layers), **_shape(layers), **_logits(layers), windows=windows if any(windows) else None,
        device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
        host_bytes=settings.host_bytes // ranks_of(config, len(layers)),
        near_bytes=settings.near_bytes if device.type == "cpu" else None,
        # One more for a prefix on its way to the disk or from there, so that requests leave room for it.
        sequences=scheduler.max_num_seqs + (settings.disk is not None),
        in_flight=2, window_slack=0,
        largest=Bucket(decode_rows=scheduler.max_num_seqs, prefill_rows=scheduler.max_num_batched_tokens,
                       prefills=scheduler.max_num_seqs, max_tokens=context),
        policies=[settings.policy], **options)
    if Features.REHEARSED in wanted_by(settings.policy).largest.features:
        raise Unsupported(f"{OWNER}policy {settings.policy} chooses by rehearsed queries, which models of vLLM do not "
                          "hand over; leave the stage rehearsed out")
    _refuse_scores(settings.policy)
    return made


def kv_dtype(layers: Sequence[Any], device: torch.device) -> str:
    """Of keys and values in memory: the model's."""
    kinds = {each.kv_cache_torch_dtype for each in layers}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        raise Unsupported(f"keys and values of {', '.join(sorted(map(str, kinds)))}: Sluice serves one type, float32, "
                          "float16 or bfloat16; give --dtype bfloat16")
    kind = kinds.pop()
    if kind == torch.float32 and device.type != "cpu":
        raise Unsupported("the model is of float32, and kernels keep keys and values as float16 or bfloat16: give "
                          "--dtype bfloat16")
    return DTYPES[kind]


def _shape(layers: Sequence[Any]) -> dict[str, int]:
    """Heads and their size; where ranks share a model, this rank's."""
    shapes = {(each.num_heads, each.num_kv_heads, each.head_size, each.head_size_v) for each in layers}
    heads, kv_heads, size = one_shape("the model", shapes, ": serve it without --worker-cls")
    return {"q_heads": heads, "kv_heads": kv_heads, "head_dim": size}


def _logits(layers: Sequence[Any]) -> dict[str, float]:
    """Soft-cap, which must be one; and scale, where it is one. Else queries are scaled at each call."""
    caps = {each.impl.softcap for each in layers}
    if len(caps) > 1:
        raise Unsupported(f"the model has layers of different soft-caps {sorted(caps)}; Sluice serves one: serve it "
                          "without --worker-cls")
    first = layers[0].impl.scale
    uniform = all(same_number(each.impl.scale, first) for each in layers)
    return {"softcap": caps.pop(), "scale": first if uniform else 0.0}


def ranks_of(config: Any, layers: int) -> Fraction:
    """How many ranks of as many layers and heads as this one would be the model: host memory is shared by these."""
    parallel, model = config.parallel_config, config.model_config
    whole = layers if parallel.pipeline_parallel_size == 1 else model.get_total_num_hidden_layers()
    return Fraction(parallel.tensor_parallel_size * whole, layers)


def block_bytes(engine: Engine, config: Any, small: int) -> int:
    """Host memory as vLLM is to count it, whose blocks of all layers take `small` bytes. It divides layers with windows
    and others into groups, which share the blocks; so does the engine.
    @throws OutOfCapacity if there is no room for one sequence of the longest context"""
    shares, context = AdmissionOptions.of(engine), config.model_config.max_model_len
    block_tokens = config.cache_config.block_size
    if block_tokens % shares.page_tokens:
        raise InvalidArgument(f"--block-size is {block_tokens} and {OWNER}page_tokens {shares.page_tokens}; the first "
                              "must be a multiple of the second")
    # vLLM keeps one block for itself, and counts whole blocks.
    pages = -(-(context + 2 * block_tokens) // shares.page_tokens)
    needed = shares.page_blocks * pages + shares.window_blocks * min(pages, shares.window_pages)
    if needed > shares.pages:
        ranks, host = ranks_of(config, engine.options.layers), engine.options.host_bytes
        least = math.ceil(-(-host * needed // shares.pages) * ranks)
        raise OutOfCapacity(f"{OWNER}host_bytes is {settings_of(config).host_bytes:,}, which do not hold a sequence of "
                            f"{context:,} tokens; give {least:,} at least, or a smaller --max-model-len")
    return shares.pages * shares.page_tokens * small // ((shares.page_blocks + shares.window_blocks) * block_tokens)
