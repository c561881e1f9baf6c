"""tools/lab/benchmarks/search.py measures what eval does, and nothing twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from saved import DEVICE, KV

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "lab" / "benchmarks"))

import search  # noqa: E402

SINKS = "streaming:sinks=4,recent=8"
SMALL = ("--tokens", "80", "--windows", "2", "--score", "6")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, text: Path,
        tmp_path: Path) -> Callable[..., str]:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"task": name, "length": 64, "prompt": [5, 6, 7] * 20, "answer": [8, 9]}) + "\n"
                             for name in "ab"))

    def call(*arguments: str) -> str:
        options = {**KV, "threads": 1, "pin_threads": "false", "answer_timeout_ms": 30_000}
        monkeypatch.setattr(sys, "argv", [
            "search.py", "--model", f"tiny={folder}", "--text", str(text), *SMALL, "--tasks", f"tiny={tasks}",
            "--device", DEVICE, "--host-bytes", "16MiB", "--near-bytes", "0", "--out", str(tmp_path / "found.jsonl"), *arguments,
            *(word for name, value in options.items() for word in ("--option", f"{name}={value}"))])
        search.main()
        return capsys.readouterr().out

    return call


def test_a_search(run: Callable[..., str], evaluate: Callable, folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    first = run("--policies", f"{SINKS};nonesuch")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["of"], row["policy"]) for row in rows] == [
        ("text", "full"), ("text", SINKS), ("answers", "dense"), ("answers", "full"), ("answers", SINKS)]
    want = json.loads(evaluate(folder, "--text", text, *SMALL, "--policies", SINKS, "--json", "-").out)
    for row, result in zip(rows, want["text"]["results"][1:]):
        assert row["kl_mean"] == pytest.approx(result["kl_mean"], abs=1e-12) and row["attended"] == result["attended"]
    assert rows[-1]["prompts"] == 2 and rows[-1]["floor_same_answer"] == 1
    shown = [line.split(" | ") for line in first.splitlines()[2:]]
    assert [line[4].strip() for line in shown] == ["full", SINKS, "dense", "full", SINKS]
    assert "(whole)" in shown[0][-2] and "(whole)" not in shown[1][-2]
    run("--policies", f"{SINKS};streaming:sinks=4,recent=64")
    more = [json.loads(line)["policy"] for line in out.read_text().splitlines()[len(rows):]]
    assert more == ["streaming:sinks=4,recent=64"] * 2
    before = out.read_text()
    lines = run("--by-policy").splitlines()
    assert len(lines) == 2 + 4 and "KL x floor: text 80" in lines[0] and "same answers 64" in lines[0]
    assert run("--table") and run("--policies", SINKS) and run("--policies", "topk", "--seconds", "0")
    assert out.read_text() == before


def test_prompts_that_are_read_sparsely_are_held_against_those_that_are_not(run: Callable[..., str],
                                                                            tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    # So little of a prompt that what follows must differ, where the prompt is longer than what is read densely.
    few = ("--tokens", "470", "--option", "prefill_min_budget=128", "--policies", "full")
    # What all are held against is measured first, wherever it stands.
    shown = run(*few, "--prefill", "flexprefill@0.01;full;flexprefill@1+lines")
    rows = {(row["of"], row["prefill"]): row for row in map(json.loads, out.read_text().splitlines())
            if row["policy"] == "full"}
    dense, sparse, whole = (rows["text", name] for name in ("full", "flexprefill@0.01", "flexprefill@1+lines"))
    assert dense["kl_over_floor"] == 1
    assert [row["prompt_blocks"] for row in (dense, whole)] == [1, 1] and sparse["prompt_blocks"] < 1
    assert sparse["kl_mean"] > 10 * dense["kl_mean"]
    assert sparse["kl_over_floor"] == pytest.approx(sparse["kl_mean"] / dense["kl_mean"])
    assert whole["kl_mean"] < sparse["kl_mean"] / 10
    assert "flexprefill@0.01" in shown and "flexprefill" not in run("--by-policy")
    before = out.read_text()
    run(*few, "--prefill", "full;flexprefill@0.01")
    assert out.read_text() == before


def test_audits_tell_coverage_and_bypassed_heads(run: Callable[..., str], tmp_path: Path) -> None:
    sparse = "exact | top_k=8 | near=0%,sinks=4,recent=0"
    bypass = sparse + " | bypass=0.0001,variance=off,growth=off"
    run("--audit", "--policies", f"{sparse};{bypass}")
    rows = {row["policy"]: row for row in map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
            if row["of"] == "text"}
    assert [rows[policy]["bypassed"] for policy in ("full", sparse)] == [0, 0]
    assert rows["full"]["coverage"] == pytest.approx(1) and 0 < rows[sparse]["coverage"] < 1
    assert 0 < rows[bypass]["bypassed"] < 1


@pytest.mark.parametrize("name", ["flex@0.9", "flexprefill", "full@1", "flexprefill@much", "flexprefill@0.9+rows"])
def test_a_way_to_read_prompts_that_there_is_not(name: str) -> None:
    with pytest.raises(search.InvalidArgument, match="write full, flexprefill@GAMMA"):
        search.prefill_options(name)
