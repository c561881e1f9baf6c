"""A server in a process of its own, and what is done to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import openai
from small import DEVICE, HOST_MIB, KV
from waiting import DEADLINE_S, children, wait_until


class Server:
    """`python -m sluice serve` with a model, or what another program of these words makes of it."""

    def __init__(self, folder: Path, *arguments: str, program: Sequence[str] = ("-m", "sluice"),
                 **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", "--model", str(folder), "--policy", "full", "--host-bytes",
             f"{HOST_MIB}MiB", "--port", "0", "--device", DEVICE, "--sequences", "8", "--prefill-rows", "64",
             "--option", "threads=1", "--option", "pin_threads=false", "--option", "answer_timeout_ms=30000",
             *(word for name, value in KV.items() for word in ("--option", f"{name}={value}")), *arguments],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
        self.said: list[str] = []
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        try:
            wait_until(lambda: self.url or self.process.poll() is not None)
            assert self.url, "".join(self.said)
            wait_until(self._answers)
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        for line in self.process.stderr:
            self.said.append(line)
            found = re.search(r"(http://\S+)/v1$", line)
            if found:
                self.url = found[1]

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=DEADLINE_S).status_code == 200
        except httpx.TransportError:
            return False

    def client(self, key: str = "none", **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_S, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=DEADLINE_S)

    def metric(self, name: str) -> float:
        """0 if there is none, as of what never happened."""
        lines = self.get("/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " ")), 0.0)

    def memory(self) -> float:
        return self.metric('sluice_memory_bytes{kind="far_pages_used"}')

    @property
    def engine_pid(self) -> int:
        return next(pid for pid in children(self.process.pid)
                    if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(DEADLINE_S)
                raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
