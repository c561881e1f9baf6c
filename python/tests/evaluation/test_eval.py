"""The command python -m sluice eval."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from saved import NOISE, TEXT, greedy, model_of, tokenizer
from sluice.errors import OutOfCapacity
from sluice.evaluation import texts
from sluice.evaluation.decoding import Prefix
from sluice.evaluation.report import Progress, finite, grid

SMALL = ("--tokens", "80", "--windows", "3", "--score", "6")
SINKS = "streaming:sinks=4,recent=8"


def test_a_text(evaluate: Callable, folder: Path, text: Path, tmp_path: Path) -> None:
    policies = ("--policies", f"full;{SINKS}")
    done = evaluate(folder, "--text", text, *SMALL, *policies, "--json", tmp_path / "out.json")
    assert (done.status, done.err) == (0, "")
    lines = [line for line in done.out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines] == ["policy", "-" * 28, "dense", "full", SINKS]
    assert lines[3].split("|")[-3].strip() == "100.0% (attended whole)"
    assert lines[3].split("|")[5].strip() == "1.0"
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["config"]["policies"] == ["full", SINKS] and told["config"]["tokens"] == 80
    dense, full, sinks = told["text"]["results"]
    assert dense["kl_max"] == 0 and full["kl_max"] < NOISE and 1e-3 < sinks["kl_mean"]
    for result in (dense, full, sinks):
        assert len(result["windows"]) == 3 and result["tokens"] == 18
        assert all(len(window[name]) == 6 for window in result["windows"] for name in ("loss", "kl", "same"))
    again = evaluate(folder, "--text", text, *SMALL, *policies, "--json", "-")
    assert json.loads(again.out)["text"] == told["text"] and again.err == ""  # Nothing but JSON, and the same.
    other = evaluate(folder, "--text", text, *SMALL, *policies, "--json", "-", "--seed", "1")
    assert json.loads(other.out)["text"] != told["text"]


def test_tasks(evaluate: Callable, folder: Path, tmp_path: Path) -> None:
    """As texts and as token ids; what is right is what the library's own generate() says."""
    model, made = model_of(), tokenizer()
    ids = made.encode(TEXT)[:150]
    # Another end than these models'. Tokens of random models may be no text.
    lines = [{"task": "ids", "length": 150, "prompt": ids, "answer": greedy(model, ids, 4)},
             {"task": "ids", "length": 150, "prompt": ids[:100], "answer": [299, 298, 297, 296]},
             {"task": "text", "prompt": TEXT[:300], "answer": made.decode(greedy(model, made.encode(TEXT[:300]), 6),
                                                                          skip_special_tokens=True)}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    done = evaluate(folder, "--tasks", path, "--policies", f"full;{SINKS}", "--json", tmp_path / "out.json")
    assert (done.status, done.err) == (0, "")
    told = json.loads((tmp_path / "out.json").read_text())["tasks"]
    right = {(cell["task"], cell["policy"]): (cell["right"], cell["prompts"]) for cell in told["results"]}
    for policy in ("dense", "full"):
        assert right["ids", policy] == (1, 2) and right["text", policy] == (1, 1)
    assert told["items"][0]["outputs"]["dense"]["ids"] == lines[0]["answer"]
    assert told["items"][2]["outputs"]["full"]["text"].strip().startswith(lines[2]["answer"].strip())
    assert "| ids  |    150 | dense " in done.out and "[0.09, 0.91]" in done.out
    chat = evaluate(folder, "--tasks", path, "--chat")
    assert chat.status == 2 and "line 1: --chat is for prompts that are text" in chat.err


def test_chat_and_contains(evaluate: Callable, folder: Path, tmp_path: Path) -> None:
    made = tokenizer()
    said = greedy(model_of(), made.encode("<|user|>the cat<|assistant|>")[1:], 12)
    wanted = made.decode(said[4:10], skip_special_tokens=True).strip()
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "the cat", "answer": wanted}))
    for words, right in (((), 0), (("--match", "contains"), 1)):
        done = evaluate(folder, "--tasks", path, "--chat", "--max-tokens", "12", "--policies", "full", "--json", "-",
                        *words)
        assert [cell["right"] for cell in json.loads(done.out)["tasks"]["results"]] == [right, right]


def test_a_model_with_a_soft_cap(evaluate: Callable, text: Path, tmp_path: Path) -> None:
    """The library's sdpa would leave it out, and dense attention would not be the model's."""
    model_of("Gemma2", sliding_window=32, query_pre_attn_scalar=16).save_pretrained(tmp_path / "capped")
    done = evaluate(tmp_path / "capped", "--tokenizer", "bytes", "--text", text, *SMALL, "--policies", "full",
                    "--json", "-")
    told = json.loads(done.out)
    assert told["text"]["results"][1]["kl_max"] < NOISE and told["config"]["dense"] == "eager"


def test_a_model_without_a_tokenizer(evaluate: Callable, text: Path, tmp_path: Path, folder: Path) -> None:
    """Tasks of token ids need none, and another folder's will do."""
    bare, tasks = tmp_path / "bare", tmp_path / "tasks.jsonl"
    model_of().save_pretrained(bare)
    done = evaluate(bare, "--text", text, *SMALL)
    assert done.status == 2 and not done.out
    assert all(each in done.err for each in ("the tokenizer of", "--tokenizer DIR names another", "--tokenizer bytes"))
    tasks.write_text(json.dumps({"prompt": [5, 6, 7], "answer": [8]}))
    assert evaluate(bare, "--tasks", tasks, "--policies", "full").status == 0
    want = evaluate(folder, "--text", text, *SMALL, "--policies", "full").out
    assert evaluate(bare, "--text", text, *SMALL, "--policies", "full", "--tokenizer", folder).out == want


@pytest.mark.parametrize(("arguments", "status", "why"), [
    ((), 2, "give --text FILE, --tasks FILE or both"),
    (("--text", "{text}", "--tokens", "5000"), 2, "--windows"),
    (("--text", "{text}", "--tokens", "700", "--windows", "1"), 2, "takes 699 tokens of context, and the model has"),
    (("--text", "{text}", "--tokens", "80", "--score", "80"), 2, "a token more than are scored"),
    (("--text", "{text}", *SMALL, "--policies", "full;nonesuch"), 2, "nonesuch"),
    (("--text", "{text}", *SMALL, "--policies", ";"), 2, "--policies: the list is empty"),
    (("--text", "{text}", *SMALL, "--host-bytes", "8K"), 2, "--host-bytes is 8192"),
    (("--text", "{text}", *SMALL, "--option", "nonesuch=1"), 2, "there is no option nonesuch"),
    (("--text", "{missing}"), 2, "No such file"),
    (("--text", "{latin}", *SMALL), 2, "is no text of UTF-8"),
    (("--text", "{text}", *SMALL, "--json", "{missing}/out.json"), 2, "out.json cannot be written: No such file"),
    (("--text", "{text}", *SMALL, "--json", "{folder}"), 2, "is a folder; name a file"),
    (("--text", "{text}", *SMALL, "--model", "{missing}"), 2, "there is no folder"),
    (("--text", "{text}", "--windows", "0"), 2, "must be a whole number at least 1"),
    (("--tasks", "{strange}"), 2, "line 1: prompt and answer has token 5000, and those of the model are below 300"),
    (("--tasks", "{long}"), 2, "line 1: prompt and answer takes 600 tokens of context"),
])
def test_errors(evaluate: Callable, folder: Path, text: Path, tmp_path: Path, arguments: tuple[str, ...], status: int,
                why: str) -> None:
    """Before anything runs, with the remedy."""
    files = {"text": text, "folder": tmp_path,
             **{name: tmp_path / name for name in ("latin", "strange", "long", "missing")}}
    files["latin"].write_bytes("é".encode("latin-1") * 900)
    files["strange"].write_text('{"prompt": [5000], "answer": [1]}')
    files["long"].write_text(json.dumps({"prompt": [5] * 600, "answer": [1]}))
    done = evaluate(folder, *(word.format(**files) for word in arguments))
    assert (done.status, done.out) == (status, "") and why in done.err and len(done.err) > 20
    assert "Traceback" not in done.err


def test_results_are_whole_or_not_there(evaluate: Callable, folder: Path, text: Path, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "results" / "out.json"
    path.parent.mkdir()
    path.write_text("those of yesterday")
    with monkeypatch.context() as patch:
        patch.setattr(texts, "compare", fails)
        assert evaluate(folder, "--text", text, *SMALL, "--json", path).status == 130
    assert path.read_text() == "those of yesterday" and list(path.parent.iterdir()) == [path]
    assert evaluate(folder, "--text", text, *SMALL, "--json", path).status == 0
    assert json.loads(path.read_text())["command"] == "eval" and list(path.parent.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode  # Who may read it is as for any other file.


def test_a_result_that_its_file_does_not_take(evaluate: Callable, folder: Path, text: Path, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to standard output."""
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    done = evaluate(folder, "--text", text, *SMALL, "--json", tmp_path / "out.json")
    assert done.status == 1 and "out.json was not written: [Errno 28] No space left on device" in done.err
    assert json.loads(done.out)["command"] == "eval" and list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize("error", [OutOfCapacity("no room"), RuntimeError("out of memory")])
def test_a_policy_that_fails(evaluate: Callable, folder: Path, text: Path, tmp_path: Path, error: Exception,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    """In its second window and in its second task: the others' results are there, and the exit code tells."""
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": [5, 6, 7], "answer": [8]}\n' * 2)
    arguments = ("--text", text, *SMALL, "--tasks", path, "--json", tmp_path / "out.json", "--policies")
    assert evaluate(folder, *arguments, f"full;{SINKS}").status == 0
    want = json.loads((tmp_path / "out.json").read_text())
    session, count = Prefix.under, itertools.count(1)

    def fails(prefix: Prefix, policy: str) -> object:
        """Every second sequence of `topk`."""
        if policy == "topk" and next(count) % 2 == 0:
            raise error
        return session(prefix, policy)

    monkeypatch.setattr(Prefix, "under", fails)
    monkeypatch.setattr(texts, "_KEPT_BYTES", 1)  # Windows one by one: what has failed is not tried again.
    done = evaluate(folder, *arguments, f"full;topk;{SINKS}")
    got = json.loads((tmp_path / "out.json").read_text())
    assert done.status == 1
    assert done.err.count(f"sluice: the policy topk has failed and is not among the results: {error}\n") == 2
    for part in ("text", "tasks"):
        assert got[part]["results"] == want[part]["results"] and want[part]["failed"] == {}
        assert got[part]["failed"] == {"topk": f"{type(error).__name__}: {error}"}


def test_under_torchrun(evaluate: Callable, folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    done = evaluate(folder, "--text", text, *SMALL)
    assert done.status == 3 and "start it without torchrun" in done.err


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On terminals alone."""
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for screen, want in ((Terminal(), "\reval: 1 of 3, full, 1:10 left\033[K\r\033[K"), (io.StringIO(), "")):
        monkeypatch.setattr("sys.stderr", screen)
        progress = Progress(3)
        clock[0] += 35
        progress.told("full")
        progress.clear()
        assert screen.getvalue() == want


def test_forms() -> None:
    assert grid([["a", "b"], ["x | y", "12"]], words=1) == "| a      |   b |\n|--------|----:|\n| x \\| y |  12 |\n"
    assert finite({"a": [1.0, float("nan")], "b": (float("inf"),)}) == {"a": [1.0, None], "b": [None]}


def test_help_names_it(evaluate: Callable) -> None:
    done = evaluate("x", "--help")
    assert done.status == 0 and "--decode-prompt" in done.out
