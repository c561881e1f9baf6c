"""A server under clients of many kinds: what it answers in a second, how long tokens take, and what is left behind.

`python tools/lab/benchmarks/clients.py --make DIR` saves a model of Llama's 8B shape, of random weights, with a
tokenizer.
`python tools/lab/benchmarks/clients.py --model DIR --clients 64 --seconds 600 --leave 0.33 -- --sequences 64` starts
`python -m sluice serve` with what follows the second `--`, and has that many clients ask it over HTTP: each sends a
prompt of random tokens, reads the answer as it streams or goes away in the middle, and begins anew. Lengths are drawn
evenly by their logarithm. Memory is told as time passes, and once more when nobody asks any longer; that there were no
errors is checked, and with `--no-prefix-cache` that no page is left. `--clients 1,2,4,8,16,32` has a line of JSON for
each. It needs httpx. That it runs is shown on the CPU by
`--make DIR --layers 2 --hidden 256 --heads 4 --kv-heads 2 --vocabulary 1000 --dtype float32`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from serve import make_model, times
from sluice.serving.arguments import size

START_S = 600.0   # For a model to be loaded.
SILENCE_S = 300.0  # For the next byte of an answer.


@dataclasses.dataclass
class Seen:
    """What clients saw. Times in seconds."""

    first: list[float] = dataclasses.field(default_factory=list)
    between: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    ended: int = 0
    left: int = 0      #: went away in the middle
    refused: int = 0   #: told to come again later
    errors: list[str] = dataclasses.field(default_factory=list)


def make(folder: Path, wants: argparse.Namespace) -> None:
    """A model whose tokens are words of a tokenizer, each of which has a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{each}": each for each in range(wants.vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    make_model(wants).save_pretrained(folder)


@asynccontextmanager
async def server(wants: argparse.Namespace) -> AsyncIterator[tuple[str, int]]:
    """Its address, and the number of its process, which has ended after that."""
    process = subprocess.Popen([sys.executable, "-m", "sluice", "serve", "--model", str(wants.model), "--port", "0",
                                *wants.serve], stderr=subprocess.PIPE, text=True)
    try:
        loop = asyncio.get_running_loop()
        url = await asyncio.wait_for(loop.run_in_executor(None, address, process), START_S)
        drain = loop.run_in_executor(None, process.stderr.read)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    await drain


def address(process: subprocess.Popen[str]) -> str:
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"(http://\S+)/v1$", line):
            print("".join(said), end="", file=sys.stderr)
            return found[1]
    raise SystemExit("the server did not begin:\n" + "".join(said))


def drawn(dice: random.Random, bounds: list[int]) -> int:
    low, high = (math.log(each) for each in bounds)
    return round(math.exp(dice.uniform(low, high)))


async def ask(http: httpx.AsyncClient, url: str, dice: random.Random, wants: argparse.Namespace, seen: Seen) -> None:
    tokens = drawn(dice, wants.answers)
    leaves = dice.randrange(tokens) if dice.random() < wants.leave else None
    prompt = [dice.randrange(wants.words) for _ in range(drawn(dice, wants.prompts))]
    body = {"model": Path(wants.model).name, "prompt": prompt, "max_tokens": tokens, "stream": True,
            "temperature": 0, "ignore_eos": True}
    began = last = time.perf_counter()
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code in (429, 503):
            seen.refused += 1
            await asyncio.sleep(min(5.0, float(answer.headers.get("retry-after", 1))))
            return
        if answer.status_code != 200:
            seen.errors.append((await answer.aread()).decode()[:300])
            return
        got = 0
        async for told in answers(answer):
            if "error" in told:
                seen.errors.append(str(told["error"])[:300])
                return
            now = time.perf_counter()
            (seen.between if got else seen.first).append(now - last)
            got, last = got + 1, now
            seen.tokens += 1
            if leaves is not None and got > leaves:
                seen.left += 1
                return
        seen.ended += 1


async def answers(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Its pieces, each of a token."""
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


async def client(url: str, number: int, ends: float, wants: argparse.Namespace, seen: Seen) -> None:
    dice = random.Random(1000 * wants.seed + number)
    async with httpx.AsyncClient(timeout=httpx.Timeout(SILENCE_S)) as http:
        while time.monotonic() < ends:
            try:
                await ask(http, url, dice, wants, seen)
            except httpx.HTTPError as error:
                seen.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)


def resident(process: int) -> float:
    """GiB of a process and those that it started."""
    task = Path(f"/proc/{process}/task/{process}")
    own = re.search(r"VmRSS:\s*(\d+) kB", (task / "status").read_text())
    return int(own[1]) / 2**20 + sum(resident(int(each)) for each in (task / "children").read_text().split())


def pages(told: dict[str, float]) -> float:
    """GiB that sequences and the prefix cache hold."""
    return told['sluice_memory_bytes{kind="far_pages_used"}'] / 2**30


async def gauges(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=60) as http:
        lines = (await http.get(f"{url}/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def watch(url: str, process: int, every: float, began: float) -> None:
    while True:
        await asyncio.sleep(every)
        now = await gauges(url)
        print(f"{time.monotonic() - began:6.0f} s   {now['sluice_running']:3.0f} running {now['sluice_waiting']:3.0f} "
              f"waiting   pages {pages(now):.2f} GiB   resident {resident(process):.2f} GiB",
              file=sys.stderr, flush=True)


async def quiet(url: str) -> dict[str, float]:
    """What the server says of itself when nothing runs."""
    ends = time.monotonic() + 60
    while True:
        now = await gauges(url)
        if now["sluice_running"] == now["sluice_waiting"] == 0:
            return now
        if time.monotonic() > ends:
            raise SystemExit("a minute after the last client left, answers are still being generated")
        await asyncio.sleep(0.2)


async def measure(url: str, process: int, clients: int, seconds: int, wants: argparse.Namespace) -> dict[str, Any]:
    seen, began = Seen(), time.monotonic()
    before, ends = resident(process), began + seconds
    watching = asyncio.ensure_future(watch(url, process, max(5.0, seconds / 10), began))
    await asyncio.gather(*(client(url, each, ends, wants, seen) for each in range(clients)))
    watching.cancel()
    took = time.monotonic() - began
    now = await quiet(url)
    for error in sorted(set(seen.errors))[:5]:
        print(f"error, {seen.errors.count(error)} times: {error}", file=sys.stderr)
    return {"clients": clients, "seconds": round(took, 1), "answers": seen.ended, "left": seen.left,
            "refused": seen.refused, "errors": len(seen.errors), "tokens_s": round(seen.tokens / took, 1),
            **times("ttft", seen.first or [0.0]), **times("tpot", seen.between or [0.0]),
            "resident_gib": [round(before, 2), round(resident(process), 2)],
            "pages_gib": round(pages(now), 3),
            "preemptions": now["sluice_preemptions_total"], "failed_forwards": now["sluice_failed_forwards_total"]}


async def drive(wants: argparse.Namespace) -> None:
    async with server(wants) as (url, process):
        for clients, seconds in zip(wants.clients, wants.seconds):
            result = await measure(url, process, clients, seconds, wants)
            print(json.dumps(result), flush=True)
            if result["errors"] or result["failed_forwards"] or (wants.leaves_nothing and result["pages_gib"]):
                raise SystemExit("there were errors, or memory was left behind; see above")


def counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def lengths(text: str) -> list[int]:
    low, _, high = text.partition(",")
    return [size(low), size(high or low)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--make", type=Path, metavar="DIR", help="save a model there, and end")
    add("--model", type=Path, metavar="DIR")
    add("--clients", type=counts, default=[64], help="at once; several numbers are measured one after the other (64)")
    add("--seconds", type=counts, default=[60], help="for each number of clients, or one for each (60)")
    add("--leave", type=float, default=0.0, help="share of requests whose client goes away (%(default)s)")
    add("--prompts", type=lengths, default=[64, 4096], help="tokens, least and most (64,4K)")
    add("--answers", type=lengths, default=[8, 256], help="tokens, least and most (8,256)")
    add("--seed", type=int, default=1)
    add("--layers", type=int, default=32)
    add("--hidden", type=int, default=4096)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--vocabulary", type=int, default=128256)
    add("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("serve", nargs="*", help="arguments of `sluice serve`, after --")
    wants = parser.parse_args()
    if (wants.make is None) == (wants.model is None):
        parser.error("one of --make and --model is needed")
    if len(wants.seconds) == 1:
        wants.seconds *= len(wants.clients)
    if len(wants.seconds) != len(wants.clients):
        parser.error("--seconds wants one number, or one for each of --clients")
    return wants


def main() -> None:
    wants = arguments()
    if wants.make is not None:
        make(wants.make, wants)
        return
    wants.words = json.loads((wants.model / "config.json").read_text())["vocab_size"]
    wants.leaves_nothing = "--no-prefix-cache" in wants.serve
    asyncio.run(drive(wants))


if __name__ == "__main__":
    main()
