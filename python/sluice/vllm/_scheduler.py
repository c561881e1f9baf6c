"""vLLM's schedulers, told of requests whose forward has failed."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler

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


class Scheduler(_EndsFailed, _Scheduler):
    pass


class AsyncScheduler(_EndsFailed, _AsyncScheduler):
    pass
