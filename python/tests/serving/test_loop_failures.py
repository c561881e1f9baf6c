"""Forwards and what follows them fail, and answers stay right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sluice.serving import loop as serving_loop
from sluice.serving.loop import Loop
from small import bare_model, expected, greedy, prompt_ids, run


def failing_choose(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """Sampling fails at these calls."""
    choose, count = serving_loop.choose, [0]

    def fail(*arguments: object) -> list:
        count[0] += 1
        if count[0] in calls:
            raise torch.OutOfMemoryError("no memory to choose with")
        return choose(*arguments)

    monkeypatch.setattr(serving_loop, "choose", fail)


def follow_up(loop: Loop, tokens: list[int]) -> None:
    """A request that begins with an answer has the tokens that it has without one."""
    prompt = [*prompt_ids(40), *tokens, *prompt_ids(5, 9)]
    told = run(loop, [greedy(9, prompt)])
    assert told.last(9).cached >= 48 and told.tokens(9) == expected(bare_model("llama"), prompt, 12)


@pytest.mark.parametrize("call", [1, 4])
def test_sampling_that_fails_once(make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    failing_choose(monkeypatch, call)
    loop, wants = make_loop(), expected(bare_model("llama"), prompt_ids(40), 20)
    assert run(loop, [greedy(1, prompt_ids(40), 20)]).tokens(1) == wants
    assert loop.status().failed_forwards == 0
    follow_up(loop, wants)


def test_sampling_that_fails_twice(make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    failing_choose(monkeypatch, 18, 19)
    loop, wants = make_loop(), expected(bare_model("llama"), prompt_ids(40), 20)
    loop.submit(greedy(1, prompt_ids(40), 20))
    events = [event for _ in range(17) for event in loop.step()]
    tokens = [token.token for event in events for token in event.tokens]
    loop.submit(greedy(2, prompt_ids(100)))  # A prompt of which the next forward reads a part.
    (event,) = loop.step()
    assert event.number == 1 and event.error == "OutOfMemoryError: no memory to choose with"
    assert run(loop, []).tokens(2) == expected(bare_model("llama"), prompt_ids(100), 12)
    assert loop.status().memory.far_pages_used == 0
    follow_up(loop, [*tokens, *wants[len(tokens):]])


def test_requests_whose_tokens_the_engine_does_not_have(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    loop.submit(greedy(1, prompt_ids(40)))
    loop.submit(greedy(2, prompt_ids(20, 2)))
    first = loop.step()
    loop._engine.truncate(loop._live[1].sequence, 39)
    told = run(loop, [])
    assert [(event.number, event.error[:13]) for event in told.events[1]] == [(1, "InternalError")]
    assert [token.token for event in (*first, *told.events[2]) if event.number == 2 for token in event.tokens] == \
        expected(bare_model("llama"), prompt_ids(20, 2), 12)


def test_a_forward_that_fails_after_it_was_finished(make_loop: Callable[..., Loop],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    finish = loop._engine.finish

    def failing(number: int) -> None:
        finish(number)
        raise RuntimeError("too late")

    monkeypatch.setattr(loop._engine, "finish", failing)
    assert "too late" in run(loop, [greedy(1, prompt_ids(40))]).last(1).error
    assert loop.status().failed_forwards == 1
    monkeypatch.undo()
    assert run(loop, [greedy(2, prompt_ids(40))]).tokens(2) == expected(bare_model("llama"), prompt_ids(40), 12)


def test_a_loop_all_of_whose_forwards_fail_is_hopeless(make_loop: Callable[..., Loop],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    loop = make_loop()
    for turn in range(5):
        with monkeypatch.context() as patch:
            if turn != 2:  # One that succeeds between others.
                patch.setattr(loop._model, "run", broken)
            assert loop.hopeless is None
            loop.submit(greedy(turn, prompt_ids(10), 1))
            loop.step()
    assert loop.hopeless is None
    monkeypatch.setattr(loop._model, "run", broken)
    run(loop, [greedy(5, prompt_ids(10), 1)])
    assert "3 turns in a row" in loop.hopeless and "an illegal memory access" in loop.hopeless


def test_an_interrupted_forward_leaves_the_loop_as_it_was(make_loop: Callable[..., Loop],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    loop.submit(greedy(1, prompt_ids(20)))

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop._model, "run", interrupted)
        loop.step()
    loop.abort(1)
    assert run(loop, [greedy(2, prompt_ids(20))]).tokens(2) == expected(bare_model("llama"), prompt_ids(20), 12)
