"""Whether a server's memory stays flat: requests with tools, JSON schemas and responses, each with names of its own.

`python tools/lab/benchmarks/memory.py --model DIR --requests 2000` starts `python -m sluice serve` with what follows
`--`, and asks it from several threads. A model without a chat template gets one that knows tools. The resident memory
of the web server and of the engine's process is taken every hundred requests. A line of JSON has all of it in MiB; the
exit code is 1 if the newest quarter's median is more than `--growth` MiB above the second quarter's, or if an answer
was none. On a CPU give `--dtype float32`: with bfloat16 torch keeps kernels for each number of rows that a forward has
had, up to 1,024 of them, which are hundreds of MiB. It needs httpx and llguidance."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from soak import KEY, PATIENCE_S, Server

EVERY = 100
TEMPLATE = ("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
            "{% for c in m.tool_calls or [] %}<call>{\"name\": \"{{ c.function.name }}\", \"arguments\": "
            "{{ c.function.arguments | tojson }}}</call>{% endfor %}{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}")


def with_template(model: Path, folder: Path) -> Path:
    """The model's files, and a chat template if it has none."""
    if (model / "chat_template.jinja").exists():
        return model
    for each in model.iterdir():
        (folder / each.name).symlink_to(each.resolve())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def schema(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field{number}": {"enum": [f"value{number}", "none"]}},
            "required": [f"field{number}"], "additionalProperties": False}


def body(number: int) -> tuple[str, dict[str, Any]]:
    """The route and the request of a number."""
    tool = {"name": f"tool{number}", "parameters": schema(number)}
    chat = {"model": "soak", "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 40,
            "seed": number, "stream": number % 8 >= 4}
    kind = number % 4
    if kind == 0:
        return "chat/completions", {**chat, "tools": [{"type": "function", "function": tool}],
                                    "tool_choice": "required"}
    if kind == 1:
        named = {"name": "answer", "schema": schema(number)}
        return "chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": named}}
    if kind == 2:
        return "chat/completions", {**chat, "tools": [{"type": "function", "function": tool}], "logprobs": True}
    return "responses", {"model": "soak", "input": f"question {number}", "max_output_tokens": 40,
                         "stream": chat["stream"], "text": {"format": {"type": "json_schema", "name": "answer",
                                                                       "schema": schema(number)}}}


def resident(pid: int) -> float:
    """MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--growth", type=float, default=16, help="MiB (%(default)s)")
    parser.add_argument("--silence", type=float, default=600)
    parser.add_argument("serve", nargs="*", help="behind --: arguments of serve")
    wants = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # The server ends with it.
    with tempfile.TemporaryDirectory() as folder:
        wants.model = with_template(wants.model, Path(folder))
        server = Server(wants)
        try:
            told = measure(server, wants)
        finally:
            server.end()
    print(json.dumps(told))
    return int(bool(told["wrong"]) or max(told["grown"].values()) > wants.growth)


def measure(server: Server, wants: argparse.Namespace) -> dict[str, Any]:
    processes = {"server": server.process.pid, "engine": server.engine}
    seen: dict[str, list[float]] = {name: [] for name in processes}
    wrong, done, lock = [], 0, threading.Lock()

    def ask(number: int) -> None:
        nonlocal done
        route, sent = body(number)
        answer = httpx.post(f"{server.url}/v1/{route}", json=sent, timeout=PATIENCE_S,
                            headers={"Authorization": f"Bearer {KEY}"})
        with lock:
            if answer.status_code != 200 or b'"error":{' in answer.content:
                wrong.append(f"{route} {number}: {answer.status_code} {answer.text[:200]}")
            done += 1
            if done % EVERY == 0:
                for name, pid in processes.items():
                    seen[name].append(round(resident(pid), 1))

    with ThreadPoolExecutor(wants.clients) as pool:
        list(pool.map(ask, range(wants.requests)))
    quarter = max(len(seen["server"]) // 4, 1)
    grown = {name: round(statistics.median(each[-quarter:]) - statistics.median(each[quarter : 2 * quarter] or each), 1)
             for name, each in seen.items()}
    return {"requests": done, "grown": grown, "resident": seen, "wrong": wrong[:20]}


if __name__ == "__main__":
    raise SystemExit(main())
