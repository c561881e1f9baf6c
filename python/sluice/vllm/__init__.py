"""vLLM with its keys and values in Sluice's host memory.

    vllm serve DIR --worker-cls sluice.vllm.Worker --attention-backend CUSTOM

vLLM finds `register` by the entry point `vllm.general_plugins` of this package. Options of the engine are under
"sluice" in `--additional-config`. docs/vllm.md says what is served, and what is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.vllm._plugin import refuse_version, register

if TYPE_CHECKING:
    from sluice.vllm._backend import Backend
    from sluice.vllm._scheduler import AsyncScheduler, Scheduler
    from sluice.vllm._worker import Worker

__all__ = ["AsyncScheduler", "Backend", "Scheduler", "Worker", "register"]

_ROOMS = {"Worker": "_worker", "Backend": "_backend", "Scheduler": "_scheduler", "AsyncScheduler": "_scheduler"}


def __getattr__(name: str) -> Any:
    # Each process of vLLM loads the plug-in, and not all of them have a worker or a scheduler.
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    refuse_version()
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
