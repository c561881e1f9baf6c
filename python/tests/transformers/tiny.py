"""Tiny models of random weights, prompts for them, and what all of them are to do with Sluice as without."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch
import transformers
from sluice.transformers import Enabled, enable
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel

# SLUICE_TEST_DEVICE=cuda runs all of this on a GPU, with the heads that its kernels have.
torch.set_default_device(os.environ.get("SLUICE_TEST_DEVICE", "cpu"))
ON_CPU = torch.get_default_device().type == "cpu"
HEAD_DIM = 32 if ON_CPU else 64
# The models are of f32. A GPU keeps keys and values of 16 bits, and what they are rounded by shows in logits.
KV = {} if ON_CPU else {"kv_dtype": "f16"}
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3} if ON_CPU else {"rtol": 2e-2, "atol": 5e-2}

SHAPE = {"vocab_size": 97, "hidden_size": 4 * HEAD_DIM, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2,
         # Weights so large that attention is anything but even; on a GPU, where keys and values are rounded to f16,
         # not so large that this alone changes tokens.
         "initializer_range": 0.3 if ON_CPU else 0.07}


def model_of(name: str, config_name: str | None = None, **changes: object) -> PreTrainedModel:
    """A model of the family that transformers calls so: LlamaForCausalLM of LlamaConfig."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{config_name or name}Config")(**{**SHAPE, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def llama(**changes: object) -> PreTrainedModel:
    return model_of("Llama", **changes)


def qwen2(**changes: object) -> PreTrainedModel:
    return model_of("Qwen2", **changes)


def enabled(model: PreTrainedModel, policy: str = "full", **options: object) -> Enabled:
    kept = KV if model.dtype == torch.float32 else {}
    return enable(model, policy, host_bytes=16 << 20, **{"threads": 1, "pin_threads": False, "prefill_rows": 256,
                                                         "answer_timeout_ms": 30_000, **kept, **options})


def prompt(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randint(3, 97, (rows, tokens), generator=generator)


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompt(3, 40), torch.ones(3, 40, dtype=torch.long)
    for row, pads in ((0, 13), (2, 39)):
        mask[row, :pads] = 0
        ids[row, :pads] = 0
    return ids, mask


def greedy(model: PreTrainedModel, ids: torch.Tensor, tokens: int = 12, **options: object) -> torch.Tensor:
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
                              **{name: options.pop(name) for name in ("prefill_chunk_size", "num_beams")
                                 if name in options})
    return model.generate(ids, generation_config=config, **options)


def assistant_of(model: PreTrainedModel) -> PreTrainedModel:
    """The same without its last layer: some of its drafts are accepted, others not."""
    assistant = copy.deepcopy(model)
    assistant.model.layers = assistant.model.layers[:-1]
    assistant.config.num_hidden_layers -= 1
    if getattr(assistant.config, "layer_types", None):
        assistant.config.layer_types = assistant.config.layer_types[:-1]
    return assistant


def fail_in(module: torch.nn.Module, error: type[BaseException] = KeyError) -> RemovableHandle:
    """Every forward of this module raises such an error of "the model's own", until remove()."""
    return module.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error("the model's own")))


Maker = Callable[[], PreTrainedModel]
Served = tuple[PreTrainedModel, PreTrainedModel, Enabled]
"""A model, itself again with Sluice, and what enable() has returned."""


def same_tokens(model: PreTrainedModel, got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether answers are equal; on a GPU, where keys and values are rounded, up to a token that is as likely."""
    for row in (() if ON_CPU else range(len(want))):
        other = (got[row] != want[row]).nonzero()
        if len(other):
            at = int(other[0])
            real = want[row, int((mask[row] == 0).sum()):at]  # Padding is on the left.
            with torch.no_grad():
                logits = model(real[None]).logits[0, -1]
            if (logits[want[row, at]] - logits[got[row, at]]).abs() > 2 * TOLERANCE["atol"]:
                return False
    return not ON_CPU or torch.equal(got, want)


def same_with_left_padding(served: Served) -> torch.Tensor:
    """The tokens."""
    model, ours, _ = served
    ids, mask = left_padded()
    want = greedy(model, ids, attention_mask=mask)
    assert same_tokens(model, greedy(ours, ids, attention_mask=mask), want, mask)
    assert not torch.equal(greedy(model, ids, attention_mask=torch.ones_like(mask)), want)  # The mask matters.
    return want


def same_logits(served: Served) -> None:
    """Of every token, in parts."""
    model, ours, here = served
    ids, mask = left_padded()
    cache, theirs = here.cache(), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for first, last in ((0, 29), (29, 39), (39, 40)):
            part = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last],
                    "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, first:last]}
            want = model(**part, past_key_values=theirs).logits
            got = ours(**part, past_key_values=cache).logits
            real = mask[:, first:last].bool()
            torch.testing.assert_close(got[real], want[real], **TOLERANCE)
    assert cache.rows.tokens() == mask.sum(1).tolist()


def same_second_turn(served: Served) -> None:
    model, ours, here = served
    ids = prompt(2, 20)
    cache, theirs = here.cache(), transformers.DynamicCache(config=model.config)
    want, got = greedy(model, ids, past_key_values=theirs), greedy(ours, ids, past_key_values=cache)
    assert torch.equal(got, want)
    more = torch.cat([want, prompt(2, 9, seed=2)], dim=1)
    mask = torch.ones_like(more)
    want = greedy(model, more, past_key_values=theirs, attention_mask=mask)
    assert torch.equal(greedy(ours, more, past_key_values=cache, attention_mask=mask), want)


def same_in_chunks(served: Served) -> None:
    model, ours, _ = served
    ids, mask = left_padded()
    want = greedy(model, ids, attention_mask=mask)
    assert same_tokens(model, greedy(ours, ids, attention_mask=mask, prefill_chunk_size=12), want, mask)


def same_beams(served: Served) -> None:
    model, ours, _ = served
    ids = prompt(2, 20)
    assert torch.equal(greedy(ours, ids, num_beams=3), greedy(model, ids, num_beams=3))
