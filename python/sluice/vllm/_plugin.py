"""What vLLM calls when it loads its plug-ins, in each of its processes."""

from __future__ import annotations

import functools
from typing import Any

from sluice.errors import Unsupported

TESTED = ("0.26.0",)
"""Versions of vLLM that tests have run with: what Sluice stands on there is not public, and changes."""


def version() -> str:
    """Of the vLLM that is installed."""
    import vllm

    return vllm.__version__.partition("+")[0]


def refuse_version() -> None:
    """Raises Unsupported if vLLM is of a version that was not tested."""
    if version() not in TESTED:
        raise Unsupported(f"vLLM {version()} was not tested with Sluice, whose parts for vLLM stand on what changes "
                          f"from one version to the next; install vLLM {' or '.join(TESTED)}")


def register() -> None:
    """Has vLLM adapt the configurations that ask for Sluice's worker, and leaves all others as they are."""
    if version() not in TESTED:
        return  # Those who use vLLM by itself are none the worse; Sluice's worker is refused when it is looked up.
    # vLLM has no hook between its own checks of a configuration and the processes that are started with it.
    from vllm.config import VllmConfig

    if hasattr(VllmConfig, "_sluice"):
        return
    VllmConfig._sluice = True
    checks, unsupported = VllmConfig.__post_init__, VllmConfig._get_v2_model_runner_unsupported_features

    @functools.wraps(checks)
    def check_and_adapt(config: Any) -> None:
        checks(config)
        if _asked_for(config):
            from sluice.vllm._config import adapt

            adapt(config)

    @functools.wraps(unsupported)
    def unsupported_features(config: Any) -> list[str]:
        # The second model runner does not tell a builder of metadata which requests it is for.
        return unsupported(config) + ["Sluice"] * _asked_for(config)

    VllmConfig.__post_init__ = check_and_adapt
    VllmConfig._get_v2_model_runner_unsupported_features = unsupported_features


def _asked_for(config: Any) -> bool:
    worker = config.parallel_config.worker_cls
    return isinstance(worker, str) and worker.startswith("sluice.vllm.")
