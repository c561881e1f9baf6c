#!/usr/bin/env python3
"""Causal attention of a prompt by torch's scaled_dot_product_attention, the yardstick beside `sluice bench prefill`.

32 query heads, 8 KV heads, head_dim 128, bf16, batch 1; flash and, where this build has it, cuDNN. Median of calls that
are queued one after the other, timed by events. Prints one JSON line per length and kernel.
"""
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SAMPLES = 5


def measure(tokens: int, backend: SDPBackend) -> float:
    """Milliseconds per call."""
    q = torch.randn(1, Q_HEADS, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(SAMPLES + 2)]
    with sdpa_kernel(backend):
        for event in events:
            event.record()
            if event is not events[-1]:
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.cuda.synchronize()
    # The first call wakes the clocks and loads kernels.
    return statistics.median(a.elapsed_time(b) for a, b in zip(events[1:], events[2:]))


def main() -> None:
    lengths = [int(text) for text in sys.argv[1:]] or [4096, 16384, 65536, 131072, 262144]
    for tokens in lengths:
        flops = 4 * HEAD_DIM * Q_HEADS * tokens * (tokens + 1) / 2
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            result = {"length_tokens": tokens, "kernel": name}
            try:
                milliseconds = measure(tokens, backend)
                result |= {"ms": round(milliseconds, 3), "tflops": round(flops / milliseconds * 1e-9, 1)}
            except RuntimeError as error:
                result["error"] = str(error).splitlines()[0]
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
