"""Tiny models of random weights and a tokenizer, as folders have them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# SLUICE_TEST_DEVICE=cuda runs all of this on a GPU, with the heads that its kernels have.
DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
# The models are of f32. A GPU keeps keys and values of 16 bits, and what they are rounded by shows in logits.
KV = {} if DEVICE == "cpu" else {"kv_dtype": "f16"}
NOISE = 1e-9 if DEVICE == "cpu" else 1e-2  # KL of the same attention, computed by others.
CONTEXT, VOCABULARY = 512, 300
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
TEXT = "the cat sat on the mat and the dog ran to the other cat, who sat with 17 mats and no dog. " * 40
TESTBED = Path(__file__).parents[3] / "tests" / "data" / "testbed"


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of all bytes, and a few words. Texts begin with token 0."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]))
    bare.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<|begin|>", eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def model_of(name: str = "Llama", **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16 if DEVICE == "cpu" else 64,
        "max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
        # Weights so large that attention is anything but even.
        "initializer_range": 0.3 if DEVICE == "cpu" else 0.1, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().to(DEVICE)


def greedy(model: transformers.PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """The library's own answer, which nothing ends."""
    config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=1, eos_token_id=None)
    made = model.generate(torch.tensor([prompt], device=DEVICE), generation_config=config)
    return made[0, len(prompt):].tolist()
