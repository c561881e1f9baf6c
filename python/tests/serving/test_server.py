"""OpenAI's own client against a real server."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from server import Server
from sluice.serving.tokens import TokenBytes
from small import KV_BYTES, SHAPE, bare_model, expected, prompt_ids, text_of, tokenizer
from waiting import DEADLINE_S, wait_until

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def strict(folder: Path) -> Iterator[Server]:
    """One answer at a time, one that waits, and a key."""
    with Server(folder, "--sequences", "1", "--queue", "1", SLUICE_API_KEY="secret") as server:
        yield server


def test_completions_are_those_of_generate(shared: Server) -> None:
    lengths = (1, 5, 16, 17, 64, 65, 130, 200)
    wants = [text_of(expected(bare_model("llama"), prompt_ids(each, each), 20)) for each in lengths]
    client = shared.client()

    def ask(length: int, stream: bool) -> str:
        answer = client.completions.create(prompt=prompt_ids(length, length), max_tokens=20, stream=stream, **GREEDY)
        return "".join(piece.choices[0].text for piece in answer) if stream else answer.choices[0].text

    assert [ask(each, False) for each in lengths] == wants
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda each: ask(each, False), lengths)) == wants
        assert list(pool.map(lambda each: ask(each, True), lengths)) == wants


def test_chat(shared: Server) -> None:
    client = shared.client()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [
        {"type": "text", "text": "the cat"}, {"type": "text", "text": " sat on the mat"}]}]
    rendered = "<|system|>be brief<|end|><|user|>the cat sat on the mat<|end|><|assistant|>"
    ids = tokenizer().encode(rendered)
    want = expected(bare_model("llama"), ids, 24)
    answer = client.chat.completions.create(messages=messages, max_completion_tokens=24, **GREEDY)
    assert answer.choices[0].message.content == text_of(want) and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length" and answer.object == "chat.completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == \
        (len(ids), 24, len(ids) + 24)
    pieces = list(client.chat.completions.create(messages=messages, max_tokens=24, stream=True, stream_options={
        "include_usage": True}, **GREEDY))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == text_of(want)
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-2].choices[0].finish_reason == "length"
    assert not pieces[-1].choices and pieces[-1].usage.completion_tokens == 24
    assert pieces[-1].usage.prompt_tokens_details.cached_tokens == 16  # Known from the call before.


def test_choices_seeds_and_several_prompts(shared: Server) -> None:
    client = shared.client()
    options = {"model": "tiny", "temperature": 1.0, "max_tokens": 16, "n": 3, "seed": 7}
    answer = client.completions.create(prompt=["the cat", "a dog"], **options)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6)) and len(set(texts)) == 6
    again = client.completions.create(prompt=["the cat", "a dog"], **options)
    assert [choice.text for choice in again.choices] == texts
    streamed = [""] * 6
    for piece in client.completions.create(prompt=["the cat", "a dog"], stream=True, **options):
        for choice in piece.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    assert client.completions.create(prompt="the cat", **{**options, "n": 1, "seed": 9}).choices[0].text == texts[2]
    free = [client.completions.create(prompt="the cat", **{**options, "n": 1, "seed": None}).choices[0].text
            for _ in range(3)]
    assert len(set(free)) > 1


def test_stops(shared: Server) -> None:
    client, prompt = shared.client(), prompt_ids(20)
    whole = text_of(expected(bare_model("llama"), prompt, 40))
    stop = whole[20:23]
    for stream in (False, True):
        answer = client.completions.create(prompt=prompt, max_tokens=40, stop=["never", stop], stream=stream, **GREEDY)
        pieces = list(answer) if stream else [answer]
        assert "".join(piece.choices[0].text for piece in pieces) == whole[: whole.index(stop)]
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_probabilities(shared: Server) -> None:
    client, prompt = shared.client(), tokenizer().encode("the cat sat on")
    want = expected(bare_model("llama"), prompt, 6)
    told = client.completions.create(prompt=prompt, max_tokens=6, logprobs=2, **GREEDY).choices[0].logprobs
    assert told.tokens == [TokenBytes(tokenizer()).name(each) for each in want]
    assert all(max(top.values()) == pytest.approx(own) for top, own in zip(told.top_logprobs, told.token_logprobs))
    assert told.text_offset[0] == 0 and len(told.text_offset) == 6
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], max_tokens=4, logprobs=True,
                                          top_logprobs=3, **GREEDY).choices[0].logprobs.content
    assert len(chat) == 4
    for each in chat:
        assert len(each.top_logprobs) == 3 and each.top_logprobs[0].token == each.token
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob) and each.logprob <= 0


def test_prompts_that_are_told_and_numbers_of_tokens(shared: Server) -> None:
    client, prompt = shared.client(), tokenizer().encode("the cat sat on")
    told = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1,
                                     extra_body={"return_token_ids": True}).choices[0]
    assert told.text.startswith("the cat sat on") and len(told.logprobs.tokens) == len(prompt) + 1
    assert told.logprobs.token_logprobs[0] is None and max(told.logprobs.token_logprobs[1:]) < 0
    assert told.prompt_token_ids == prompt and len(told.token_ids) == 1
    ids = httpx.post(f"{shared.url}/tokenize", json={"prompt": "the cat sat on"}, timeout=DEADLINE_S).json()["tokens"]
    assert ids == prompt


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="the package llguidance is not installed")
def test_answers_that_follow_a_schema(shared: Server) -> None:
    mats = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"cat": {"enum": ["sat", "ran"]}, "mats": mats},
              "required": ["cat", "mats"], "additionalProperties": False}
    wants = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 100, "seed": 1,
             "response_format": {"type": "json_schema", "json_schema": {"name": "cats", "schema": schema}}}
    client = shared.client()
    whole = client.chat.completions.create(**wants).choices[0]
    pieces = [piece.choices[0] for piece in client.chat.completions.create(stream=True, **wants)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert json.loads(whole.message.content).keys() == {"cat", "mats"} and whole.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_gives_its_memory_back(shared: Server, stream: bool) -> None:
    wait_until(lambda: shared.memory() == 0)
    before = shared.metric('sluice_requests_total{outcome="given_up"}')
    body = json.dumps({"model": "tiny", "prompt": prompt_ids(100), "max_tokens": 7000, "ignore_eos": True,
                       "stream": stream}).encode()
    address = httpx.URL(shared.url)
    with socket.create_connection((address.host, address.port), DEADLINE_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: tiny\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: shared.metric("sluice_running") == 1)
        if stream:
            told = b""
            while b"data: {" not in told:
                told += (piece := connection.recv(1 << 16))
                assert piece and told.startswith(b"HTTP/1.1 200 OK")
    wait_until(lambda: shared.metric('sluice_requests_total{outcome="given_up"}') == before + 1)
    wait_until(lambda: shared.metric("sluice_running") == 0)
    wait_until(lambda: shared.memory() == 0)


@pytest.mark.parametrize(("change", "status", "words"), [
    ({"prompt": prompt_ids(8192)}, 400, "8192 tokens.*8192"),
    ({"prompt": prompt_ids(8000), "max_tokens": 200}, 400, "8000 tokens, and 200 more.*8192"),
    ({"prompt": []}, 400, "no tokens"),
    ({"prompt": ""}, 400, "no tokens"),
    ({"prompt": [1, 5000]}, 400, "5000 is none"),
    ({"prompt": ["a"] * 65, "n": 2}, 400, "too many"),
    ({"prompt": "a", "model": "other"}, 404, '"other".*"tiny"'),
    ({"prompt": "a", "temperature": 9}, 400, "temperature.*2"),
    ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "a", "guided_json": {}}, 400, "guided_json is not served"),
    ({}, 400, "prompt"),
])
def test_requests_that_are_refused(shared: Server, change: dict, status: int, words: str) -> None:
    body = {"model": "tiny", **change}
    answer = httpx.post(f"{shared.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == status
    assert shared.metric('sluice_requests_total{outcome="refused"}') > 0
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and re.search(words, error["message"])


@pytest.mark.parametrize(("change", "words"), [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
    ({"messages": [{"content": "a"}]}, "role"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"response_format": {"type": "bogus"}}, "response_format"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "may not have chat_template"),
])
def test_chats_that_are_refused(shared: Server, change: dict, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        shared.client().chat.completions.create(**{
            "model": "tiny", "messages": [{"role": "user", "content": "a"}], **change})


def test_models_and_metrics(shared: Server) -> None:
    assert [model.id for model in shared.client().models.list()] == ["tiny"]
    assert shared.get("/health").json() == {"status": "ok"}
    before = shared.metric("sluice_answer_tokens_total")
    shared.client().completions.create(prompt="the cat", max_tokens=5, **GREEDY)
    assert shared.metric("sluice_answer_tokens_total") == before + 5
    for name in ("sluice_time_to_first_token_seconds_count", "sluice_time_per_output_token_seconds_count",
                 'sluice_requests_total{outcome="done"}', "sluice_prompt_tokens_total", "sluice_forwards_total",
                 'sluice_memory_bytes{kind="far_pages"}', 'sluice_engine_total{kind="matched_tokens"}'):
        assert shared.metric(name) > 0


def test_a_queue_that_is_full(strict: Server) -> None:
    client = strict.client("secret")

    def ask(tokens: int) -> object:
        return client.completions.create(prompt=prompt_ids(10), max_tokens=tokens, stream=True, **GREEDY)

    runs, waits = ask(8000), ask(3)
    next(iter(runs))
    wait_until(lambda: strict.metric("sluice_waiting") == 1)
    with pytest.raises(openai.RateLimitError, match="try again later") as refused:
        ask(3)
    assert refused.value.response.headers["retry-after"] == "1"
    runs.close()
    assert len("".join(piece.choices[0].text for piece in waits)) > 0  # Its turn comes.
    assert client.completions.create(prompt="a", max_tokens=2, **GREEDY).usage.completion_tokens == 2


def test_an_api_key(strict: Server) -> None:
    for key in ("wrong", "secret2", "s"):
        with pytest.raises(openai.AuthenticationError, match="API key"):
            strict.client(key).models.list()
    for path in ("completions", "chat/completions"):
        assert httpx.post(f"{strict.url}/v1/{path}", json={}, timeout=DEADLINE_S).status_code == 401
    assert [model.id for model in strict.client("secret").models.list()] == ["tiny"]
    assert strict.get("/health").status_code == 200


def test_preempted_answers_are_the_same(start: Callable[..., Server], shared: Server) -> None:
    """With forwards of fixed sizes, too; which these are, test_graphs.py has."""
    server = start("--graphs", "on", "--host-bytes", str(12 * 16 * 3 * 2 * SHAPE["head_dim"] * 2 * KV_BYTES))
    lengths = (30, 31, 32, 33)

    def ask(of: Server, length: int) -> openai.Stream:
        return of.client().completions.create(prompt=prompt_ids(length, length), max_tokens=140, stream=True, **GREEDY)

    def text(pieces: openai.Stream) -> str:
        return "".join(piece.choices[0].text for piece in pieces)

    with ThreadPoolExecutor(4) as pool:
        wants = list(pool.map(lambda length: text(ask(shared, length)), lengths))
        streams = list(pool.map(lambda length: ask(server, length), lengths))  # All have begun before one is read.
        assert list(pool.map(text, streams)) == wants
    assert server.metric("sluice_preemptions_total") > 0
    wait_until(lambda: server.metric("sluice_graph_replays_total") > 0)  # Its status comes now and then.
    assert server.metric("sluice_graph_captures_total") > 0
