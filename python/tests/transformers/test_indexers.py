"""A model with a trained indexer, DeepSeek's sparse attention, whose scores choose in a sluice.Engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import sluice
import torch
from transformers import AttentionInterface, DynamicCache

models = pytest.importorskip("transformers.models.deepseek_v32", reason="no indexer of DeepSeek's here")

LAYERS, HEADS, HEAD_DIM, TOKENS = 2, 4, 64, 256
PROMPT = torch.arange(40).mul(7).remainder(89).unsqueeze(0)


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(3)
    config = models.DeepseekV32Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, first_k_dense_replace=LAYERS, n_routed_experts=4, num_experts_per_tok=1, n_group=1,
        topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=HEAD_DIM - 32,
        v_head_dim=HEAD_DIM, index_n_heads=2, index_head_dim=64, index_topk=TOKENS, max_position_embeddings=TOKENS,
        bos_token_id=None, eos_token_id=None, initializer_range=0.2)
    return models.DeepseekV32ForCausalLM(config).eval()


class Scored:
    """A model whose tokens attend through an engine. The cache of the model's own keeps the keys of its indexers, and
    those that the engine's choice is held against."""

    def __init__(self, model: torch.nn.Module, policy: str, chosen: int | None) -> None:
        options = sluice.EngineOptions(
            layers=LAYERS, q_heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, kv_dtype="f32", host_bytes=8 << 20,
            largest=sluice.Bucket(decode_rows=1, prefill_rows=64, prefills=1, max_tokens=TOKENS), threads=1,
            policies=[policy], pin_threads=False, answer_timeout_ms=30_000)
        self.engine, self._model, self._chosen = sluice.Engine(options), model, chosen
        self._sequence, self._at = self.engine.begin(policy), 0
        self._cache = DynamicCache(config=model.config)
        self._scores: list[torch.Tensor] = []
        AttentionInterface.register("scored", self._attend)
        model.set_attn_implementation("scored")
        for layer in model.model.layers:
            self._note(layer.self_attn.indexer)

    def _note(self, indexer: torch.nn.Module) -> None:
        """What the indexer chooses by, as it computes it."""
        own, topk = indexer.forward, torch.Tensor.topk

        def noted(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._scores.append(scores)
            return topk(scores, *args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            with mock.patch.object(torch.Tensor, "topk", noted):
                return own(*args, **kwargs)

        indexer.forward = forward

    def _attend(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                attention_mask: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        rows = query.shape[2]
        q, k, v = (each[0, :, -rows:].transpose(0, 1).contiguous() for each in (query, key, value))
        out, scores = torch.empty_like(q), None
        if self._decodes:
            scores = torch.zeros(1, 1, TOKENS)
            scores[0, 0, : self._at + 1] = self._scores[-1][0, -1]
        self.engine.attend(self._bucket, module.layer_idx, q, k, v, out, scores=scores)
        if self._decodes and self._chosen is not None:
            self._check(out[0], q[0].double(), key[0].double(), value[0].double(), scores[0, 0], module.scaling)
        return out.unsqueeze(0), None

    def _check(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor,
               scale: float) -> None:
        """The highest scores of the tokens before the newest, of equal ones the first, and the newest, in float64."""
        assert self._at > self._chosen
        order = scores[: self._at].sort(descending=True, stable=True).indices
        attended = torch.cat([order[: self._chosen], torch.tensor([self._at])])
        weights = (torch.einsum("hd,htd->ht", q, k[:, attended]) * scale).softmax(-1)
        torch.testing.assert_close(out.double(), torch.einsum("ht,htd->hd", weights, v[:, attended]), rtol=0, atol=2e-5)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> int:
        """The token that follows these."""
        count = ids.shape[1]
        self._decodes, features = self._at != 0, self.engine.options.largest.features
        self._bucket = (sluice.Bucket(decode_rows=1, features=features) if self._decodes else
                        sluice.Bucket(prefill_rows=count, prefills=1))
        number = self.engine.plan([sluice.PlanItem(self._sequence, count, not self._decodes)], self._bucket)
        seen = torch.ones(count, self._at + count, dtype=torch.bool).tril(self._at)[None, None]
        masks = dict.fromkeys(("deepseek_sparse_attention", "indexed_attention"), seen)  # As 5.17 names it, and 5.23.
        logits = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True,
                             position_ids=torch.arange(self._at, self._at + count).unsqueeze(0),
                             attention_mask=masks).logits
        self.engine.finish(number)
        self._at += count
        return int(logits[0, -1].argmax())

    def generate(self, prompt: torch.Tensor, count: int) -> list[int]:
        tokens = [self.forward(prompt)]
        while len(tokens) < count:
            tokens.append(self.forward(torch.tensor([[tokens[-1]]])))
        return tokens


@pytest.fixture(params=[("all", None), ("8", 8)], ids=["full", "sparse"])
def scored(request: pytest.FixtureRequest, model: torch.nn.Module) -> Iterator[tuple[Scored, list[int] | None]]:
    budget, chosen = request.param
    want = None
    if chosen is None:  # The indexers of the model's own leave nothing out, either.
        want = model.generate(PROMPT, do_sample=False, max_new_tokens=12)[0, PROMPT.shape[1] :].tolist()
    driven = Scored(model, f"scores | top_k={budget} | near=0,sinks=0,recent=1", chosen)
    yield driven, want
    driven.engine.close()


def test_an_indexer_chooses_in_an_engine(scored: tuple[Scored, list[int] | None]) -> None:
    driven, want = scored
    tokens = driven.generate(PROMPT, 12)
    assert want is None or tokens == want
    assert len(set(tokens)) > 1
