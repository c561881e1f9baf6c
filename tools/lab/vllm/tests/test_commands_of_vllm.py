"""Each command, as small as it may be, with vLLM on the CPU; and that the rules it goes by find what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines  # noqa: F401  It has vLLM look at models in this process.
import kl
import lab
import models
import normal_weights
import pytest
import serve
import soak
import speed
import tokens
import torch
from families import save
from servers import installed

SMOLLM2 = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sluice" / "models" / "smollm2"
SMALL = ("--dtype", "float32", "--max-len", "256", "--batched", "64", "--host", "16MiB", "--kv", "64MiB", "--option",
         "threads=1", "--option", "pin_threads=false", "--option", "answer_timeout_ms=30000")
Run = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("Llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "ids.json"
    file.write_text(json.dumps(lab.random_ids(400, 3, 97)))
    return file


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Run:
    """Exit code and results of a command."""
    def call(main: Callable[[list[str]], int], *words: str, model: Path = model) -> tuple[int, list[dict[str, Any]]]:
        out = tmp_path / "out.jsonl"
        code = main(["--model", str(model), *SMALL, "--out", str(out), *words])
        return code, [json.loads(line) for line in out.read_text().splitlines()]

    return call


def test_speed(run: Run, tmp_path: Path) -> None:
    """Of random weights, by which tokens do not weigh the same."""
    assert models.main([str(tmp_path / "made"), "--small", "--layers", "2"]) == 0
    code, (start, *found) = run(speed.main, "--random-weights", "--steps", "5", "40:1,3", "60:2",
                                model=tmp_path / "made")
    assert code == 0 and start["attention"] == "sluice.vllm._backend.Attention" and start["host_bytes"] <= 16 << 20
    assert [(each["length"], each["batch"], each["tokens"]) for each in found] == [(40, 1, 5), (40, 3, 15), (60, 2, 10)]
    assert all(each["ms_median"] > 0 and each["prompt_s"] > 0 for each in found)
    assert [each.get("ttft_s") for each in found] == [found[0]["prompt_s"], None, None]
    code, results = run(speed.main, "--random-weights", "--own", "--label", "theirs", "--steps", "5", "40:2",
                        model=tmp_path / "made")
    assert code == 0 and results[-1]["label"] == "theirs" and results[-1]["tokens"] == 10
    assert "sluice" not in results[-2]["attention"]


def test_a_sequence_that_ends_is_not_measured(run: Run) -> None:
    with pytest.raises(RuntimeError, match="ended, by length, while it was measured: give a larger --max-len"):
        run(speed.main, "250:1")


class Waits:
    """A batch of three of which one sequence has no memory."""

    def __len__(self) -> int:
        return 3

    def step(self) -> tuple[float, int]:
        return 0.001, 2


def test_a_sequence_that_waits_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="3 sequences had 10 tokens in 5 steps: some waited for memory"):
        speed.measured(Waits(), 5)


def test_tokens(run: Run) -> None:
    code, (own, *found) = run(tokens.main, "--lengths", "5,60,100", "--answer", "60", "--modes", "eager")
    assert code == 0 and [each["kind"] for each in found] == ["plenty", "far", "preempted"]
    assert all(count > 20 for count in own["different"])
    assert all(each["rows"] == [[None, None, each["rows"][at][2]] for at in range(3)] for each in found)
    assert [each["preemptions"] > 0 for each in found] == [False, False, True]


def test_tokens_that_are_others_are_told(run: Run, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "sluice_options", lambda wants: {**lab.sluice_options(wants),
                                                                 "policy": "streaming:sinks=4,recent=8"})
    code, found = run(tokens.main, "--text", str(text), "--lengths", "60,100", "--answer", "20", "--modes", "eager")
    assert code == 1 and not any(each["ok"] for each in found[1:])


def test_answers_that_end_before_anything_is_preempted(run: Run) -> None:
    code, (_, *found) = run(tokens.main, "--lengths", "5", "--answer", "20", "--modes", "eager")
    assert code == 1 and [(each["kind"], each["ok"]) for each in found] == [
        ("plenty", True), ("far", True), ("preempted", False)]


def test_the_margin_rule() -> None:
    own = [(1, {1: -0.1, 2: -3.0}), (2, {2: -0.5, 3: -0.7}), (3, {3: -1.0})]
    assert tokens.difference(own, own) == (None, None, 0.0)
    assert tokens.difference(own, [(1, {1: -0.3}), (3, {3: -0.4}), (9, {})]) == (1, 0.2, 0.2)
    assert tokens.difference(own, [(7, {7: 0.0})])[:2] == (0, 99.0)


def test_kl(run: Run, text: Path) -> None:
    code, found = run(kl.main, "--text", str(text), "--prompt", "120", "--forced", "12", "--texts", "2", "full",
                      "streaming:sinks=4,recent=8; page_tokens=32")
    assert code == 0 and [each["positions"] for each in found] == [22, 22]
    exact, narrow = found
    assert abs(exact["mean"]) < 1e-3 and exact["same_top"] == 1.0
    assert narrow["mean"] > 0.05 and narrow["max"] >= narrow["p99"] >= narrow["p50"] > 0


def test_divergence() -> None:
    one, other = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    assert kl.divergence([[one], [other]], [[one], [other]])["mean"] == 0.0
    found = kl.divergence([[one, other]], [[other, other]])
    assert found["max"] == pytest.approx(0.25 * torch.tensor(2.0).log().item()) and found["same_top"] == 0.5
    # Of a token that the first one has none of, nothing.
    assert kl.divergence([[torch.tensor([0.0, -torch.inf])]], [[torch.tensor([0.0, -9.0])]])["mean"] == 0.0
    with pytest.raises(RuntimeError, match="NaN"):
        kl.divergence([[one]], [[torch.full_like(one, torch.nan)]])
    assert kl.options_of("sluice | sample=8; near_bytes=64MiB; threads=2") == (
        "sluice | sample=8", {"near_bytes": 64 << 20, "threads": 2})


def test_soak(run: Run) -> None:
    code, found = run(soak.main, "--seconds", "10", "--every", "2", "--sequences", "4", "--preempt", "40",
                      "--host-tokens", "900")
    end = found[-1]
    assert code == 0 and end["left"] == 0 and end["errors"] == 0 and len(found) >= 4
    assert end["submitted"] == end["done"] + end["aborted"] and end["done"] > 5 and end["preemptions"] > 0
    assert all(each["rss_gib"] > 0 for each in found[1:])


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves of Sluice's entry point, for processes that a test starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed(tmp_path)), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("plug_in")
def test_serve(run: Run, tmp_path: Path) -> None:
    code, found = run(serve.main, "--rates", "2", "--seconds", "2", "--input", "24", "--answer", "4", "--log",
                      str(tmp_path / "log"), model=SMOLLM2)
    assert code == 0 and [(each["rate"], each["completed"], each["failed"]) for each in found] == [(2.0, 4, 0)]
    assert found[0]["median_ttft_ms"] > 0 and found[0]["p99_tpot_ms"] > 0
    assert "Sluice keeps 30 layers" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("completed", [2, 0])
def test_requests_that_fail_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completed: int) -> None:
    def bench(words: list[str], **_: Any) -> SimpleNamespace:
        assert words[words.index("--num-prompts") + 1] == "3"
        told = {"completed": completed, "failed": 3 - completed, "median_ttft_ms": 0.0}
        (tmp_path / words[words.index("--result-filename") + 1]).write_text(json.dumps(told))
        return SimpleNamespace(returncode=0, stdout="", stderr="the server is gone")

    monkeypatch.setattr(serve.subprocess, "run", bench)
    wants = SimpleNamespace(tokenizer=None, model=tmp_path, input=8, answer=2)
    with pytest.raises(RuntimeError, match=f"{completed} of 3 requests were answered.*the server is gone"):
        serve.bench(wants, "http://localhost", "1", 3, tmp_path)


@pytest.mark.usefixtures("plug_in")
def test_a_server_that_does_not_start(run: Run) -> None:
    with pytest.raises(RuntimeError, match="(?s)the server does not answer; --log .*there is no option polcy"):
        run(serve.main, "--option", "polcy=full", model=SMOLLM2)


def test_a_command_that_is_terminated_ends_its_server(tmp_path: Path) -> None:
    told = tmp_path / "server"
    server = (f"import os, pathlib, time; file = pathlib.Path({str(told)!r}); part = file.with_suffix('.part'); "
              "part.write_text(str(os.getpid())); part.rename(file); time.sleep(600)")
    command = ("import sys, serve; "
               f"serve.server_words = lambda wants, port: [sys.executable, '-c', {server!r}]; serve.main(['--model', '.'])")
    with subprocess.Popen([sys.executable, "-c", command], cwd=Path(serve.__file__).parent) as process:
        try:
            ends = time.monotonic() + 120
            while not told.exists() and time.monotonic() < ends:
                assert process.poll() is None
                time.sleep(0.1)
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_the_cause_of_a_server_that_ended() -> None:
    said = """(APIServer pid=1) WARNING 11-29 00:27:10 [system_utils.py:299] such as `OSError: too many files`
(EngineCore pid=2) ERROR 11-29 00:27:11 [core.py:100] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-29 00:27:11 [core.py:100]   File "a.py", line 1, in <module>
(EngineCore pid=2) ERROR 11-29 00:27:11 [core.py:100]     raise InvalidArgument()
(EngineCore pid=2) ERROR 11-29 00:27:11 [core.py:100] sluice.errors.InvalidArgument: too few
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert serve._cause(said).startswith("sluice.errors.InvalidArgument: too few")
    assert serve._cause("a\nb") == "a\nb"


@pytest.mark.parametrize("words", [("8064:4,1",), ("8K",), ("8064:a",)])
def test_plans_that_are_none(model: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--model", str(model), *words])


def test_weights_for_other_processes(tmp_path: Path) -> None:
    folder = normal_weights.installed(tmp_path / "plugin")
    assert (folder / "normal_weights.py").resolve() == Path(normal_weights.__file__).resolve()
    assert "normal_weights:register" in next(folder.glob("*.dist-info/entry_points.txt")).read_text()
    norm, layer = torch.nn.LayerNorm(4), torch.nn.Linear(64, 64)
    for each in (norm, layer):
        normal_weights.fill(each)
    assert norm.weight.eq(1).all() and 0.015 < layer.weight.std().item() < 0.025
