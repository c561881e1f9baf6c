"""vLLM's worker, with an engine in the place of its caches of keys and values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from sluice.errors import Error, InvalidArgument, Unsupported
from sluice.vllm._backend import Attention, link, unlink
from sluice.vllm._config import BACKEND, refuse, settings_of
from sluice.vllm._disk import disk_of
from sluice.vllm._engine import block_bytes, in_order, make_engine
from sluice.vllm._forwards import Forwards
from sluice.vllm._scheduler import FAILED

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
elif current_platform.is_cuda():
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    raise Unsupported(f"vLLM runs on {current_platform.device_name or 'no device'} here; Sluice serves NVIDIA's GPUs "
                      "and the CPU")

logger = init_logger("vllm.sluice")


class Worker(_Worker):
    """On the CPU a subclass of vLLM's CPUWorker, on a GPU of its Worker."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        settings = settings_of(vllm_config)
        refuse(vllm_config, settings)
        if vllm_config.cache_config.enable_prefix_caching:
            raise InvalidArgument("vLLM has not loaded Sluice's plug-in, as VLLM_PLUGINS names others: add sluice to "
                                  "it")
        self._link = link(vllm_config, settings, lambda: self.model_runner.input_batch.req_ids)
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
        super().__init__(vllm_config, *arguments, **options)

    def load_model(self, *arguments: Any, **options: Any) -> None:
        with _chosen() if current_platform.is_cpu() else contextlib.nullcontext():
            super().load_model(*arguments, **options)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """What vLLM is to keep: a token takes two bytes of each layer. Its blocks count the engine's pages."""
        true = super().get_kv_cache_spec()
        in_order(true)
        size = self.cache_config.block_size
        return {name: replace(spec, block_size=size, num_kv_heads=1, head_size=1, head_size_v=1, dtype=torch.int8,
                              page_size_padded=None) for name, spec in true.items()}

    def determine_available_memory(self) -> int:
        """Makes the engine, when the model's own memory is known. Returns what vLLM may keep, in its own bytes."""
        if current_platform.is_cpu():
            self.model_runner.warming_up_model()
            device_bytes = None
        else:
            device_bytes = super().determine_available_memory()
        if self.parallel_config.world_size > 1:
            # By these the engine takes its share of the machine's cores, unless the process is bound to some.
            os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
            os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.parallel_config.local_world_size))
        specs = self.get_kv_cache_spec()
        layers = self._layers(in_order(specs))
        config, settings = self.vllm_config, self._link.settings
        engine = make_engine(config, layers, settings, self.device, device_bytes)
        try:
            available = block_bytes(engine, config, sum(spec.page_size_bytes for spec in specs.values()))
            disk = disk_of(config, settings, engine)
        except BaseException:
            engine.close()
            raise
        scheduler, graphs = config.scheduler_config, config.compilation_config.cudagraph_mode
        alone = config.parallel_config.world_size == 1
        self._link.layers = {layer.layer_name: number for number, layer in enumerate(layers)}
        self._link.forwards = Forwards(
            engine, settings.policy, ahead=int(bool(scheduler.async_scheduling)),
            goes_on=alone and str(scheduler.scheduler_cls).startswith("sluice.vllm."),
            graphs=not current_platform.is_cpu() and graphs.has_full_cudagraphs(), disk=disk)
        made = engine.options
        logger.info("Sluice keeps %d layers of keys and values (%s, policy %s) in %.2f GiB of host memory%s.",
                    made.layers, made.kv_dtype, settings.policy, made.host_bytes / 2**30,
                    f" and {made.near_bytes / 2**30:.2f} GiB of the GPU's" if made.near_bytes else "")
        return available

    def execute_model(self, scheduler_output: Any) -> Any:
        forwards = self._link.forwards
        preempted = {*(scheduler_output.preempted_req_ids or ()),
                     *scheduler_output.scheduled_cached_reqs.resumed_req_ids}
        with self._errors_heard():
            forwards.start(scheduler_output.finished_req_ids, preempted)
            raised = True
            try:
                result = super().execute_model(scheduler_output)
                raised = False
            finally:
                forwards.stop(raised)
            return self._with_failed(result)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with self._errors_heard():
            return self._with_failed(super().sample_tokens(grammar_output))

    def shutdown(self) -> None:
        super().shutdown()
        unlink(self.vllm_config)
        forwards, self._link.forwards = self._link.forwards, None
        if forwards is not None:
            forwards.close()

    def _layers(self, names: list[str]) -> list[Any]:
        known = self.vllm_config.compilation_config.static_forward_context
        layers = [known[name] for name in names]
        for layer in layers:
            if not isinstance(layer.impl, Attention):
                raise Unsupported(f"layer {layer.layer_name} has the attention of {type(layer.impl).__name__}; give "
                                  "--attention-backend CUSTOM, or serve the model without --worker-cls")
        return layers

    @contextlib.contextmanager
    def _errors_heard(self) -> Iterator[None]:
        """vLLM reads the answers of one rank alone, the first of those that have the last layers, which waits for the
        others within the model: an error of another one ends its process, and so all. Without it that rank would go on
        without what its forward had."""
        parallel = self.parallel_config
        try:
            yield
        except Error:
            if self.rank == parallel.world_size - parallel.tensor_parallel_size:
                raise
            logger.exception("Sluice failed on rank %d, which ends all.", self.rank)
            raise SystemExit(1) from None

    def _with_failed(self, output: Any) -> Any:
        """An output, with the requests whose forwards have failed."""
        if isinstance(output, AsyncModelRunnerOutput):
            return _Later(output, self._link.forwards.failed())
        # vLLM's output of a step without requests is one object for all of these.
        if isinstance(output, ModelRunnerOutput) and output.req_ids:
            failed = self._link.forwards.failed()
            if failed:
                setattr(output, FAILED, failed)
        elif not get_pp_group().is_last_rank:
            self._link.forwards.failed()  # Raises: others have what this rank's layers made.
        return output


@contextlib.contextmanager
def _chosen() -> Iterator[None]:
    """In it the layers of a model get Sluice's attention on a CPU, whose platform knows one backend, whichever is asked
    for. Other engines of this process have vLLM's own."""
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()


class _Later(AsyncModelRunnerOutput):
    """An output that is still on its way from the device."""

    def __init__(self, output: AsyncModelRunnerOutput, failed: set[str]) -> None:
        self._output, self._failed = output, failed

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        if self._failed:
            setattr(output, FAILED, self._failed)
        return output
