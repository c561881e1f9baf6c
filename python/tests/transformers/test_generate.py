"""Models of transformers give the same tokens with Sluice as without. Tiny ones, of random weights."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import sluice
import torch
import transformers
from sluice.transformers import Enabled
from tiny import assistant_of, enabled, greedy, left_padded, llama, prompt, qwen2
from transformers import PreTrainedModel

POLICIES = ("full", "exact | int4 | top_k=all | near=0")


@pytest.fixture(scope="module", params=[llama, qwen2], ids=["llama", "qwen2"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, and itself again for Sluice."""
    model = request.param()
    return model, copy.deepcopy(model)


@pytest.fixture(params=POLICIES)
def served(request: pytest.FixtureRequest, pair: tuple) -> Iterator[tuple[PreTrainedModel, PreTrainedModel, Enabled]]:
    with enabled(pair[1], request.param) as here:
        yield *pair, here


def test_one_prompt(served: tuple) -> None:
    model, ours, _ = served
    ids = prompt(1, 50)
    want, got = greedy(model, ids, 30), greedy(ours, ids, 30)
    assert torch.equal(got, want)
    assert len(set(want[0, 50:].tolist())) > 5  # Tokens that tell something.
    torch.testing.assert_close(ours(got).logits, model(got).logits, rtol=1e-3, atol=1e-3)  # Without a cache.


def test_a_batch_with_left_padding(served: tuple) -> None:
    model, ours, _ = served
    ids, mask = left_padded()
    want = greedy(model, ids, attention_mask=mask)
    assert torch.equal(greedy(ours, ids, attention_mask=mask), want)
    assert not torch.equal(greedy(model, ids, attention_mask=torch.ones_like(mask)), want)  # The mask matters.


def test_logits_of_every_token(served: tuple) -> None:
    model, ours, here = served
    ids, mask = left_padded()
    cache, theirs = here.cache(), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for first, last in ((0, 30), (30, 40)):
            part = {"input_ids": ids[:, first:last], "attention_mask": mask[:, :last],
                    "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, first:last]}
            want = model(**part, past_key_values=theirs).logits
            got = ours(**part, past_key_values=cache).logits
            real = mask[:, first:last].bool()
            torch.testing.assert_close(got[real], want[real], rtol=1e-3, atol=1e-3)
    assert [here.engine.tokens(sequence) for sequence in cache.rows._sequences] == mask.sum(1).tolist()


def test_a_second_turn(served: tuple) -> None:
    model, ours, here = served
    ids = prompt(2, 20)
    cache, theirs = here.cache(), transformers.DynamicCache(config=model.config)
    want, got = greedy(model, ids, past_key_values=theirs), greedy(ours, ids, past_key_values=cache)
    assert torch.equal(got, want)
    more = torch.cat([want, prompt(2, 9, seed=2)], dim=1)
    mask = torch.ones_like(more)
    want = greedy(model, more, past_key_values=theirs, attention_mask=mask)
    assert torch.equal(greedy(ours, more, past_key_values=cache, attention_mask=mask), want)
    assert here.engine.stats().dense_chunks > 0


def test_prompts_in_chunks(served: tuple) -> None:
    model, ours, _ = served
    ids, mask = left_padded()
    want = greedy(model, ids, attention_mask=mask)
    assert torch.equal(greedy(ours, ids, attention_mask=mask, prefill_chunk_size=12), want)
    ids = prompt(2, 200)  # More than prefill_rows: it chooses chunks by itself.
    assert torch.equal(greedy(ours, ids), greedy(model, ids))


def test_beams(served: tuple) -> None:
    model, ours, here = served
    ids = prompt(2, 20)
    assert torch.equal(greedy(ours, ids, num_beams=3), greedy(model, ids, num_beams=3))
    gc.collect()
    assert here.engine.memory().far_pages_used == 0  # All sequences have ended with their cache.


def test_drafts_of_an_assistant(served: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours, here = served
    truncate, left = here.engine.truncate, []
    monkeypatch.setattr(here.engine, "truncate", lambda *call: (left.append(call[1]), truncate(*call)))
    ids = prompt(1, 30)
    want = greedy(model, ids, 20)
    # Half of its layers: some of its drafts are accepted, others not.
    assistant = copy.deepcopy(model)
    assistant.model.layers = assistant.model.layers[:2]
    assistant.config.num_hidden_layers = 2
    if getattr(assistant.config, "layer_types", None):
        assistant.config.layer_types = assistant.config.layer_types[:2]
    assert torch.equal(greedy(ours, ids, 20, assistant_model=assistant), want)
    assert left  # Some were not accepted.


def test_a_model_that_fails_leaves_nothing_behind(served: tuple) -> None:
    model, ours, here = served
    ids, failing = prompt(1, 10), ours.model.layers[1]
    handle = failing.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("the model's own")))
    with pytest.raises(KeyError, match="the model's own"):
        greedy(ours, ids)
    handle.remove()
    assert torch.equal(greedy(ours, ids), greedy(model, ids))


def test_halves_run() -> None:
    model = llama().to(torch.bfloat16)
    with enabled(model, "full") as here:
        assert here.engine.options.kv_dtype == "bf16"
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
    with enabled(ours):
        assert torch.equal(greedy(ours, ids), greedy(model, ids))
