"""Tiny models of random weights, prompts for them, and what their tests have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import transformers
from sluice.transformers import Enabled, enable
from transformers import GenerationConfig, PreTrainedModel

SHAPE = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2,
         # Weights so large that attention is anything but even.
         "initializer_range": 0.3}


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
    return enable(model, policy, host_bytes=16 << 20, **{"threads": 1, "pin_threads": False, "prefill_rows": 256,
                                                         "answer_timeout_ms": 30_000, **options})


def prompt(rows: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


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


Maker = Callable[[], PreTrainedModel]
