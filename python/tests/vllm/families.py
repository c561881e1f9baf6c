"""Tiny models of random weights, as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

# Weights so large that attention is anything but even.
SHAPE = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
         "initializer_range": 0.3}
GEMMA = {"query_pre_attn_scalar": 48, "hidden_activation": "gelu_pytorch_tanh"}  # Not the size of a head: a scale.
FAMILIES = {
    "Llama": {},
    # Every other layer has a window.
    "Gemma2": {"num_hidden_layers": 4, "sliding_window": 48, "attn_logit_softcapping": 3.0,
               "final_logit_softcapping": 30.0, "tie_word_embeddings": True, **GEMMA},
    # Five of six have one: six groups of layers.
    "Gemma3": {"num_hidden_layers": 6, "sliding_window": 32, **GEMMA},
    # All have one.
    "Mistral": {"sliding_window": 48},
    "Qwen3": {},
    # Sinks, beside windows.
    "GptOss": {"num_hidden_layers": 2, "sliding_window": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def save(family: str, folder: Path) -> Path:
    """A model of the family, saved in a folder below this one."""
    torch.manual_seed(5)
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if family == "Gemma2":  # vLLM has its embeddings tied; were they large, a token would follow itself.
        with torch.no_grad():
            model.model.embed_tokens.weight *= 0.03
    if family == "GptOss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, 1.0)
    model.save_pretrained(folder / family)
    return folder / family
