"""Texts and tasks as tokens, and lists of policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved import TEXT, tokenizer
from sluice.errors import InvalidArgument
from sluice.evaluation.inputs import Bytes, Tokenizer, read_tasks, read_windows
from sluice.evaluation.policies import split_policies


@pytest.mark.parametrize(("text", "want"), [
    ("full,sluice", ["full", "sluice"]), ("full;sluice;", ["full", "sluice"]),
    ("lfps:alpha=0.3,budget=2%,full", ["lfps:alpha=0.3,budget=2%", "full"]),
    ("exact | int4 | top_k=max(64, 1%);full", ["exact | int4 | top_k=max(64, 1%)", "full"]),
    ("pages:quest,budget=8 | top_p=0.9,psa:mass=0.9", ["pages:quest,budget=8 | top_p=0.9", "psa:mass=0.9"]),
    ("full, full;sluice", ["full", "sluice"]),
])
def test_policies(text: str, want: list[str]) -> None:
    assert split_policies(text) == want


def test_no_policies() -> None:
    with pytest.raises(InvalidArgument, match="name at least one"):
        split_policies(" ;,")


def test_windows(text: Path) -> None:
    """They are parts of the text, begin as texts do, and do not overlap."""
    ids = list(TEXT.encode())
    for seed in range(20):
        windows = read_windows(str(text), Bytes(256), 101, 30, seed)
        assert len(windows) == 30
        for window, after in zip(windows, [*windows[1:], None]):
            assert window.ids == [256, *ids[window.first : window.first + 100]] and len(window.ids) == 101
            assert after is None or window.first + 100 <= after.first
    assert read_windows(str(text), Bytes(256), 101, 30, 1) == read_windows(str(text), Bytes(256), 101, 30, 1)
    assert read_windows(str(text), Bytes(256), 101, 30, 1) != read_windows(str(text), Bytes(256), 101, 30, 2)
    size = len(ids)
    assert [window.ids for window in read_windows(str(text), Bytes(None), size, 1, 3)] == [ids]
    with pytest.raises(InvalidArgument, match=rf"has {size} tokens, and 4 windows of 1000 need 4000; .*--windows 3 at"):
        read_windows(str(text), Bytes(None), 1000, 4, 0)
    with pytest.raises(InvalidArgument, match=rf"--tokens {size + 1} --windows 1 at most"):
        read_windows(str(text), Bytes(256), 9000, 4, 0)


def test_tokenizers(folder: Path) -> None:
    made, bare = Tokenizer(str(folder)), tokenizer()
    assert made.begins == [0] and made.encode(TEXT) == bare.encode(TEXT)[1:]
    assert made.decode(made.encode("a dog")) == "a dog"
    assert made.chat("a dog") == bare.encode("<|user|>a dog<|assistant|>")[1:]
    assert Bytes(256).decode([256, *"ö".encode(), 65]) == "öA"


def test_tasks(tmp_path: Path, folder: Path) -> None:
    lines = [{"prompt": "the cat", "answer": " sat"}, {"task": "b", "length": 4000, "prompt": [5, 6, 7], "answer": [8]}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    made = Tokenizer(str(folder))
    one, other = read_tasks(str(path), lambda: made, chat=False)
    assert (one.line, one.name, one.answer, one.prompt) == (1, "task", " sat", [0, *made.encode("the cat")])
    assert one.length >= len(one.prompt) > one.length / 2  # The next power of two.
    assert (other.line, other.name, other.length, other.prompt, other.answer) == (3, "b", 4000, [5, 6, 7], [8])
    path.write_text(json.dumps(lines[0]))
    assert read_tasks(str(path), lambda: made, chat=True)[0].prompt == made.chat("the cat")


@pytest.mark.parametrize(("line", "why"), [
    ("{", "line 2 is no JSON"), ("[1]", "line 2 has no object"), ('{"prompt": "a"}', "line 2: answer must be"),
    ('{"prompt": [], "answer": "a"}', "line 2: prompt must be"),
    ('{"prompt": [1, -1], "answer": "a"}', "prompt must be"), ('{"prompt": [1, true], "answer": "a"}', "prompt must be"),
    ('{"prompt": "a", "answer": " "}', "answer is blank"),
    ('{"prompt": "a", "answer": "b", "outputs": []}', "line 2 has outputs"),
    ('{"prompt": "a", "answer": "b", "length": "2K"}', "length a whole number"),
])
def test_tasks_that_are_wrong(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "b"}}\n{line}\n')
    with pytest.raises(InvalidArgument, match=why):
        read_tasks(str(path), lambda: Bytes(None), chat=False)


def test_no_tasks(tmp_path: Path) -> None:
    (tmp_path / "none").write_text("\n")
    with pytest.raises(InvalidArgument, match="has no tasks; write one on each line"):
        read_tasks(str(tmp_path / "none"), lambda: Bytes(None), chat=False)
