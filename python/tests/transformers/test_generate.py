"""Models of transformers give the same tokens with Sluice as without. Tiny ones, of random weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from tiny import (TOLERANCE, Served, assistant_of, enabled, fail_in, greedy, llama, prompt, qwen2, same_beams,
                  same_in_chunks, same_logits, same_second_turn, same_with_left_padding)
from transformers import PreTrainedModel

POLICIES = ("full", "exact | int4 | top_k=all | near=0")


@pytest.fixture(scope="module", params=[llama, qwen2], ids=["llama", "qwen2"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, and itself again for Sluice."""
    model = request.param()
    return model, copy.deepcopy(model)


@pytest.fixture(params=POLICIES)
def served(request: pytest.FixtureRequest, pair: tuple) -> Iterator[Served]:
    with enabled(pair[1], request.param) as here:
        yield *pair, here


def test_one_prompt(served: Served) -> None:
    model, ours, _ = served
    ids = prompt(1, 50)
    want, got = greedy(model, ids, 30), greedy(ours, ids, 30)
    assert torch.equal(got, want)
    assert len(set(want[0, 50:].tolist())) > 5  # Tokens that tell something.
    torch.testing.assert_close(ours(got).logits, model(got).logits, **TOLERANCE)  # Without a cache.


def test_a_batch_with_left_padding(served: Served) -> None:
    same_with_left_padding(served)


def test_logits_of_every_token(served: Served) -> None:
    same_logits(served)


def test_a_second_turn(served: Served) -> None:
    same_second_turn(served)
    assert served[2].engine.stats().dense_chunks > 0


def test_prompts_in_chunks(served: Served) -> None:
    same_in_chunks(served)
    model, ours, _ = served
    ids = prompt(2, 200)  # More than prefill_rows: it chooses chunks by itself.
    assert torch.equal(greedy(ours, ids), greedy(model, ids))


def test_beams(served: Served) -> None:
    same_beams(served)
    gc.collect()
    assert served[2].engine.memory().far_pages_used == 0  # All sequences have ended with their cache.


def test_drafts_of_an_assistant(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours, here = served
    truncate, left = here.engine.truncate, []
    monkeypatch.setattr(here.engine, "truncate", lambda *call: (left.append(call[1]), truncate(*call)))
    ids = prompt(1, 30)
    want = greedy(model, ids, 20)
    assert torch.equal(greedy(ours, ids, 20, assistant_model=assistant_of(model)), want)
    assert left  # Some were not accepted.


def test_a_model_that_fails_leaves_nothing_behind(served: Served) -> None:
    model, ours, here = served
    ids, handle = prompt(1, 10), fail_in(ours.model.layers[1])
    with pytest.raises(KeyError, match="the model's own"):
        greedy(ours, ids)
    handle.remove()
    assert torch.equal(greedy(ours, ids), greedy(model, ids))


def test_halves_run() -> None:
    model = llama().to(torch.bfloat16)
    with enabled(model, "full") as here:
        assert here.engine.options.kv_dtype == "bf16"
        assert greedy(model, prompt(2, 20)).shape == (2, 32)


@pytest.mark.parametrize("policy", ["lfps", "tactic | int4"])
def test_rows_of_a_batch_have_what_their_policy_keeps(policy: str) -> None:
    """Tables on the CPU, and clusters on the device, one for each row."""
    model = llama()
    with enabled(model, policy):
        both = greedy(model, prompt(2, 60))
        assert torch.equal(greedy(model, prompt(2, 60)[1:]), both[1:])


def test_rows_of_8_bits_run() -> None:
    model = llama()
    with enabled(model, "full", kv_dtype="fp8_e4m3") as here:
        assert here.engine.options.kv_dtype == "fp8_e4m3"
        assert greedy(model, prompt(2, 20)).shape == (2, 32)


def test_it_is_taken_back() -> None:
    model = llama()
    before, ids = model.config._attn_implementation, prompt(1, 20)
    want = greedy(model, ids)
    with enabled(model):
        assert model.config._attn_implementation == "sluice"
    assert model.config._attn_implementation == before and "generate" not in vars(model)
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks
    assert torch.equal(greedy(model, ids), want)


def test_another_scale() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.7
    ids, ours = prompt(1, 20), copy.deepcopy(model)
    with enabled(ours) as here:
        assert here.engine.options.scale == pytest.approx(model.model.layers[0].self_attn.scaling)
        assert torch.equal(greedy(ours, ids), greedy(model, ids))
    model.model.layers[1].self_attn.scaling *= 0.5  # No engine has two: the queries of the others are scaled.
    ours = copy.deepcopy(model)
    with enabled(ours) as here:
        assert here.engine.options.scale == 0
        assert torch.equal(greedy(ours, ids), greedy(model, ids))


def test_sequences_that_outgrow_the_configuration() -> None:
    """As in the library; models with a rope that scales are used so."""
    model = llama(max_position_embeddings=64)
    ids = prompt(1, 40)
    wants = greedy(copy.deepcopy(model), ids, 40)
    with enabled(model):
        assert torch.equal(greedy(model, ids, 40), wants)
