"""Prompts that begin like known ones: with the policy `full` the tokens are the same, and fewer are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import Engine, greedy, prompts
from sluice.vllm._prefixes import Prefixes
from vllm import SamplingParams

PAGE = 16  # Tokens, as an engine has them by default.
LONG, TAILS = prompts(150, seed=4)[0], prompts(9, 40, 25, seed=5)
COMMON = LONG[:100]
ANSWER = greedy(30)


def whole(tokens: int) -> int:
    """Of so many tokens that are known, those that are found."""
    return tokens - tokens % PAGE


@pytest.fixture(scope="module", params=[pytest.param(False, marks=pytest.mark.nightly), True], ids=["one", "two"])
def engine(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Iterator[Engine]:
    """With one forward under way, or two. Each test has salts of its own."""
    with Engine(model_of("Llama"), {}, asynchronous=request.param) as made:
        yield made


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Mistral"])
def test_tokens_are_the_same(family: str, model_of: Callable[[str], Path]) -> None:
    """Whole prompts, and beginnings of others; layers with windows among them."""
    given = [LONG, *(COMMON + tail for tail in TAILS)]
    with Engine(model_of(family), {}, enable_prefix_caching=False) as engine:
        own = engine.tokens(given, ANSWER)
        again = engine.run(given, ANSWER)
        assert [each.known for each in again] == [0] * len(given)
        assert engine.forwards.engine.stats().matched_tokens == 0
    with Engine(model_of(family), {}) as engine:
        assert engine.tokens(given[:1], ANSWER) == own[:1]
        answers = engine.run(given, ANSWER)
        assert [each.tokens for each in answers] == own
        assert [each.known for each in answers] == [whole(len(LONG) - 1)] + [whole(len(COMMON))] * len(TAILS)
        assert engine.forwards.engine.stats().matched_tokens == sum(each.known for each in answers)


def test_fewer_tokens_are_computed(engine: Engine) -> None:
    computed: list[int] = []
    execute = engine.worker.execute_model

    def counted(scheduled: object) -> object:
        computed.append(scheduled.total_num_scheduled_tokens)
        return execute(scheduled)

    engine.worker.execute_model = counted
    try:
        for want in (len(LONG), len(LONG) - whole(len(LONG) - 1)):
            computed.clear()
            engine.run([LONG], greedy(9), cache_salt="fewer")
            assert sum(computed) - want in (8, 9)  # A step may be planned for a request that has ended.
    finally:
        del engine.worker.execute_model


def test_salts_keep_prompts_apart(engine: Engine) -> None:
    known = [engine.run([LONG], ANSWER, cache_salt=salt)[0].known for salt in ("one", "other", "one", "other")]
    assert known == [0, 0] + [whole(len(LONG) - 1)] * 2


def test_adapters_keep_prompts_apart() -> None:
    """Also one that has the name of another, which was unloaded."""
    salts: list[int] = []
    prefixes = Prefixes(SimpleNamespace(known=lambda prompt: salts.append(prompt.salt) or 0, bring=lambda prompt: True))
    for adapter in (None, ("a", 1, "one"), ("b", 2, "two"), ("a", 3, "two"), ("a", 1, "one")):
        lora = None if adapter is None else SimpleNamespace(
            **dict(zip(("lora_name", "lora_int_id", "lora_path"), adapter)))
        prefixes.get_num_new_matched_tokens(SimpleNamespace(
            request_id="0", mm_features=[], prompt_embeds=None, skip_reading_prefix_cache=False, cache_salt=None,
            lora_request=lora, num_tokens=len(LONG), all_token_ids=LONG), 0)
    assert len(set(salts)) == 4 and salts[1] == salts[4]


@pytest.mark.parametrize("policy", ["sluice", "snapkv"])
def test_policies(policy: str, model_of: Callable[[str], Path]) -> None:
    """The second wants the queries of a prompt's last 32 tokens, which are computed, known or not."""
    with Engine(model_of("Llama"), {"policy": policy}) as engine:
        unseen = engine.forwards.engine.sizes.prompt_queries
        assert unseen == {"sluice": 1, "snapkv": 32}[policy]
        answers = [engine.run([LONG, COMMON], greedy(8)) for _ in range(2)]
    assert [each.reason for each in answers[0] + answers[1]] == ["length"] * 4
    assert [each.known for each in answers[1]] == [whole(len(ids) - unseen) for ids in (LONG, COMMON)]


def test_requests_of_the_same_step_do_not_wait_for_each_other(engine: Engine) -> None:
    """What one computes the other one finds later, and no more than vLLM was told of."""
    answers = engine.run([LONG, LONG, COMMON], ANSWER, cache_salt="beside")
    assert answers[0].tokens == answers[1].tokens
    again = engine.run([LONG, LONG, COMMON], ANSWER, cache_salt="beside")
    assert [each.tokens for each in again] == [each.tokens for each in answers]
    assert [each.known for each in again] == [whole(len(LONG) - 1)] * 2 + [whole(len(COMMON) - 1)]


def test_prompts_whose_likelihoods_are_asked_for_are_read_whole(engine: Engine) -> None:
    asks = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    assert [engine.run([LONG], asks, cache_salt="asked")[0].known for _ in range(2)] == [0, 0]
    assert engine.run([LONG], ANSWER, cache_salt="asked")[0].known > 0


def test_short_prompts_and_whole_pages(engine: Engine) -> None:
    """The last token is computed, whatever is known."""
    for tokens in (1, PAGE, PAGE + 1, 4 * PAGE):
        known = [engine.run([LONG[:tokens]], ANSWER, cache_salt=f"short {tokens}")[0].known for _ in range(2)]
        assert known == [0, whole(tokens - 1)]


def test_a_reset_forgets(engine: Engine) -> None:
    """As vLLM's own prefixes are, which callers mean when they do not speak of connectors."""
    engine.run([LONG], ANSWER, cache_salt="reset")
    engine.vllm.reset_prefix_cache()
    assert [engine.run([LONG], ANSWER, cache_salt="reset")[0].known for _ in range(2)] == [0, whole(len(LONG) - 1)]


def test_requests_that_are_preempted_find_their_prompts(model_of: Callable[[str], Path]) -> None:
    given = prompts(100, 80, 120, 60, seed=7)
    with Engine(model_of("Llama"), {}) as engine:
        own = engine.tokens(given, greedy(60))

        def preempt(step: int, numbers: list[str]) -> None:
            scheduler = engine.core.scheduler
            if step == 20:
                while scheduler.running:
                    scheduler._preempt_request(scheduler.running.pop(), 0.0)
                scheduler.prev_step_scheduled_req_ids.clear()
            if step == 40:  # What they were known by is not found now.
                assert scheduler.reset_prefix_cache(reset_running_requests=True)

        before = engine.forwards.engine.stats().matched_tokens
        assert [each.tokens for each in engine.run(given, greedy(60), preempt, cache_salt="preempted")] == own
        assert engine.forwards.preemptions == 2 * len(given)
        assert engine.forwards.engine.stats().matched_tokens - before == sum(whole(len(ids)) for ids in given)


def test_what_is_known_gives_way(model_of: Callable[[str], Path]) -> None:
    """Host memory is full of known prompts: all requests are answered, and tokens are the same."""
    given = prompts(*range(40, 200, 10), seed=8)
    with Engine(model_of("Llama"), {"host_bytes": 1 << 20}, enable_prefix_caching=False) as engine:
        own = engine.tokens(given, ANSWER)
    with Engine(model_of("Llama"), {"host_bytes": 1 << 20}, asynchronous=True) as engine:
        for _ in range(2):
            assert engine.tokens(given, ANSWER) == own
        stats = engine.forwards.engine.stats()
        assert stats.evicted_blocks > 0 and stats.matched_tokens > 0


def test_a_prompt_that_is_forgotten_too_early_fails_alone(engine: Engine) -> None:
    """Between the scheduler's question and the step nothing is forgotten; were it, no wrong token would come of it."""
    own = engine.run([LONG, *TAILS], ANSWER, cache_salt="early")
    known = engine.forwards.known
    engine.forwards.known = lambda prompt: known(prompt) + (PAGE if len(prompt.ids) == len(LONG) else 0)
    try:
        answers = engine.run([LONG[:120] + LONG[:30], *TAILS], ANSWER, cache_salt="early")
    finally:
        del engine.forwards.known
    assert [each.reason for each in answers] == ["error"] + ["length"] * len(TAILS)
    assert [each.tokens for each in answers[1:]] == [each.tokens for each in own[1:]]
    assert engine.run([LONG], ANSWER, cache_salt="early")[0].tokens == own[0].tokens
    engine.settle()
    assert len(engine.forwards) == 1
