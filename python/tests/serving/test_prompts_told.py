"""Probabilities of a prompt's tokens, answers of a least length, and prompts that are only read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sluice.serving.answers import Form, Shown
from sluice.serving.loop import Loop
from sluice.serving.sending import together
from sluice.serving.tokens import TokenBytes
from small import ATOL, bare_model, expected, greedy, prompt_ids, run, tokenizer


def wanted(ids: list[int]) -> list[float]:
    with torch.no_grad():
        logs = bare_model("llama")(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return logs[torch.arange(len(ids) - 1), ids[1:]].tolist()


@pytest.mark.parametrize("options", [{}, {"host_bytes": 1 << 20}], ids=["at-once", "in-turns"])
def test_prompts_are_told_as_the_library_has_them(make_loop: Callable[..., Loop], options: dict) -> None:
    """Though they are read in chunks, are known already, and are read again."""
    loop, lengths = make_loop(**options), (1, 2, 63, 64, 65, 150)
    prompts = {length: prompt_ids(length, length) for length in lengths}
    run(loop, [greedy(1000 + length, prompts[length], 1) for length in lengths])
    told = run(loop, [greedy(length, prompts[length], 3, prompt_logprobs=2, logprobs=2) for length in lengths])
    for length in lengths:
        event = together(told.events[length])
        assert [each.token for each in event.prompt] == prompts[length] and event.prompt[0].logprob is None
        got = [each.logprob for each in event.prompt[1:]]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted(prompts[length])), atol=10 * ATOL, rtol=1e-3)
        assert all(len(each.top) == 2 and each.top[0][1] >= each.logprob for each in event.prompt[1:])
        assert told.tokens(length) == expected(bare_model("llama"), prompts[length], 3)


def test_prompts_that_are_only_read(make_loop: Callable[..., Loop]) -> None:
    loop = make_loop()
    told = run(loop, [greedy(1, prompt_ids(70), 0, prompt_logprobs=0, logprobs=0),
                      greedy(2, prompt_ids(70), 2, after=1), greedy(3, prompt_ids(20, 2), 0)])
    assert [len(told.events[number]) for number in (1, 3)] == [1, 1]
    (event,) = told.events[1]
    assert (event.finish, event.text, event.tokens, event.count) == ("length", "", (), 0) and len(event.prompt) == 70
    assert len(told.tokens(2)) == 2 and loop.idle


def test_answers_of_a_least_length(make_loop: Callable[..., Loop]) -> None:
    prompt = prompt_ids(20)
    tokens = expected(bare_model("llama"), prompt, 12)
    ends = make_loop(end_ids=[tokens[2]])
    told = run(ends, [greedy(1, prompt, 12, ignore_eos=False), greedy(2, prompt, 12, ignore_eos=False, min_tokens=6)])
    assert told.tokens(1) == tokens[:2] and told.last(1).end.token == tokens[2]
    assert len(told.tokens(2)) >= 6 and tokens[2] not in told.tokens(2)[:6]
    text = tokenizer().decode(tokens)
    told = run(make_loop(), [greedy(3, prompt, 12, stop=(text[:1],), min_tokens=4)])
    assert len(told.tokens(3)) >= 4


def shown(events: list, prompt: list[int], **more: object) -> dict:
    form = Form("tiny", False, TokenBytes(tokenizer()), Shown(**{"logprobs": True, "ids": True, "prompts": [prompt],
                                                                 **more}))
    return form.whole([together(events)], {})["choices"][0]


def test_a_prompt_comes_first_if_it_is_to(make_loop: Callable[..., Loop]) -> None:
    """As lm-eval reads it: one entry for each token of the prompt and one for the answer's, also if that is an end."""
    prompt = tokenizer().encode("the cat é sat")
    answer = expected(bare_model("llama"), prompt, 1)
    for ends in ((), answer):
        told = run(make_loop(end_ids=ends), [greedy(1, prompt, 1, prompt_logprobs=1, logprobs=1, ignore_eos=False)])
        choice = shown(told.events[1], prompt, echo=["the cat é sat"])
        assert choice["text"] == "the cat é sat" + ("" if ends else told.text(1))
        probabilities = choice["logprobs"]
        assert {len(each) for each in probabilities.values()} == {len(prompt) + 1}
        assert probabilities["token_logprobs"][0] is None and probabilities["top_logprobs"][0] is None
        assert probabilities["text_offset"][: len(prompt)] == [
            len(tokenizer().decode(prompt[:at]).rstrip("\ufffd")) for at in range(len(prompt))]
        assert choice["prompt_token_ids"] == prompt and choice["token_ids"] == answer
        assert all(top is None or name in top for name, top in zip(probabilities["tokens"],
                                                                  probabilities["top_logprobs"]))
