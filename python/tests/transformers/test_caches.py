"""What happens to a cache: failures, threads, other caches of the same model, and what the library may ask of it."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import sluice
import torch
import transformers
from sluice._transformers_rows import Turn
from test_families import SLIDING, gpt_oss
from tiny import (HEAD_DIM, ON_CPU, TOLERANCE, Served, assistant_of, enabled, fail_in, greedy, left_padded, llama,
                  model_of, prompt)
from transformers import PreTrainedModel


def mixed() -> PreTrainedModel:
    return model_of("Qwen2", **SLIDING, use_sliding_window=True)


@pytest.fixture(scope="module", params=[llama, mixed], ids=["full", "mixed"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    model = request.param()
    ours = copy.deepcopy(model)
    with enabled(ours) as here:
        yield model, ours, here


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", range(3))
def test_a_forward_that_fails(served: Served, failing: int, error: type[BaseException]) -> None:
    model, ours, here = served
    ids, cache = prompt(1, 30), here.cache()
    want = model(ids).logits[:, 20:]
    ours(ids[:, :20], past_key_values=cache)
    hook = fail_in(ours.model.layers[failing].mlp, error)
    with pytest.raises(error, match="the model's own"):
        ours(ids[:, 20:], past_key_values=cache)
    hook.remove()
    if len(set(cache.is_sliding)) > 1:  # The library's layers have no way back.
        with pytest.raises(sluice.InvalidArgument, match="failed.*reset"):
            ours(ids[:, 20:], past_key_values=cache)
        cache.reset()
        ours(ids[:, :20], past_key_values=cache)
    torch.testing.assert_close(ours(ids[:, 20:], past_key_values=cache).logits, want, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("tokens", [0, 20])
def test_a_head_that_fails(served: Served, tokens: int, error: type[BaseException]) -> None:
    model, ours, here = served
    ids, cache = prompt(2, 30), here.cache()
    want = model(ids).logits[:, tokens:]
    if tokens:
        ours(ids[:, :tokens], past_key_values=cache)
    hook = fail_in(ours.lm_head, error)
    with pytest.raises(error, match="the model's own"):
        ours(ids[:, tokens:], None, None, cache)  # By its place: mask, positions, cache.
    hook.remove()
    if len(set(cache.is_sliding)) > 1:
        with pytest.raises(sluice.InvalidArgument, match="failed.*reset"):
            ours(ids[:, tokens:], past_key_values=cache)
        return
    assert error is KeyboardInterrupt or cache.get_seq_length() == tokens
    torch.testing.assert_close(ours(ids[:, tokens:], past_key_values=cache).logits, want, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_first_forward_that_fails_leaves_an_empty_cache(error: type[BaseException]) -> None:
    model, ids = llama(), prompt(2, 20)
    with enabled(model) as here:
        cache = here.cache()
        hook = fail_in(model.model.layers[1], error)
        with pytest.raises(error):
            model(ids, past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 0
        cache.batch_repeat_interleave(2)
        assert error is KeyboardInterrupt or cache.batch_size == 0
        model(ids[:1], past_key_values=cache)  # Also of another size.
        assert cache.rows.tokens() == [20]


@torch.no_grad()
def test_an_engine_that_fails(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ours, here = served
    ids, cache, attend = prompt(1, 20), here.cache(), here.engine.attend

    def failing(bucket: sluice.Bucket, layer: int, *call: object, **options: object) -> None:
        if layer:
            raise sluice.DeviceError("the engine's own")
        attend(bucket, layer, *call, **options)

    with monkeypatch.context() as patch:
        patch.setattr(here.engine, "attend", failing)
        with pytest.raises(sluice.DeviceError, match="the engine's own"):
            ours(ids, past_key_values=cache)
    cache.reset()
    torch.testing.assert_close(ours(ids, past_key_values=cache).logits, model(ids).logits, **TOLERANCE)


def test_threads(served: Served) -> None:
    model, ours, here = served
    prompts = [prompt(2, 20 + seed, seed) for seed in range(3)]
    want = [greedy(ours, ids, 16, num_beams=2) for ids in prompts]  # One after the other.
    # On a GPU rounded keys and values may change them: `same_beams` has what is compared there.
    assert not ON_CPU or all(torch.equal(each, greedy(model, ids, 16, num_beams=2)) for each, ids in zip(want, prompts))
    got: list[torch.Tensor | None] = [None] * len(prompts)

    device = torch.get_default_device()  # Threads begin with another one.

    def run(index: int) -> None:
        with device:
            got[index] = greedy(ours, prompts[index], 16, num_beams=2)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert all(each is not None and torch.equal(each, wanted) for each, wanted in zip(got, want))
    gc.collect()
    assert here.engine.memory().far_pages_used == 0


def test_a_thread_whose_forward_fails_is_not_waited_for() -> None:
    model, ids = llama(), prompt(1, 20)
    want = greedy(model, ids)
    with enabled(model, timeout_ms=100) as here:
        hook = fail_in(model.model.layers[1])
        failed: list[KeyError] = []

        @torch.no_grad()
        def run() -> None:
            try:
                model(ids, past_key_values=here.cache())
            except KeyError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(600)
        hook.remove()
        assert failed
        assert torch.equal(greedy(model, ids), want)


def test_a_turn_that_does_not_end() -> None:
    with enabled(llama(), timeout_ms=50) as here:
        first, second = here.cache(), here.cache()
        here.turn.take(first.rows)
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                here.turn.take(second.rows)
            except sluice.Timeout as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(600)
        assert "another thread took more than 50 ms" in str(failed[0])
        here.turn.take(second.rows)  # This thread has left the other one's forward behind.
        assert isinstance(here.turn, Turn) and here.turn.holder is second.rows
        here.turn.drop()
        assert here.turn.holder is None


def test_two_models_at_once(served: Served) -> None:
    model, ours, _ = served
    ids, assistant = prompt(1, 30), llama(num_hidden_layers=2)
    want = greedy(model, ids, 20)
    with enabled(assistant):
        assert torch.equal(greedy(ours, ids, 20, assistant_model=assistant), want)


@torch.no_grad()
@pytest.mark.parametrize("make", [
    lambda model: transformers.DynamicCache(config=model.config),
    lambda model: transformers.StaticCache(config=model.config, max_cache_len=64),
], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_caches_of_the_library(served: Served, make: Callable, padded: bool) -> None:
    model, ours, _ = served
    ids, mask = left_padded()
    caches = make(model), make(model)
    for first, last in ((0, 20), (20, 39), (39, 40)):
        part = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, first:last],
                "attention_mask": mask[:, :last]} if padded else {}
        want, got = (each(ids[:, first:last], past_key_values=cache, **part).logits
                     for each, cache in zip((model, ours), caches))
        real = mask[:, first:last].bool() | torch.tensor(not padded)
        torch.testing.assert_close(got[real], want[real], **TOLERANCE)


@torch.no_grad()
def test_rows_are_selected_and_repeated() -> None:
    model = llama()
    ours, ids = copy.deepcopy(model), prompt(3, 20)
    with enabled(ours) as here:
        cache, theirs = here.cache(), transformers.DynamicCache(config=model.config)
        for each, kept in ((ours, cache), (model, theirs)):
            each(ids, past_key_values=kept)
            kept.batch_select_indices(torch.tensor([2, 0]))
            kept.batch_repeat_interleave(2)
            kept.reorder_cache(torch.tensor([3, 0, 0, 1]))
        assert cache.batch_size == 4
        got, want = (each(prompt(4, 1), past_key_values=kept).logits for each, kept in ((ours, cache), (model, theirs)))
        torch.testing.assert_close(got, want, **TOLERANCE)


@torch.no_grad()
def test_another_default_device() -> None:
    """What is kept of masks is on the CPU, wherever tensors are made that say nothing."""
    with enabled(llama()) as here:
        cache = here.cache()
        q, k, v = (torch.randn(2, heads, 5, HEAD_DIM) for heads in (4, 2, 2))
        padded = torch.ones(2, 10, dtype=torch.bool)
        with torch.device("meta"):
            for mask in (None, padded):
                for layer in range(3):
                    assert cache.rows.attend(layer, q, k, v, mask).isfinite().all()
            cache.reorder_cache(torch.tensor([1, 1], device="cpu"))
        assert cache.rows.tokens() == [10, 10]


@torch.no_grad()
def test_rows_that_find_no_room_are_lost() -> None:
    model, ids = llama(), prompt(2, 20)
    with enabled(model, sequences=3) as here:
        cache = here.cache()
        model(ids, past_key_values=cache)
        with pytest.raises(sluice.OutOfCapacity):
            cache.batch_repeat_interleave(2)
        with pytest.raises(sluice.InvalidArgument, match="rows of this cache are lost"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        assert cache.rows.tokens() == [20, 20]


@torch.no_grad()
def test_tokens_are_taken_back(served: Served) -> None:
    model, ours, here = served
    ids, cache = prompt(1, 30), here.cache()
    want = model(ids).logits[:, 15:]
    ours(ids[:, :14], past_key_values=cache)
    cache.crop(0)
    assert cache.get_seq_length() == 14
    for tokens in (torch.tensor(-3), 9):
        cache.crop(tokens)
    assert cache.get_seq_length() == 9 and cache.rows.tokens() == [9]
    ours(ids[:, 9:15], past_key_values=cache)
    torch.testing.assert_close(ours(ids[:, 15:], past_key_values=cache).logits, want, **TOLERANCE)
    cache.crop(0)
    if len(set(cache.is_sliding)) > 1:  # Beyond its window a layer has not kept what would come back.
        with pytest.raises(sluice.Unsupported, match="cannot take tokens back.*activate_past_recording"):
            cache.crop(-1)
        assert cache.rows.tokens() == [30]


def test_no_tokens_are_taken_back_from_linear_attention() -> None:
    model = model_of("Qwen3Next", num_hidden_layers=2, head_dim=HEAD_DIM, num_experts=2, num_experts_per_tok=1,
                     linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=16, linear_value_head_dim=16,
                     layer_types=["linear_attention", "full_attention"])
    with enabled(model) as here, torch.no_grad():
        cache = here.cache()
        model(prompt(1, 20), past_key_values=cache)
        cache.crop(0)
        with pytest.raises(sluice.Unsupported, match="LinearAttentionLayer.*cannot take tokens back"):
            cache.crop(-1)
        with pytest.raises(sluice.Unsupported, match="has no batch_repeat_interleave"):
            cache.batch_repeat_interleave(2)
        assert cache.rows.tokens() == [20]


def test_assistants_of_the_same_family() -> None:
    model = llama()
    ours, ids = copy.deepcopy(model), prompt(1, 30)
    assistant = assistant_of(model)
    with enabled(ours), enabled(assistant):
        assert torch.equal(greedy(ours, ids, 20, assistant_model=assistant), greedy(model, ids, 20))


@pytest.mark.parametrize("policy", ["exact | int4 | top_k=all | near=0", "streaming"])
def test_sinks_and_policies(policy: str) -> None:
    model, ids = gpt_oss(), prompt(1, 40)
    ours = copy.deepcopy(model)
    with enabled(ours, policy):
        assert torch.equal(greedy(ours, ids), greedy(model, ids))


def test_sinks_in_halves() -> None:
    # Without outliers, or layers make much of what is rounded off.
    model, ids = gpt_oss(initializer_range=0.05, num_experts_per_tok=4).to(torch.bfloat16), prompt(2, 40)
    ours = copy.deepcopy(model)
    with enabled(ours) as here, torch.no_grad():
        want, got = (each(ids, past_key_values=cache).logits.float()
                     for each, cache in ((model, transformers.DynamicCache(config=model.config)), (ours, here.cache())))
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.999
