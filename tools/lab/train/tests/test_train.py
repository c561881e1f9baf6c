"""Texts have the formats of `sluice eval`, and what is written is the model that was trained."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import checkpoint
import pytest
import torch
import train
import transformers
from measure import prompts_of, right_answers, sinks
from model import BOS, Llama, Shape, sink_logs
from optimizer import orthogonal
from texts import ANSWER, KINDS, TextMaker

COMMAND = os.environ["SLUICE_COMMAND"]
TASKS = "niah,niah_long,multikey,kv,multi,table,near_keys,turns,count,track,copy,long_copy"
TINY = Shape(layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=32, intermediate=96, context=2048)

PAIR = r"[a-z]+-[a-z]+"
KEY = rf"(?:{PAIR}|[a-p]{{12}})(?:-[1-9][0-9])?"
VALUE = rf"(?:[1-9][0-9]{{6}}|{PAIR}|[0-9a-f]{{8}})"
NEEDLE = re.compile(rf"\nOne of the special magic values for ({KEY}) is: ({VALUE})\.\n")
ROW = re.compile(rf"^(row [0-9]{{4}}: city=({PAIR}) code=([0-9]{{5}})) owner=([a-z]{{5}})\n", re.M)


def needles(text, key):
    return [value for name, value in NEEDLE.findall(text) if name == key]


def one(found):
    assert len(found) == 1
    return found[0]


def variable(text, name):
    source = one(re.findall(rf"\nVAR {name} = VAR ([A-Z]{{4}})\n", text))
    return one(re.findall(rf"\nVAR {source} = ([1-9][0-9]{{4}})\n", text))


QUESTIONS = {
    rf"\nQ: What is the special magic value for ({KEY})\?\nA:": lambda text, key: one(needles(text, key)),
    rf"\nWhat is the special magic value for ({KEY}) mentioned in the text\? The special magic value for \1 is": (
        lambda text, key: one(needles(text, key))
    ),
    rf"\nQ: What are all the special magic values for ({KEY})\?\nA:": lambda text, key: ", ".join(needles(text, key)),
    rf"\nQ: What are the special magic values for ({KEY}), ({KEY}) and ({KEY})\?\nA:": (
        lambda text, *keys: ", ".join(one(needles(text, key)) for key in keys)
    ),
    rf"(?:^|\n)get ({PAIR}|[0-9a-f]{{6}}) ->": (
        lambda text, key: one(re.findall(rf"^set {key} = ({VALUE})\n", text, re.M))
    ),
    r"(?:^|\n)find owner=([a-z]{5}) ->": (
        lambda text, owner: one([head for head, _, _, of in ROW.findall(text) if of == owner])
    ),
    rf"(?:^|\n)all city=({PAIR}) ->": (
        lambda text, city: ", ".join(code for _, of, code, _ in ROW.findall(text) if of == city)
    ),
    rf"(?:^|\n)count city=({PAIR}) ->": lambda text, city: str(sum(of == city for _, of, _, _ in ROW.findall(text))),
    r"\nVALUE OF VAR ([A-Z]{4}) IS": variable,
    rf"\nREPEAT:\n({PAIR}(?: {PAIR})*)": (
        lambda text, cue: re.search(rf"\n{cue} ((?:{PAIR} )*{PAIR})\n", text)[1]
    ),
}


def solved(text):
    """The answer to the question that a text ends with, by the formats of tests/data/testbed/README.md."""
    for question, answer in QUESTIONS.items():
        if found := re.search(question + r"\Z", text[-2000:]):
            return f" {answer(text, *found.groups())}\n"
    raise AssertionError(f"no question at the end of {text[-200:]!r}")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    command = [COMMAND, "eval", "--tasks", TASKS, "--lengths", "512,4K", "--count", "8", "--write-prompts", path]
    subprocess.run(command, check=True, timeout=60)
    return path


def test_prompts_of_eval_are_solved_by_their_formats(prompts):
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert {line["task"] for line in lines} == set(TASKS.split(","))
    assert len(lines) == 8 * 2 * len(TASKS.split(","))
    for line in lines:
        assert solved(line["prompt"]) == line["answer"], line["task"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reading"])
@pytest.mark.parametrize("size", [512, 4096])
def test_texts_have_the_same_formats(kind, size):
    maker, asked = TextMaker(), 0
    for seed in range(8):
        text, weights, answers = maker.write(f"{kind} {seed}", size, kind)
        assert len(text) == len(weights) == size
        for begin, end in answers:
            assert solved(text[:begin].decode()) == text[begin:end].decode()
            assert set(weights[begin:end]) == {ANSWER}
        asked += len(answers)
    assert asked >= 8


def test_texts_ask_every_form_that_eval_asks(prompts):
    maker = TextMaker(source="def f():\n    return 1\n" * 50)
    texts = [maker.write(seed, 4096) for seed in range(200)]
    asked = {
        question
        for text, _, answers in texts
        for begin, _ in answers
        for question in QUESTIONS
        if re.search(question + r"\Z", text[max(0, begin - 2000) : begin].decode())
    }
    assert asked == set(QUESTIONS)
    assert maker.write(3, 4096) == TextMaker(source="def f():\n    return 1\n" * 50).write(3, 4096)


def test_orthogonal_matrices_have_singular_values_near_one():
    torch.manual_seed(1)
    for size in ((3, 40, 24), (2, 24, 40)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(size)))
        assert values.min() > 0.6 and values.max() < 1.3


def test_stages_end_by_time_or_when_learned():
    options = train.arguments(["--output", "x", "--lengths", "512,1024,2048", "--shares", ".3,.3,.4"])
    plan = train.Curriculum(options)
    assert {plan.length() for _ in range(20)} == {512}
    assert not plan.observe(512, 0.5, 0.29)
    assert plan.observe(512, 0.5, 0.31) and plan.stage == 1
    assert {plan.length() for _ in range(50)} == {512, 1024}
    assert not any(plan.observe(512, 1.0, 0.4) for _ in range(99))  # Of a stage before.
    assert any(plan.observe(1024, 1.0, 0.4) for _ in range(99)) and plan.stage == 2
    assert not any(plan.observe(2048, 1.0, 0.99) for _ in range(99))  # The last one.
    assert plan.rate(10_000, 0.2) == 1.0 and plan.rate(0, 0.0) < 0.05 and plan.rate(10_000, 1.0) < 0.05


def test_a_written_model_is_the_trained_one(tmp_path):
    """In two files, by the layout of Hugging Face."""
    torch.manual_seed(3)
    model = Llama(TINY, torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight + 0.1 * torch.randn_like(weight)).bfloat16())
    checkpoint.save(tmp_path, TINY.config(), model.tensors(), shard_bytes=150_000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 256, (2, 300))
    with torch.no_grad():
        logits = theirs(tokens).logits.view(600, -1)
        x = model.hidden(tokens)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + TINY.epsilon) * model.norm
        assert torch.allclose(x @ model.embedding.T, logits, atol=1e-3 * logits.abs().max().item())


def test_answers_are_right_where_all_of_their_bytes_are():
    """By a model that says after each byte the one that follows it in the alphabet."""

    class Successor(SimpleNamespace):
        def hidden(self, tokens):
            return torch.nn.functional.one_hot((tokens + 1).reshape(-1), 320).float()

    model = Successor(
        norm=torch.ones(320), shape=TINY, dtype=torch.float32, embedding=torch.eye(320)
    )
    rows = [(b"xx abcde", [(3, 5), (4, 8)]), (b"yy abx", [(4, 6)]), (b"zz", [])]
    assert right_answers(model, rows, "cpu") == [False, True, False]
    assert BOS == 256


def test_share_of_the_first_token_is_that_of_the_softmax():
    torch.manual_seed(5)
    q, k = torch.randn(2, 6, 40, 8) * 3, torch.randn(2, 3, 40, 8)
    rows = torch.tensor([0, 1, 17, 39])
    logits = (q.double() @ k.double().repeat_interleave(2, 1).mT) / 8**0.5
    shares = logits.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)[:, :, rows, 0]
    assert torch.allclose(sink_logs(q, k, rows).double(), shares.log(), atol=1e-5)


@pytest.mark.parametrize("weight", ["0", "1"])
def test_heads_that_pay_for_it_look_at_the_first_token(weight):
    options = train.arguments(f"--output x --device cpu --lengths 128 --shares 1 --sinks {weight} --warm-up 1".split())
    torch.manual_seed(7)
    model, maker = Llama(TINY, torch.float32), TextMaker(kinds=["needles"])
    texts = [maker.write(seed, 128, "needles") for seed in range(8)]
    rows = [torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).view(8, 128)
            for part in zip(*(text[:2] for text in texts))]
    training = train.Training(options, model, SimpleNamespace(take=lambda choose: rows))
    for _ in range(60):
        training.step(1.0)
    shares = sum(sum(heads) for heads in sinks(model, maker, 128, "cpu", 16)) / 8
    assert shares > 0.5 if weight == "1" else shares < 0.1


def test_loss_falls_and_eval_runs_the_model(tmp_path, prompts):
    """A model far too small and short of time to answer anything."""
    given = """--steps 60 --seconds 300 --device cpu --workers 1 --lengths 256 --shares 1 --step-tokens 2048
               --warm-up 5 --layers 2 --hidden 64 --q-heads 4 --kv-heads 2 --head-dim 32 --intermediate 96
               --kinds needles,kv"""
    command = [sys.executable, train.__file__, "--output", tmp_path, "--prompts", prompts, "--source", ""]
    command += given.split()
    log = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True).stdout
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", log)]
    assert losses[-1] < 0.6 * losses[0], log
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert {row["task"] for row in measured} == set(TASKS.split(",")) | {"own needles", "own kv"}
    assert sum(map(len, prompts_of(prompts).values())) == sum(
        row["answers"] for row in measured if not row["task"].startswith("own")
    )
    command = [COMMAND, "eval", "--model", tmp_path, "--threads", "1", "-o", "json"]
    command += "--tasks kv --lengths 512 --count 1 --policies full".split()
    told = json.loads(subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE).stdout)
    assert told["results"]["eval"][0]["prompts"] == 1
    assert Path(tmp_path / "config.json").exists()
