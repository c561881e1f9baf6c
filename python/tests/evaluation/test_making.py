"""Tasks that are made in texts: what they ask for is there, once, and the same arguments make the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from saved import TESTBED, model_of, tokenizer
from sluice.errors import InvalidArgument
from sluice.evaluation.inputs import Bytes, Tokenizer
from sluice.evaluation.making import TASKS, Texts, as_ids, made_tasks
from sluice.evaluation.sources import text_of

BYTES = Bytes(None)
WORDS = " ".join(a + b + c for a in "bdfgk" for b in ("ana", "elo", "iru", "omi", "une")
                 for c in ("la", "ri", "to", "ve", "su", "ni", "ka", "go", "pe"))
TEXTS = Texts("\n".join([WORDS[at : at + 60] for at in range(0, len(WORDS), 60)] * 20),
              "\n".join(f"def f{line}(): return {line % 7}" for line in range(2000)))


def lines_of(*, length: int = 1500, count: int = 2, seed: int = 3, texts: Texts = TEXTS) -> list[dict]:
    return list(made_tasks(BYTES, texts, [length], count, seed))


def test_answers_are_in_the_prompts() -> None:
    for line in lines_of(count=4):
        prompt, answer = line["prompt"], line["answer"].strip()
        assert 1300 < len(prompt.encode()) <= 1500 == line["length"], line["task"]
        key = re.findall(r"[\w-]+", prompt.rsplit("magic number", 1)[-1])[-2 if line["task"] != "uuid" else -1]
        if line["task"] == "multivalue":
            found = re.findall(rf"numbers for {key} is: (\d+)\.", prompt)
            assert ", ".join(found) == answer and len(found) == 4
        elif line["task"] in ("niah", "multikey"):
            assert re.findall(rf"numbers for {key} is: (\d+)\.", prompt) == [answer]
            assert len(re.findall("magic numbers for", prompt)) == 1 or line["task"] == "multikey"
        elif line["task"] == "uuid":
            asked = re.search(r'RECORDS\["([^"]+)"\] == "$', prompt)[1]
            assert re.findall(rf'"{asked}": "([^"]+)"', prompt)[0].startswith(answer) and len(answer) == 13
            compile(prompt + '"', "prompt", "exec")
        else:
            namespace: dict[str, int] = {}
            found = [part for part in prompt.split("\n") if re.fullmatch(r"\w+ = \w+", part)]
            exec("\n".join(found), namespace)  # Each name is there before it is used.
            assert str(namespace[prompt.split()[-2]]) == answer
            assert len(found) == (5 if line["task"] == "trace" else 1)


def test_they_are_drawn_one_by_one() -> None:
    """More prompts, other lengths: those that were there before are the same."""
    few, many = lines_of(count=1), lines_of(count=3)
    assert [line["task"] for line in few] == list(TASKS) and many[: len(few)] == few
    assert list(made_tasks(BYTES, TEXTS, [900, 1500], 1, 3))[len(TASKS) :] == few
    assert all(other != line for other, line in zip(lines_of(count=1, seed=4), few))
    assert len({line["prompt"] for line in many}) == len(many)


@pytest.mark.parametrize(("changes", "why"), [
    ({"texts": Texts("few words", TEXTS.code)}, "has 1 words of 4 to 9 letters"),
    ({"texts": Texts(TEXTS.prose, "x = 1\n")}, "has 6 tokens"),
    ({"texts": Texts(TEXTS.prose.replace("\n", " "), TEXTS.code)}, "too few lines"),
    ({"length": 256}, "has no room for anything but its question"),
])
def test_texts_that_will_not_do(changes: dict, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        lines_of(**changes)


def test_texts_that_are_there() -> None:
    prose, code = text_of("prose"), text_of("code")
    assert "The Python" in prose and len(prose) > 300_000
    assert "import" in code and len(code) > 300_000
    assert Texts(prose, code).words()


def test_token_ids(folder: Path) -> None:
    """Prompt and answer in a row are the tokens of both texts in a row, also where the answer's first ones depend on
    what is before them; where a token reaches over both, each is its own."""
    words, line = Tokenizer(str(folder)), {"task": "a", "length": 9, "prompt": "a cat sat", "answer": " on 17 mats"}
    made = as_ids(line, words)
    assert made == {**line, "prompt": [0, *words.encode("a cat sat")], "answer": words.encode(" on 17 mats")}
    assert made["prompt"] + made["answer"] == words.tokenizer("a cat sat on 17 mats")["input_ids"]
    over = as_ids({"prompt": "a ca", "answer": "t"}, words)
    assert (over["prompt"], over["answer"]) == ([0, *words.encode("a ca")], words.encode("t"))
    assert as_ids(line, Bytes(256))["prompt"] == [256, *b"a cat sat"]


class Marked:
    """A vocabulary that writes a 9 before the first byte of every text, as SentencePiece does a blank."""

    begins = [8]

    def encode(self, text: str) -> list[int]:
        return [9, *text.encode()]


def test_token_ids_behind_the_prompt_s() -> None:
    made = as_ids({"prompt": "a", "answer": "b"}, Marked())
    assert (made["prompt"], made["answer"]) == ([8, 9, *b"a"], list(b"b"))


def test_the_command(evaluate: Callable, folder: Path, tmp_path: Path) -> None:
    """Of a folder with a tokenizer and nothing else; what it makes is what --tasks takes."""
    tokenizer().save_pretrained(tmp_path / "words")
    (tmp_path / "words" / "config.json").write_text(model_of().config.to_json_string())
    (tmp_path / "prose.txt").write_text(TEXTS.prose)
    (tmp_path / "code.txt").write_text(TEXTS.code)
    make = ("--make-tasks", tmp_path / "tasks.jsonl", "--text", tmp_path / "prose.txt", "--code", tmp_path / "code.txt",
            "--count", "1", "--lengths")
    done = evaluate(tmp_path / "words", *make, "1400")
    assert (done.status, done.out, done.err) == (0, f"6 tasks in {tmp_path / 'tasks.jsonl'}\n", "")
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [line["task"] for line in lines] == list(TASKS)
    assert all(1000 < len(tokenizer().encode(line["prompt"])) <= 1401 for line in lines)
    assert evaluate(folder, "--tasks", tmp_path / "tasks.jsonl").err.count("tokens of context, and the model has") == 1
    ids = evaluate(tmp_path / "words", *make, "1400", "--token-ids")
    assert (ids.status, ids.err) == (0, "")
    words = Tokenizer(str(tmp_path / "words"))
    assert [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()] == [
        as_ids(line, words) for line in lines]
    assert evaluate(folder, "--tasks", tmp_path / "tasks.jsonl").err.count("tokens of context, and the model has") == 1
    assert evaluate(TESTBED, *make, "1400", "--token-ids", "--tokenizer", "bytes").status == 0
    first = json.loads((tmp_path / "tasks.jsonl").read_text().splitlines()[0])
    assert first["prompt"][0] == 256 and bytes(first["prompt"][1:]).endswith(b" is") and first["answer"][0] == ord(" ")
    assert "give --make-tasks FILE, too" in evaluate(folder, "--tasks", tmp_path / "tasks.jsonl", "--token-ids").err
    (tmp_path / "tasks.jsonl").write_text("as it was")
    refused = evaluate(tmp_path / "words", *make, "1400", "--token-ids", "--chat")
    assert refused.status == 2 and "a chat may begin in several ways; leave out --token-ids" in refused.err
    assert (tmp_path / "tasks.jsonl").read_text() == "as it was"
    assert "must be a whole number at least 256" in evaluate(folder, *make, "12").err
    (tmp_path / "tasks.jsonl").unlink()
    assert "is a folder" in evaluate(folder, *make[:1], tmp_path, *make[2:], "1400").err
