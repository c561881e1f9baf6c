"""What is claimed of accuracy, on a model that others have trained: SmolLM2-135M-Instruct, which tools/python_env.sh
fetches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from sluice.evaluation.answers import Rules, answer
from sluice.evaluation.decoding import Setup, under
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import Task, Tokenizer, read_windows
from sluice.evaluation.making import Texts, made_tasks
from sluice.evaluation.policies import FLOOR
from sluice.evaluation.sources import text_of
from sluice.evaluation.texts import score_windows, summaries
from sluice.transformers import enable

POLICY = "sluice"
MODEL = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sluice" / "models" / "smollm2"
OPTIONS = {"threads": 1, "pin_threads": False, "answer_timeout_ms": 60_000, "near_bytes": 0}
HOST_BYTES = 512 << 20

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason=f"there is no {MODEL}; tools/python_env.sh makes it")


def model_of(dtype: torch.dtype) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return model_of(torch.float32)


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return Tokenizer(str(MODEL))


def test_greedy_tokens_of_full_are_the_model_s_own(model: transformers.PreTrainedModel, vocabulary: Tokenizer) -> None:
    ids = torch.tensor([vocabulary.encode("A sluice is a gate that lets water through. It is built where a")])
    config = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=2)
    want = model.generate(ids, generation_config=config)
    with enable(model, "full", HOST_BYTES, **OPTIONS):
        got = model.generate(ids, generation_config=config)
    assert got.tolist() == want.tolist()
    assert len(set(want[0, ids.shape[1]:].tolist())) > 12  # It says something.


def test_predictions_are_as_near_as_two_floors(vocabulary: Tokenizer) -> None:
    """In bf16, where dense attention in other sums is something else, too."""
    setup = Setup(model_of(torch.bfloat16), 2048, HOST_BYTES, OPTIONS)
    windows = read_windows("prose", vocabulary, 2048, 1, 0) + read_windows("code", vocabulary, 2048, 1, 0)
    failures = Failures()
    scores = score_windows(setup, windows, 64, [[FLOOR, POLICY]], lambda _: None, failures)
    told = {each["policy"]: each for each in summaries(scores, 0)}
    assert failures.reasons == {} and told[FLOOR]["whole"] and 1e-4 < told[FLOOR]["kl_mean"] < 1e-2
    assert told[POLICY]["attended"] < 0.4  # It chooses.
    assert told[POLICY]["kl_over_floor"] < 2
    assert told[POLICY]["perplexity_ratio"] == pytest.approx(1, abs=0.02)


def test_a_needle_in_prose(model: transformers.PreTrainedModel, vocabulary: Tokenizer) -> None:
    setup = Setup(model, 2048, HOST_BYTES, OPTIONS)
    line = next(made_tasks(vocabulary, Texts(text_of("prose"), text_of("code")), [4096], 1, 0))
    prompt, rules = vocabulary.encode(line["prompt"]), Rules(24, None, False, lambda: vocabulary)
    assert line["task"] == "niah" and 4000 < len(prompt) <= 4096
    task = Task(1, "niah", 4096, prompt, line["answer"])
    with under(setup, [POLICY], 24) as subject, subject.prefix(prompt[:-24]) as prefix, prefix.under(POLICY) as session:
        given = answer(session, prompt[-24:], task, rules)
    assert given.right, vocabulary.decode(given.output)
    assert given.reading.attended < 0.25
