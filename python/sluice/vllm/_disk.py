"""Prefixes on disk: the server's tier, of an engine with the keys and values of a model of vLLM."""

from __future__ import annotations

import hashlib
from typing import Any

from vllm.logger import init_logger

from sluice.engine import Engine
from sluice.serving.disk import Folder
from sluice.serving.sessions import signature
from sluice.serving.tier import DiskTier, kind_of
from sluice.vllm._config import OWNER, Settings
from sluice.vllm._plugin import version

logger = init_logger("vllm.sluice")


def disk_of(config: Any, settings: Settings, engine: Engine) -> DiskTier | None:
    """Where prefixes go that host memory has no room for; None without a folder for them.
    @throws InvalidArgument if the folder cannot be used"""
    if settings.disk is None:
        return None
    kind = kind_of(engine.options, signature_of(config, settings, engine))
    return DiskTier(engine, settings.policy, Folder(settings.disk, settings.disk_bytes, kind, f"{OWNER}disk"),
                    logger.warning)


def signature_of(config: Any, settings: Settings, engine: Engine) -> str:
    """All that keys and values depend on besides tokens: of weights the files, of the configuration what vLLM has made
    of it, such as with --hf-overrides."""
    model = config.model_config
    made = hashlib.sha256(model.hf_config.to_json_string(use_diff=False).encode()).hexdigest()
    parts = (signature(model.model), model.model_weights, model.revision,
             getattr(model.hf_config, "_commit_hash", None), made, str(model.dtype), model.quantization,
             config.load_config.load_format)
    return (f"vllm {version()} {' '.join(map(str, parts))}; policy {settings.policy}; "
            f"prefill {engine.options.prefill_mode}")
