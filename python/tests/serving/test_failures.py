"""Processes that die leave nobody waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from server import DEADLINE_S, Server, wait_until
from small import prompt_ids

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_engine_that_dies(start: Callable[..., Server]) -> None:
    server = start()
    client = server.client()
    under_way = client.completions.create(prompt=prompt_ids(10), max_tokens=8000, stream=True, **GREEDY)
    next(iter(under_way))
    os.kill(server.engine_pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the engine's process has ended with exit code -9"):
        list(under_way)
    wait_until(lambda: server.get("/health").status_code == 503)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="ended") as refused:
            client.completions.create(prompt="a", max_tokens=2, stream=stream, **GREEDY)
        assert refused.value.status_code == 503
    server.close()
    assert server.process.returncode in (0, -signal.SIGTERM)


def test_an_engine_that_is_silent_for_a_while(start: Callable[..., Server]) -> None:
    server = start("--silence", "5")
    client, pid = server.client(), server.engine_pid
    under_way = client.completions.create(prompt=prompt_ids(10), max_tokens=8000, stream=True, **GREEDY)
    next(iter(under_way))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(openai.APIError, match="has said nothing for 5 s"):
            list(under_way)
        wait_until(lambda: server.get("/health").status_code == 503)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: server.get("/health").status_code == 200)
    wait_until(lambda: server.memory() == 0)  # Nobody wants that answer any more.
    assert client.completions.create(prompt="a", max_tokens=2, **GREEDY).usage.completion_tokens == 2


def test_a_web_server_that_dies_takes_its_engine_along(start: Callable[..., Server]) -> None:
    server = start()
    pid = server.engine_pid
    assert alive(pid)
    server.process.kill()
    server.process.wait(DEADLINE_S)
    wait_until(lambda: not alive(pid))


def test_a_server_ends_when_it_is_told(start: Callable[..., Server]) -> None:
    server = start("--api-key", "secret")
    pid = server.engine_pid
    client = server.client("secret")
    under_way = client.completions.create(prompt=prompt_ids(10), max_tokens=8000, stream=True, **GREEDY)
    next(iter(under_way))
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="being shut down"):
        list(under_way)
    server.process.wait(DEADLINE_S)
    wait_until(lambda: not alive(pid))


@pytest.mark.parametrize(("arguments", "words"), [
    (["--model", "/nonexistent/model"], "/nonexistent/model"),
    (["--policy", "bogus"], "bogus"),
])
def test_models_that_cannot_be_served(folder: Path, arguments: list[str], words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "sluice", "serve", "--model", str(folder), "--port", "0", "--device",
                           "cpu", *arguments], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1 and done.stderr.startswith("sluice: ") and words in done.stderr
    assert "Traceback" not in done.stderr
