"""What torchrun starts in tests: commands of sluice, or a part of them, with ranks that fail when they are told."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from sluice import Engine
from sluice.__main__ import main
from sluice.errors import OutOfCapacity
from sluice.serving.child import exit_of_rank
from sluice.serving.load import load_follower, load_loop
from sluice.serving.process import Settings
from sluice.serving.ranks import Ranks
from sluice.transformers import enable
from small import DEVICE, KV, KV_BYTES, SHAPE, Told, expected, greedy, prompt_ids, run, tokenizer
from transformers.distributed import DistributedConfig

RANK = int(os.environ.get("RANK", 0))
TOKEN_BYTES = SHAPE["num_hidden_layers"] * 2 * SHAPE["head_dim"] * KV_BYTES  # Of one KV head.
ENGINE = {"threads": 1, "pin_threads": False, "answer_timeout_ms": 30_000, **KV}
FAULTS = "SLUICE_TEST_FAULTS"
"""The environment's name of a file: "1 attend 2" there has the next two calls of rank 1's Engine.attend fail."""
LATE = "SLUICE_TEST_LATE"
"""The environment's name of seconds that a thread of torch's is busy for after a rank has left its group."""


def set_fault(rank: int, what: str, times: int) -> None:
    """All of it at once, as the other rank may be reading."""
    file = Path(os.environ[FAULTS])
    new = file.with_suffix(f".{RANK}")
    new.write_text(f"{rank} {what} {times}")
    new.replace(file)


def faulty(name: str) -> Callable:
    own, file = getattr(Engine, name), Path(os.environ[FAULTS])

    def call(*arguments: object, **options: object) -> object:
        rank, what, times = (file.read_text().split() if file.exists() else ("-1", "", 0))
        if int(rank) == RANK and what == name and int(times):
            set_fault(RANK, name, int(times) - 1)
            if name == "finish":
                own(*arguments, **options)  # As of a forward that is done when its end is told.
            raise (OutOfCapacity if name == "begin" else RuntimeError)(f"{name} is broken")
        return own(*arguments, **options)

    return call


def patch() -> None:
    if FAULTS in os.environ:
        for name in ("begin", "plan", "attend", "finish"):
            setattr(Engine, name, faulty(name))


def leave_late(own: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    def busy(_: object) -> None:
        ends = time.monotonic() + float(os.environ[LATE])
        while time.monotonic() < ends:
            pass

    def close(ranks: Ranks) -> None:
        done = torch.distributed.all_reduce(torch.zeros(1), async_op=True).get_future()
        done.then(busy)  # On the thread of gloo's that has run the collective.
        done.wait()
        own(ranks)

    return close


if LATE in os.environ:  # Here, as the process that serve starts imports this.
    Ranks.close = leave_late(Ranks.close)


def generate(*folders: str) -> None:
    """Greedy tokens of models, or why one is refused."""
    told = {}
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_size=2))
        try:
            with enable(model, "full", host_bytes=16 << 20, prefill_rows=32, **ENGINE) as here:
                told[folder] = [here.engine.options.kv_heads, here.engine.options.host_bytes,
                                expected(model, prompt_ids(100), 12)]
        except Exception as error:
            told[folder] = f"{type(error).__name__}: {error}"
    (Path(folders[0]).parent / f"told.{RANK}").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


def loop(folder: str, graphs: str) -> None:
    """Requests of a loop while ranks fail: by fault what they are told, and tokens of a request after each."""
    # 20 pages of 16 tokens, in which four answers have no room.
    settings = Settings(folder, policy="full", host_bytes=2 * 20 * 16 * TOKEN_BYTES, context=256, sequences=4,
                        prefill_rows=64, device=DEVICE, graphs=graphs, options=dict(ENGINE))
    if RANK:
        model = load_follower(settings)
        model.follow()
        model.close()
        return
    made, _ = load_loop(settings)
    four = run(made, [greedy(n, prompt_ids(50 + n, n), 32) for n in range(1, 5)])
    told = {"four": [four.tokens(n) for n in range(1, 5)], "preemptions": made.status().preemptions}
    faults = [(rank, what, times) for rank in (0, 1)
              for what, times in (("begin", 1), ("plan", 1), ("plan", 2), ("attend", 2), ("finish", 2))]
    for number, fault in enumerate(faults, 10):
        set_fault(*fault)
        ends = run(made, [greedy(2 * number, prompt_ids(90), 6)])
        after = run(made, [greedy(2 * number + 1, prompt_ids(90), 6)])
        told[str(fault)] = [ends.last(2 * number).error, ends.tokens(2 * number), after.tokens(2 * number + 1)]
    status = made.status()
    told["status"] = [status.memory.far_pages_used, status.graph_replays, made.hopeless]
    (Path(folder).parent / "told.loop").write_text(json.dumps(told))
    made.close()


def windows(folder: str) -> None:
    """The second chunk of a prompt fails on a rank, once and then twice: what its request is told, and the next one."""
    settings = Settings(folder, policy="full", host_bytes=32 << 20, context=512, sequences=4, prefill_rows=128,
                        device=DEVICE, graphs="off", prefix=False, options=dict(ENGINE))
    if RANK:
        model = load_follower(settings)
        model.follow()
        model.close()
        return
    made, _ = load_loop(settings)
    told = {}
    for number, fault in enumerate(((1, "attend", 1), (0, "attend", 1), (1, "finish", 1), (1, "attend", 2)), 10):
        ends = Told()
        made.submit(greedy(2 * number, prompt_ids(300), 6))
        ends.take(made.step())
        set_fault(*fault)
        while not made.idle:
            ends.take(made.step())
        after = run(made, [greedy(2 * number + 1, prompt_ids(300), 6)])
        told[str(fault)] = [ends.last(2 * number).error, ends.tokens(2 * number), after.tokens(2 * number + 1)]
    (Path(folder).parent / "told.windows").write_text(json.dumps(told))
    made.close()


if __name__ == "__main__":
    patch()
    if sys.argv[1] in ("generate", "loop", "windows"):
        globals()[sys.argv[1]](*sys.argv[2:])
        exit_of_rank(0)
    else:
        raise SystemExit(main())
