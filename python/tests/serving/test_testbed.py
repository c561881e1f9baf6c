"""A needle in the context of the testbed's model is found: by `generate`, and over HTTP in text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from server import Server
from sluice.transformers import enable
from small import DEVICE

TESTBED = Path(__file__).parents[3] / "tests/data/testbed"
SENTENCES = ("The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ",
             "There and back again. ")
BEGIN, END, TOKENS = 256, 257, 4000
POLICIES = ("full", "sluice")


def needle(seed: int) -> tuple[str, str]:
    """A context with a needle every 600 bytes and a question about one of them, and the answer."""
    dice = random.Random(seed)
    values: dict[str, str] = {}
    while len(values) < TOKENS // 600:
        values[f"{dice.choice(('amber', 'noble', 'quiet'))}-{dice.choice(('otter', 'engine'))}-{len(values):02}"] = \
            f"{dice.randrange(10**6, 10**7)}"
    asked, text = dice.choice(list(values)), ""
    for key, value in values.items():
        begins = len(text)
        while len(text) < begins + 500:
            text += dice.choice(SENTENCES)
        text += f"\nOne of the special magic values for {key} is: {value}.\n"
    return f"{text}\nQ: What is the special magic value for {asked}?\nA:", f" {values[asked]}\n"


@pytest.fixture(scope="module")
def folder() -> Path:
    return TESTBED


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    made = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("é\n", "", "  日本\x00\t", bytes(range(128)).decode()):
        assert made.encode(text) == [BEGIN, *text.encode()] and made.decode(list(text.encode())) == text
    assert (made.bos_token_id, made.eos_token_id) == (BEGIN, END)
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_generate(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, policy: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
    with enable(model, policy, host_bytes=64 << 20, prefill_rows=1024):
        for seed in range(2 if policy == "sluice" else 1):
            text, answer = needle(seed)
            ids = torch.tensor([tokenizer.encode(text)], device=DEVICE)
            assert ids.shape[1] > 0.8 * TOKENS
            told = model.generate(ids, max_new_tokens=len(answer), do_sample=False, prefill_chunk_size=1024)
            assert tokenizer.decode(told[0, ids.shape[1]:]) == answer


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    """Of the policy that chooses; that of `full` gives the library's tokens over HTTP, test_server.py has."""
    with Server(folder, "--policy", "sluice", "--host-bytes", "64MiB", "--dtype", "bfloat16", "--option",
                "kv_dtype=bf16", "--prefill-rows", "1024") as made:
        yield made


def test_over_http(server: Server) -> None:
    text, answer = needle(0)
    told = server.client().completions.create(model="testbed", prompt=text, max_tokens=20, temperature=0, stop="\n")
    assert told.choices[0].text + "\n" == answer and told.choices[0].finish_reason == "stop"
    assert told.usage.prompt_tokens == len(text.encode()) + 1


def test_the_program_of_the_readme() -> None:
    """As it stands there, with less host memory, finds a needle."""
    (program,) = re.findall(r"```python\n(.*?)```", (TESTBED.parents[2] / "README.md").read_text(), re.DOTALL)
    assert program.count("8 << 30") == 1 and program.count("model.generate(**inputs)") == 1
    text, answer = needle(1)
    inputs = {"input_ids": torch.tensor([[BEGIN, *text.encode()]], device="cpu"), "max_new_tokens": len(answer)}
    names = {"DIR": TESTBED, "inputs": inputs}
    exec(program.replace("8 << 30", "128 << 20").replace("model.generate", "told = model.generate"), names)
    assert bytes(names["told"][0, inputs["input_ids"].shape[1] :].tolist()) == answer.encode()
