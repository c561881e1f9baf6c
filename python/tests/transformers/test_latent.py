"""Models with latent attention, DeepSeek V2 and V3, in absorbed form through a sluice.Engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sluice
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

LAYERS, LATENT, ROPE, NOPE, VALUE, TOKENS = 3, 64, 32, 32, 48, 128
PROMPT = torch.arange(40).mul(7).remainder(89).unsqueeze(0)


def model_of(kind: str, heads: int) -> torch.nn.Module:
    torch.manual_seed(5)
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=80, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=heads, first_k_dense_replace=2, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, q_lora_rank=32, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE, v_head_dim=VALUE, max_position_embeddings=TOKENS, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config).eval()


class Absorbed:
    """A model without a cache of its own, whose tokens attend through an engine, keys being [latent, RoPE]."""

    def __init__(self, model: torch.nn.Module, policy: str) -> None:
        config = model.config
        options = sluice.EngineOptions(
            layers=LAYERS, q_heads=config.num_attention_heads, kv_heads=1, head_dim=LATENT + ROPE, value_dim=LATENT,
            scale=model.model.layers[0].self_attn.scaling, kv_dtype="f32", host_bytes=8 << 20,
            largest=sluice.Bucket(decode_rows=1, prefill_rows=64, prefills=1, max_tokens=TOKENS), threads=1,
            policies=[policy], pin_threads=False, answer_timeout_ms=30_000)
        self.engine, self._model = sluice.Engine(options), model
        self._sequence, self._at = self.engine.begin(policy), 0
        AttentionInterface.register("absorbed", self._attend)
        model.set_attn_implementation("absorbed")
        for layer in model.model.layers:
            layer.self_attn.expand_kv = self._keep

    def _keep(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's keys and values would be made of, which are not read."""
        self._keys = torch.cat([latent, rope], dim=-1)[0].transpose(0, 1).contiguous()
        return self._keys, self._keys

    def _attend(self, module: torch.nn.Module, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        heads = query.shape[1]
        up_k, up_v = module.kv_b_proj.weight.view(heads, NOPE + VALUE, LATENT).split([NOPE, VALUE], dim=1)
        nope, rope = query[0].split([NOPE, ROPE], dim=-1)
        q = torch.cat([torch.einsum("hrn,hnc->rhc", nope, up_k), rope.transpose(0, 1)], dim=-1)
        out = q.new_empty(q.shape[0], heads, LATENT)
        self.engine.attend(self._bucket, module.layer_idx, q, self._keys, None, out)
        return torch.einsum("rhc,hvc->rhv", out, up_v).unsqueeze(0), None

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> int:
        """The token that follows these."""
        count, decodes = ids.shape[1], self._at != 0 and ids.shape[1] == 1
        self._bucket = (sluice.Bucket(decode_rows=1, features=self.engine.options.largest.features) if decodes else
                        sluice.Bucket(prefill_rows=count, prefills=1))
        number = self.engine.plan([sluice.PlanItem(self._sequence, count, not decodes)], self._bucket)
        logits = self._model(input_ids=ids, use_cache=False,
                             position_ids=torch.arange(self._at, self._at + count).unsqueeze(0),
                             attention_mask=torch.ones(1, 1, count, count, dtype=torch.bool)).logits
        self.engine.finish(number)
        self._at += count
        return int(logits[0, -1].argmax())

    def generate(self, prompt: torch.Tensor, count: int) -> list[int]:
        half = prompt.shape[1] // 2  # Two chunks, the second of which sees the first.
        self.forward(prompt[:, :half])
        tokens = [self.forward(prompt[:, half:])]
        while len(tokens) < count:
            tokens.append(self.forward(torch.tensor([[tokens[-1]]])))
        return tokens


@pytest.mark.parametrize("policy", ["full", "exact | int4 | sample=128 | near=0,sinks=4,recent=8"])
@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_absorbed_tokens_are_the_models_own(kind: str, heads: int, policy: str) -> None:
    model = model_of(kind, heads)
    want = model.generate(PROMPT, do_sample=False, max_new_tokens=16)[0, PROMPT.shape[1] :].tolist()
    driven = Absorbed(model, policy)
    try:
        assert driven.generate(PROMPT, 16) == want
        # Three layers of 96 numbers for a token, whatever the heads are.
        blocks = -(-(PROMPT.shape[1] + 15) // driven.engine.options.page_tokens)
        assert driven.engine.far_bytes(driven._sequence) == blocks * driven.engine.options.page_tokens * LAYERS * 96 * 4
    finally:
        driven.engine.close()
    assert len(set(want)) > 2


def test_values_that_are_given_or_missing_are_refused() -> None:
    options = sluice.EngineOptions(
        layers=1, q_heads=48, kv_heads=1, head_dim=96, value_dim=64, kv_dtype="f32", host_bytes=1 << 20,
        largest=sluice.Bucket(prefill_rows=2, prefills=1), pin_threads=False)
    plain = dataclasses.replace(options, q_heads=4, value_dim=0)
    bucket, k = sluice.Bucket(prefill_rows=2, prefills=1), torch.zeros(2, 1, 96)
    with sluice.Engine(options) as engine:
        assert engine.options.value_dim == 64
        with pytest.raises(sluice.InvalidArgument, match="v is given"):
            engine.attend(bucket, 0, torch.zeros(2, 48, 96), k, k, torch.zeros(2, 48, 64))
        with pytest.raises(sluice.InvalidArgument, match=r"out is \[2, 48, 96\]; this call needs \[2, 48, 64\]"):
            engine.attend(bucket, 0, torch.zeros(2, 48, 96), k, None, torch.zeros(2, 48, 96))
    with sluice.Engine(plain) as engine, pytest.raises(sluice.InvalidArgument, match="v"):
        engine.attend(bucket, 0, torch.zeros(2, 4, 96), k, None, torch.zeros(2, 4, 96))
    with pytest.raises(sluice.Unsupported, match="value_dim, of latent attention, beside near_bytes"):
        sluice.Engine(dataclasses.replace(options, near_bytes=1 << 20))
