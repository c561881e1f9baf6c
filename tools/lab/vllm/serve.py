#!/usr/bin/env python3
"""`vllm bench serve` against vLLM's server, with Sluice and without, at some rates of requests.

    tools/lab/vllm/serve.py --model DIR --random-weights --tokenizer DIR --near 16GiB --host 40GiB --max-len 9216 \\
      --sequences 64 --batched 8192 --rates 0.5,1,1.5
    tools/lab/vllm/serve.py --own ...

Prompts of --input random tokens, answers of --answer, as many requests as come in --seconds at a rate. A line of
results is what `vllm bench serve` says of a rate: times to the first token, per token and between tokens in
milliseconds. Before the first rate there are two requests that do not count. What the server prints goes to --log."""

from __future__ import annotations

import argparse
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

import normal_weights
from lab import BLOCK_TOKENS, Results, graph_options, parser_of, size, sluice_options

_START_S, _END_S = 900, 30
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (ERROR \S+ \S+ \[\S+\] ?)?")  # Of a line of a process.
# The command `vllm` of packages for the CPU does not find its own version.
_BENCH = ("import argparse; from vllm.benchmarks.serve import add_cli_args, main; parser = argparse.ArgumentParser(); "
          "add_cli_args(parser); main(parser.parse_args())")


def server_words(wants: argparse.Namespace, port: int) -> list[str]:
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
    if wants.own:
        return words + ([] if wants.kv is None else ["--kv-cache-memory-bytes", str(wants.kv)])
    return [*words, "--worker-cls", "sluice.vllm.Worker", "--attention-backend", "CUSTOM", "--additional-config",
            json.dumps({"sluice": sluice_options(wants)})]


@contextmanager
def server(wants: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The URL of a server that answers.  @throws RuntimeError with what it has said, if it does not"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # Processes as vLLM has them.
    if wants.random_weights:
        more = str(normal_weights.installed(folder / "plugin"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [more, environment.get("PYTHONPATH")]))
    log = wants.log or folder / "server.log"
    with log.open("wb") as written:
        process = subprocess.Popen(server_words(wants, port), stdout=written, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
    try:
        url, ends = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the server does not answer; --log FILE keeps all that it says. "
                                   f"{_cause(log.read_text(errors='replace'))}")
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        try:  # What it has started, if that has not ended by then.
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


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


def bench(wants: argparse.Namespace, url: str, rate: str, requests: int, folder: Path) -> dict[str, Any]:
    """What `vllm bench serve` has measured.  @throws RuntimeError with what it has said, if not all was answered"""
    file = folder / f"{rate}.json"
    words = [sys.executable, "-c", _BENCH, "--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions",
             "--model", "served", "--tokenizer", str(wants.tokenizer or wants.model), "--dataset-name", "random",
             "--random-input-len", str(wants.input), "--random-output-len", str(wants.answer), "--num-prompts",
             str(requests), "--request-rate", rate, "--ignore-eos", "--disable-tqdm", "--seed", "1",
             "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--save-result",
             "--result-dir", str(folder), "--result-filename", file.name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not file.exists():
        raise RuntimeError(f"vllm bench serve: {(done.stdout + done.stderr)[-4000:]}")
    found = json.loads(file.read_text())
    if found["completed"] != requests:
        raise RuntimeError(f"vllm bench serve: {found['completed']} of {requests} requests were answered, and times "
                           f"are of these alone: {(done.stdout + done.stderr)[-4000:]}")
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()
            if isinstance(value, (int, float)) and not name.startswith("std")}


def main(words: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--own", action="store_true", help="vLLM without Sluice")
    parser.add_argument("--tokenizer", type=Path, help="a folder (the model's)")
    parser.add_argument("--rates", default="0.5,1,1.5", help="requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=40, help="for each rate, until the last request comes "
                        "(%(default)s)")
    parser.add_argument("--input", type=size, default=8192, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--answer", type=size, default=128, help="tokens (%(default)s)")
    parser.add_argument("--log", type=Path, help="a file for what the server prints")
    wants = parser.parse_args(words)
    # What ends this command by a signal, such as timeout(1), ends its server, too, which has most of a GPU's memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = Results("serve", wants.out)
    with tempfile.TemporaryDirectory(prefix="sluice-serve.") as made:
        folder = Path(made)
        with server(wants, folder) as url:
            bench(wants, url, "inf", 2, folder)
            for rate in wants.rates.split(","):
                requests = max(1, round(float(rate) * wants.seconds))
                results.add(label="own" if wants.own else "sluice", rate=float(rate), input=wants.input,
                            answer=wants.answer, **bench(wants, url, rate, requests, folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
