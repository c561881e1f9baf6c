"""Weights of queries and keys are scaled so that keys are even: outputs stay what they are, 4-bit copies tell more."""

from __future__ import annotations

import copy

import pytest
import torch
from sluice.errors import InvalidArgument, Unsupported
from sluice.transformers import balance
from tiny import HEAD_DIM, enabled, llama, model_of, prompt
from transformers import PreTrainedModel

FAMILIES = {
    "llama": llama,
    "qwen2": lambda: model_of("Qwen2"),
    "qwen3": lambda: model_of("Qwen3", head_dim=48),
    "granite": lambda: model_of("Granite", attention_multiplier=0.3),
    "olmo2": lambda: model_of("Olmo2"),
    "gpt-oss": lambda: model_of("GptOss", head_dim=HEAD_DIM, num_local_experts=4, num_experts_per_tok=2),
    "smollm3": lambda: model_of("SmolLM3", no_rope_layers=[1, 0, 1]),
}
PAIR = 3
KV_HEAD = 1


def uneven(model: PreTrainedModel, exponent: int = 7) -> PreTrainedModel:
    """The same model, but that one pair of one KV head has small keys and large queries, in each layer."""
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for block in model.model.layers:
        for channel in (PAIR, PAIR + head_dim // 2):
            block.self_attn.k_proj.weight.data[KV_HEAD * head_dim + channel] *= 2.0 ** -exponent
            for head in range(KV_HEAD * group, (KV_HEAD + 1) * group):
                block.self_attn.q_proj.weight.data[head * head_dim + channel] *= 2.0 ** exponent
    return model


def scatter(model: PreTrainedModel) -> None:
    """Channels of keys get sizes of their own."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    for block in model.model.layers:
        weight = getattr(block.self_attn, "k_norm", block.self_attn.k_proj).weight
        exponents = torch.randint(-3, 4, weight.shape[:1], generator=generator)
        weight.data.view(len(exponents), -1).mul_(torch.exp2(exponents)[:, None])


@torch.no_grad()
def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay_what_they_are(family: str, dtype: torch.dtype) -> None:
    model = FAMILIES[family]().to(dtype)
    scatter(model)
    before = copy.deepcopy(model)
    exponents = balance(model, prompt(2, 100))
    assert len(exponents) == 3
    assert any((own != 0).any() for own in exponents)
    ids = prompt(2, 60, seed=2)
    torch.testing.assert_close(logits(model, ids), logits(before, ids), rtol=0, atol=0)


def test_a_small_pair_becomes_larger_by_half_of_what_it_lacks() -> None:
    plain = balance(llama(), prompt(1, 200))
    for before, after in zip(plain, balance(uneven(llama(), 6), prompt(1, 200)), strict=True):
        moved = after - before
        # The mean over the channels is taken off: all others move together, by little.
        others = moved[KV_HEAD][torch.arange(HEAD_DIM) % (HEAD_DIM // 2) != PAIR].median()
        for channel in (PAIR, PAIR + HEAD_DIM // 2):
            assert abs(moved[KV_HEAD, channel] - others - 3) <= 1
        assert (moved[1 - KV_HEAD] == 0).all()


def test_a_balanced_model_is_left_alone() -> None:
    model = uneven(llama())
    balance(model, prompt(1, 200))
    for own in balance(model, prompt(1, 200)):
        assert own.abs().max() <= 4  # Half of what is left.


@torch.no_grad()
def off(model: PreTrainedModel) -> float:
    """How far a decoded token's logits are from dense attention's where few keys are chosen by 4-bit copies."""
    ids = prompt(1, 400, seed=3)
    dense = logits(model, ids)[:, -1]
    policy = "exact | int4 | top_k=40 | near=0,sinks=0,recent=0"
    with enabled(model, policy, prefill_rows=400) as served:
        cache = served.cache()
        model(ids[:, :-1], past_key_values=cache)
        found = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
    return (found - dense).norm().item() / dense.norm().item()


def test_copies_of_balanced_keys_tell_more() -> None:
    model = uneven(llama())
    before = off(model)
    balance(model, prompt(1, 200))
    assert off(model) < 0.5 * before


def test_what_cannot_be_scaled_is_refused_and_left_as_it_was() -> None:
    # Its positions rotate neighbouring channels.
    model = model_of("Llama4", "Llama4Text", num_hidden_layers=2, head_dim=HEAD_DIM, num_local_experts=2,
                     attention_chunk_size=64, interleave_moe_layer_step=1, intermediate_size_mlp=64,
                     use_qk_norm=False)
    scatter(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(Unsupported, match="gives other outputs"):
        balance(model, prompt(1, 60))
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    with pytest.raises(Unsupported, match="no layer with q_proj and k_proj"):
        balance(model_of("Phi3"), prompt(1, 60))
    quantized = llama()
    quantized.model.layers[1].self_attn.k_proj.weight.data = torch.zeros(2 * HEAD_DIM, 4 * HEAD_DIM,
                                                                         dtype=torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match="no plain floats"):
        balance(quantized, prompt(1, 60))
    model = llama()
    with enabled(model), pytest.raises(InvalidArgument, match="before enable"):
        balance(model, prompt(1, 60))
