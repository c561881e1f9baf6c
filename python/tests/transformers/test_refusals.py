"""What cannot be served is refused, with the reason, before anything has changed."""

from __future__ import annotations

import threading
import types

import pytest
import sluice
import sluice.transformers
import torch
import transformers
from sluice._transformers_support import kv_dtype
from test_families import SLIDING
from tiny import HEAD_DIM, ON_CPU, TOLERANCE, Maker, enabled, greedy, llama, model_of, prompt, qwen2
from transformers import PreTrainedModel


def changed(**options: object) -> PreTrainedModel:
    model = llama()
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


def split() -> PreTrainedModel:
    model = llama()
    model.model.layers[1].to("meta")
    return model


def t5() -> PreTrainedModel:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=97, d_model=32, d_kv=16, d_ff=32,
                                                                         num_layers=1, num_heads=2))


MODELS: dict[str, tuple[Maker, str]] = {
    "encoder-decoder": (t5, "T5ForConditionalGeneration"),
    "cross-attention": (lambda: changed(add_cross_attention=True), "no decoder of its own"),
    "no-interface": (lambda: transformers.BloomForCausalLM(transformers.BloomConfig(
        vocab_size=97, hidden_size=32, n_layer=1, n_head=2)), "Bloom.*AttentionInterface"),
    "latent-attention": (lambda: model_of("DeepseekV3", num_key_value_heads=4, n_routed_experts=4, n_group=1,
                                          topk_group=1, num_experts_per_tok=2, moe_intermediate_size=64),
                         "kv_lora_rank 512"),
    "shared-keys": (lambda: changed(num_kv_shared_layers=1), "share keys and values"),
    "both-directions": (lambda: model_of("Gemma3", "Gemma3Text", head_dim=32, use_bidirectional_attention=True),
                        "use_bidirectional_attention"),
    "not-causal": (lambda: changed(is_causal=False), "causal self-attention alone"),
    "sliding-alone": (lambda: model_of("Mistral", sliding_window=16), "sliding_attention alone.*full_attention"),
    "both-in-one-layer": (lambda: model_of("FalconH1", head_dim=32, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16),
                          "layers of hybrid"),
    "other-values": (lambda: changed(v_head_dim=16), f"keys of {HEAD_DIM} numbers and values of 16"),
    "several-devices": (split, f"is on {'cpu' if ON_CPU else 'cuda:0'}, meta"),
    "tensor-parallel": (lambda: changed_model(_tp_size=2, _tp_plan={}), "leaves the heads of its attention whole"),
    "heads-of-ranks": (lambda: changed_model(_tp_size=3), "2 heads of keys and values, which 3 ranks cannot share"),
    "float64": (lambda: llama().to(torch.float64), "float64"),
    "float8": (lambda: llama().to(torch.float8_e4m3fn), "float8"),
    "head-dim": (lambda: llama(hidden_size=96, num_attention_heads=12, num_key_value_heads=4), "head_dim"),
    "group": (lambda: llama(head_dim=16, num_attention_heads=64, num_key_value_heads=1), "32"),
}


def changed_model(**attributes: object) -> PreTrainedModel:
    model = llama()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def test_floats_on_a_gpu() -> None:
    def on(device: str, dtype: torch.dtype) -> types.SimpleNamespace:
        parameter = types.SimpleNamespace(device=torch.device(device))
        return types.SimpleNamespace(dtype=dtype, parameters=lambda: iter([parameter]))

    words = 'float32 model on a GPU.*dtype=torch.bfloat16, or give kv_dtype="f16"'
    with pytest.raises(sluice.Unsupported, match=words):
        kv_dtype(on("cuda:1", torch.float32), None)
    assert kv_dtype(on("cuda:1", torch.float32), "f16") == "f16"
    assert [kv_dtype(on("cuda:1", each), None) for each in (torch.float16, torch.bfloat16)] == ["f16", "bf16"]
    assert kv_dtype(on("cpu", torch.float32), None) == "f32"


@pytest.mark.skipif(ON_CPU, reason="there is no GPU")
def test_a_model_of_floats_on_a_gpu() -> None:
    with pytest.raises(sluice.Unsupported, match="float32 model on a GPU"):
        sluice.transformers.enable(llama(), host_bytes=16 << 20)
    model = llama()
    with enabled(model) as here:  # Says what keys and values are kept as.
        assert here.engine.options.kv_dtype == "f16" and model.dtype == torch.float32


@pytest.mark.parametrize(("make", "words"), MODELS.values(), ids=MODELS.keys())
def test_models(make: Maker, words: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(sluice.Error, match=words):
        enabled(model)
    assert model.config._attn_implementation == before and "generate" not in vars(model)


def test_a_policy_whose_queries_are_rehearsed() -> None:
    model = llama()
    with pytest.raises(sluice.Unsupported, match="infinigen chooses by rehearsed queries"):
        enabled(model, policy="infinigen")
    with enabled(model):  # Nothing has changed.
        pass


def test_a_policy_whose_scores_nobody_hands_over() -> None:
    model = llama()
    with pytest.raises(sluice.Unsupported, match="scores of a model's own indexer"):
        enabled(model, policy="scores | top_k=64 | near=0")
    with enabled(model):  # Nothing has changed.
        pass


def test_what_is_no_model() -> None:
    with pytest.raises(sluice.InvalidArgument, match="model is a str; give what from_pretrained"):
        sluice.transformers.enable("some/folder")


def test_a_model_twice() -> None:
    model = llama()
    with enabled(model):
        with pytest.raises(sluice.InvalidArgument, match="enabled already"):
            enabled(model)
    with enabled(model):
        pass


@pytest.mark.parametrize("name", ["sluice", "sluice_packed"])
def test_a_model_with_an_attention_of_ours(name: str) -> None:
    model = llama()
    model.config._attn_implementation = name
    with pytest.raises(sluice.InvalidArgument, match="enabled already"):
        enabled(model)


def test_two_threads_enable_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before, both, made = model.config._attn_implementation, threading.Barrier(2), []
    # Both have found that the model is free.
    monkeypatch.setattr(sluice.transformers, "Engine",
                        lambda options, **owner: (both.wait(600), sluice.Engine(options, **owner))[1])

    def run() -> None:
        try:
            made.append(enabled(model))
        except sluice.InvalidArgument as error:
            made.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert sorted(type(each).__name__ for each in made) == ["Enabled", "InvalidArgument"]
    next(each for each in made if not isinstance(each, Exception)).close()
    assert model.config._attn_implementation == before and "generate" not in vars(model)


def test_close_takes_back_what_is_there() -> None:
    model = llama()
    own = model.generate = model.generate  # Of the model alone, as when another library has put its own there.
    with enabled(model):
        assert model.generate is not own
    assert vars(model).pop("generate") is own
    before, here = model.config._attn_implementation, enabled(model)
    kept = model.generate
    del model.generate
    here.close()
    here.close()
    assert model.config._attn_implementation == before and "generate" not in vars(model)
    assert kept(prompt(1, 5), max_new_tokens=2, do_sample=False).shape[0] == 1


def test_generate() -> None:
    model, ids = llama(), prompt(1, 20)
    with enabled(model) as here, enabled(qwen2()) as other:
        for options, words in (({"use_cache": False}, "use_cache"), ({"output_attentions": True}, "output_attentions"),
                               ({"cache_implementation": "static"}, "cache_implementation"),
                               ({"assistant_early_exit": 1}, "assistant_early_exit"),
                               ({"past_key_values": transformers.DynamicCache()}, "DynamicCache"),
                               ({"past_key_values": other.cache()}, "another model")):
            with pytest.raises(sluice.Error, match=words):
                greedy(model, ids, **options)
        for options, words in (({"use_cache": False}, "use_cache"), ({"cache_implementation": "static"}, "static")):
            with pytest.raises(sluice.Unsupported, match=words):
                model.generate(ids, transformers.GenerationConfig(max_new_tokens=2, **options))
        assert here.engine.memory().far_pages_used == 0
        model.generation_config.cache_implementation = "hybrid"  # As on the hub; the library makes None of it.
        assert model.generate(ids, transformers.GenerationConfig(max_new_tokens=2)).shape[1] > 20
        model.generation_config.use_cache = False  # What a configuration of one call leaves open.
        with pytest.raises(sluice.Unsupported, match="use_cache"):
            model.generate(ids, transformers.GenerationConfig(max_new_tokens=2))


@torch.no_grad()
def test_forwards() -> None:
    model, ids = llama(), prompt(1, 20)
    with enabled(model, prefill_rows=32, sequences=2) as here:
        with pytest.raises(sluice.OutOfCapacity):
            model(prompt(3, 5), past_key_values=here.cache())
        cache = here.cache()
        model(ids, past_key_values=cache)
        hidden = torch.ones(1, 21, dtype=torch.long)
        hidden[0, 3] = 0
        with pytest.raises(sluice.Unsupported, match="hides other tokens"):
            model(ids[:, :1], past_key_values=cache, attention_mask=hidden)
        with pytest.raises(sluice.InvalidArgument, match="has 1 rows, and this batch 2"):
            model(prompt(2, 1), past_key_values=cache)
        seeing_ahead = torch.ones(1, 1, 20, 20, dtype=torch.bool)
        with pytest.raises(sluice.Unsupported, match="more than causal"):
            model(ids, past_key_values=here.cache(), attention_mask=seeing_ahead)
        with torch.enable_grad(), pytest.raises(sluice.InvalidArgument, match="gradients"):
            model(ids, past_key_values=here.cache())
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        with pytest.raises(sluice.Unsupported, match="dropout"):
            model(ids, past_key_values=here.cache())


@torch.no_grad()
def test_tokens_of_an_image_that_see_each_other() -> None:
    text = {**SLIDING, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": HEAD_DIM, "vocab_size": 97}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1)).eval()
    model.set_attn_implementation({"vision_config": "eager"})
    ids, pixels = prompt(1, 8), torch.randn(2, 3, 28, 28)
    features = model.model.vision_tower(pixels).last_hidden_state
    want = greedy(model, ids)
    with enabled(model) as here:
        assert torch.equal(greedy(model, ids), want)
        torch.testing.assert_close(model.model.vision_tower(pixels).last_hidden_state, features)
        with pytest.raises(sluice.Unsupported, match="image"):
            model(ids, token_type_ids=torch.ones_like(ids), past_key_values=here.cache())
    parts = model.config, model.config.text_config, model.config.vision_config
    assert [part._attn_implementation for part in parts] == ["sdpa", "sdpa", "eager"]


@torch.no_grad()
@pytest.mark.parametrize("what", ["keys", "values"])
def test_keys_and_values_that_the_cache_does_not_get(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), prompt(1, 20)
    with enabled(model) as here:
        ours = transformers.AttentionInterface()["sluice"]

        def another(module: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *call: object,
                    **options: object) -> object:
            return ours(module, q, k * 2 if what == "keys" else k, v * 2 if what == "values" else v, *call, **options)

        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sluice", another)
        with pytest.raises(sluice.Unsupported, match="changes keys or values between the cache and attention"):
            model(ids, past_key_values=here.cache())


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 3])
def test_layers_that_attend_in_another_way(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(num_hidden_layers=layers), prompt(1, 20)
    want = model(ids).logits
    with enabled(model) as here:
        cache = here.cache()
        with monkeypatch.context() as patch:
            patch.setitem(transformers.AttentionInterface._global_mapping, "sluice",
                          transformers.AttentionInterface()["sdpa"])
            with pytest.raises(sluice.Unsupported, match="layer 0 did not come to Sluice"):
                model(ids, past_key_values=cache)
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, want, **TOLERANCE)
