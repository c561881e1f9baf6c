"""Each command, as small as it may be, with vLLM on the CPU; and that the rules it goes by find what is wrong."""

from __future__ import annotations

import asyncio
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
import prefixes
import pytest
import ranks
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


def test_progress_of_prompts_and_the_limit(run: Run) -> None:
    code, (_, *found) = run(speed.main, "--every", "0", "--steps", "5", "200:2")
    read, (decode,) = found[:-1], found[-1:]
    assert code == 0 and decode["step"] == "decode" and {each["step"] for each in read} == {"prompt"}
    # Steps of 64 tokens.
    assert [each["tokens_read"] for each in read][:3] == [64, 128, 192] and read[-1]["tokens_read"] == 400
    code, (*_, last) = run(speed.main, "--limit", "1", "--steps", "100000", "40:1")
    assert code == 1 and last["step"] == "limit" and last["seconds"] == 1


def test_all_memory_is_near(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option reaches Sluice where there is a GPU; a CPU has no near memory."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(speed, "sluice_options", lambda wants: given.append(
        {"near_bytes": wants.near, "host_bytes": wants.host}) or lab.sluice_options(wants))
    code, found = run(speed.main, "--memory", "all", "--steps", "2", "40:1")
    assert code == 0 and given == [{"near_bytes": 16 << 20, "host_bytes": 16 << 20}]
    assert {each["label"] for each in found} == {"all"}
    for words in (("--own",), ("--near", "1MiB")):
        with pytest.raises(SystemExit):
            run(speed.main, "--memory", "all", *words, "40:1")


def test_prefixes(run: Run, tmp_path: Path) -> None:
    code, found = run(prefixes.main, "--disk", str(tmp_path / "disk"), "--length", "100", "--answer", "4")
    assert code == 0 and [each["step"] for each in found] == ["memory 1", "memory 2", "disk 1", "disk 2", "later 1"]
    assert all(each["ok"] and each["rows"] == [[None, None, each["rows"][at][2]] for at in range(8)] for each in found)
    assert [each["known"] for each in found[:3]] == [[0] * 8, [96] * 8, [0] * 8]
    assert found[3]["disk"]["found"] > 0 and found[4]["disk"]["found"] > 0 and found[4]["disk"]["refused"] == 0
    with pytest.raises(SystemExit):
        run(prefixes.main, "--disk", str(tmp_path / "disk"))


def test_prefixes_that_are_not_found_are_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "sluice_options", lambda wants, **options: lab.sluice_options(
        wants, **{name: value for name, value in options.items() if name == "host_bytes"}))
    code, found = run(prefixes.main, "--disk", str(tmp_path / "disk"), "--length", "100", "--answer", "4")
    assert code == 1 and [each["ok"] for each in found] == [True, True, True, False, False]


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


def test_ranks(run: Run, tmp_path: Path) -> None:
    """A pipeline, whose workers are processes."""
    assert models.main([str(tmp_path / "made"), "--small", "--layers", "3", "--weights"]) == 0
    code, (found,) = run(ranks.main, "--lengths", "5,60,100", "--answer", "20", "--shapes", "1x2",
                         model=tmp_path / "made")
    assert code == 0 and (found["tensor"], found["pipeline"], found["ok"]) == (1, 2, True)
    assert [each[0] for each in found["rows"]] == [None] * 6 and found["blocks"] > 0
    assert ranks.shapes_of("2x1,1x2,2x2") == [(2, 1), (1, 2), (2, 2)]
    with pytest.raises(SystemExit):
        run(ranks.main, "--shapes", "2")


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
    """Both servers, and each is measured in its share of the time."""
    code, found = run(serve.main, "--rates", "2,4", "--seconds", "2", "--limit", "1200", "--input", "24", "--answer",
                      "4", "--log", str(tmp_path / "log"), model=SMOLLM2)
    assert code == 0
    assert [(each["label"], each["step"], each.get("rate"), each.get("completed")) for each in found] == [
        (label, *row) for label in ("own", "sluice")
        for row in (("start", None, None), ("rate", 2.0, 4), ("rate", 4.0, 8))]
    rates = [each for each in found if each["step"] == "rate"]
    assert all(each["failed"] == 0 and each[f"p{share}_{what}_ms"] > 0 for each in rates for share in (50, 99)
               for what in ("ttft", "tpot"))
    assert "Sluice keeps 30 layers" in (tmp_path / "log").read_text()


class Bench:
    """`vllm bench serve`, of which `lasting` seconds are real and `completed` requests are answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, completed: int | None = None, lasting: float = 0.0) -> None:
        self._completed, self._lasting = completed, lasting
        self.asked: list[tuple[float, int]] = []  #: rates and requests
        monkeypatch.setattr(serve, "main_async", self)

    async def __call__(self, words: Any) -> dict[str, Any]:
        self.asked.append((words.request_rate, words.num_prompts))
        print("the server is gone")
        await asyncio.sleep(self._lasting)
        done = words.num_prompts if self._completed is None else self._completed
        return {"completed": done, "failed": words.num_prompts - done, "median_ttft_ms": 0.12345, "std_ttft_ms": 1.0}


def wants(rates: str = "1", seconds: float = 40) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=None, model=Path("none"), input=8, answer=2, rates=rates, seconds=seconds)


@pytest.mark.parametrize("completed", [2, 0])
def test_requests_that_fail_are_not_measured(monkeypatch: pytest.MonkeyPatch, completed: int) -> None:
    Bench(monkeypatch, completed)
    with pytest.raises(RuntimeError, match=f"{completed} of 3 requests were answered.*the server is gone"):
        serve.bench(wants(), "http://localhost", "1", 3, 60)


def test_rates_share_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench, out = Bench(monkeypatch), tmp_path / "out"
    assert serve.rates_of(wants("1,2,4"), "own", "", lab.Limit(60), lab.Results("serve", out))
    # As none of them takes any time, what is left is a third of it, a half, and all, but for --seconds.
    assert bench.asked == [(float("inf"), 2), (1.0, 10), (2.0, 30), (4.0, 120)]
    assert [json.loads(line)["median_ttft_ms"] for line in out.read_text().splitlines()] == [0.123] * 3


def test_a_rate_that_takes_too_long_is_told_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch,
                                                                     tmp_path: Path) -> None:
    out = tmp_path / "out"
    bench = serve.bench
    Bench(monkeypatch, lasting=60)
    monkeypatch.setattr(serve, "bench", lambda wants, url, rate, *others: rate == "inf" or bench(
        wants, url, rate, *others))
    began = time.monotonic()
    assert not serve.rates_of(wants("1,2"), "own", "", lab.Limit(4), lab.Results("serve", out))
    assert time.monotonic() - began < 20
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["rate"] for each in found] == [1.0, 2.0]
    assert all("were not answered in 2 s; give fewer --rates, or a larger --limit" in each["error"] for each in found)


@pytest.mark.usefixtures("plug_in")
def test_a_server_that_does_not_start(run: Run) -> None:
    code, (found,) = run(serve.main, "--servers", "sluice", "--option", "polcy=full", model=SMOLLM2)
    assert code == 1 and found["step"] == "start"
    assert "the server has ended; --log " in found["error"] and "there is no option polcy" in found["error"]


def test_a_server_that_does_not_answer_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and what it has started."""
    told = tmp_path / "processes"
    code = f"echo $$ >{told}; trap '' TERM; sleep 600 & echo $! >>{told}; wait"
    monkeypatch.setattr(serve, "server_words", lambda *_: ["sh", "-c", code])
    monkeypatch.setattr(serve, "_END_S", 1)
    out = tmp_path / "out"
    assert serve.main(["--model", ".", "--servers", "own", "--limit", "4", "--out", str(out)]) == 1
    assert "does not answer in its share of the time; give a" in json.loads(out.read_text())["error"]
    assert not any(running(int(number)) for number in told.read_text().split())


def running(process: int) -> bool:
    """One that has ended and of which nothing has asked is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("servers", ["", "own,theirs"])
def test_servers_that_are_none(servers: str) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--model", ".", "--servers", servers])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM),
                                              (signal.SIGKILL, -signal.SIGKILL)])
def test_a_command_that_is_ended_ends_its_server(tmp_path: Path, number: int, code: int) -> None:
    told = tmp_path / "server"
    server = (f"import os, pathlib, time; file = pathlib.Path({str(told)!r}); part = file.with_suffix('.part'); "
              "part.write_text(str(os.getpid())); part.rename(file); time.sleep(600)")
    command = ("import sys, serve; "
               f"serve.server_words = lambda *_: [sys.executable, '-c', {server!r}]; serve.main(['--model', '.'])")
    with subprocess.Popen([sys.executable, "-c", command], cwd=Path(serve.__file__).parent) as process:
        try:
            ends = time.monotonic() + 600
            while not told.exists() and time.monotonic() < ends:
                assert process.poll() is None
                time.sleep(0.1)
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()
    ends = time.monotonic() + 10
    while running(int(told.read_text())) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not running(int(told.read_text()))


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
