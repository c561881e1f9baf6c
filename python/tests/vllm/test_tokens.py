"""With the policy `full` vLLM's tokens are its own: families, mixed lengths, chunks of prompts, preemption, two
forwards under way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from engines import Engine, greedy, prompts

PROMPTS = prompts(5, 40, 100, 17, 33, 64, 1)  # Longer than a step's 64 rows, and than windows.
ANSWER = greedy(60)


FAMILIES = ("Llama", "Gemma2", "Gemma3", "Mistral", "Qwen3")
SMALL = {"Mistral": 1 << 19}  # Of host memory, else a MiB: not all requests have room at once.


@pytest.fixture(scope="module")
def own_of(model_of: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """vLLM's own tokens, by the family of its model."""
    known: dict[str, list[list[int]]] = {}

    def of(family: str) -> list[list[int]]:
        if family not in known:
            with Engine(model_of(family), None) as engine:
                known[family] = engine.tokens(PROMPTS, ANSWER)
            assert len({token for tokens in known[family] for token in tokens}) > 30  # It says something.
        return known[family]

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_vllms_own(family: str, model_of: Callable[[str], Path],
                              own_of: Callable[[str], list[list[int]]]) -> None:
    own = own_of(family)
    with Engine(model_of(family), {}) as engine:
        assert engine.tokens(PROMPTS, ANSWER) == own
        assert engine.forwards.preemptions == 0
        # vLLM itself keeps two bytes of a token and layer.
        kept = sum(tensor.size for tensor in engine.core.scheduler.kv_cache_config.kv_cache_tensors)
        assert 0 < kept < engine.forwards.engine.options.host_bytes / 50


@pytest.mark.parametrize("family", FAMILIES[:4])  # The last one is below.
def test_tokens_of_requests_that_were_preempted_are_the_same(family: str, model_of: Callable[[str], Path],
                                                             own_of: Callable[[str], list[list[int]]]) -> None:
    own = own_of(family)
    with Engine(model_of(family), {"host_bytes": SMALL.get(family, 1 << 20)}) as engine:
        assert engine.tokens(PROMPTS * 2, ANSWER) == own * 2
        assert engine.forwards.preemptions > 0


@pytest.mark.parametrize(("family", "host_bytes"), [("Gemma2", 16 << 20), ("Gemma2", 1 << 20), ("Qwen3", 1 << 20)])
def test_tokens_with_two_forwards_under_way(family: str, host_bytes: int, model_of: Callable[[str], Path],
                                            own_of: Callable[[str], list[list[int]]]) -> None:
    own = own_of(family)
    with Engine(model_of(family), {"host_bytes": host_bytes}, asynchronous=True) as engine:
        assert engine.tokens(PROMPTS * 2, ANSWER) == own * 2
        assert engine.forwards.most_under_way == 2
        assert (engine.forwards.preemptions > 0) == (host_bytes == 1 << 20)


def test_sinks(model_of: Callable[[str], Path]) -> None:
    """Against transformers: vLLM's own attention on the CPU takes sinks of bf16 alone."""
    folder, given = model_of("GptOss"), PROMPTS[:4]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    config = transformers.GenerationConfig(max_new_tokens=40, do_sample=False, pad_token_id=0)
    own = [model.generate(torch.tensor([ids]), generation_config=config)[0, len(ids):].tolist() for ids in given]
    assert len({token for tokens in own for token in tokens}) > 10 and all(len(tokens) == 40 for tokens in own)
    with Engine(folder, {}) as engine:
        assert engine.tokens(given, greedy(40)) == own
        for name in engine.link.layers:
            engine.worker.vllm_config.compilation_config.static_forward_context[name].impl.sinks = None
        assert engine.tokens(given, greedy(40)) != own


def test_a_layer_without_values_says_something_else(model_of: Callable[[str], Path],
                                                    own_of: Callable[[str], list[list[int]]]) -> None:
    """What the tests above would see if a layer's values were lost."""
    own = own_of("Llama")
    with Engine(model_of("Llama"), {}) as engine:
        attend = engine.forwards.engine.attend

        def without(bucket: object, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object,
                    **options: object) -> None:
            attend(bucket, layer, q, k, torch.zeros_like(v) if layer == 1 else v, *rest, **options)

        engine.forwards.engine.attend = without
        assert all(got != want for got, want in zip(engine.tokens(PROMPTS, ANSWER), own))


def test_smollm2(smollm2: Path) -> None:
    """Which others have trained, in f32: tokens of text, with likelihoods of the prompts asked for."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    given = [tokenizer(text).input_ids for text in (
        "A sluice is a gate that lets water through. It is built where a", "The capital of France",
        "def fibonacci(n):\n    if n < 2:", "Once upon a time there was a river, and on the river a mill. " * 12)]
    sampling = greedy(24, prompt_logprobs=0)
    changes = {"max_model_len": 320, "max_num_batched_tokens": 96}
    with Engine(smollm2, None, **changes) as engine:
        own = engine.tokens(given, sampling)
    with Engine(smollm2, {"host_bytes": 64 << 20}, **changes) as engine:
        assert engine.tokens(given, sampling) == own
    assert all(len(set(tokens)) > 8 for tokens in own[:3])


def test_other_policies_and_types_answer(model_of: Callable[[str], Path]) -> None:
    """The default, one that chooses on the CPU, and keys and values that are rounded."""
    for options, dtype in (({"policy": "sluice"}, "bfloat16"), ({"policy": "magicpig"}, "float32"),
                           ({"policy": "full", "kv_dtype": "fp8_e4m3"}, "bfloat16")):
        with Engine(model_of("Llama"), options, dtype=dtype) as engine:
            answers = engine.run(PROMPTS, greedy(8))
            assert [(len(each.tokens), each.reason) for each in answers] == [(8, "length")] * len(PROMPTS)
            kept = options.get("kv_dtype", {"float32": "f32"}.get(dtype, "bf16"))
            assert engine.forwards.engine.options.kv_dtype == kept
