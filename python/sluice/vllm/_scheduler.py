"""vLLM's schedulers, told of requests whose forward has failed, and of prompts that the engine knows."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats

from sluice.vllm._backend import forwards_of
from sluice.vllm._config import settings_of
from sluice.vllm._prefixes import Prefixes

logger = init_logger("vllm.sluice")

FAILED = "sluice_failed"
"""Attribute of a ModelRunnerOutput: requests that are to end with an error."""


class _EndsFailed:
    """Ends the requests that a worker names. Without it an error of a worker ends vLLM's engine, and all requests."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed = {request for request in getattr(model_runner_output, FAILED, ()) if request in self.requests}
        sampled = model_runner_output.sampled_token_ids
        for request in failed:
            index = model_runner_output.req_id_to_index.get(request)
            if index is not None and index < len(sampled):
                sampled[index] = []  # Drawn from attention of 0.
        # Where vLLM has the requests whose grammar is wrong: they end with an error when this output has been taken.
        self.grammar_compile_error_reqs.update(failed)
        return super().update_from_output(scheduler_output, model_runner_output)


class _KnowsPrompts:
    """Has the worker's engine asked what it knows of a prompt."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(vllm_config, *arguments, **options)
        forwards = forwards_of(vllm_config)
        if not settings_of(vllm_config).prefixes:
            return
        if forwards is None or vllm_config.parallel_config.pipeline_parallel_size > 1:
            # Of ranks with other layers one may have forgotten what another one knows.
            logger.info("Every prompt is read whole: %s.", "the worker, which knows others, is in another process"
                        if forwards is None else "ranks with pipeline parallelism do not know the same of them")
            return
        self.connector = Prefixes(forwards)
        if self.log_stats:
            self.connector_prefix_cache_stats = PrefixCacheStats()

    def get_kv_connector(self) -> None:
        """Nothing beside the scheduler has to do with it: workers have no part of it, and prompts need no hashes."""
        return

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """What the engine knows is in the place of vLLM's own, which callers mean: keys and values are stale when
        weights have changed."""
        return super().reset_prefix_cache(reset_running_requests, True)


class Scheduler(_KnowsPrompts, _EndsFailed, _Scheduler):
    pass


class AsyncScheduler(_KnowsPrompts, _EndsFailed, _AsyncScheduler):
    pass
