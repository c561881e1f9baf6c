"""The serving loop gives the tokens that the library's own generate() gives, whatever is in a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import sluice
import torch
from sluice.serving.loop import Loop
from small import ATOL, DEVICE, KV_BYTES, SHAPE, bare_model, expected, greedy, prompt_ids, run, text_of

LENGTHS = (1, 15, 16, 17, 40, 64, 65, 130)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_tokens_are_those_of_generate(make_loop: Callable[..., Loop], kind: str) -> None:
    model = bare_model(kind)
    wants = {length: expected(model, prompt_ids(length, length), 12) for length in LENGTHS}
    assert len({token for want in wants.values() for token in want}) > 10  # Tokens that tell something.
    loop = make_loop(kind)
    for length in LENGTHS:
        alone = run(loop, [greedy(length, prompt_ids(length, length))])
        assert alone.tokens(length) == wants[length]
        assert alone.last(length).finish == "length" and alone.last(length).count == 12
    for slowdown in (0.0, 1.5):  # However long chunks of prompts are.
        together = run(make_loop(kind, slowdown=slowdown), [greedy(length, prompt_ids(length, length))
                                                            for length in LENGTHS])
        assert {length: together.tokens(length) for length in LENGTHS} == wants


@pytest.mark.parametrize("policy", ["exact | int4 | top_k=16 | near=0,sinks=4,recent=16",
                                    "exact | top_k=16 | near=0,sinks=4,recent=16"])
def test_policies_that_choose(make_loop: Callable[..., Loop], policy: str) -> None:
    """What is attended, and so what comes, does not depend on the requests beside it."""
    requests = [greedy(length, prompt_ids(length, length), 24) for length in (5, 33, 100, 150)]
    loop, wants = make_loop(policy=policy, prefix=False), {}
    for request in requests:
        wants[request.number] = run(loop, [request]).tokens(request.number)
    together = make_loop(policy=policy, prefix=False)
    told = run(together, requests)
    assert {each.number: told.tokens(each.number) for each in requests} == wants
    for each in (loop, together):
        stats = each.status().stats
        rows = sum((len(request.prompt) + at) for request in requests for at in range(1, 24))
        attended = stats["near_tokens"] + stats["far_tokens"] + stats["fetched_tokens"]
        assert 0 < attended < 0.7 * rows * 3 * 2  # Layers and KV heads: something was left out.
    assert run(make_loop(), requests[:1]).tokens(5) == wants[5]  # So short that all is attended.


def test_prompts_that_are_known_are_not_read_again(make_loop: Callable[..., Loop]) -> None:
    prompt = prompt_ids(70)
    requests = [greedy(1, prompt), greedy(2, prompt), greedy(3, [*prompt[:40], *prompt_ids(20, 9)])]
    without = make_loop(prefix=False)
    wants = [run(without, [request]) for request in requests]
    loop = make_loop()
    told = [run(loop, [request]) for request in requests]
    assert [each.tokens(request.number) for each, request in zip(told, requests)] == \
        [each.tokens(request.number) for each, request in zip(wants, requests)]
    assert [each.last(request.number).cached for each, request in zip(told, requests)] == [0, 64, 32]
    salted = [dataclasses.replace(requests[0], number=10 + at, salt=salt) for at, salt in enumerate((7, 1 << 63, 7))]
    apart = [run(loop, [request]) for request in salted]
    assert [each.last(request.number).cached for each, request in zip(apart, salted)] == [0, 0, 64]
    assert [each.tokens(request.number) for each, request in zip(apart, salted)] == 3 * [wants[0].tokens(1)]
    assert {each.last(request.number).cached for each, request in zip(wants, requests)} == {0}
    # What was decoded is known, too: the next turn of a conversation.
    again = [*prompt, *told[0].tokens(1), *prompt_ids(5, 8)]
    assert run(loop, [greedy(4, again)]).last(4).cached == 80


def test_one_prompt_for_several_answers_is_read_once(make_loop: Callable[..., Loop]) -> None:
    loop, prompt = make_loop(), prompt_ids(100)
    requests = [greedy(1, prompt, seed=1, temperature=1.0)]
    requests += [greedy(number, prompt, seed=number, temperature=1.0, after=1) for number in (2, 3)]
    told = run(loop, requests)
    assert [told.last(number).cached for number in (1, 2, 3)] == [0, 96, 96]
    assert told.order[:4] == [1, 1, 2, 3]  # They do not wait for its end.
    assert len({tuple(told.tokens(number)) for number in (1, 2, 3)}) == 3
    # The first is given up before it has read its prompt: the others do without.
    loop.submit(requests[0])
    loop.submit(requests[1])
    loop.abort(1)
    assert run(loop, []).last(2).finish == "length"


def test_the_next_of_several_reads_a_prompt_whose_first_reader_leaves(make_loop: Callable[..., Loop]) -> None:
    loop, prompt = make_loop(), prompt_ids(200)
    for number in range(1, 6):
        loop.submit(greedy(number, prompt, after=1 if number > 1 else None))
    loop.step()  # A part of it.
    loop.abort(1)
    loop.abort(3)
    loop.step()
    loop.abort(2)
    told = run(loop, [])
    assert set(told.events) == {4, 5} and told.last(4).finish == told.last(5).finish == "length"
    assert told.last(5).cached == 192 and told.last(4).cached < 192


def test_what_is_drawn_depends_on_the_seed_alone(make_loop: Callable[..., Loop]) -> None:
    def requests() -> list:
        return [greedy(at, prompt_ids(20, at), 16, temperature=1.0, seed=at, **options)
                for at, options in enumerate(({}, {"top_p": 0.8}, {"top_k": 5}, {"repetition_penalty": 1.3},
                                              {"presence_penalty": 1.0, "frequency_penalty": 0.5}))]

    together = run(make_loop(), requests())
    loop = make_loop()
    for request in reversed(requests()):
        assert run(loop, [request]).tokens(request.number) == together.tokens(request.number)


def test_ends_of_answers(make_loop: Callable[..., Loop]) -> None:
    prompt, loop = prompt_ids(20), make_loop()
    free = run(loop, [greedy(1, prompt, 40)])
    tokens = free.tokens(1)
    place = next(at for at in range(5, 40) if tokens[at] not in tokens[:at])
    stopped = run(loop, [greedy(2, prompt, 40, stop_ids=frozenset({tokens[place]}))])
    assert stopped.tokens(2) == tokens[:place]
    assert stopped.last(2).finish == "stop" and stopped.last(2).count == place + 1
    # The model's own end, which is another token's here.
    ends = make_loop(end_ids=[tokens[place]])
    assert run(ends, [greedy(3, prompt, 40, ignore_eos=False)]).tokens(3) == tokens[:place]
    assert run(ends, [greedy(4, prompt, 40)]).tokens(4) == tokens
    # The context's end.
    assert run(loop, [greedy(5, prompt_ids(250), None)]).last(5).count == 256 - 250
    assert run(loop, [greedy(6, prompt_ids(255), None)]).last(6).count == 1


def cuts_a_character(ids: Sequence[int]) -> int | None:
    """The tokens of an answer that end within a character; None if there is no such number."""
    return next((at for at in range(1, len(ids)) if text_of(list(ids[:at])).endswith("\ufffd")), None)


def test_texts_that_end_answers_across_tokens(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    prompt = next(ids for ids in (prompt_ids(20, seed) for seed in range(1, 50))
                  if cuts_a_character(expected(bare_model("llama"), ids, 40)) is not None)
    free = run(loop, [greedy(1, prompt, 40)])
    whole = text_of(free.tokens(1))
    assert free.text(1) == whole
    for first in range(len(whole) - 3):
        stop = whole[first : first + 3]
        told = run(loop, [greedy(first + 2, prompt, 40, stop=("never comes", stop))])
        assert told.text(first + 2) == whole[: whole.index(stop)]
        assert told.last(first + 2).finish == "stop"
    # An answer that ends within a character, whose mark is a part of the text that ends it.
    cut = cuts_a_character(free.tokens(1))
    stop = text_of(free.tokens(1)[:cut])
    told = run(loop, [greedy(98, prompt, cut, stop=(stop,))])
    assert (told.text(98), told.last(98).finish) == ("", "stop")
    told = run(loop, [greedy(99, prompt, 40, stop=(whole[-4:] + "?",))])  # Held back, and told in the end.
    assert told.text(99) == whole and told.last(99).finish == "length"


def test_an_abort_gives_memory_back_at_once(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    memory = loop._engine.memory
    loop.submit(greedy(1, prompt_ids(130), 100))
    loop.step()  # A part of its prompt.
    assert memory().far_pages_used
    loop.abort(1)
    assert memory().far_pages_used == 0 and loop.idle and loop.step() == []
    loop.submit(greedy(2, prompt_ids(20), 100))
    while not loop.step():
        pass
    loop.submit(greedy(3, prompt_ids(20), 100))  # Never begins.
    loop.abort(3)
    loop.abort(2)
    loop.abort(2)
    assert memory().far_pages_used == 0 and loop.idle


def test_preempted_requests_give_the_same_tokens(make_loop: Callable[..., Loop]) -> None:
    requests = [greedy(length, prompt_ids(length, length), 60) for length in (30, 31, 32, 33, 50)]
    wants = run(make_loop(), requests)
    page = 16 * 3 * 2 * SHAPE["head_dim"] * 2 * KV_BYTES
    for pages in (7, 12):  # The longest alone needs 7.
        loop = make_loop(host_bytes=pages * page)
        assert loop.limit == pages * 16
        told = run(loop, requests)
        assert loop.status().preemptions > 0
        for request in requests:
            assert told.tokens(request.number) == wants.tokens(request.number)
            assert told.text(request.number) == wants.text(request.number)
        assert loop.status().memory.far_pages_used == 0


def test_a_forward_that_fails_once_is_repeated(make_loop: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    wants = run(make_loop(), [greedy(1, prompt_ids(40)), greedy(2, prompt_ids(7))])
    loop = make_loop()
    finish, calls = loop._engine.finish, []

    def failing(number: int) -> None:
        calls.append(number)
        if len(calls) % 3 == 1:
            loop._engine.cancel(number)
            raise sluice.DeviceError("the far part was not answered in time")
        finish(number)

    monkeypatch.setattr(loop._engine, "finish", failing)
    told = run(loop, [greedy(1, prompt_ids(40)), greedy(2, prompt_ids(7))])
    assert told.tokens(1) == wants.tokens(1) and told.tokens(2) == wants.tokens(2)
    assert loop.status().failed_forwards > 2


def test_a_forward_that_fails_again_fails_its_requests_alone(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop(sequences=1)
    layer, failing = loop._model._model.model.layers[1], [True]
    layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("the model's own")) if failing else None)
    loop.submit(greedy(1, prompt_ids(40)))
    loop.submit(greedy(2, prompt_ids(41)))  # Waits.
    events = loop.step()
    assert [(event.number, event.finish) for event in events] == [(1, None)] and "the model's own" in events[0].error
    failing.clear()
    want = expected(bare_model("llama"), prompt_ids(41), 12)
    assert run(loop, []).tokens(2) == want
    assert loop.status().failed_forwards == 2 and loop.status().memory.far_pages_used == 0


def test_probabilities_are_the_models(make_loop: Callable[..., Loop]) -> None:
    prompt = prompt_ids(30)
    told = run(make_loop(), [greedy(1, prompt, 8, logprobs=3, temperature=0.7, seed=5, presence_penalty=1.0)])
    tokens = told.tokens(1)
    with torch.no_grad():
        logs = bare_model("llama")(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    for at, chosen in enumerate(token for event in told.events[1] for token in event.tokens):
        assert chosen.logprob == pytest.approx(logs[at, chosen.token].item(), abs=ATOL)
        values, ids = logs[at].topk(3)
        numbers = [number for number, _ in chosen.top]
        if DEVICE == "cpu":
            assert numbers == ids.tolist()
        assert len(set(numbers)) == 3 and logs[at, numbers].tolist() == pytest.approx(values.tolist(), abs=ATOL)
        assert [value for _, value in chosen.top] == pytest.approx(values.tolist(), abs=ATOL)


@pytest.mark.parametrize(("request_of", "words"), [
    (lambda: greedy(1, []), "no tokens"),
    (lambda: greedy(1, prompt_ids(256)), "256 tokens.*256; shorten"),
    (lambda: greedy(1, [5, 9999]), "9999 is none of the model's"),
    (lambda: greedy(1, [5], logit_bias={-1: 1.0}), "-1 is none"),
    (lambda: greedy(1, [5], temperature=-1), "temperature is -1"),
    (lambda: greedy(1, [5], top_p=0), "top_p is 0"),
    (lambda: greedy(1, [5], -1), "max_tokens is -1"),
    (lambda: greedy(1, [5], stop=("",)), "empty text"),
    (lambda: greedy(1, [5], logprobs=21), "logprobs is 21"),
])
def test_requests_that_are_refused(make_loop: Callable[..., Loop], request_of: Callable, words: str) -> None:
    loop = make_loop()
    with pytest.raises(sluice.InvalidArgument, match=words):
        loop.submit(request_of())
    assert loop.idle


def test_an_engine_without_room_lets_the_youngest_rest(make_loop: Callable[..., Loop],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [greedy(number, prompt_ids(20, number)) for number in (1, 2, 3)]
    wants, loop = run(make_loop(), requests), make_loop()
    plan = loop._engine.plan

    def full(items: list, *others: object) -> int:
        if len(items) > most:
            raise sluice.OutOfCapacity("no page is left")
        return plan(items, *others)

    monkeypatch.setattr(loop._engine, "plan", full)
    most = 2
    told = run(loop, requests)
    assert [told.tokens(each.number) for each in requests] == [wants.tokens(each.number) for each in requests]
    assert loop.status().preemptions == 1 and loop.status().failed_forwards == 0
    most = 0  # Nobody else is in its way.
    assert "OutOfCapacity: no page is left" in run(loop, requests[:1]).last(1).error
    assert loop.status().memory.far_pages_used == 0


def test_logits_that_are_no_numbers_fail_their_request_alone(make_loop: Callable[..., Loop],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    wants = run(loop, [greedy(1, prompt_ids(20, 1))])
    forward = loop._model.run

    def broken(items: list, ids: list, kept: list) -> tuple:
        number, logits = forward(items, ids, kept)
        return number, torch.cat([logits[:-1], torch.full_like(logits[-1:], torch.nan)])

    loop.submit(greedy(1, prompt_ids(20, 1)))
    first = loop.step()
    loop.submit(greedy(2, prompt_ids(21, 2)))
    monkeypatch.setattr(loop._model, "run", broken)
    events = loop.step()
    assert [event.number for event in events] == [1, 2] and "not finite" in events[1].error and not events[0].error
    monkeypatch.undo()
    rest = run(loop, [])
    assert [token.token for event in (*first, events[0], *rest.events[1]) for token in event.tokens] == wants.tokens(1)
