#!/usr/bin/env python3
"""`vllm bench serve` against vLLM's server, by itself and with Sluice, at some rates of requests.

    tools/lab/vllm/serve.py --model DIR --random-weights --tokenizer DIR --near 16GiB --host 40GiB --max-len 9216 \\
      --sequences 64 --batched 8192 --rates 1,2,3 --limit 240 --out FILE

One server after the other, those of --servers; prompts of --input random tokens, answers of --answer. A line of results
is what `vllm bench serve` says of a rate: times to the first token, per token and between tokens in milliseconds.
Before the first rate there are two requests that do not count.

All is over after --limit seconds, which begin with the command: servers share what is left, and a server's rates what
its start has left. In a rate's share requests come for half of it, or for --seconds if that is less; those that are not
answered at its end are given up. A line says so, as it does of a server that does not start, and the exit code is 1.
What servers print goes to --log."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import BEGAN, BLOCK_TOKENS, Limit, Results, graph_options, parser_of, size, sluice_options
from normal_weights import installed
from vllm.benchmarks.serve import add_cli_args, main_async

SERVERS = ("own", "sluice")
_END_S = 10  # Of a server that was told to end, until it is killed.
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (ERROR \S+ \S+ \[\S+\] ?)?")  # Of a line of a process.
_PR_SET_PDEATHSIG = 1


def server_words(wants: argparse.Namespace, label: str, port: int) -> list[str]:
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(wants.model), "--tokenizer",
             str(wants.tokenizer or wants.model), "--served-model-name", "served", "--host", "127.0.0.1", "--port",
             str(port), "--dtype", wants.dtype, "--max-model-len", str(wants.max_len), "--max-num-seqs",
             str(wants.sequences), "--max-num-batched-tokens", str(wants.batched), "--block-size", str(BLOCK_TOKENS),
             "--no-enable-prefix-caching"]
    graphs = graph_options(wants.graphs, wants.sequences)
    if "enforce_eager" in graphs:
        words.append("--enforce-eager")
    elif graphs:
        words += ["--compilation-config", json.dumps(graphs["compilation_config"])]
    if wants.random_weights:
        words += ["--load-format", "dummy"]
    if label == "own":
        return words + ([] if wants.kv is None else ["--kv-cache-memory-bytes", str(wants.kv)])
    return [*words, "--worker-cls", "sluice.vllm.Worker", "--attention-backend", "CUSTOM", "--additional-config",
            json.dumps({"sluice": sluice_options(wants)})]


@contextmanager
def server(wants: argparse.Namespace, label: str, folder: Path, limit: Limit) -> Iterator[str]:
    """The URL of a server that answers. It ends with the block, and with this process, whatever ends that.
    @throws RuntimeError with what it has said, if it does not answer within the limit"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # Processes as vLLM has them.
    if wants.random_weights:
        more = str(installed(folder / "plugin"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [more, environment.get("PYTHONPATH")]))
    log = wants.log or folder / "server.log"
    system = ctypes.CDLL(None)
    with log.open("ab") as written:
        first = written.tell()
        process = subprocess.Popen(server_words(wants, label, port), stdout=written, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True,
                                   preexec_fn=lambda: system.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
    try:
        url = f"http://127.0.0.1:{port}"
        while not _answers(url):
            if process.poll() is not None:
                said = log.read_bytes()[first:].decode(errors="replace")
                raise RuntimeError(f"the server has ended; --log FILE keeps all that it says. {_cause(said)}")
            if limit.left() < 0:
                raise RuntimeError("the server does not answer in its share of the time; give a larger --limit, or one "
                                   "of --servers")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """It and what it has started: they have most of a GPU's memory until they have ended."""
    ends = time.monotonic() + _END_S
    while time.monotonic() < ends:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        process.poll()
        time.sleep(0.1)


def _cause(text: str) -> str:
    """Of what a server has said that did not start, the first error: its processes repeat each other's."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    first = next((at for at, line in enumerate(lines) if line.startswith("Traceback")), len(lines))
    # What is behind a trace, whose lines are indented.
    error = next((at for at in range(first + 1, len(lines)) if lines[at] and not lines[at].startswith(" ")), None)
    return "\n".join(lines[-20:] if error is None else lines[error : error + 3])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def bench(wants: argparse.Namespace, url: str, rate: str, requests: int, seconds: float) -> dict[str, Any]:
    """What `vllm bench serve` has measured.  @throws RuntimeError if not all was answered in so many seconds"""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    words = parser.parse_args([
        "--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions", "--model", "served", "--tokenizer",
        str(wants.tokenizer or wants.model), "--dataset-name", "random", "--random-input-len", str(wants.input),
        "--random-output-len", str(wants.answer), "--num-prompts", str(requests), "--request-rate", rate,
        "--ignore-eos", "--disable-tqdm", "--seed", "1", "--ready-check-timeout-sec", "0",
        "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"])
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            found = asyncio.run(asyncio.wait_for(main_async(words), max(1.0, seconds)))
    except asyncio.TimeoutError:
        raise RuntimeError(f"vllm bench serve: {requests} requests were not answered in {seconds:.0f} s; give fewer "
                           "--rates, or a larger --limit") from None
    if found["completed"] != requests:
        raise RuntimeError(f"vllm bench serve: {found['completed']} of {requests} requests were answered, and times "
                           f"are of these alone: {said.getvalue()[-2000:]}")
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()
            if isinstance(value, (int, float)) and not name.startswith("std")}


def rates_of(wants: argparse.Namespace, label: str, url: str, limit: Limit, results: Results) -> bool:
    """Adds a line for each rate. Returns whether all were measured."""
    rates, right = wants.rates.split(","), True
    bench(wants, url, "inf", 2, limit.left())
    for at, rate in enumerate(rates):
        share = limit.left() / (len(rates) - at)
        requests = max(1, round(float(rate) * min(wants.seconds, share / 2)))
        told = {"label": label, "step": "rate", "rate": float(rate), "input": wants.input, "answer": wants.answer}
        try:
            results.add(**told, **bench(wants, url, rate, requests, share))
        except (RuntimeError, OSError) as error:
            right = False
            results.add(**told, error=str(error))
    return right


def main(words: list[str] | None = None, began: float | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--servers", type=lambda text: text.split(","), default=list(SERVERS),
                        help="own: vLLM by itself (own,sluice)")
    parser.add_argument("--tokenizer", type=Path, help="a folder (the model's)")
    parser.add_argument("--rates", default="0.5,1,1.5", help="requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=40, help="for each rate, until the last request comes "
                        "(%(default)s)")
    parser.add_argument("--limit", type=float, default=900, help="seconds for all (%(default)s)")
    parser.add_argument("--input", type=size, default=8192, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--answer", type=size, default=128, help="tokens (%(default)s)")
    parser.add_argument("--log", type=Path, help="a file to which is added what servers print")
    wants = parser.parse_args(words)
    if not wants.servers or not set(wants.servers) <= set(SERVERS):
        parser.error(f"--servers are of {', '.join(SERVERS)}")
    # What ends this command by a signal, such as timeout(1), ends its server, too, which has most of a GPU's memory.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *told: sys.exit(128 + told[0]))
    results, whole, right = Results("serve", wants.out), Limit(wants.limit, began), True
    with tempfile.TemporaryDirectory(prefix="sluice-serve.") as made:
        for at, label in enumerate(wants.servers):
            limit = Limit(whole.left() / (len(wants.servers) - at) - _END_S)
            folder, asked = Path(made) / label, time.monotonic()
            folder.mkdir(exist_ok=True)
            try:
                with server(wants, label, folder, limit) as url:
                    results.add(label=label, step="start", seconds=round(time.monotonic() - asked, 1))
                    right = rates_of(wants, label, url, limit, results) and right
            except RuntimeError as error:
                right = False
                results.add(label=label, step="start", error=str(error))
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main(began=BEGAN))
