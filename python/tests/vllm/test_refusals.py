"""What Sluice does not serve is refused before a model is loaded, by name, with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sluice
import sluice.vllm
import torch
import vllm
from engines import Engine, arguments, configured
from sluice.serving.process import Settings as Server
from sluice.vllm._config import adapt, settings_of
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

REFUSED = (sluice.Unsupported, sluice.InvalidArgument, ValueError)  # vLLM wraps a ValueError in one of its own.


@pytest.fixture(scope="module")
def llama(model_of: Callable[[str], Path]) -> Path:
    return model_of("Llama")


def test_defaults_are_those_of_the_server(llama: Path) -> None:
    config = EngineArgs(**{**arguments(llama, {}), "additional_config": {}}).create_engine_config()
    settings = settings_of(config)
    assert (settings.policy, settings.host_bytes, settings.near_bytes) == (Server.policy, Server.host_bytes, None)
    assert settings.policy == "sluice" and settings.host_bytes == 8 << 30


def test_what_is_adapted(llama: Path) -> None:
    config = configured(llama, {"host_bytes": "8MiB"})
    assert settings_of(config).host_bytes == 8 << 20
    assert config.attention_config.backend == AttentionBackendEnum.CUSTOM
    assert not config.cache_config.enable_prefix_caching and settings_of(config).prefixes
    assert config.scheduler_config.scheduler_cls == "sluice.vllm.Scheduler"
    before = repr(config)
    adapt(config)  # vLLM checks some configurations twice.
    assert repr(config) == before


def test_known_prompts_are_left_out_where_vllm_is_to_leave_its_own_out(llama: Path) -> None:
    assert not settings_of(configured(llama, {}, enable_prefix_caching=False)).prefixes


def test_others_are_left_alone(llama: Path) -> None:
    config = configured(llama, None)
    assert config.cache_config.enable_prefix_caching and config.scheduler_config.scheduler_cls is None
    assert config.attention_config.backend is None


def test_the_second_model_runner_is_not_chosen(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM would where there is a GPU."""
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setattr("vllm.config.VllmConfig._is_default_v2_model_runner_model", lambda config: True)
    assert configured(llama, None).use_v2_model_runner
    assert not configured(llama, {}).use_v2_model_runner


@pytest.mark.parametrize(("changes", "said"), [
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
     "speculative decoding.*leave --speculative-config out"),
    ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8.*kv_dtype"),
    ({"attention_backend": "FLASH_ATTN"}, "another attention backend.*CUSTOM"),
    ({"kv_cache_memory_bytes": 1 << 20}, "--kv-cache-memory-bytes.*host_bytes"),
    ({"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")}, "KV connectors"),
])
def test_configurations(llama: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(REFUSED, match=f"(?s){said}"):
        configured(llama, {}, **changes)


@pytest.mark.parametrize(("part", "name", "value", "said"), [
    ("parallel_config", "decode_context_parallel_size", 2, r"\(DCP\)"),
    ("parallel_config", "prefill_context_parallel_size", 2, r"\(PCP\)"),
    ("parallel_config", "enable_dbo", True, "microbatches"),
    ("attention_config", "use_non_causal", True, "not causal"),
    ("model_config", "enable_sleep_mode", True, "--enable-sleep-mode"),
    ("model_config", "runner_type", "pooling", "not for generating text"),
    ("cache_config", "num_gpu_blocks_override", 8, "--num-gpu-blocks-override"),
    ("cache_config", "cache_dtype", "int8_per_token_head", "kv_dtype"),
])
def test_configurations_of_other_machines(llama: Path, part: str, name: str, value: Any, said: str) -> None:
    """That vLLM itself refuses or changes on a CPU."""
    config = configured(llama, {})
    setattr(getattr(config, part), name, value)
    with pytest.raises(REFUSED, match=said):
        adapt(config)


@pytest.mark.parametrize(("policy", "served"), [
    ("quest", False), ("magicpig", False), ("pyramidkv", False), ("exact | int4 | top_k=9 | near=0 | dense=2", False),
    ("snapshot:pyramid=20 | top_k=all | near=0", False), ("lsh | sampled | near=0,sinks=4 | dense=0,every=16", False),
    ("sluice", True), ("exact | int4 | top_k=9 | near=0 | dense=0", True), ("streaming", True)])
def test_policies_of_a_pipeline_are_alike_in_all_layers(llama: Path, policy: str, served: bool) -> None:
    config = configured(llama, {"policy": policy})
    config.parallel_config.pipeline_parallel_size = 2
    if served:
        adapt(config)
    else:
        with pytest.raises(REFUSED, match="pipeline parallelism.*same in all layers"):
            adapt(config)


def test_the_older_executor_of_ray(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(llama, {})
    config.parallel_config.distributed_executor_backend = "ray"
    adapt(config)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(REFUSED, match="older executor of Ray"):
        adapt(config)


def test_latent_attention(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(llama, {})
    monkeypatch.setattr("vllm.config.ModelConfig.use_mla", True)
    with pytest.raises(sluice.Unsupported, match=r"LlamaForCausalLM has latent attention \(MLA\).*--worker-cls"):
        adapt(config)


@pytest.mark.parametrize(("options", "said"), [
    ({"polcy": "full"}, "there is no option polcy; there are "),
    ({"policy": "fulll"}, "fulll"),
    ({"host_bytes": "much"}, "--additional-config.sluice.host_bytes: \"much\" is no size"),
    ({"page_tokens": 7.5}, "--additional-config.sluice.page_tokens"),
    ({"sequences": 3}, "--additional-config.sluice.sequences: --max-num-seqs sets it"),
    ({"layers": 3}, "--additional-config.sluice.layers: the model sets it"),
    ({"prefix_bytes": 0}, "--additional-config.sluice.prefix_bytes: --enable-prefix-caching sets it"),
    ({"prompt_queries": 64}, "there is no option prompt_queries; there are "),
    ({"policies": ["full"]}, "--additional-config.sluice.policies: policy sets it"),
])
def test_options(llama: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(REFUSED, match=said):
        configured(llama, options)


def test_options_that_are_none(llama: Path) -> None:
    with pytest.raises(REFUSED, match="must be an object"):
        EngineArgs(**{**arguments(llama, {}), "additional_config": {"sluice": "full"}}).create_engine_config()


@pytest.mark.parametrize(("options", "changes", "said"), [
    ({"host_bytes": 1 << 18}, {}, r"host_bytes is 262,144, which do not hold a sequence of 256 tokens; give \S+ at"),
    ({"page_tokens": 64}, {}, "--block-size is 32 and .*page_tokens 64"),
    ({"policy": "infinigen"}, {}, "rehearsed queries"),
    ({"policy": "scores | top_k=64 | near=0"}, {}, "scores of a model's own indexer"),
])
def test_engines(llama: Path, options: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    """What is known when the model is loaded."""
    with pytest.raises(sluice.Error, match=said):
        Engine(llama, options, **changes)


def test_the_memory_that_a_refusal_asks_for_is_enough(llama: Path) -> None:
    with pytest.raises(sluice.OutOfCapacity) as refused:
        Engine(llama, {"host_bytes": 1 << 18})
    least = int(str(refused.value).partition("; give ")[2].partition(" ")[0].replace(",", ""))
    with Engine(llama, {"host_bytes": least}) as engine:
        assert engine.forwards.engine.options.host_bytes == least


def layer_of(config: VllmConfig, **options: Any) -> Any:
    """One layer's attention, as vLLM makes it."""
    with set_current_vllm_config(config):
        return sluice.vllm.Backend.get_impl_cls()(4, 32, 1.0, 2, **options)


def test_the_backend_needs_the_worker(llama: Path) -> None:
    with pytest.raises(sluice.InvalidArgument, match="give --worker-cls sluice.vllm.Worker, too"):
        layer_of(configured(llama, None))


@pytest.mark.parametrize(("options", "said"), [
    ({"alibi_slopes": [0.5] * 4}, "ALiBi"), ({"attn_type": "encoder_only"}, "encoder_only"),
    ({"kv_sharing_target_layer_name": "layers.0"}, "layers.0"), ({"chunk_lookback": 2}, "chunk_lookback"),
    ({"logits_soft_cap": 30.0, "sinks": torch.zeros(4)}, "both a soft-cap and sinks"),
])
def test_layers(llama: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(sluice.Unsupported, match=f"{said}.*serve it without --worker-cls"):
        layer_of(configured(llama, {}), **options)


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0+cu130")
    with pytest.raises(sluice.Unsupported, match=r"vLLM 0.33.0 was not tested.*install vLLM 0.26.0"):
        _ = sluice.vllm.Worker
    sluice.vllm.register()  # Leaves vLLM alone.


def test_names() -> None:
    assert json.dumps(sorted(sluice.vllm.__all__)) == json.dumps(
        ["AsyncScheduler", "Backend", "Scheduler", "Worker", "register"])
    assert all(getattr(sluice.vllm, name).__name__ == name for name in sluice.vllm.__all__[:4])
    with pytest.raises(AttributeError, match="no attribute 'Wrker'"):
        _ = sluice.vllm.Wrker
