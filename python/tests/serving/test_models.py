"""Which models a PackedModel takes, and how it gives them back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import sluice
import torch
import transformers
from sluice.serving import model as serving_model
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from small import DEVICE, KV, SHAPE, bare_model, expected, greedy, prompt_ids, run, tokenizer
from waiting import DEADLINE_S

Model = transformers.PreTrainedModel
MOE = {"num_experts_per_tok": 2, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}


def packed(model: Model, policy: str = "full", **options: object) -> PackedModel:
    return PackedModel(model, policy, **{"host_bytes": 8 << 20, "context": 256, "threads": 1, "pin_threads": False,
                                         "answer_timeout_ms": 30_000, "sequences": 4, "prefill_rows": 64, **KV,
                                         **options})


@pytest.fixture
def served() -> Iterator[Callable[..., Loop]]:
    made: list[PackedModel] = []

    def serve(model: Model, policy: str = "full", **options: object) -> Loop:
        made.append(packed(copy.deepcopy(model), policy, **options))
        return Loop(made[-1], tokenizer())

    yield serve
    for each in made:
        each.close()


def gpt_oss(**changes: object) -> Model:
    """All of whose layers are full attention, with sinks."""
    torch.manual_seed(6)
    shape = {**SHAPE, "vocab_size": len(tokenizer()), "num_local_experts": 4, **MOE,
             "layer_types": ["full_attention"] * SHAPE["num_hidden_layers"], **changes}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**shape)).eval()
    for layer, block in enumerate(model.model.layers):
        # Large enough to take half of the attention, and another one for each head.
        block.self_attn.sinks.data = torch.tensor([0.0, 1.0, 2.0, 3.0]) + layer
    return model


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("policy", ["full", "exact | int4 | top_k=all | near=0"])
def test_attention_sinks(served: Callable[..., Loop], policy: str, graphs: str) -> None:
    model = gpt_oss()
    wants = {length: expected(model, prompt_ids(length, length), 12) for length in (1, 17, 65)}
    assert len({token for want in wants.values() for token in want}) > 10  # Tokens that tell something.
    told = run(served(model, policy, graphs=graphs), [greedy(each, prompt_ids(each, each)) for each in wants])
    assert {each: told.tokens(each) for each in wants} == wants
    for block in model.model.layers:
        block.self_attn.sinks.data.fill_(-100)
    assert {each: expected(model, prompt_ids(each, each), 12) for each in wants} != wants  # The sinks matter.


OTHERS: dict[str, tuple[Callable[[], Model], str]] = {
    "chunks": (lambda: of("Llama4", "Llama4Text", attention_chunk_size=16, num_local_experts=2,
                          intermediate_size_mlp=128, layer_types=["chunked_attention", "full_attention"] * 2),
               r"layers of chunked_attention; the server takes.*enable\(\)"),
    "convolutions": (lambda: of("Lfm2", layer_types=["conv", "full_attention"] * 2), "layers of conv; the server"),
    "linear": (lambda: of("Qwen3Next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                          shared_expert_intermediate_size=64, linear_num_value_heads=4, linear_num_key_heads=2,
                          linear_key_head_dim=16, linear_value_head_dim=16,
                          layer_types=["linear_attention", "full_attention"] * 2), "layers of linear_attention; the"),
    "heads": (lambda: of("Gemma4", "Gemma4Text", sliding_window=16, global_head_dim=2 * SHAPE["head_dim"],
                         layer_types=["sliding_attention", "full_attention"] * 2, num_global_key_value_heads=1,
                         attention_k_eq_v=True, num_kv_shared_layers=0, hidden_size_per_layer_input=16,
                         vocab_size_per_layer_input=len(tokenizer())), "layers of different heads"),
    "shared-keys": (lambda: of("Gemma4", "Gemma4Text", sliding_window=16, num_kv_shared_layers=2,
                               layer_types=["sliding_attention", "full_attention"] * 2,
                               hidden_size_per_layer_input=16, vocab_size_per_layer_input=len(tokenizer())),
                    "layers that share keys and values"),
    "rope": (lambda: of("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
             "rope_type dynamic"),
    "both-directions": (lambda: of("Bert", is_decoder=False), "more than causal"),
    "window-of-the-configuration-alone": (lambda: of("Phimoe", sliding_window=16, num_local_experts=2),
                                          "layer 0 has a window of all tokens, and the model's configuration says 16"),
    "twice-in-a-layer": (lambda: of("DiffLlama"), "layer 0 attends where layer 1 should"),
    "heads-of-the-configuration-alone": (lambda: of("GPTNeoX"), r"KV heads, head_dim\) \(4, 4, 16\)"),
    "latent": (lambda: of("DeepseekV3", num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
                          num_experts_per_tok=2, moe_intermediate_size=64), "kv_lora_rank 512, latent attention"),
}


def of(name: str, config_name: str | None = None, **changes: object) -> Model:
    config = getattr(transformers, f"{config_name or name}Config")(
        **{**SHAPE, "num_hidden_layers": 4, "vocab_size": len(tokenizer()), "eos_token_id": 0, "pad_token_id": 0,
           "bos_token_id": None, **changes})
    kind = {"Bert": "BertLMHeadModel"}.get(name, f"{name}ForCausalLM")
    return getattr(transformers, kind)(config).eval().to(DEVICE)  # Some have parameters of the CPU.


@pytest.mark.parametrize(("make", "words"), OTHERS.values(), ids=OTHERS.keys())
def test_models_that_are_refused(make: Callable[[], Model], words: str) -> None:
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(sluice.Unsupported, match=words):
        packed(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["scale", "softcap", "windows"])
def test_what_the_model_says(name: str) -> None:
    with pytest.raises(sluice.InvalidArgument, match=f"{name}: the model itself says that"):
        packed(copy.deepcopy(bare_model("llama")), **{name: None})


def test_policies_beside_the_policy() -> None:
    with pytest.raises(sluice.InvalidArgument, match="policies: the engine is for the policy"):
        packed(copy.deepcopy(bare_model("llama")), policies=["lfps"])


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_experts(served: Callable[..., Loop], graphs: str) -> None:
    """Rows of padding have experts of their own choice, and change nothing of others."""
    torch.manual_seed(7)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        **SHAPE, **MOE, vocab_size=len(tokenizer()), num_experts=4, moe_intermediate_size=64)).eval()
    wants = {length: expected(model, prompt_ids(length, length), 12) for length in (5, 17, 40)}
    loop = served(model, graphs=graphs)
    told = run(loop, [greedy(each, prompt_ids(each, each)) for each in wants])
    assert {each: told.tokens(each) for each in wants} == wants
    assert loop.status().failed_forwards == 0
    if DEVICE == "cpu":
        assert (loop.status().graph_replays > 0) == (graphs == "on")


def test_two_threads_serve_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(bare_model("llama"))
    before, both, made = model.config._attn_implementation, threading.Barrier(2), []
    # Both have found that the model is free.
    monkeypatch.setattr(serving_model, "Engine", lambda options: (both.wait(DEADLINE_S), sluice.Engine(options))[1])

    def serve() -> None:
        try:
            made.append(packed(model))
        except sluice.InvalidArgument as error:
            made.append(error)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(type(each).__name__ for each in made) == ["InvalidArgument", "PackedModel"]
    refused = next(each for each in made if isinstance(each, Exception))
    assert "enabled already; close() the PackedModel" in str(refused)
    winner = next(each for each in made if isinstance(each, PackedModel))
    assert model.config._attn_implementation == "sluice_packed"
    winner.close()
    winner.close()
    assert model.config._attn_implementation == before


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
def test_a_model_of_floats_on_a_gpu() -> None:
    model = copy.deepcopy(bare_model("llama"))
    with pytest.raises(sluice.Unsupported, match='float32 model on a GPU.*give kv_dtype="f16"'):
        packed(model, kv_dtype=None)
    assert model.config._attn_implementation != "sluice_packed"
