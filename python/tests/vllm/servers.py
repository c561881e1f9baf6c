"""vLLM's server with Sluice, as a user starts it: in processes of its own, the plug-in found by its entry point."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import httpx
import openai

PYTHON = Path(__file__).parents[2]
DEADLINE_S = 300.0


def installed(folder: Path) -> Path:
    """What pip leaves of the package's entry points, as pyproject.toml has them."""
    project = tomllib.loads((PYTHON / "pyproject.toml").read_text())["project"]
    information = folder / "sluice-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sluice\nVersion: 0\n")
    (information / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {what}\n" for name, what in points.items())
        for group, points in project["entry-points"].items()))
    return folder


class Server:
    """vLLM's server with these words."""

    def __init__(self, folder: Path, model: Path, *words: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        path = os.pathsep.join([str(installed(folder)), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO"}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")  # Processes as vLLM has them.
        # What `vllm serve` runs. The command itself does not find its own version in packages for the CPU.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--worker-cls",
             "sluice.vllm.Worker", "--attention-backend", "CUSTOM", "--host", "127.0.0.1", "--port", str(port),
             "--served-model-name", "served", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True)
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.said.append(line)

    def wait(self) -> None:
        """Until it answers, or has ended."""
        end = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)

    def ended(self) -> int:
        """Its status, once it has ended and all that it said is here."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            try:  # What it has started, if that has not ended by then.
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
