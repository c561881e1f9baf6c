"""Next-token logits of a model of Llama's 8B shape with the policy `full` beside transformers' own attention (sdpa, and
eager attention, another order of the same sums), all in bf16, each held against the same model in float32 with sdpa.
Random weights and tokens: a prompt in chunks, then tokens one by one, the same for all.

`python tools/lab/benchmarks/logits.py --tokens 8K`. An attention within the noise of bf16 is as far from float32 as
the library's own is. With `--device cpu --layers 2` it shows that it runs."""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import torch
import transformers
from generate import SHAPE, random_model
from sluice.serving.arguments import option, size
from sluice.transformers import enable


@torch.inference_mode()
def logits_of(model: transformers.PreTrainedModel, cache: Any, ids: torch.Tensor, wants: argparse.Namespace,
              ) -> torch.Tensor:
    """[2 * steps, vocabulary], float32: of the last `steps` tokens of the prompt, and of as many that are decoded."""
    kept = []
    for first in range(0, wants.tokens, wants.chunk):
        out = model(input_ids=ids[:, first : min(first + wants.chunk, wants.tokens)], past_key_values=cache,
                    logits_to_keep=wants.steps)
    kept.append(out.logits[0].float())
    for at in range(wants.tokens, wants.tokens + wants.steps):
        kept.append(model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[0].float())
    return torch.cat(kept)


def distance(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Root mean square and largest difference, in standard deviations of `want`; KL(want, got) in nats; how often the
    likeliest token is the same."""
    unit = want.std()
    told = torch.log_softmax(want, -1)
    kl = (told.exp() * (told - torch.log_softmax(got, -1))).sum(-1)
    return {"rms": round(float(((got - want) / unit).square().mean().sqrt()), 6),
            "largest": round(float(((got - want) / unit).abs().max()), 5),
            "kl_mean": float(f"{kl.mean():.3g}"), "kl_largest": float(f"{kl.max():.3g}"),
            "same_first": round(float((got.argmax(-1) == want.argmax(-1)).float().mean()), 4)}


def ours(model: transformers.PreTrainedModel, ids: torch.Tensor, wants: argparse.Namespace) -> torch.Tensor:
    config, room = model.config, wants.tokens + wants.steps + 1024
    config.max_position_embeddings = room  # What `enable` makes room for.
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    with enable(model, wants.policy, host_bytes=room * token_bytes + (64 << 20), sequences=1, prefill_rows=wants.chunk,
                **dict(wants.option)) as here:
        return logits_of(model, here.cache(), ids, wants)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=size, default=8 << 10, help="of the prompt")
    arguments.add_argument("--steps", type=int, default=64, help="tokens of the prompt's end, and decoded ones")
    arguments.add_argument("--chunk", type=size, default=2048, help="tokens of a prompt that are read at once")
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--policy", default="full")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE of EngineOptions")
    wants = arguments.parse_args()
    config = transformers.LlamaConfig(num_hidden_layers=wants.layers, attn_implementation="sdpa", **SHAPE)
    model = random_model(config, torch.bfloat16, wants.device)
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, wants.tokens + wants.steps), generator=random).to(wants.device)
    exact_model = copy.deepcopy(model).float()
    exact = logits_of(exact_model, transformers.DynamicCache(config=config), ids, wants)
    del exact_model
    found = {"sdpa": logits_of(model, transformers.DynamicCache(config=config), ids, wants)}
    model.set_attn_implementation("eager")
    found["eager"] = logits_of(model, transformers.DynamicCache(config=config), ids, wants)
    model.set_attn_implementation("sdpa")
    found[wants.policy] = ours(model, ids, wants)
    for name, got in found.items():
        for part, rows in (("prompt", slice(None, wants.steps)), ("decoded", slice(wants.steps, None))):
            print(json.dumps({"attention": name, "tokens": wants.tokens, "logits": part,
                              "from_float32": distance(got[rows], exact[rows]),
                              "from_sdpa": distance(got[rows], found["sdpa"][rows])}), flush=True)


if __name__ == "__main__":
    main()
