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
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with the tokenizer that its README describes: a token is a byte."""
    path = tmp_path_factory.mktemp("testbed") / "testbed"
    path.mkdir()
    for file in TESTBED.iterdir():
        (path / file.name).symlink_to(file)
    # A byte's character as pre_tokenizers.ByteLevel has it: itself where it is printed, else one behind 255.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printed else next(others)) for byte in range(256)]
    bare = Tokenizer(models.BPE({character: byte for byte, character in enumerate(characters)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken("<begin>"), AddedToken("<end>")])
    bare.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<begin>", eos_token="<end>",
                                         ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> transformers.PreTrainedTokenizerFast:
    made = transformers.AutoTokenizer.from_pretrained(folder)
    assert made.encode("é\n") == [BEGIN, *"é\n".encode()] and made.decode(list("é\n".encode())) == "é\n"
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_generate(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, policy: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE).eval()
    with enable(model, policy, host_bytes=64 << 20, prefill_rows=1024):
        for seed in range(2):
            text, answer = needle(seed)
            ids = torch.tensor([tokenizer.encode(text)], device=DEVICE)
            assert ids.shape[1] > 0.8 * TOKENS
            told = model.generate(ids, max_new_tokens=len(answer), do_sample=False, prefill_chunk_size=1024)
            assert tokenizer.decode(told[0, ids.shape[1]:]) == answer


@pytest.fixture(params=POLICIES)
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Server]:
    with Server(folder, "--policy", request.param, "--host-bytes", "64MiB", "--dtype", "bfloat16", "--option",
                "kv_dtype=bf16", "--prefill-rows", "1024") as made:
        yield made


def test_over_http(server: Server) -> None:
    client = server.client()
    for seed in range(2):
        text, answer = needle(seed)
        told = client.completions.create(model="testbed", prompt=text, max_tokens=20, temperature=0, stop="\n")
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
