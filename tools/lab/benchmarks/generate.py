"""Time to read a prompt and to decode a token of a model of Llama's 8B shape in transformers: with its own cache on the
device, with its own cache in host memory, and with Sluice, in one run. Random weights and tokens.

`python tools/lab/benchmarks/generate.py --tokens 32K --caches device,offloaded,full,sluice`; a name that is none of
the library's caches is a policy of Sluice. With `--device cpu` and a few layers it shows that it runs. Under
`torchrun --nproc-per-node N` the ranks share the model, and rank 0 tells what it measured."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
import transformers
from sluice.serving.arguments import option, size
from sluice.serving.ranks import Launch
from sluice.transformers import enable
from transformers.distributed import DistributedConfig

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 128256, "max_position_embeddings": 1 << 20, "rope_theta": 500000.0}
OWN = ("device", "offloaded")


def random_model(config: transformers.LlamaConfig, dtype: torch.dtype, device: str) -> transformers.PreTrainedModel:
    """Under torchrun each rank has its part, on its own device."""
    launch, made = Launch.of_environment(), transformers.LlamaForCausalLM
    torch.manual_seed(1)
    if launch.ranks > 1:
        transformers.utils.logging.set_verbosity_error()  # Which weights are missing, and all of them are.
        return made.from_pretrained(None, config=config, state_dict={}, dtype=dtype,
                                    distributed_config=DistributedConfig(tp_size=launch.ranks)).eval()
    with torch.device(device):
        return made._from_config(config, dtype=dtype).eval()


def near_size(text: str) -> int | None:
    """Bytes, or auto."""
    return None if text == "auto" else size(text)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


@torch.inference_mode()
def measure(model: transformers.PreTrainedModel, cache: Any, wants: argparse.Namespace) -> dict[str, float]:
    """Seconds of the prompt, and milliseconds of a token."""
    random = torch.Generator().manual_seed(2)  # The same for all ranks.
    ids = torch.randint(0, SHAPE["vocab_size"], (wants.batch, wants.tokens), generator=random).to(wants.device)
    began = time.perf_counter()
    for first in range(0, wants.tokens, wants.chunk):
        out = model(input_ids=ids[:, first : first + wants.chunk], past_key_values=cache, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    wait(wants.device)
    prompt_s, times = time.perf_counter() - began, []
    for _ in range(wants.warm_up + wants.steps):
        began = time.perf_counter()
        token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
        wait(wants.device)
        times.append(1e3 * (time.perf_counter() - began))
    times = sorted(times[wants.warm_up :])
    return {"prompt_s": round(prompt_s, 3), "token_ms": round(statistics.median(times), 2),
            "token_p95_ms": round(times[int(0.95 * len(times))], 2)}


def run(model: transformers.PreTrainedModel, name: str, wants: argparse.Namespace) -> dict[str, Any]:
    if name == "device":
        return measure(model, transformers.DynamicCache(config=model.config), wants)
    if name == "offloaded":
        return measure(model, transformers.DynamicCache(config=model.config, offloading=True), wants)
    config = model.config
    config.max_position_embeddings = wants.tokens + 1024  # What `enable` makes room for.
    token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    host_bytes = wants.batch * (wants.tokens + 1024) * token_bytes + (64 << 20)
    with enable(model, name, host_bytes=host_bytes, sequences=wants.batch, prefill_rows=wants.batch * wants.chunk,
                **{"near_bytes": wants.near_bytes, **dict(wants.option)}) as here:
        cache = here.cache()
        result = measure(model, cache, wants)
        memory = here.engine.memory()
        for name in ("device", "near_pages", "codes", "digests", "buffers", "far_pages_used", "policies"):
            result[f"{name}_gib"] = round(getattr(memory, name) / 2**30, 2)
        cache.reset()
    return result


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=size, default=32 << 10, help="of the prompt")
    arguments.add_argument("--batch", type=int, default=1)
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--chunk", type=size, default=2048, help="tokens of a prompt that are read at once")
    arguments.add_argument("--steps", type=int, default=32, help="tokens that are decoded and timed")
    arguments.add_argument("--warm-up", type=int, default=8)
    arguments.add_argument("--caches", default="device,offloaded,full,sluice")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--near-bytes", type=near_size, help="GPU memory for near keys and values; auto: by what "
                           "is free (auto)")
    arguments.add_argument("--option", type=option, action="append", default=[], help="NAME=VALUE of EngineOptions")
    arguments.add_argument("--json", action="store_true", help="a line of JSON for each")
    wants = arguments.parse_args()
    config = transformers.LlamaConfig(num_hidden_layers=wants.layers, attn_implementation="sdpa", **SHAPE)
    model, launch = random_model(config, torch.bfloat16, wants.device), Launch.of_environment()
    for name in wants.caches.split(","):
        result = run(model, name, wants)
        gc.collect()
        if wants.device != "cpu":
            torch.cuda.empty_cache()
        if launch.rank:
            continue
        if wants.json:
            print(json.dumps({"cache": name, "tokens": wants.tokens, "batch": wants.batch,
                              "ranks": launch.ranks, **result}), flush=True)
        else:
            print(f"{name:24} prompt {result['prompt_s']:8.2f} s   token {result['token_ms']:8.2f} ms   p95 "
                  f"{result['token_p95_ms']:8.2f}   near {result.get('near_pages_gib', 0.0):6.2f} GiB", flush=True)
    if launch.ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
