"""A rank of those that share a model: prints the answers to prompts, each of which is given twice, as JSON.
rank.py MODEL PROMPTS TOKENS HOST_BYTES TENSOR PIPELINE, with what torchrun sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engines import Engine, greedy

if __name__ == "__main__":
    model, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    tokens, host_bytes, tensor, pipeline = (int(each) for each in sys.argv[3:])
    with Engine(model, {"host_bytes": host_bytes}, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline,
                distributed_executor_backend="external_launcher") as engine:
        made = engine.forwards.engine.options
        answers = [engine.run(given, greedy(tokens)) for _ in range(2)]
        print(json.dumps({"tokens": [[each.tokens for each in all_] for all_ in answers],
                          "known": [each.known for each in answers[1]],
                          "layers": list(engine.link.layers), "windows": made.windows,
                          "shape": [made.q_heads, made.kv_heads, made.host_bytes],
                          "blocks": engine.core.vllm_config.cache_config.num_gpu_blocks,
                          "preemptions": engine.forwards.preemptions}))
