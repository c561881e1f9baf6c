"""A model of tests as a file of GGUF, the form that llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
import transformers

_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
          "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
          "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write(path: Path, model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    """A Llama, in floats of 32 bits, with a byte-level tokenizer."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(writer, tokenizer)
    for name, values in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        split = next((count for part, count in heads.items() if part in name), None)
        if split is not None:  # Channels that positions rotate together are neighbours there.
            values = values.view(split, 2, -1, values.shape[1]).transpose(1, 2).reshape(values.shape)
        writer.add_tensor(_name(name), values.to("cpu", torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    plain = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}
    if name in plain:
        return plain[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    special = set(tokenizer.all_special_ids) | {each["id"] for each in told["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    writer.add_token_types([gguf.TokenType.CONTROL if each in special else gguf.TokenType.NORMAL
                            for each in range(len(tokenizer))])
    writer.add_token_merges([" ".join(merge) for merge in told["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
