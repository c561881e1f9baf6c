"""What the commands here share: options, results as lines of JSON, and an engine of vLLM in this process, by itself or
with Sluice. Importing it sets the environment for that, so it comes before vLLM."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = time.monotonic()  #: of a command, whose limit counts the seconds in which vLLM is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Models are folders.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # The engine can be looked into.

import normal_weights  # noqa: E402  Behind the environment, as all of these.
import torch  # noqa: E402
from sluice.serving.arguments import option, size  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402
from vllm.v1.executor.abstract import Executor  # noqa: E402

BLOCK_TOKENS = 32
GRAPHS = ("decode", "default", "eager")
_LEAST_ID = 10  # Below are those that end a text, and the like.


def parser_of(text: str) -> argparse.ArgumentParser:
    """Of a command with this description, with the options of all."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a folder as transformers saves models, or as models.py makes one")
    add("--dtype", default="bfloat16")
    add("--policy", default="sluice", help="Sluice's (%(default)s)")
    add("--host", type=size, default=8 << 30, help="Sluice's host_bytes (8GiB)")
    add("--near", type=size, help="its near_bytes on a GPU (by what is free)")
    add("--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="others of Sluice's; may be "
        "repeated")
    add("--graphs", choices=GRAPHS, default="decode", help="CUDA graphs: full ones of decoded tokens and nothing "
        "compiled, as vLLM has them by default, or none, as always on a CPU (%(default)s)")
    add("--kv", type=size, help="what vLLM by itself keeps (what its --gpu-memory-utilization leaves)")
    add("--max-len", type=size, default=4096, help="tokens of a sequence (%(default)s)")
    add("--sequences", type=int, default=8, help="at once (%(default)s)")
    add("--batched", type=size, default=1024, help="tokens of a step (%(default)s)")
    add("--random-weights", action="store_true", help="the folder has a configuration alone")
    add("--out", type=Path, help="a file to which results are added; they are printed anyway")
    return parser


def sluice_options(wants: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """What is under "sluice" in --additional-config."""
    near = {} if wants.near is None or current_platform.is_cpu() else {"near_bytes": wants.near}
    return {"policy": wants.policy, "host_bytes": wants.host, **near, **dict(wants.option), **changes}


def graph_options(graphs: str, sequences: int) -> dict[str, Any]:
    """Of EngineArgs."""
    if graphs == "eager" or current_platform.is_cpu():
        return {"enforce_eager": True}
    if graphs == "default":
        return {}
    sizes = [each for each in (1, 2, 4, 8, 16, 32, 64, 128, 256) if each <= sequences]
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}}


class Limit:
    """Seconds that something may take, from `began` (now) on."""

    def __init__(self, seconds: float, began: float | None = None) -> None:
        self._ends = (time.monotonic() if began is None else began) + seconds

    def left(self) -> float:
        """Less than 0 if it is over."""
        return self._ends - time.monotonic()


class Results:
    """Lines of JSON on standard output, and in a file."""

    def __init__(self, what: str, file: Path | None) -> None:
        self._what, self._file = what, file

    def add(self, **values: Any) -> None:
        line = json.dumps({"what": self._what, **values})
        print(line, flush=True)
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(line + "\n")


class Engine:
    """`with Engine(...)`: an engine of vLLM, in this thread."""

    def __init__(self, wants: argparse.Namespace, sluice: Mapping[str, Any] | None, **changes: Any) -> None:
        """`sluice`: as `sluice_options` makes them; None: vLLM is by itself. `changes`: of EngineArgs."""
        options: dict[str, Any] = {
            "model": str(wants.model), "dtype": wants.dtype, "seed": 0, "skip_tokenizer_init": True,
            "max_model_len": wants.max_len, "max_num_seqs": wants.sequences, "max_num_batched_tokens": wants.batched,
            "block_size": BLOCK_TOKENS, "enable_prefix_caching": False, **graph_options(wants.graphs, wants.sequences)}
        if wants.random_weights:
            normal_weights.register()
            options["load_format"] = "dummy"
        if sluice is not None:
            options |= {"worker_cls": "sluice.vllm.Worker", "additional_config": {"sluice": dict(sluice)}}
        elif wants.kv is not None:
            options["kv_cache_memory_bytes"] = wants.kv
        config = EngineArgs(**{**options, **changes}).create_engine_config()
        self.vllm = LLMEngine(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False,
                              multiprocess_mode=False)
        self.core, self._config, self._count = self.vllm.engine_core.engine_core, config, 0
        # Sluice's, where it is in this process.
        self.forwards = None if sluice is None or config.parallel_config.world_size > 1 else (
            self.core.model_executor.driver_worker.worker._link.forwards)

    def about(self) -> dict[str, Any]:
        """What it is made of."""
        cache, layers = self._config.cache_config, self._config.compilation_config.static_forward_context
        attention = next((type(layer.impl) for layer in layers.values() if hasattr(layer, "impl")), None)
        told = {"attention": attention and f"{attention.__module__}.{attention.__name__}",
                "blocks": cache.num_gpu_blocks, "block_tokens": cache.block_size,
                "async": bool(self._config.scheduler_config.async_scheduling),
                "graphs": self._config.compilation_config.cudagraph_mode.name}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            told["gpu_used_gib"] = round((total - free) / 2**30, 2)
        if self.forwards is not None:
            made = self.forwards.engine.options
            told |= {"host_bytes": made.host_bytes, "near_bytes": made.near_bytes, "dense_tokens": made.dense_tokens,
                     "memory": dataclasses.asdict(self.forwards.engine.memory())}
        return told

    def submit(self, ids: Sequence[int], sampling: SamplingParams) -> str:
        """Returns the request's name."""
        self._count += 1
        name = str(self._count)
        self.vllm.add_request(name, {"prompt_token_ids": list(ids)}, sampling)
        return name

    def run(self, given: Sequence[Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams],
            before: Callable[[int], None] = lambda step: None) -> list[Any]:
        """vLLM's outputs for prompts that come at once, in their order. `sampling`: of all, or of each."""
        each = [sampling] * len(given) if isinstance(sampling, SamplingParams) else sampling
        names = [self.submit(ids, one) for ids, one in zip(given, each)]
        outputs, step = {}, 0
        while self.vllm.has_unfinished_requests():
            before(step)
            outputs.update({output.request_id: output for output in self.vllm.step()})
            step += 1
        return [outputs[name] for name in names]

    def preempt_all(self) -> None:
        """All that run lose their memory, and begin again with all their tokens."""
        self.core.scheduler.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        self.core.shutdown()
        del self.vllm, self.core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)


def random_ids(tokens: int, seed: int, vocabulary: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(min(_LEAST_ID, vocabulary - 1), vocabulary) for _ in range(tokens)]


def text_ids(file: Path, model: Path) -> list[int]:
    """Of a file of text, by the model's tokenizer; or of a file of JSON, which has them."""
    if file.suffix == ".json":
        return json.loads(file.read_text())
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(file.read_text(), add_special_tokens=False).input_ids


def configuration(model: Path) -> dict[str, Any]:
    return json.loads((model / "config.json").read_text())


def token_bytes(model: Path, dtype: str) -> int:
    """Of one token's keys and values."""
    made = configuration(model)
    head = made.get("head_dim") or made["hidden_size"] // made["num_attention_heads"]
    element = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    return 2 * head * made["num_key_value_heads"] * made["num_hidden_layers"] * element


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def windows(ids: Sequence[int], tokens: int, count: int) -> Iterator[Sequence[int]]:
    """So many parts of a text, which begin evenly spread over it.
    @throws ValueError if it is too short"""
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids)} tokens, and {tokens} are wanted: give a longer one")
    for index in range(count):
        first = index * (len(ids) - tokens) // max(1, count - 1)
        yield ids[first : first + tokens]
