"""Weights that vLLM keeps quantized: with the policy `full` tokens are those of vLLM's own attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from engines import Engine, greedy, prompts
from families import SHAPE
from safetensors.torch import save_file

GROUP = 32  # Input features that share a scale, of 4-bit weights.
PROMPTS = prompts(5, 40, 100)
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "int8": {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
             "ignore": ["lm_head"], "config_groups": {"group_0": {
                 "targets": ["Linear"],
                 "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                 "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                                       "dynamic": True}}}},
}


def packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight 4-bit values of the last dimension in each number of 32 bits; `order`: which of them, the lowest first."""
    words = values.long().reshape(*values.shape[:-1], -1, 8)[..., order] << torch.arange(0, 32, 4)
    return words.sum(-1).to(torch.int32)


def quantized(method: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A linear layer's tensors, as files of the method have them."""
    if method == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}
    grouped = weight.T.reshape(-1, GROUP, weight.shape[0])
    scales = grouped.abs().amax(1) / 7
    values = ((grouped / scales[:, None]).round() + 8).reshape(weight.T.shape)
    zeros = torch.full_like(scales, 8)
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": packed(values, order), "qzeros": packed(zeros, order), "scales": scales.half()}
    return {"qweight": packed(values.T).T.contiguous(), "qzeros": packed(zeros - 1), "scales": scales.half(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP}


def save(method: str, folder: Path) -> Path:
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name.endswith("proj.weight"):
            layer = name.removesuffix("weight")
            tensors |= {layer + key: tensor for key, tensor in quantized(method, weight).items()}
        else:
            tensors[name] = weight.half()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float16",
              "quantization_config": CONFIGS[method]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("method", CONFIGS)
def test_tokens_are_vllms_own(method: str, tmp_path: Path) -> None:
    folder, answer = save(method, tmp_path), greedy(20)
    with Engine(folder, None, dtype="float16") as engine:
        linear = engine.worker.model_runner.model.model.layers[0].mlp.down_proj
        assert {"qweight", "weight_scale"} & {name for name, _ in linear.named_parameters()}
        own = engine.tokens(PROMPTS, answer)
    assert len({token for tokens in own for token in tokens}) > 20  # It says something.
    with Engine(folder, {}, dtype="float16") as engine:
        assert engine.forwards.engine.options.kv_dtype == "f16"
        assert engine.tokens(PROMPTS, answer) == own
