"""Prefixes on disk: the server's tier, of an engine with the keys and values of a model of vLLM."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from sluice.engine import Engine
from sluice.errors import InvalidArgument
from sluice.serving.disk import Folder
from sluice.serving.sessions import signature
from sluice.serving.tier import DiskTier, kind_of
from sluice.vllm._config import OWNER, Settings
from sluice.vllm._plugin import version

logger = init_logger("vllm.sluice")

_COMMIT = re.compile(r"[0-9a-f]{40}")
# Of --load-format: their weights are files that a digest or a commit names.
_FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral",
               "bitsandbytes", "sharded_state", "dummy")


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
    of it, such as with --hf-overrides.
    @throws InvalidArgument if weights of other contents may have the same name"""
    model = config.model_config
    made = hashlib.sha256(model.hf_config.to_json_string(use_diff=False).encode()).hexdigest()
    parts = (_weights(model, config.load_config), made, str(model.dtype), model.quantization)
    return (f"vllm {version()} {' '.join(map(str, parts))}; policy {settings.policy}; "
            f"prefill {engine.options.prefill_mode}")


def _weights(model: Any, load: Any) -> str:
    """Names them for good. Those of an object store, say, are others when that has others."""
    if load.load_format not in _FROM_FILES:
        raise InvalidArgument(f"{OWNER}disk needs weights that do not change, and --load-format {load.load_format} has "
                              "no files that tell; leave one of them out")
    if Path(model.model).exists():
        name = signature(model.model)
    else:
        # The configuration's, unless that comes from elsewhere.
        found = "" if model.hf_config_path else getattr(model.hf_config, "_commit_hash", None)
        commit = next((each for each in (model.revision, found) if _COMMIT.fullmatch(each or "")), None)
        if commit is None:
            raise InvalidArgument(f"{OWNER}disk needs weights that do not change, and nothing says which revision of "
                                  f"{model.model} these are; give --revision with a commit, or a folder")
        name = f"{model.model} {commit}"
    return f"{name} {load.load_format} {load.model_loader_extra_config}"
