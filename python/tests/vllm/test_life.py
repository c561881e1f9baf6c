"""What becomes of requests: they end, are given up, or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import Breaks, Engine, greedy, prompts

PROMPTS = prompts(5, 40, 100)
LATER = prompts(17, 33, seed=2)


@pytest.fixture(scope="module", params=[False, True], ids=["one", "two"])
def engine(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Iterator[Engine]:
    """With one forward under way, or two. All tests of this file have it: one that ends takes along what vLLM keeps for
    all engines of a process."""
    with Engine(model_of("Llama"), {}, asynchronous=request.param) as made:
        yield made


def test_memory_comes_back(engine: Engine) -> None:
    far = engine.forwards.engine
    engine.settle()
    before = far.memory().far_pages_used
    engine.tokens(PROMPTS + LATER, greedy(20))
    assert far.memory().far_pages_used > 0
    engine.settle()
    assert far.memory().far_pages_used == before
    assert len(engine.forwards) == 1  # settle()'s own, of which the worker is not told that it has ended.


def test_requests_that_are_given_up_leave_the_others_alone(engine: Engine) -> None:
    own = engine.tokens(PROMPTS, greedy(30))

    def give_up(step: int, numbers: list[str]) -> None:
        if step == 10:
            engine.vllm.abort_request([numbers[1]])

    answers = engine.run(PROMPTS, greedy(30), give_up)
    assert [answers[0].tokens, answers[2].tokens] == [own[0], own[2]]
    assert answers[1].reason in (None, "abort") and answers[1].tokens == own[1][: len(answers[1].tokens)]
    assert len(answers[1].tokens) < 30
    engine.settle()
    assert len(engine.forwards) == 1


@pytest.mark.parametrize("late", [False, True], ids=["in a layer", "at its end"])
def test_a_forward_that_fails_ends_its_requests_alone(engine: Engine, late: bool) -> None:
    own = engine.tokens(PROMPTS + LATER, greedy(30))
    breaks = Breaks(engine, 6, late)
    answers = engine.run(PROMPTS, greedy(30), breaks)
    assert breaks.broke == 1
    assert [each.reason for each in answers] == ["error"] * len(PROMPTS)
    assert all(each.tokens == want[: len(each.tokens)] for each, want in zip(answers, own))
    assert engine.tokens(PROMPTS + LATER, greedy(30)) == own
    engine.settle()
    assert len(engine.forwards) == 1
