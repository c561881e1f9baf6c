"""Models whose layers see the newest tokens alone, in all layers or in some, with soft-caps and sinks beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import sluice
import torch
import transformers
from sluice.serving.attention import attention
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from small import DEVICE, KV, KV_BYTES, SHAPE, Told, expected, greedy, prompt_ids, run, same, tokenizer
from transformers import PreTrainedModel

WINDOW = 16


def mixed(layers: int = 4) -> dict[str, object]:
    """Every other layer has a window."""
    return {"sliding_window": WINDOW, "num_hidden_layers": layers,
            "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}


MIXED = mixed()
LENGTHS = (1, 15, 16, 17, 33, 64, 130)  # Up to eight windows; prompts are read 64 tokens at a time.


def model_of(name: str, config_name: str | None = None, **changes: object) -> PreTrainedModel:
    torch.manual_seed(6)
    shape = {**SHAPE, "vocab_size": len(tokenizer()), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = getattr(transformers, f"{config_name or name}Config")(**{**shape, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None  # generate() would take it from here and end with it.
    return model


def gpt_oss(layers: int = 4) -> PreTrainedModel:
    model = model_of("GptOss", **mixed(layers), num_local_experts=4, num_experts_per_tok=2)
    for layer, block in enumerate(model.model.layers):
        # Large enough to take half of the attention, and another one for each head.
        block.self_attn.sinks.data = torch.tensor([0.0, 1.0, 2.0, 3.0]) + layer
    return model


def gemma2(layers: int = 4) -> PreTrainedModel:
    model = model_of("Gemma2", **mixed(layers), attn_logit_softcapping=3.0, final_logit_softcapping=None,
                     query_pre_attn_scalar=16, tie_word_embeddings=False)
    model.set_attn_implementation("eager")  # sdpa has no soft-cap, and leaves it out.
    return model


ROPES = {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma2": gemma2,
    "gemma3": lambda: model_of("Gemma3", "Gemma3Text", **MIXED, **ROPES, query_pre_attn_scalar=32,
                               tie_word_embeddings=False),
    "gpt-oss": gpt_oss,
    "mistral-alone": lambda: model_of("Mistral", sliding_window=WINDOW),
    "phi3-alone": lambda: model_of("Phi3", sliding_window=WINDOW),
    "starcoder2-alone": lambda: model_of("Starcoder2", sliding_window=WINDOW),
    "ministral": lambda: model_of("Ministral", **MIXED),
    "qwen2": lambda: model_of("Qwen2", **MIXED, use_sliding_window=True),
    "qwen3": lambda: model_of("Qwen3", **MIXED, use_sliding_window=True),
    "olmo3": lambda: model_of("Olmo3", **MIXED),
    "smollm3": lambda: model_of("SmolLM3", **MIXED, use_sliding_window=True, no_rope_layers=[1, 0, 1, 1]),
    "cohere2": lambda: model_of("Cohere2", **MIXED, tie_word_embeddings=False),
    "exaone4": lambda: model_of("Exaone4", **MIXED),
}
Serve = Callable[..., Loop]
Family = tuple[PreTrainedModel, dict[int, list[int]]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[PackedModel] = []

    def loop(model: PreTrainedModel, policy: str = "full", **options: object) -> Loop:
        made.append(PackedModel(copy.deepcopy(model), policy, **{
            "host_bytes": 8 << 20, "context": 256, "threads": 1, "pin_threads": False, "answer_timeout_ms": 30_000,
            "sequences": 8, "prefill_rows": 64, **KV, **options}))
        return Loop(made[-1], tokenizer())

    yield loop
    for each in made:
        each.close()


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    """A model, and what the library answers by the length of the prompt."""
    model = request.param()
    wants = {length: expected(model, prompt_ids(length, length), 12) for length in LENGTHS}
    assert len({token for want in wants.values() for token in want}) > 10  # Tokens that tell something.
    return model, wants


def all_same(model: PreTrainedModel, told: Told, wants: dict[int, list[int]]) -> bool:
    """Whether answers are the library's, by the length of their prompts."""
    return all(same(model, prompt_ids(length, length), told.tokens(length), want) for length, want in wants.items())


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_tokens_are_those_of_generate(serve: Serve, family: Family, graphs: str) -> None:
    model, wants = family
    loop = serve(model, graphs=graphs)
    together = run(loop, [greedy(length, prompt_ids(length, length)) for length in LENGTHS])
    assert all_same(model, together, wants)
    # Again, with what is known of the prompts: pages behind a window are there for rows that come anew.
    for length in LENGTHS:
        again = run(loop, [greedy(length, prompt_ids(length, length))])
        assert all_same(model, again, {length: wants[length]})
        assert again.last(length).cached == (length - 1) // 16 * 16
    assert loop.status().failed_forwards == 0


def test_an_answer_that_outgrows_windows(serve: Serve, family: Family) -> None:
    model, _ = family
    told = run(serve(model), [greedy(10, prompt_ids(10, 10), 70)])
    assert all_same(model, told, {10: expected(model, prompt_ids(10, 10), 70)})


def page_bytes(model: PreTrainedModel) -> int:
    """Of all layers and KV heads."""
    return 2 * 16 * model.config.num_hidden_layers * model.config.num_key_value_heads * SHAPE["head_dim"] * KV_BYTES


@pytest.mark.parametrize("pages", [2, 40])
def test_near_memory_beside_windows(serve: Serve, family: Family, pages: int) -> None:
    """For a part of what rows see, and for all of it."""
    model, wants = family
    loop = serve(model, near_bytes=pages * page_bytes(model))
    told = run(loop, [greedy(length, prompt_ids(length, length)) for length in LENGTHS])
    assert all_same(model, told, wants)
    assert loop.status().stats["near_tokens"] > 0


def test_after_preemption(serve: Serve, family: Family) -> None:
    """Memory for a part of what requests come to: the youngest rest, and come again with all their tokens."""
    model, _ = family
    wants = {length: expected(model, prompt_ids(length, length), 40) for length in (60, 61, 62, 63)}
    loop = serve(model, host_bytes=22 * page_bytes(model))
    told = run(loop, [greedy(length, prompt_ids(length, length), 40) for length in wants])
    assert loop.status().preemptions > 0 and all_same(model, told, wants)


@pytest.mark.parametrize("policy", ["exact | int4 | top_k=all | near=0", "exact | top_k=all | near=0"])
def test_policies_beside_windows(serve: Serve, policy: str) -> None:
    """That choose on the device, and on the CPU."""
    model = gpt_oss()
    wants = {length: expected(model, prompt_ids(length, length), 12) for length in LENGTHS}
    told = run(serve(model, policy), [greedy(length, prompt_ids(length, length)) for length in LENGTHS])
    assert all_same(model, told, wants)


def test_windows_that_no_sequence_outgrows_are_none(serve: Serve) -> None:
    model = model_of("Ministral", **{**MIXED, "sliding_window": 64})
    for context, windows in ((65, [64, 0, 64, 0]), (64, None)):
        loop = serve(model, context=context)
        assert loop._engine.options.windows == windows
        told = run(loop, [greedy(50, prompt_ids(50, 50), context)])
        assert all_same(model, told, {50: expected(model, prompt_ids(50, 50), context - 50)})
        with pytest.raises(sluice.InvalidArgument, match=f"would have {context + 1} tokens, and may have {context}"):
            served = loop._model
            served.run([sluice.PlanItem(served.engine.begin("full"), context + 1, True)], [1] * (context + 1), [0])


def called_with(served: PackedModel, **changes: object) -> None:
    """A forward in which the model's code calls attention with others of these."""
    def other(*call: object, **options: object) -> object:
        return attention(*call, **{**options, **changes})

    number = served.engine.begin("full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transformers.AttentionInterface._global_mapping, "sluice_packed", other)
        served.run([sluice.PlanItem(number, 5, True)], prompt_ids(5), [4])


@pytest.mark.parametrize(("changes", "words"), [
    ({"sliding_window": WINDOW + 1}, "layer 0 has a window of 17 tokens, and the model's configuration says 16"),
    ({"sliding_window": None}, "layer 0 has a window of all tokens, and the model's configuration says 16"),
    ({"softcap": 2.0}, "layer 0 has softcap 2.0, and the model's configuration says 3.0"),
    ({"s_aux": torch.zeros(4)}, "both a softcap and sinks")])
def test_attention_that_is_not_as_configured(serve: Serve, changes: dict[str, object], words: str) -> None:
    served = serve(gemma2())._model
    with pytest.raises(sluice.Unsupported, match=words):
        called_with(served, **changes)
    called_with(served)


@pytest.mark.skipif(DEVICE != "cpu", reason="the weights are others")
def test_the_window_is_exact(family: Family) -> None:
    """These models notice a window that is one token longer or shorter: the other tests say something."""
    model, length = family[0], LENGTHS[-1]
    for window in (WINDOW - 1, WINDOW + 1):
        other = copy.deepcopy(model)
        other.config.sliding_window = window
        with torch.no_grad():
            ids = torch.tensor([prompt_ids(length, length)])
            logits = [each(ids, use_cache=False).logits for each in (model, other)]
        assert (logits[0] - logits[1]).abs().max() > 0.1
