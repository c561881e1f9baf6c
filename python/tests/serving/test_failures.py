"""Processes that die leave nobody waiting."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import sluice
from server import Server
from sluice.__main__ import main
from sluice.serving.arguments import CannotLoad, device_of
from sluice.serving.load import load_loop, load_tokenizer
from sluice.serving.process import EngineProcess, Settings
from small import DEVICE, prompt_ids
from waiting import DEADLINE_S, alive, wait_until

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_an_engine_that_is_silent_for_a_while_and_then_dies(start: Callable[..., Server]) -> None:
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
    under_way = client.completions.create(prompt=prompt_ids(10), max_tokens=8000, stream=True, **GREEDY)
    next(iter(under_way))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the engine's process has ended with exit code -9"):
        list(under_way)
    wait_until(lambda: server.get("/health").status_code == 503)
    assert [server.metric(f"sluice_{name}") for name in ("engine_up", "running", "waiting")] == [0, 0, 0]
    assert server.said[-1].startswith("sluice: the engine's process has ended with exit code -9; requests are answered")
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="ended") as refused:
            client.completions.create(prompt="a", max_tokens=2, stream=stream, **GREEDY)
        assert refused.value.status_code == 503
    server.close()
    assert server.process.returncode in (0, -signal.SIGTERM)


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
    os.kill(pid, signal.SIGTERM)  # As all of a group have it.
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="being shut down"):
        list(under_way)
    server.process.wait(DEADLINE_S)
    wait_until(lambda: not alive(pid))


@pytest.mark.parametrize(("arguments", "status", "words"), [
    (["--model", "/nonexistent/model"], 2, "there is no folder /nonexistent/model"),
    (["--policy", "bogus"], 2, 'policy "bogus"'),
    (["--option", "page_tokens=abc"], 2, "--option page_tokens is 'abc'; it must be a whole number"),
    (["--option", "page_tokens=7"], 2, "page_tokens is 7; it must be a power of two in [8, 256]"),
    (["--option", "pin_threads=5"], 2, "pin_threads is 5; it must be 0 or 1"),
    (["--option", "near_bytes=4096"], 2, "--option near_bytes: --near-bytes sets it"),
    (["--near-bytes", "much"], 2, '"much" is no size'),
    (["--option", "windows=[16]"], 2, "--option windows: the model sets it"),
    (["--option", "sequences=4"], 2, "--option sequences: --sequences sets it"),
    (["--port", "99999"], 2, '"99999" must be a whole number in [0, 65535]'),
    (["--context", "0"], 2, "--context"),
    (["--api-key", ""], 2, "--api-key is empty"),
])
def test_what_is_refused_before_anything_is_loaded(folder: Path, capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int,
                                                   words: str) -> None:
    monkeypatch.setattr("sys.argv", ["sluice", "serve", "--model", str(folder), "--port", "0", "--device", "cpu",
                                     *arguments])
    monkeypatch.setattr(EngineProcess, "start", lambda _: pytest.fail("a process was started"))
    try:
        assert main() == status
    except SystemExit as ended:  # Of argparse.
        assert ended.code == status
    assert words in capsys.readouterr().err


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU")
@pytest.mark.parametrize("command", ["serve", "run", "eval"])
def test_a_gpu_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
                                 command: str) -> None:
    more = {"serve": ["--port", "0"], "run": ["--prompt", "a"], "eval": ["--text", "prose"]}[command]
    monkeypatch.setattr(EngineProcess, "start", lambda _: pytest.fail("a process was started"))
    monkeypatch.setattr("sys.argv", ["sluice", command, "--model", str(folder), "--device", "cuda", *more])
    assert main() == 3
    told = capsys.readouterr().err
    assert told.startswith("sluice: --device cuda: torch ") and told.endswith("or use --device cpu\n")


def test_a_gpu_behind_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("sluice._library.library", lambda: SimpleNamespace(cuda_devices=lambda: 2, path="a library"))
    assert device_of(Namespace(device="cuda:1")) == "cuda:1"
    with pytest.raises(sluice.Unsupported, match="--device cuda:2: there are 2 GPUs, the first is cuda:0"):
        device_of(Namespace(device="cuda:2"))


def test_a_model_without_a_tokenizer_is_refused_at_once(folder: Path, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
    monkeypatch.setattr(EngineProcess, "start", lambda _: pytest.fail("a process was started"))
    monkeypatch.setattr("sys.argv", ["sluice", "serve", "--model", str(bare), "--port", "0", "--device", "cpu"])
    assert main() == 2 and "its files, such as tokenizer.json, must be beside the model" in capsys.readouterr().err


def test_models_that_transformers_does_not_take(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=lambda *_: ["tokenizer.json", "tokenizer_config.json"])
    strange = tmp_path / "strange"
    shutil.copytree(folder, strange)
    (strange / "config.json").write_text('{"model_type": "bogus"}')
    no_tokenizer = f"the tokenizer of {bare} cannot be loaded; its files, such as tokenizer.json"
    for path, words in ((bare, no_tokenizer), (strange, "cannot be loaded")):
        with pytest.raises(CannotLoad) as refused:
            load_tokenizer(str(path))
            load_loop(Settings(str(path)))
        assert words in str(refused.value) and "\n" not in str(refused.value) and refused.value.exit_code == 2


def test_a_server_that_cannot_load_its_model(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    shutil.copytree(folder, empty, ignore=lambda *_: ["model.safetensors"])
    done = subprocess.run([sys.executable, "-m", "sluice", "serve", "--model", str(empty), "--port", "0", "--device",
                           "cpu", "--policy", "full"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2 and done.stderr.startswith("sluice: the model "), done.stderr
    assert done.stderr.count("\n") == 1
