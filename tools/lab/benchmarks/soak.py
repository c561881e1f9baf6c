"""A server that is treated badly, for a while: nothing may be lost, and /health is right each time.

`python tools/lab/benchmarks/soak.py --model DIR --seconds 600` starts `python -m sluice serve` under `ulimit -n 256`.
Clients ask it, whose greedy answers must stay the same; others go away, send half a request, garbage or the wrong key,
or hold hundreds of connections and say nothing. Meanwhile the engine's process is stopped (SIGSTOP) for longer than
--silence, the web server is stopped, and the engine is killed and the server started again: /health must say 503 as
long as there is no engine, and 200 again behind it. Beside that `run --session` writes to a disk that is full (a limit
on the length of files): its answer must come, and the session that was there must stay. A line of JSON tells what was
seen; the exit code is 1 if anything was wrong. It needs httpx."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx

FILES, PATIENCE_S = 256, 300.0
KEY = "secret"
PROMPTS = ["the cat", "a dog ran", "on the mat and the dog", "x" * 200]


class Server:
    """`python -m sluice serve`, and what it said."""

    def __init__(self, wants: argparse.Namespace) -> None:
        words = [sys.executable, "-m", "sluice", "serve", "--model", str(wants.model), "--name", "soak", "--port", "0",
                 "--api-key", KEY, "--silence", str(wants.silence), *wants.serve]
        self.process = subprocess.Popen(["bash", "-c", f'ulimit -n {FILES}; exec "$@"', "bash", *words],
                                        stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        until(lambda: self.url or self.process.poll() is not None)
        if not self.url:
            raise SystemExit("".join(self.said))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.said.append(line)
            found = re.search(r"(http://\S+)/v1$", line)
            self.url = found[1] if found else self.url

    @property
    def engine(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def health(self, seconds: float = 30) -> int:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=seconds).status_code
        return 0

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def until(what: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > ends:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what.__name__}")
        time.sleep(0.05)


class Clients:
    """Threads that ask the newest server until they are told to end. Where nothing was done to it meanwhile, every
    failure counts."""

    def __init__(self, server: Server) -> None:
        self.server, self.ends = server, threading.Event()
        self.troubles = 0  # Begun and ended: odd while there is one.
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._wants: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(each, number)) for each, count in (
            (self._ask, 3), (self._leave, 1), (self._rude, 1), (self._silent, 1)) for number in range(count)]
        for each in self._threads:
            each.start()

    def close(self) -> None:
        self.ends.set()
        for each in self._threads:
            each.join(PATIENCE_S)

    def _run(self, what: Callable[[random.Random], str], number: int) -> None:
        draw = random.Random(number)
        while not self.ends.is_set():
            before = self.troubles
            try:
                said = what(draw)
            except (httpx.HTTPError, OSError) as error:
                said = f"failed: {type(error).__name__}"
            troubled = before % 2 or before != self.troubles
            with self._lock:
                self.seen[f"{what.__name__[1:]}: {'trouble' if troubled and 'failed' in said else said}"] += 1
                if "failed" in said and not troubled:
                    self.wrong.append(f"{what.__name__[1:]}: {said}")

    def _ask(self, draw: random.Random) -> str:
        prompt, tokens, stream = draw.choice(PROMPTS), draw.choice([1, 5, 40]), draw.random() < 0.5
        body = {"model": "soak", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
        answer = httpx.post(f"{self.server.url}/v1/completions", json=body, headers=self._key(), timeout=PATIENCE_S)
        if answer.status_code in (429, 503):
            return f"failed: {answer.status_code}" if answer.status_code == 503 else "429"
        if stream:
            parts = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
            if any("error" in part for part in parts):
                return f"failed: {parts[-1]['error']['message']}"
            text = "".join(part["choices"][0]["text"] for part in parts)
        else:
            text = answer.json()["choices"][0]["text"]
        with self._lock:
            if self._wants.setdefault((prompt, tokens), text) != text:
                self.wrong.append(f"another answer to {body}: {text!r}")
        return "answered"

    def _leave(self, draw: random.Random) -> str:
        body = {"model": "soak", "prompt": PROMPTS[1], "max_tokens": 400, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, headers=self._key(),
                          timeout=PATIENCE_S) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number > draw.randrange(1, 9):
                    return "left"
        return f"{answer.status_code}" if answer.status_code == 429 else f"failed: {answer.status_code}"

    def _rude(self, draw: random.Random) -> str:
        sent = draw.choice([b"\x16\x03\x01", b"GET / HTTP/9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                            b"Content-Length: 3000000\r\nConnection: close\r\n\r\n" + bytes(3_000_000),
                            b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
                            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
        with self._connect() as connection:
            with contextlib.suppress(OSError):  # It may be refused before all is sent.
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)
        time.sleep(0.05)
        return "sent"

    def _silent(self, draw: random.Random) -> str:
        with contextlib.ExitStack() as held:
            for number in range(2 * FILES):
                connection = held.enter_context(self._connect())
                with contextlib.suppress(OSError):
                    connection.sendall(draw.choice([b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost:"]))
                if number % 32 == 0 and self.server.health() not in ((0, 200, 503) if self.troubles % 2 else (200,)):
                    return "failed: /health beside silent connections"
            self.ends.wait(draw.uniform(0, 3))
        return "held"

    def _connect(self) -> socket.socket:
        url = httpx.URL(self.server.url)
        return socket.create_connection((url.host, url.port), 30)

    @staticmethod
    def _key() -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"}


def stop_engine(clients: Clients) -> None:
    """For longer than it may be silent."""
    pid = clients.server.engine
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: clients.server.health() == 503)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: clients.server.health() == 200)


def stop_server(clients: Clients, wants: argparse.Namespace) -> None:
    os.kill(clients.server.process.pid, signal.SIGSTOP)
    try:
        time.sleep(wants.silence + 2)
        if clients.server.health(1):
            raise SystemExit("a server that is stopped has answered")
    finally:
        os.kill(clients.server.process.pid, signal.SIGCONT)
    until(lambda: clients.server.health() == 200)


def kill_engine(clients: Clients, wants: argparse.Namespace) -> None:
    server = clients.server
    os.kill(server.engine, signal.SIGKILL)
    until(lambda: server.health() == 503)
    until(lambda: any("has ended with exit code -9" in line for line in server.said))
    if server.metric("sluice_running") or server.metric("sluice_engine_up"):
        raise SystemExit("/metrics tells of an engine that is not there")
    clients.wrong += [line for line in server.said[1:] if not line.startswith(("  ", "sluice: "))]
    server.end()
    clients.server = Server(wants)
    until(lambda: clients.server.health() == 200)


def full_disk(wants: argparse.Namespace) -> None:
    """A session that does not fit costs no answer, and the one before stays."""
    with tempfile.TemporaryDirectory() as folder:
        def run(limit: str, prompt: str) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, "-m", "sluice", "run", "--model", str(wants.model), "--prompt", prompt, "--session",
                     f"{folder}/s", "--max-tokens", "3", "--temperature", "0", *wants.run]
            return subprocess.run(["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *words], text=True,
                                  capture_output=True, timeout=PATIENCE_S)

        first = run("unlimited", "the cat sat on the mat " * 4)
        before = Path(folder, "s").read_bytes()
        second = run(str(max(len(before) // 1024 // 2, 1)), "the cat sat on the mat " * 40)
        if (first.returncode, second.returncode) != (0, 1) or not second.stdout or "was not written" not in second.stderr:
            raise SystemExit(f"a full disk: {first} {second}")
        if Path(folder, "s").read_bytes() != before or os.listdir(folder) != ["s"]:
            raise SystemExit(f"a full disk: {os.listdir(folder)}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", type=Path, required=True)
    made.add_argument("--seconds", type=float, default=600)
    made.add_argument("--silence", type=float, default=6, help="seconds, of the server; more on a busy machine")
    made.add_argument("--run", type=str.split, default=[], help="arguments of run, such as --host-bytes")
    made.add_argument("serve", nargs="*", help="behind --: arguments of serve")
    return made


def main() -> int:
    wants = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # The server ends with it.
    clients, told = Clients(Server(wants)), Counter()
    began = time.monotonic()
    events = [(stop_engine, ()), (stop_server, (wants,)), (kill_engine, (wants,))]
    try:
        while time.monotonic() - began < wants.seconds:
            for call, arguments in events:
                time.sleep(min(20, wants.seconds / 20))
                if clients.server.health() != 200:
                    clients.wrong.append("/health is not 200 in a calm")
                clients.troubles += 1
                call(clients, *arguments)
                clients.troubles += 1
                told[call.__name__] += 1
            full_disk(wants)
            told["full_disk"] += 1
        clients.close()
        server = clients.server
        clients.wrong += [line for line in server.said[1:] if not line.startswith(("  ", "sluice: "))]
        until(lambda: server.metric("sluice_running") == 0 and server.health() == 200)
        print(json.dumps({"seconds": round(time.monotonic() - began), "events": told, "seen": clients.seen,
                          "files": server.files(), "wrong": clients.wrong[:20]}))
    finally:
        clients.ends.set()
        clients.server.end()
    return int(bool(clients.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
