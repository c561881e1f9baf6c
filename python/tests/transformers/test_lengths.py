"""Forwards of any length and of any number of rows: more than prefill_rows go through the model in pieces, and an
engine that was not told how many rows there will be has room for those that come."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import sluice
import torch
import transformers
from sluice._transformers_support import longest
from sluice.transformers import enable
from test_families import FAMILIES, SLIDING
from tiny import (KV, ON_CPU, TOLERANCE, Served, assistant_of, enabled, fail_in, greedy, left_padded, llama, model_of,
                  prompt)

ROWS = 24  # prefill_rows: a batch of three has pieces of 8 columns.


@pytest.mark.parametrize(("rope", "tokens"), [
    ({}, 4096), ({"rope_type": "default"}, 4096), ({"rope_type": "yarn", "factor": 4.0}, 16384),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
    ({"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}}, 8192),
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096)])
def test_positions_that_are_scaled_are_counted(rope: dict[str, object], tokens: int) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        assert longest(SimpleNamespace(max_position_embeddings=4096, **{name: rope})) == tokens


def served_of(model: transformers.PreTrainedModel, **options: object) -> Iterator[Served]:
    ours = copy.deepcopy(model)
    with enabled(ours, prefill_rows=ROWS, **options) as here:
        yield model, ours, here


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from served_of(llama())


@pytest.fixture(scope="module", params=["gemma3", "llama4-chunks", "qwen3-next-linear", "lfm2-convolutions",
                                        "qwen3-moe"] if ON_CPU else ["qwen3-moe"])
def mixed(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Layers of transformers' own beside those of Sluice's."""
    yield from served_of(FAMILIES[request.param]())


def two_turns(served: Served, **options: object) -> None:
    """The second one is longer than prefill_rows."""
    model, ours, here = served
    cache, theirs = here.cache(), transformers.DynamicCache(config=model.config)
    ids = prompt(2, 10)
    want = greedy(model, ids, 4, past_key_values=theirs)
    assert torch.equal(greedy(ours, ids, 4, past_key_values=cache, **options), want)
    more = torch.cat([want, prompt(2, 61, seed=2)], dim=1)
    want = greedy(model, more, past_key_values=theirs, attention_mask=torch.ones_like(more))
    got = greedy(ours, more, past_key_values=cache, attention_mask=torch.ones_like(more), **options)
    assert torch.equal(got, want)


def test_a_second_turn_that_is_long(served: Served) -> None:
    two_turns(served)


@pytest.mark.parametrize("size", [5, 100])
def test_chunks_of_a_size_that_is_said(served: Served, size: int) -> None:
    two_turns(served, prefill_chunk_size=size)


def test_a_second_turn_of_a_model_of_several_kinds(mixed: Served) -> None:
    two_turns(mixed)


@pytest.mark.parametrize("keep", [0, 1, 30])
def test_a_call_of_the_model(served: Served, keep: int) -> None:
    model, ours, here = served
    ids, mask = left_padded()
    for positions in (None, (mask.cumsum(1) - 1).clamp(min=0)):
        options = {"attention_mask": mask, "position_ids": positions, "logits_to_keep": keep}
        with torch.no_grad():
            got = ours(ids, past_key_values=here.cache(), **options).logits
            want = model(ids, past_key_values=transformers.DynamicCache(), **options).logits
        real = mask[:, -want.shape[1]:].bool()
        torch.testing.assert_close(got[real], want[real], **TOLERANCE)
        assert got.shape == want.shape


def test_hidden_states_of_a_call(served: Served) -> None:
    model, ours, here = served
    ids = prompt(2, 31)
    with torch.no_grad():
        got = ours.model(ids, past_key_values=here.cache(), output_hidden_states=True)
        want = model.model(ids, output_hidden_states=True)
    assert len(got.hidden_states) == len(want.hidden_states) == 4
    for one, other in zip((got.last_hidden_state, *got.hidden_states), (want.last_hidden_state, *want.hidden_states)):
        torch.testing.assert_close(one, other, **TOLERANCE)


def test_one_token_too_many(served: Served) -> None:
    """The last piece has one column, and is a part of the prompt all the same."""
    model, ours, here = served
    cache = here.cache()
    before = here.engine.stats().dense_chunks
    with torch.no_grad():
        got = ours(prompt(1, ROWS + 1), past_key_values=cache).logits
        torch.testing.assert_close(got, model(prompt(1, ROWS + 1)).logits, **TOLERANCE)
    assert here.engine.stats().dense_chunks - before == 2 * here.engine.options.layers


def test_drafts_behind_a_long_prompt(served: Served) -> None:
    model, ours, _ = served
    ids = prompt(1, 10).repeat(1, 8)
    want = greedy(model, ids, 20)
    assert torch.equal(greedy(ours, ids, 20, prompt_lookup_num_tokens=4), want)
    assert torch.equal(greedy(ours, ids, 20, assistant_model=assistant_of(model)), want)


@pytest.mark.parametrize("tokens", [ROWS - 4, 3 * ROWS + 1])
@pytest.mark.parametrize("chunk", [None, 7])
def test_embeddings(served: Served, tokens: int, chunk: int | None) -> None:
    model, ours, _ = served
    options = {} if chunk is None else {"prefill_chunk_size": chunk}
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    embeddings = model.get_input_embeddings()(prompt(2, tokens)).detach()
    want = model.generate(inputs_embeds=embeddings, generation_config=config)
    assert torch.equal(ours.generate(inputs_embeds=embeddings, generation_config=config, **options), want)


def test_a_piece_that_fails_takes_all_of_its_forward_back(served: Served) -> None:
    model, ours, here = served
    ids, cache = prompt(1, 10), here.cache()
    with torch.no_grad():
        ours(ids, past_key_values=cache)
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("the model's own")

    handle = ours.model.layers[1].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(KeyError, match="the model's own"):
        ours(prompt(1, 70, seed=2), past_key_values=cache)
    handle.remove()
    assert cache.rows.tokens() == [10] and len(calls) == 3
    more = prompt(1, 70, seed=3)
    with torch.no_grad():
        torch.testing.assert_close(ours(more, past_key_values=cache).logits,
                                   model(torch.cat([ids, more], 1)).logits[:, 10:], **TOLERANCE)


def test_what_cannot_be_read_in_pieces() -> None:
    model = llama()
    with enabled(model, prefill_rows=ROWS) as here:
        with torch.no_grad(), pytest.raises(sluice.Unsupported, match="40 tokens of prompts.*strange.*more prefill_rows"):
            model(prompt(1, 40), past_key_values=here.cache(), strange=torch.zeros(1, 40))
        with torch.no_grad(), pytest.raises(sluice.Unsupported, match=f"batch of {ROWS + 1} rows.*prefill_rows"):
            model(prompt(ROWS + 1, 2), past_key_values=here.cache())
        own = model.model.forward
    assert "forward" not in vars(model.model) and model.model.forward != own


@pytest.mark.parametrize(("rows", "beams"), [(17, 1), (1, 20), (9, 4)])
def test_more_rows_than_an_engine_is_made_for(rows: int, beams: int) -> None:
    model = llama()
    want = greedy(model, prompt(rows, 6), 5, num_beams=beams)
    with enable(model, "full", host_bytes=16 << 20, threads=1, pin_threads=False, answer_timeout_ms=30_000,
                prefill_rows=64, **KV) as here:
        first = here.engine
        assert torch.equal(greedy(model, prompt(rows, 6), 5, num_beams=beams), want)
        assert here.engine is not first and here.engine.options.sequences >= rows * beams
        gc.collect()
        assert here.engine.memory().far_pages_used == 0
        with pytest.raises(sluice.InvalidArgument, match="closed"):
            first.memory()


def test_rows_that_live_are_in_the_way_of_more() -> None:
    model = llama()
    with enable(model, "full", host_bytes=16 << 20, threads=1, pin_threads=False, prefill_rows=64, **KV) as here:
        cache = here.cache()
        with torch.no_grad():
            model(prompt(3, 6), past_key_values=cache)
        with pytest.raises(sluice.OutOfCapacity, match=r"17 rows.*3 live in other caches.*sequences=20"):
            greedy(model, prompt(17, 6))
        assert greedy(model, prompt(13, 6)).shape[0] == 13  # As many as there is room for.
        assert cache.rows.tokens() == [6] * 3
    with enabled(model, sequences=4) as here:
        with pytest.raises(sluice.OutOfCapacity, match="5 rows.*sequences=5"):
            greedy(model, prompt(5, 6))
        assert here.engine.options.sequences == 4


@pytest.mark.skipif(not ON_CPU, reason="a window's head_dim")
def test_masks_that_were_made_for_each_type_of_layer() -> None:
    """As models of text and images call their decoder."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    for served in served_of(model_of("Gemma3", "Gemma3Text", **SLIDING, head_dim=32, tie_word_embeddings=False)):
        model, ours, here = served
        cache, theirs = here.cache(), transformers.DynamicCache(config=model.config)
        past = 0
        for tokens in (40, 61):
            ids, mask = prompt(2, tokens, seed=tokens), torch.ones(2, past + tokens, dtype=torch.long)
            mask[0, :5] = 0
            found = []
            for each, kept in ((model, theirs), (ours, cache)):
                wants = {"config": each.config, "inputs_embeds": each.get_input_embeddings()(ids),
                         "attention_mask": mask, "past_key_values": kept}
                masks = {"full_attention": create_causal_mask(**wants),
                         "sliding_attention": create_sliding_window_causal_mask(**wants)}
                with torch.no_grad():
                    found.append(each.model(ids, attention_mask=masks, past_key_values=kept).last_hidden_state)
            real = mask[:, past:].bool()
            torch.testing.assert_close(found[1][real], found[0][real], **TOLERANCE)
            past += tokens
