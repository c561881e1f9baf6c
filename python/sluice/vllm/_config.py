"""A configuration of vLLM: Sluice's options in it, and what is refused of it before anything is loaded."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from sluice.errors import InvalidArgument, Unsupported
from sluice.serving.arguments import check_options, size
from sluice.serving.process import Settings as Server

OWNER = "--additional-config.sluice."
"""What messages have before names of options."""

BACKEND = "sluice.vllm.Backend"
SCHEDULERS = {False: "sluice.vllm.Scheduler", True: "sluice.vllm.AsyncScheduler"}
# Of EngineOptions, what sets them.
_OTHERS = {**dict.fromkeys(("layers", "q_heads", "kv_heads", "head_dim", "scale", "softcap", "windows"), "the model"),
           "device": "vLLM", "sequences": "--max-num-seqs", "in_flight": "--async-scheduling",
           "largest": "--max-num-seqs, --max-num-batched-tokens and --max-model-len", "window_slack": "Sluice",
           "policies": "policy", "prefix_bytes": "--enable-prefix-caching"}
_PREFIXES = "enable_prefix_caching"  # What vLLM's own option of this name said.
# Policies that are not alike in all layers: presets by name, and what makes others so.
_BY_LAYER = re.compile(r"\b(quest|twilight|arkvale|adamas|infinigen|magicpig|pyramidkv)\b|\b(dense|pyramid)\s*=\s*[1-9]"
                       r"|\bevery\s*=\s*([2-9]|1\d)")
_KV_DTYPES = ("auto", "float16", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """Sluice's options, with the defaults of its own server."""

    policy: str = Server.policy
    host_bytes: int = Server.host_bytes
    near_bytes: int | None = None
    prefixes: bool = False  #: prompts begin with what is known of them
    disk: Path | None = None  #: a folder for prefixes that host memory has no room for
    disk_bytes: int = 0  #: and what they may take there
    options: dict[str, Any] = field(default_factory=dict)  #: others of EngineOptions


def settings_of(config: Any) -> Settings:
    """What `--additional-config` says of Sluice.
    @throws InvalidArgument naming what it may not be"""
    additional = config.additional_config
    given = additional.get("sluice", {}) if isinstance(additional, dict) else {}
    if not isinstance(given, dict):
        raise InvalidArgument(f'--additional-config has {given!r} for "sluice"; it must be an object, such as '
                              '{"sluice": {"policy": "full"}}')
    options = dict(given)
    policy = options.pop("policy", Settings.policy)
    host_bytes = _bytes("host_bytes", options.pop("host_bytes", Settings.host_bytes))
    near_bytes, prefixes = options.pop("near_bytes", None), options.pop(_PREFIXES, False)
    disk, disk_bytes = _disk(options.pop("disk", None), options.pop("disk_bytes", None))
    check_options(options, policy, OWNER, _OTHERS)
    return Settings(policy, host_bytes, None if near_bytes is None else _bytes("near_bytes", near_bytes),
                    bool(prefixes), disk, disk_bytes, options)


def _disk(path: Any, most_bytes: Any) -> tuple[Path | None, int]:
    if (path is None) != (most_bytes is None):
        raise InvalidArgument(f"{OWNER}disk and {OWNER}disk_bytes belong together; give both, or neither")
    if path is None:
        return None, 0
    if not isinstance(path, str) or not path:
        raise InvalidArgument(f"{OWNER}disk is {path!r}; it must be the name of a folder")
    try:  # No shell has done it inside JSON.
        folder = Path(path).expanduser()
    except RuntimeError:
        raise InvalidArgument(f"{OWNER}disk is {path!r}, and there is no such user; write the folder out") from None
    return folder, _bytes("disk_bytes", most_bytes)


def _bytes(name: str, value: Any) -> int:
    try:
        return size(str(value))
    except argparse.ArgumentTypeError as reason:
        raise InvalidArgument(f"{OWNER}{name}: {reason}") from None


def adapt(config: Any) -> None:
    """Makes a configuration that asks for Sluice's worker what that serves. vLLM's own checks are behind it; they may
    be made again, and then this is, too.
    @throws Unsupported naming what is not served, and what to do"""
    settings = settings_of(config)
    refuse(config, settings)
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.model_config.disable_cascade_attn = True
    if config.cache_config.enable_prefix_caching:
        # The engine's, and not vLLM's own, whose blocks hold nothing. Said where other processes read it, too.
        config.cache_config.enable_prefix_caching = False
        if isinstance(config.additional_config, dict):
            config.additional_config["sluice"] = {**config.additional_config.get("sluice", {}), _PREFIXES: True}
    if config.scheduler_config.scheduler_cls is None:
        config.scheduler_config.scheduler_cls = SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
    if current_platform.is_cpu():
        # Or vLLM would look for memory of its own for them.
        config.cache_config.kv_cache_memory_bytes = settings.host_bytes


def refuse(config: Any, settings: Settings) -> None:
    """Raises Unsupported or InvalidArgument if Sluice cannot serve a configuration."""
    _refuse_model(config.model_config)
    _refuse_cache(config, settings)
    if settings.disk is not None:
        _refuse_disk(config, settings)
    parallel, attention = config.parallel_config, config.attention_config
    stages = parallel.pipeline_parallel_size
    for wrong, what, remedy in (
        (stages > 1 and _BY_LAYER.search(settings.policy) is not None, f"policy {settings.policy} with pipeline "
         "parallelism: it treats the first layers of a model apart, and each rank would do so with its own",
         "give a policy that is the same in all layers, such as sluice"),
        (parallel.distributed_executor_backend == "ray" and not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND,
         "vLLM's older executor of Ray, which passes the worker by", "leave VLLM_USE_RAY_V2_EXECUTOR_BACKEND out"),
        (config.speculative_config is not None, "speculative decoding, whose lengths are upper bounds when a forward "
         "is planned", "leave --speculative-config out"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism (DCP)",
         "leave --decode-context-parallel-size out"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism (PCP)",
         "leave --prefill-context-parallel-size out"),
        (parallel.use_ubatching, "microbatches (dual batch overlap)", "leave --enable-dbo out"),
        (attention.backend not in (None, AttentionBackendEnum.CUSTOM) or bool(attention.backend_per_kind),
         "another attention backend", "give --attention-backend CUSTOM"),
        (attention.use_non_causal, "attention that is not causal", "leave use_non_causal out"),
        (config.use_v2_model_runner, "vLLM's second model runner",
         "leave VLLM_USE_V2_MODEL_RUNNER out, or set it to 0"),
    ):
        if wrong:
            raise Unsupported(f"Sluice does not serve {what}: {remedy}")


def _refuse_model(model: Any) -> None:
    name = model.architecture
    for wrong, what in (
        (model.runner_type != "generate", "is not for generating text"),
        (model.use_mla, "has latent attention (MLA)"),
        (model.is_encoder_decoder, "has an encoder and a decoder"),
        (model.is_attention_free or model.is_hybrid, "has layers that are no attention, whose state is not kept"),
        (model.is_mm_prefix_lm, "has attention among the tokens of an image that is not causal"),
        (model.rswa_window is not None, "has windows that leave prompts visible (R-SWA)"),
    ):
        if wrong:
            raise Unsupported(f"{name} {what}, which Sluice does not serve: serve it without --worker-cls")
    if model.enable_sleep_mode:
        raise Unsupported("Sluice does not serve sleep: it would leave host memory as it is; leave --enable-sleep-mode "
                          "out")


def _refuse_cache(config: Any, settings: Settings) -> None:
    cache = config.cache_config
    if cache.cache_dtype not in _KV_DTYPES:
        raise Unsupported(f"--kv-cache-dtype {cache.cache_dtype}: Sluice keeps keys and values of the model's type, or "
                          f'rounded by itself: leave it out, and give {OWNER}kv_dtype "fp8_e4m3" for 8 bits')
    if config.kv_transfer_config is not None:
        raise Unsupported("Sluice does not serve KV connectors and --kv-offloading-size: its keys and values are in "
                          "host memory already, and vLLM has none that could be moved; leave them out")
    if cache.kv_sharing_fast_prefill:
        raise Unsupported("Sluice does not serve layers that share keys and values: leave "
                          "--kv-sharing-fast-prefill out")
    if cache.kv_cache_memory_bytes not in (None, settings.host_bytes) or cache.num_gpu_blocks_override is not None:
        raise InvalidArgument("--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE and --num-gpu-blocks-override say how "
                              f"much vLLM itself keeps, which is nothing: leave them out, and give {OWNER}host_bytes")


def _refuse_disk(config: Any, settings: Settings) -> None:
    parallel, scheduler = config.parallel_config, config.scheduler_config.scheduler_cls
    for wrong, why in (
        (not settings.prefixes and not config.cache_config.enable_prefix_caching,
         "--no-enable-prefix-caching keeps no prefixes"),
        (parallel.distributed_executor_backend != "uni" or parallel.world_size > 1,
         "the worker must be in the scheduler's process, and it is not with several GPUs, nor with "
         "--distributed-executor-backend mp, which a CPU has unless VLLM_ENABLE_V1_MULTIPROCESSING is 0"),
        (scheduler not in (None, *SCHEDULERS.values()), "--scheduler-cls names another scheduler than Sluice's"),
    ):
        if wrong:
            raise InvalidArgument(f"{OWNER}disk is for prefixes of prompts, and {why}; leave one of them out")
