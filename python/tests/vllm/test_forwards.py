"""Sequences and forwards of requests, without vLLM: what a batch of vLLM's does to an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sluice
import torch
from sluice.vllm._forwards import Forwards, Prompt, Rows

LAYERS, HEADS, KV_HEADS, SIZE = 2, 4, 2, 32


def engine_of(**changes: object) -> sluice.Engine:
    options = sluice.EngineOptions(
        layers=LAYERS, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE, kv_dtype="f32", sequences=2, threads=1,
        pin_threads=False, answer_timeout_ms=30_000, policies=["full"],
        **{"host_bytes": 4 << 20, "largest": sluice.Bucket(decode_rows=4, prefill_rows=64, prefills=2, max_tokens=256),
           **changes})
    return sluice.Engine(options)


@pytest.fixture
def forwards() -> Iterator[Forwards]:
    made = Forwards(engine_of(), "full", ahead=1)
    yield made
    made.close()


def random(rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Of each row the same, however many there are."""
    return tuple(torch.randn(rows, heads, SIZE, generator=torch.Generator().manual_seed(seed + index))
                 for index, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))


def step(forwards: Forwards, *rows: Rows, finished: tuple[str, ...] = (), preempted: tuple[str, ...] = (),
         padded: int = 0) -> torch.Tensor:
    """Of its last layer, what comes of random queries, keys and values."""
    forwards.start(finished, preempted)
    bucket = forwards.plan(rows, padded)
    out = torch.full((bucket.rows, HEADS, SIZE), torch.nan)
    for layer in range(LAYERS):
        forwards.attend(bucket, layer, *random(bucket.rows), out, None)
    forwards.stop()
    return out


def test_chunks_and_single_tokens_of_several_requests(forwards: Forwards) -> None:
    step(forwards, Rows("a", 40, 0, True), Rows("b", 8, 0, True))
    step(forwards, Rows("b", 1, 8, False), Rows("a", 20, 40, True))
    assert forwards.planned == sluice.Bucket(1, 20, 1, forwards.engine.options.largest.max_tokens,
                                             forwards.engine.options.largest.features)
    step(forwards, Rows("a", 1, 60, False), Rows("b", 1, 9, False))
    forwards.start(())
    forwards.stop()
    assert len(forwards) == 2 and forwards.most_under_way == 2 and forwards.failed() == set()


def test_padding_is_zero_and_changes_nothing(forwards: Forwards) -> None:
    step(forwards, Rows("a", 8, 0, True))
    padded = step(forwards, Rows("a", 1, 8, False), padded=4)
    assert forwards.planned.decode_rows == 4
    assert padded[0].any() and not padded[1:].any()
    step(forwards, Rows("a", 8, 0, True), preempted=("a",))
    torch.testing.assert_close(step(forwards, Rows("a", 1, 8, False))[0], padded[0])


def test_a_preempted_request_begins_again(forwards: Forwards) -> None:
    step(forwards, Rows("a", 8, 0, True), Rows("b", 8, 0, True))
    step(forwards, Rows("b", 1, 8, False), preempted=("a",))
    step(forwards, Rows("a", 9, 0, True), Rows("b", 1, 9, False))
    assert forwards.preemptions == 1 and forwards.failed() == set()


def test_a_request_takes_the_place_of_one_that_is_under_way_still(forwards: Forwards) -> None:
    """The engine has two sequences, and those that leave are in the forward that has not been finished."""
    step(forwards, Rows("a", 8, 0, True), Rows("b", 8, 0, True))
    step(forwards, Rows("c", 8, 0, True), Rows("d", 8, 0, True), finished=("a", "b"))
    assert len(forwards) == 2 and forwards.failed() == set()


def test_memory_of_a_request_that_has_ended_is_awaited() -> None:
    forwards = Forwards(engine_of(host_bytes=8 * (16 << 10)), "full", ahead=1)  # 128 tokens.
    step(forwards, Rows("a", 64, 0, True))
    step(forwards, Rows("a", 56, 64, True))
    step(forwards, Rows("b", 64, 0, True), finished=("a",))
    assert forwards.failed() == set()
    step(forwards, Rows("b", 64, 64, True))
    out = step(forwards, Rows("b", 64, 128, True))  # More than there is.
    assert forwards.failed() == {"b"} and not out.any()
    forwards.close()


def test_tokens_that_are_not_there_fail_a_request(forwards: Forwards) -> None:
    step(forwards, Rows("a", 8, 0, True))
    assert not step(forwards, Rows("a", 1, 9, False)).any()
    assert forwards.failed() == {"a"} and forwards.failed() == set()


def test_a_step_that_was_planned_before_a_failure_was_known(forwards: Forwards) -> None:
    """Its other requests are none the worse."""
    step(forwards, Rows("a", 8, 0, True), Rows("b", 8, 0, True))
    step(forwards, Rows("a", 1, 9, False))
    got = step(forwards, Rows("a", 1, 10, False), Rows("b", 1, 8, False))
    assert forwards.failed() == {"a"}
    step(forwards, Rows("b", 8, 0, True), finished=("a",), preempted=("b",))
    want = step(forwards, Rows("b", 1, 8, False), padded=2)
    assert got[1].any() and want[0].any() and len(forwards) == 1


def test_without_a_way_to_tell_an_error_is_raised() -> None:
    forwards = Forwards(engine_of(), "full", goes_on=False)
    with pytest.raises(sluice.InternalError, match="request a goes on at token 7, and the engine has 0"):
        step(forwards, Rows("a", 1, 7, False))
    forwards.close()


PROMPT = Prompt(range(3, 43), 0)


def test_a_request_has_the_name_of_one_that_ends_in_the_same_step(forwards: Forwards) -> None:
    """It was given up and came again, and its prompt is known."""
    forwards.expect("a", PROMPT, 0)
    step(forwards, Rows("a", 40, 0, True))
    step(forwards, Rows("b", 8, 0, True))
    step(forwards, Rows("b", 1, 8, False))
    assert forwards.known(PROMPT) == 32
    forwards.expect("a", PROMPT, 32)
    assert step(forwards, Rows("a", 8, 32, True), finished=("a",)).any()
    assert forwards.failed() == set() and forwards.engine.stats().matched_tokens == 32


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_prompt_that_was_forgotten(goes_on: bool) -> None:
    forwards = Forwards(engine_of(), "full", goes_on=goes_on)
    forwards.expect("a", PROMPT, 32)
    rows = Rows("a", 8, 32, True), Rows("b", 8, 0, True)
    if goes_on:
        assert step(forwards, *rows)[8:].any() and forwards.failed() == {"a"}
    else:
        with pytest.raises(sluice.InternalError, match="a was to begin with 32 known tokens, and the engine has 0"):
            step(forwards, *rows)
    forwards.close()


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_engine_that_cannot_say_what_it_knows(goes_on: bool) -> None:
    """A prompt is read whole then; ranks have to agree."""
    forwards = Forwards(engine_of(), "full", goes_on=goes_on)

    def match_prefix(*_: object) -> int:
        raise sluice.DeviceError("the device failed, as a test wants")

    forwards.engine.match_prefix = match_prefix
    if goes_on:
        assert forwards.known(PROMPT) == 0
    else:
        with pytest.raises(sluice.DeviceError):
            forwards.known(PROMPT)
    forwards.close()
