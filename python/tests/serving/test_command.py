"""The commands run and chat."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import sluice
from sluice.__main__ import main
from sluice.errors import Error, InvalidArgument
from sluice.serving import model as serving_model
from sluice.serving.arguments import CannotLoad, add_engine, in_arguments, option, settings_of, size
from sluice.serving.command import api_keys, listen, name_of
from sluice.serving.load import load_model
from sluice.serving.talk import Progress, conversation
from small import DEVICE, KV, Breaks, bare_model, expected, text_of, tokenizer
from waiting import DEADLINE_S

ARGUMENTS = ("--policy", "full", "--host-bytes", "8MiB", "--device", DEVICE, "--option", "threads=1", "--option",
             "pin_threads=false", "--option", "answer_timeout_ms=30000", "--temperature", "0", "--max-tokens", "12",
             *(word for name, value in KV.items() for word in ("--option", f"{name}={value}")))


def test_kv_dtype(folder: Path) -> None:
    parser = argparse.ArgumentParser()
    add_engine(parser, 1)
    for words, options in (((), {}), (("--kv-dtype", "fp8_e4m3"), {"kv_dtype": "fp8_e4m3"}),
                           (("--option", "kv_dtype=f16"), {"kv_dtype": "f16"})):
        assert settings_of(parser.parse_args(["--model", str(folder), *words])).options == options


def test_near_bytes(folder: Path) -> None:
    parser = argparse.ArgumentParser()
    add_engine(parser, 1)
    for words, options in (((), {}), (("--near-bytes", "0"), {"near_bytes": 0}),
                           (("--near-bytes", "1.5GiB"), {"near_bytes": 3 << 29})):
        assert settings_of(parser.parse_args(["--model", str(folder), *words])).options == options


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def command(name: str, folder: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "sluice", name, "--model", str(folder), *ARGUMENTS, *arguments],
                          input=typed, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command in this process, which has loaded what it needs."""
    def call(name: str, *arguments: str, typed: str | io.StringIO = "") -> Done:
        monkeypatch.setattr("sys.argv", ["sluice", name, "--model", str(folder), *ARGUMENTS, *arguments])
        monkeypatch.setattr("sys.stdin", io.StringIO(typed) if isinstance(typed, str) else typed)
        status = main()
        return Done(status, *capsys.readouterr())

    return call


def answer_to(prompt: str) -> str:
    ids = expected(bare_model("llama"), tokenizer().encode(prompt), 12)
    if 0 in ids:  # The model's end.
        ids = ids[: ids.index(0)]
    return text_of(ids)


@pytest.mark.parametrize("how", ["prompt", "input"])
def test_run(folder: Path, here: Callable[..., Done], how: str) -> None:
    prompt = "the cat sat on the mat " * 20
    done = command("run", folder, "--prompt", prompt) if how == "prompt" else here("run", "--file", "-", typed=prompt)
    assert (done.returncode, done.stderr) == (0, "")  # Progress is for terminals.
    assert done.stdout == answer_to(prompt) + "\n"


def test_graphs(here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none can be made, which standard error says."""
    prompt = "the cat sat on the mat"
    done = here("run", "--prompt", prompt, "--graphs", "on")
    assert (done.returncode, done.stdout, done.stderr) == (0, answer_to(prompt) + "\n", "")
    for name in ("Uncaptured", "CudaGraphs"):
        monkeypatch.setattr(serving_model, name, Breaks)
    done = here("run", "--prompt", prompt, "--graphs", "on", "--sequences", "8")
    assert (done.returncode, done.stdout) == (0, answer_to(prompt) + "\n")
    assert done.stderr == "sluice: forwards run without CUDA graphs: RuntimeError: not permitted when capturing\n"


def test_chat(here: Callable[..., Done]) -> None:
    done = here("chat", "--system", "be brief", typed="the cat\n\na dog\n")
    first = answer_to("<|system|>be brief<|end|><|user|>the cat<|end|><|assistant|>")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(first + "\n")
    second = answer_to(f"<|system|>be brief<|end|><|user|>the cat<|end|><|assistant|>{first}<|end|><|user|>a dog<|end|>"
                     "<|assistant|>")
    assert done.stdout == f"{first}\n{second}\n"


class Terminal(io.StringIO):
    """What a person types; ^C is that key."""

    def isatty(self) -> bool:
        return True

    def readline(self, *size: int) -> str:
        line = super().readline(*size)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def test_a_chat_of_a_person(here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "/help\n/status\n/nonsense\n^C\n//the cat\n/status\nthe cat\n/quit\nnever said\n"
    done = here("chat", typed=Terminal(typed))
    first = answer_to("<|user|>/the cat<|end|><|assistant|>")
    second = answer_to(f"<|user|>/the cat<|end|><|assistant|>{first}<|end|><|user|>the cat<|end|><|assistant|>")
    assert done.returncode == 0 and done.stdout.replace("> ", "") == f"{first}\n{second}\n"
    told = done.stderr.splitlines()
    assert told.count("/help    this") == 2 and "there is no /nonsense" in told and "[no answer yet]" in told
    figures = [line for line in told if "of them new" in line]
    assert len(figures) == 3 and figures[0] == figures[1] != figures[2]
    assert all(re.search(r"; near 0 KiB, far \d+ KiB; \d+\.\d s to the first; \d+ ms a token\]$", line)
               for line in figures)
    assert here("chat", typed=Terminal("^C\n^C\nthe cat\n")).returncode == 130
    assert here("chat", typed=Terminal("")).returncode == 0


def test_an_answer_that_is_interrupted(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "sluice", "chat", "--model", str(folder), *ARGUMENTS,
                                "--max-tokens", "8000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    ends = threading.Timer(DEADLINE_S, process.kill)
    ends.start()
    try:
        process.stdin.write(b"the cat\n")
        process.stdin.flush()
        assert process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=DEADLINE_S)  # No further turn.
    finally:
        ends.cancel()
        process.kill()
    assert (process.returncode, errors) == (0, b"")
    assert told.endswith(b"\n") and len(told) < 4000


def test_a_file_that_is_not_there(here: Callable[..., Done], tmp_path: Path) -> None:
    """Exit codes are those of `sluice`: 2 for wrong input, 1 for what the system refuses, 3 for what is not here."""
    done = here("run", "--file", str(tmp_path / "none"))
    assert done.returncode == 2 and str(tmp_path / "none") in done.stderr
    done = here("run", "--file", str(tmp_path))
    assert done.returncode == 1 and str(tmp_path) in done.stderr
    assert here("run", "--prompt", "a", "--policy", "nonesuch").returncode == 2
    done = here("run", "--prompt", "a", "--policy", "scores | top_k=9 | near=0")
    assert done.returncode == 3 and "scores of a model's own indexer" in done.stderr


def test_exit_codes_by_error(here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    for error, code in ((sluice.Unsupported("no GPU"), 3), (sluice.Corrupt("cut"), 2), (sluice.NotFound("none"), 2),
                        (sluice.DeviceError("lost"), 1), (sluice.Timeout("late"), 1), (KeyboardInterrupt(), 130)):
        def fails(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("sluice.serving.talk.Teller", fails)
            assert here("run", "--prompt", "a").returncode == code


def test_messages_of_an_engine_name_arguments(here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> None:
    done = here("run", "--prompt", "a", "--host-bytes", "4KiB")
    assert done.returncode != 0 and "--host-bytes" in done.stderr and "Options" not in done.stderr, done.stderr
    assert in_arguments("raise EngineOptions.import_rows; EngineOptions.sequences says; EngineOptions.kv_dtype") == \
        "raise --option import_rows; --sequences says; --kv-dtype"


def test_a_chat_that_outgrows_the_context(here: Callable[..., Done]) -> None:
    lines = ["the cat sat on the mat " * 3, "a dog", "the dog ran " * 200, "the mat"]
    done = here("chat", "--context", "100", typed="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert "prompt and answer together may have 100; write less" in done.stderr
    assert len(done.stdout.splitlines()) >= 3


def test_the_oldest_turns_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    teller = SimpleNamespace(tokenizer=tokenizer(), limit=60)
    messages = [{"role": "system", "content": "be brief"}]
    for number in range(4):
        messages += [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "yes"}]
    messages.append({"role": "user", "content": "and now"})
    ids = conversation(teller, messages, 1)
    assert len(ids) < 60 and tokenizer().decode(ids).startswith("<|system|>be brief<|end|><|user|>question")
    assert messages[-1]["content"] == "and now" and len(messages) % 2 == 0 and "left out" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="write less"):
        conversation(teller, [{"role": "user", "content": "a" * 100}], 0)


def test_keys_and_addresses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def warning(host: str, key: str | None = None) -> str:
        api_keys(SimpleNamespace(host=host, api_key=key and [key]))
        return capsys.readouterr().err

    monkeypatch.delenv("SLUICE_API_KEY", raising=False)
    assert not any(warning(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert all("sets a key" in warning(host) for host in ("0.0.0.0", "::", "", "example.org"))
    assert not warning("0.0.0.0", "secret")
    monkeypatch.setenv("SLUICE_API_KEY", " one  two ")
    assert api_keys(SimpleNamespace(host="::", api_key=None)) == ("one", "two")
    for key in ("", " ", "a\nb", "gehe\u00efm"):
        with pytest.raises(InvalidArgument, match="--api-key is empty, or has what no header may have"):
            api_keys(SimpleNamespace(host="::1", api_key=["one", key]))


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Error, match=f"127.0.0.1 port {port}: Address already in use; --port"):
            listen("127.0.0.1", port)
    with pytest.raises(Error, match="203.0.113.1 port 0: .*--host"):
        listen("203.0.113.1", 0)


def test_a_file_of_weights_that_is_cut_short_is_named(folder: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    weights = next(cut.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CannotLoad, match=f"{weights.name} is damaged, or was not copied whole"):
        load_model(str(cut), "auto")
    weights.unlink()
    weights.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CannotLoad, match=weights.name):
        load_model(str(cut), "auto")


def test_a_damaged_file_that_a_model_does_without(folder: Path, tmp_path: Path) -> None:
    more = tmp_path / "more"
    shutil.copytree(folder, more)
    (more / "another.safetensors").write_bytes(b"cut")
    assert load_model(str(more), "auto").config.vocab_size > 0


def test_a_damaged_file_is_not_blamed_for_another_error(folder: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    shutil.copytree(folder, strange)
    (strange / "another.safetensors").write_bytes(b"cut")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "nobody-knows-it"}))
    with pytest.raises(CannotLoad, match="nobody-knows-it.*; another.safetensors is damaged"):
        load_model(str(strange), "auto")


def test_names_of_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert {name_of(model) for model in (".", "./", str(folder), f"{folder}/")} == {"tiny"}
    assert name_of("some/other") == "other"


def test_progress_of_long_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    clock, screen = [100.0], Terminal()
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("sys.stderr", screen)
    progress = Progress()
    for seconds, done in ((5, 2000), (10, 4000), (10, 6000)):
        clock[0] += seconds
        progress.tell(done, 20_000)
    progress.clear()
    told = screen.getvalue().split("\r")
    assert "2,000 of 20,000 tokens\033" in told[1] and "4,000 of 20,000 tokens, 1:20 left" in told[2]
    assert "1:10 left" in told[3] and told[4] == "\033[K"


def test_arguments() -> None:
    assert [size(text) for text in ("8GiB", "8G", "512M", "1.5k", "7")] == [8 << 30, 8 << 30, 512 << 20, 1536, 7]
    assert [option(text) for text in ("a=1", "a=true", "a=f32")] == [("a", 1), ("a", True), ("a", "f32")]
    for call, text in ((size, "8 apples"), (size, ""), (option, "a"), (option, "=1")):
        with pytest.raises(Exception, match="is no size|is not NAME=VALUE"):
            call(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_tokens_are_sent_at_once(host: str) -> None:
    """Nothing waits for what was sent before to be acknowledged."""
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")

    async def delays() -> int:
        told = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            told.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen(host, 0)
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.close()
            return await asyncio.wait_for(told, DEADLINE_S)

    assert asyncio.run(delays()) == 1
