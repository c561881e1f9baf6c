"""Tokens per second, time to the first token and time per token of the server's loop, with CUDA graphs and without.

`python tools/lab/benchmarks/serve.py --prompt 4K --answer 128 --graphs on,off` serves a model of Llama's 8B shape,
of random weights and tokens, in this process and without HTTP. As many requests are under way as `--concurrency` says;
one that ends makes place for the next. Times per token are those between two tokens of one answer: what another
request's prompt takes is part of them. That it runs is shown on the CPU by
`--device cpu --layers 2 --hidden 256 --heads 4 --kv-heads 2 --vocabulary 1000 --dtype float32`. Under
`torchrun --nproc-per-node N` the ranks share the model; then `--graphs` is one of both."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import time
from typing import Any

import torch
import transformers
from generate import SHAPE, near_size, random_model, wait
from sluice.serving.arguments import option, size
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from sluice.serving.ranks import Launch, Ranks, join
from sluice.serving.requests import Request, Sampling
from sluice.serving.sharded import ShardedModel

_numbers = itertools.count()  # Of requests: none comes twice.


class Letters:
    """Instead of a tokenizer: every token is a letter, so that each is told when it comes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)


@dataclasses.dataclass
class Told:
    """When tokens of a request came, in seconds."""

    submitted: float
    tokens: list[float] = dataclasses.field(default_factory=list)


def make_model(wants: argparse.Namespace) -> transformers.PreTrainedModel:
    shape = {**SHAPE, "hidden_size": wants.hidden, "intermediate_size": 7 * wants.hidden // 2,
             "num_attention_heads": wants.heads, "num_key_value_heads": wants.kv_heads,
             "vocab_size": wants.vocabulary}
    config = transformers.LlamaConfig(num_hidden_layers=wants.layers, attn_implementation="sdpa", **shape)
    return random_model(config, getattr(torch, wants.dtype), wants.device)


def packed_model(model: transformers.PreTrainedModel, ranks: Ranks | None, *arguments: Any,
                 **options: Any) -> PackedModel:
    return (PackedModel(model, *arguments, **options) if ranks is None else
            ShardedModel(model, *arguments, ranks=ranks, **options))


def serve(loop: Loop, wants: argparse.Namespace, together: int, requests: int, answer: int) -> tuple[float, list[Told]]:
    """Seconds that all requests took, and when their tokens came."""
    random = torch.Generator().manual_seed(2)
    sampling = Sampling(max_tokens=answer, temperature=wants.temperature, ignore_eos=True)
    told: dict[int, Told] = {}
    ended, began = 0, time.perf_counter()
    while ended < requests:
        while len(told) < min(ended + together, requests):
            prompt = torch.randint(0, wants.vocabulary, (wants.prompt,), generator=random).tolist()
            number = next(_numbers)
            told[number] = Told(time.perf_counter())
            loop.submit(Request(number, prompt, sampling))
        events = loop.step()
        now = time.perf_counter()
        for event in events:
            if event.error:
                raise SystemExit(f"a request failed: {event.error}")
            told[event.number].tokens.append(now)
            ended += event.finish is not None
    wait(wants.device)
    return time.perf_counter() - began, list(told.values())


def measure(loop: Loop, wants: argparse.Namespace, together: int) -> dict[str, Any]:
    serve(loop, wants, together, together, min(8, wants.answer))
    before = loop.status()
    seconds, told = serve(loop, wants, together, wants.rounds * together, wants.answer)
    after = loop.status()
    first = [each.tokens[0] - each.submitted for each in told]
    between = [later - sooner for each in told for sooner, later in zip(each.tokens, each.tokens[1:])] or [0.0]
    return {"concurrency": together, "tokens_s": round(sum(len(each.tokens) for each in told) / seconds, 1),
            **times("ttft", first), **times("tpot", between), "forwards": after.forwards - before.forwards,
            "replays": after.graph_replays - before.graph_replays,
            "preemptions": after.preemptions - before.preemptions}


def times(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, the worst where they are fewer than 100, in milliseconds."""
    ordered = sorted(seconds)
    return {f"{name}_p50_ms": round(1e3 * statistics.median(ordered), 2),
            f"{name}_p99_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2)}


def tell(graphs: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"graphs": graphs, **result}), flush=True)
        return
    print(f"graphs {graphs:3} {result['concurrency']:3} at once {result['tokens_s']:9.1f} tokens/s   first token p50 "
          f"{result['ttft_p50_ms']:9.1f} p99 {result['ttft_p99_ms']:9.1f} ms   token p50 {result['tpot_p50_ms']:7.2f} "
          f"p99 {result['tpot_p99_ms']:7.2f} ms   {result['replays']} of {result['forwards']} forwards replayed   "
          f"{result['near_gib']:.2f} GiB near",
          flush=True)


def add_model(parser: argparse.ArgumentParser) -> None:
    """What make_model takes, and the memory that is near."""
    add = parser.add_argument
    add("--layers", type=int, default=32)
    add("--hidden", type=int, default=SHAPE["hidden_size"])
    add("--heads", type=int, default=SHAPE["num_attention_heads"])
    add("--kv-heads", type=int, default=SHAPE["num_key_value_heads"])
    add("--vocabulary", type=int, default=SHAPE["vocab_size"])
    add("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    add("--device", default="cuda")
    add("--near-bytes", type=near_size, help="GPU memory for near keys and values; auto: by what is free (auto)")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--concurrency", default="1,2,4,8,16,32", help="requests that are under way at once (%(default)s)")
    add("--rounds", type=int, default=2, help="as many times as many requests (%(default)s)")
    add("--prompt", type=size, default=4 << 10, help="tokens (4K)")
    add("--answer", type=int, default=128, help="tokens (%(default)s)")
    add("--graphs", default="on,off", help="what is compared (%(default)s)")
    add("--compile", action="store_true", help="as `sluice serve` has it")
    add("--policy", default="sluice")
    add("--temperature", type=float, default=0.0)
    add("--prefill-rows", type=size, default=2048)
    add("--slowdown", type=float, default=0)
    add_model(parser)
    add("--option", type=option, action="append", default=[], help="NAME=VALUE of EngineOptions")
    add("--json", action="store_true", help="a line of JSON for each")
    return parser.parse_args()


def main() -> None:
    wants, launch, ranks = arguments(), Launch.of_environment(), None
    if launch.ranks > 1:
        if "," in wants.graphs:
            raise SystemExit("torchrun's ranks end with the first measurement: --graphs on, or off")
        ranks = join(launch, wants.device, 600)
    model, counts = make_model(wants), [int(each) for each in wants.concurrency.split(",")]
    context = wants.prompt + wants.answer + 64
    numbers = 2 * wants.layers * wants.kv_heads * model.config.head_dim  # Of a token's keys and values.
    host_bytes = max(counts) * context * numbers * model.dtype.itemsize + (64 << 20)
    for graphs in wants.graphs.split(","):
        packed = packed_model(model, ranks, wants.policy, host_bytes, context=context, sequences=max(counts),
                              prefill_rows=wants.prefill_rows, graphs=graphs, compile=wants.compile and graphs == "on",
                              **{"near_bytes": wants.near_bytes, **dict(wants.option)})
        try:
            if launch.rank:
                packed.follow()
                continue
            memory = packed.engine.memory()
            if failed := packed.graphs_failed or packed.compile_failed:
                raise SystemExit(f"forwards run plainly: {failed}")
            loop = Loop(packed, Letters(), prefix=False, slowdown=wants.slowdown)
            for together in counts:
                tell(graphs, {**measure(loop, wants, together), "near_gib": round(memory.near_pages / 2**30, 2)},
                     wants.json)
        finally:
            packed.close()
        gc.collect()
        if wants.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
