#!/usr/bin/env python3
"""A folder with the configuration of Llama-3.1-8B's shape, for --random-weights.

    tools/lab/vllm/models.py DIR            32 layers
    tools/lab/vllm/models.py DIR --layers 8

--small makes one that a CPU can run; --weights saves random weights with it, by which attention is anything but even,
for what is to have the same ones however many ranks it has."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "vocab_size": 128256, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
         "hidden_act": "silu", "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": False,
         "dtype": "bfloat16", "attention_bias": False, "mlp_bias": False}
SMALL = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "vocab_size": 997, "bos_token_id": 1, "eos_token_id": 2}

_DEVIATION = 0.3


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--weights", action="store_true")
    wants = parser.parse_args(words)
    made = {**SHAPE, **(SMALL if wants.small else {}), "num_hidden_layers": wants.layers}
    wants.folder.mkdir(parents=True, exist_ok=True)
    (wants.folder / "config.json").write_text(json.dumps(made, indent=1) + "\n")
    if wants.weights:
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig.from_dict({**made, "initializer_range": _DEVIATION})
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(wants.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
