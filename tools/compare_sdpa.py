#!/usr/bin/env python3
"""Decode attention of torch's scaled_dot_product_attention (flash), the yardstick beside `sluice bench gpu --dense-only`.

One query token, 32 query heads, 8 KV heads, head_dim 128, bf16, batch 1. As many copies of the keys and values as it
takes to outgrow the device's caches; median over bursts (a CUDA graph each), timed by events. Prints one JSON line per length.
"""
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

COLD_BYTES = 256 << 20
BURST = 20


def measure(tokens: int) -> float:
    """Microseconds per call."""
    bytes_per_copy = 2 * tokens * 8 * 128 * 2
    copies = max(1, -(-COLD_BYTES // bytes_per_copy))
    kv = [torch.randn(2, 1, 8, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)

    def burst() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for call in range(BURST):
                k, v = kv[call % copies]
                torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    # A graph, so that the time is the device's alone.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        burst()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        burst()
    samples = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / BURST)
    return statistics.median(samples[1:])


def main() -> None:
    lengths = [int(text) for text in sys.argv[1:]] or [4096, 16384, 32768, 65536, 131072, 262144, 524288]
    for tokens in lengths:
        microseconds = measure(tokens)
        rate = 2 * tokens * 8 * 128 * 2 / microseconds * 1e-3
        print(json.dumps({"length_tokens": tokens, "sdpa_flash_us": round(microseconds, 2), "GB_per_s": round(rate)}))


if __name__ == "__main__":
    main()
