"""Tiny models of random weights, a tokenizer of bytes, and what the library's own generate() says."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import torch
import transformers
from sluice.serving.graphs import Uncaptured
from sluice.serving.loop import Loop
from sluice.serving.requests import Event, Request, Sampling
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# SLUICE_TEST_DEVICE=cuda runs all of this on a GPU, with the heads that its kernels have.
DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
torch.set_default_device(DEVICE)
# The models are of f32. A GPU keeps keys and values of 16 bits, and what they are rounded by shows in logits.
KV = {} if DEVICE == "cpu" else {"kv_dtype": "f16"}
KV_BYTES = 4 if DEVICE == "cpu" else 2
HOST_MIB = 8 if DEVICE == "cpu" else 16  # For as many tokens.
ATOL = 1e-3 if DEVICE == "cpu" else 5e-2

END = "<|end|>"
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16 if DEVICE == "cpu" else 64, "max_position_embeddings": 8192,
         # Weights so large that attention is anything but even; on a GPU, where keys and values are rounded to f16,
         # not so large that this alone changes tokens.
         "initializer_range": 0.3 if DEVICE == "cpu" else 0.1}


@functools.cache
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of all bytes, and a few words."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.train_from_iterator(["the cat sat on the mat and the dog ran"] * 9, trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END, "<|user|>", "<|assistant|>", "<|system|>"]))
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=END)
    made.chat_template = TEMPLATE
    return made


@functools.cache
def bare_model(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed({"llama": 3, "qwen3": 4}[kind])
    name = kind.capitalize()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer()), bos_token_id=None, eos_token_id=0, pad_token_id=0, **SHAPE)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def expected(model: transformers.PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """The library's own greedy answer, which nothing ends."""
    config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt):].tolist()


def same(model: transformers.PreTrainedModel, prompt: Sequence[int], got: Sequence[int], want: Sequence[int]) -> bool:
    """Whether an answer is the library's, up to a token that is as likely: to what float32 rounds off where prompts are
    read in other pieces, or, where keys and values are rounded, to that."""
    at = next((at for at, (one, other) in enumerate(zip(got, want)) if one != other), None)
    if at is None:
        return list(got) == list(want)
    tie = 2 * ATOL if KV else 1e-6
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *want[:at]]]), use_cache=False).logits[0, -1]
    return len(got) == len(want) and bool((logits[want[at]] - logits[got[at]]).abs() <= tie)


def text_of(ids: list[int]) -> str:
    """As the library decodes it."""
    return tokenizer().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def prompt_ids(tokens: int, seed: int = 1) -> list[int]:
    return torch.randint(4, 280, (tokens,), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()


def greedy(number: int, prompt: Sequence[int], tokens: int = 12, **options: object) -> Request:
    after = options.pop("after", None)
    return Request(number, list(prompt), Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
                                                     **options}), after)


class Breaks:
    """A recorder that records two sizes, and then no more."""

    def __init__(self, *_: object) -> None:
        self._recorded = 0

    def record(self, warm_up: Callable[[], None], forward: Callable[[], None]) -> Callable[[], None]:
        self._recorded += 1
        if self._recorded > 2:
            raise RuntimeError("not permitted\nwhen capturing")
        return Uncaptured().record(warm_up, forward)


class Told:
    """What came of requests."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = {}
        self.order: list[int] = []  #: whose events came

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.setdefault(event.number, []).append(event)
            self.order.append(event.number)

    def tokens(self, number: int) -> list[int]:
        return [token.token for event in self.events[number] for token in event.tokens]

    def text(self, number: int) -> str:
        return "".join(event.text for event in self.events[number])

    def last(self, number: int) -> Event:
        return self.events[number][-1]


def run(loop: Loop, requests: Sequence[Request], steps: int = 2000) -> Told:
    """All of them at once, until the last one ends."""
    told = Told()
    for request in requests:
        loop.submit(request)
    while not loop.idle:
        told.take(loop.step())
        steps -= 1
        assert steps, "requests do not end"
    return told
