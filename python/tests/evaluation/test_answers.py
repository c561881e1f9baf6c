"""Greedy answers to tasks, and how they are judged."""

from __future__ import annotations

import functools
import itertools
import json
import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from saved import DEVICE, KV, TESTBED, VOCABULARY, greedy, model_of
from sluice.evaluation.answers import Answer, Rules, answer, answer_beside, answer_tasks, first_other, items, summaries
from sluice.evaluation.decoding import Setup, Subject, dense, under
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import Bytes, Task, read_tasks
from sluice.evaluation.reading import Reading

SINKS = "streaming:sinks=4,recent=8"
RULES = Rules(decode_prompt=24, max_tokens=None, contains=False, vocabulary=lambda: Bytes(None))
OPTIONS = {"threads": 1, "pin_threads": False, "answer_timeout_ms": 30_000, "near_bytes": 0, **KV}


@functools.cache
def setup() -> Setup:
    return Setup(model_of(), 64, 16 << 20, OPTIONS)


def prompt(tokens: int = 150, seed: int = 1) -> list[int]:
    return torch.randint(2, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def task(prompt: list[int], answer: str | list[int], name: str = "a", length: int = 256) -> Task:
    return Task(1, name, length, prompt, answer)


def answered(subject: Subject, each: Task, rules: Rules, policy: str = "dense") -> Answer:
    before = max(len(each.prompt) - rules.decode_prompt, 0)
    with subject.prefix(each.prompt[:before]) as prefix, prefix.under(policy) as session:
        return answer(session, each.prompt[before:], each, rules)


@pytest.mark.parametrize("tokens", [1, 2, 24, 25, 150])
def test_answers_are_the_library_s(tokens: int) -> None:
    """Also where all of a prompt is read under the policy."""
    ids = prompt(tokens)
    want = greedy(setup().model, ids, 8)
    with dense(setup()) as subject:
        assert answered(subject, task(ids, want), RULES).output == want
    with under(setup(), ["full"]) as subject:
        given = answered(subject, task(ids, want), RULES, "full")
        assert (given.output, given.right, given.reading.whole) == (want, True, True)


def test_the_question_is_read_under_the_policy() -> None:
    """Else the first token of an answer would be dense attention's, whatever the policy."""
    wants = task(prompt(), greedy(setup().model, prompt(), 1))
    with under(setup(), [SINKS]) as subject:
        few, many = (answered(subject, wants, Rules(rows, 1, False, RULES.vocabulary), SINKS) for rows in (1, 100))
    assert few.reading.attended != many.reading.attended and few.reading.attended < 0.3
    assert len(few.output) == 1


def test_ends() -> None:
    want = greedy(setup().model, prompt(), 8)
    for end, left in ((want[3], want[: want.index(want[3])]), (want[0], [])):
        rules = Rules(24, 8, False, RULES.vocabulary, frozenset([end]))
        with dense(setup()) as subject:
            given = answered(subject, task(prompt(), want), rules)
        assert given.output == left and not given.right


@pytest.mark.parametrize("policy", ["full", SINKS, "exact | int4 | top_k=8 | near=0"])
def test_answers_beside_dense_attention_s_are_decoded_ones(policy: str) -> None:
    """Whatever that answer was: the same, one that parts sooner or later, one that ended earlier, and none."""
    each = task(prompt(), [1] * 8)
    with under(setup(), [policy]) as subject, subject.prefix(each.prompt[:-24]) as prefix:
        with prefix.under(policy) as session:
            want = answer(session, each.prompt[-24:], each, RULES).output
        others = [[*want[:place], want[place] ^ 1, *want[place + 1 :]] for place in (0, 3, 7)]
        for ends in (frozenset(), frozenset([want[5]]), frozenset([want[0]])):
            rules = Rules(24, None, False, RULES.vocabulary, ends)
            for of_dense in (want, *others, want[:2], []):
                told = list(itertools.takewhile(lambda token: token not in ends, of_dense))
                given = answer_beside(prefix, policy, each.prompt[-24:], each, rules, told)
                assert given.output == list(itertools.takewhile(lambda token: token not in ends, want))


@pytest.mark.parametrize(("wanted", "output", "begins", "contains"), [
    ([5, 6], [5, 6, 7], True, True), ([5, 6], [4, 5, 6], False, True), ([5, 6], [5], False, False),
    ([5, 6], [], False, False),
    (" dog\n", list(b"dog and"), True, True), ("dog", list(b" a dog"), False, True), ("dog", list(b"do"), False, False),
])
def test_what_is_right(wanted: str | list[int], output: list[int], begins: bool, contains: bool) -> None:
    for how, right in ((False, begins), (True, contains)):
        assert Rules(1, None, how, RULES.vocabulary).right(task([1], wanted), output) == right


def test_limits() -> None:
    assert RULES.limit(task([1], [5, 6, 7])) == 3 and RULES.limit(task([1], "dog")) == 3 + 8
    assert Rules(1, 5, False, RULES.vocabulary).limit(task([1], "dog")) == 5


def test_summaries() -> None:
    """Of prompts that a policy loses, wins, and neither; by task and length."""
    def given(*right: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(right=each, output=[index, each], reading=Reading(0.25, 0.25, 0, 0, 0))
                for index, each in enumerate(right)]

    tasks = [task([1], [2])] * 4 + [task([1], [2], "b")]
    dense_, ours = given(True, True, True, False, True), given(False, False, True, True, True)
    cells = summaries(tasks, {"dense": dense_, "p": ours})
    assert [(cell["task"], cell["policy"], cell["prompts"], cell["right"]) for cell in cells] == [
        ("a", "dense", 4, 3), ("a", "p", 4, 2), ("b", "dense", 1, 1), ("b", "p", 1, 1), ("all", "dense", 5, 4),
        ("all", "p", 5, 3)]
    assert [(cell["task"], cell["length"]) for cell in summaries(tasks[:4], {"dense": dense_[:4]})] == [("a", 256)]
    cell = cells[1]
    assert (cell["only_dense"], cell["only_policy"], cell["p_value"], cell["same_answer"]) == (2, 1, 1.0, 0.25)
    assert cell["accuracy"] == 0.5 and cell["accuracy_95"] == pytest.approx((0.15, 0.85), abs=1e-3)
    assert cell["attended"] == 0.25


def test_items() -> None:
    """A policy that sees next to nothing parts from dense attention, and items say where."""
    tasks = [task(prompt(seed=seed), greedy(setup().model, prompt(seed=seed), 8)) for seed in range(4)]
    answers = answer_tasks(setup(), tasks, RULES, [["full", SINKS]], lambda _: None, Failures())
    told = items(tasks, answers, RULES)
    assert all(each["outputs"]["full"]["right"] and each["outputs"]["full"]["first_other"] is None for each in told)
    lost = [each for each in told if not each["outputs"][SINKS]["right"]]
    assert lost
    for each in lost:
        ours, place = each["outputs"][SINKS]["ids"], each["outputs"][SINKS]["first_other"]
        assert ours[:place] == each["answer"][:place] and ours[place] != each["answer"][place]


def test_where_answers_part() -> None:
    assert [first_other([1, 2], other) for other in ([1, 2], [1, 3], [1], [1, 2, 3], [])] == [None, 1, 1, 2, 0]


@pytest.fixture(scope="module")
def testbed() -> Setup:
    if DEVICE != "cpu":
        pytest.skip("its figures are those of f32 keys and values")
    model = transformers.AutoModelForCausalLM.from_pretrained(TESTBED, dtype=torch.float32).eval()
    return Setup(model, 512, 128 << 20, OPTIONS)


def test_a_real_model(testbed: Setup) -> None:
    """Logits and greedy tokens that were written down when it was made."""
    case = json.loads((TESTBED / "golden.json").read_text())["cases"][0]
    for name, attention in (("dense", dense(testbed)), ("full", under(testbed, ["full"]))):
        with attention as subject:
            with subject.prefix(case["prompt_ids"][:-1]) as prefix, prefix.under(name) as session:
                logits = session.read(case["prompt_ids"][-1:])[0]
            torch.testing.assert_close(logits, torch.tensor(case["last_logits"]), atol=2e-3, rtol=0)
            given = answered(subject, task(case["prompt_ids"], case["greedy"]), RULES, name)
        assert given.right and given.output == case["greedy"]


def test_tasks_of_a_real_model(testbed: Setup, tmp_path: Path) -> None:
    """It answers them, and does not where it sees only the newest tokens."""
    make = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "lab" / "benchmarks" / "testbed_tasks.py"))["make"]
    path = tmp_path / "tasks.jsonl"
    lines = [make(kind, 768, 1) for kind in ("niah", "multikey", "kv")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = read_tasks(str(path), lambda: Bytes(256), chat=False)
    narrow = "streaming:sinks=4,recent=60"
    cells = summaries(tasks, answer_tasks(testbed, tasks, RULES, [["full", narrow]], lambda _: None, Failures()))
    told = {(cell["task"], cell["policy"]): cell for cell in cells}
    for kind in ("niah", "multikey", "kv"):
        assert told[kind, "dense"]["right"] == told[kind, "full"]["right"] == 1
        assert told[kind, narrow]["only_dense"] == 1 and told[kind, narrow]["attended"] < 0.15


@pytest.mark.skipif("SLUICE_COMMAND" not in os.environ or DEVICE != "cpu", reason="no command of the CPU")
def test_the_command_sluice_tells_the_same(evaluate: Callable, tmp_path: Path) -> None:
    """Of the tasks beside the model, in the same form."""
    tasks, ours, theirs = (tmp_path / name for name in ("tasks.jsonl", "ours.json", "theirs.json"))
    lines = (TESTBED / "tasks.jsonl").read_text().splitlines()
    tasks.write_text("\n".join(line for line in lines if json.loads(line)["length"] == 512))
    said = ("--tasks", tasks, "--policies", "full;streaming:sinks=4,recent=60")
    assert evaluate(TESTBED, *said, "--json", ours).status == 0
    subprocess.run([os.environ["SLUICE_COMMAND"], "eval", "--model", TESTBED, *said, "--threads", "1", "--audit", "0",
                    "-o", "json", "--output", theirs], check=True)
    found, other = (json.loads(path.read_text())["tasks"] for path in (ours, theirs))
    rows = [row for row in found["results"] if row["policy"] != "dense"]  # Which the command calls full.
    # The command ends with a policy that fails.
    assert found.keys() - {"failed"} == other.keys() and found["failed"] == {} and len(rows) == len(other["results"]) == 8
    for row, like in zip(rows, other["results"]):
        assert row.keys() == like.keys()
        for name in row.keys() - {"near_bytes", "far_bytes"}:  # These by how much there is room for near.
            want = like[name]
            assert row[name] == (want if isinstance(want, str) else pytest.approx(want, rel=1e-6)), name
    for item, like in zip(found["items"], other["items"]):
        assert item.keys() == like.keys() and item["outputs"]["dense"]["ids"] == like["outputs"]["full"]["ids"]
        assert item["outputs"]["full"].keys() == like["outputs"]["full"].keys()
