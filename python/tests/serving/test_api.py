"""The web application over an engine that is not there."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from bodies import fits
from sluice.serving.answering import Front
from sluice.serving.api import create_app
from sluice.serving.guard import Guard
from sluice.serving.process import EngineLost, Ready, Settings
from sluice.serving.requests import Event, Status
from small import tokenizer
from waiting import DEADLINE_S

LIMIT = 512


class Engine:
    """Answers with a text at once."""

    def __init__(self) -> None:
        self.settings, self.status, self.outstanding = Settings("none", sequences=2), Status(), 0
        self.lost: str | None = None
        self.text = "fine"
        self.asked: list[Any] = []

    def answer(self, prompts: Any, samplings: Any, salt: int) -> Engine:
        if self.lost:
            raise EngineLost(self.lost)
        self.asked.append((prompts, samplings, salt))
        return self

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        yield 0, Event(1, self.text, count=1, finish="stop")

    def listen(self) -> None:
        pass

    def close(self) -> None:
        pass


class Words:
    """The tokenizer, which waits and counts."""

    def __init__(self) -> None:
        self.free, self.calls = threading.Event(), 0
        self.free.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(tokenizer(), name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.calls += 1
        assert self.free.wait(DEADLINE_S)
        return tokenizer().encode(text, **options)


class Site:
    def __init__(self, words: Words | None = None, **front: Any) -> None:
        self.engine, self.words = Engine(), words or Words()
        self.app = create_app(self.engine, Ready(LIMIT, {}, 300), self.words,
                              Front("tiny", **{"queue": 1, **front}))

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=DEADLINE_S) as client:
            return await client.request(method, path, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self.send("GET", path, **options))

    def post(self, path: str = "completions", **options: Any) -> httpx.Response:
        return asyncio.run(self.send("POST", f"/v1/{path}", **options))

    def ask(self, **wants: Any) -> httpx.Response:
        path = "chat/completions" if "messages" in wants else "completions"
        return self.post(path, json={"model": "tiny", **wants})

    def metric(self, outcome: str) -> float:
        name = f'sluice_requests_total{{outcome="{outcome}"}} '
        return next((float(line[len(name):]) for line in self.get("/metrics").text.splitlines()
                     if line.startswith(name)), 0)


@pytest.fixture
def site() -> Iterator[Site]:
    yield Site()


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer wrong", b"Basic secret", "Bearer gehe\u00efm".encode()])
def test_the_key_is_checked_before_anything_is_read(header: bytes) -> None:
    site, said = Site(api_keys=("secret",)), []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        said.append(message)

    headers = [(b"authorization", header), (b"content-length", b"99999999999")]
    for path in ("/v1/completions", "/v1/models", "/v1/none"):
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        asyncio.run(site.app(scope, receive, send))
    assert [message["status"] for message in said if "status" in message] == [401] * 3
    assert site.get("/v1/models", headers={"authorization": "bearer secret"}).status_code == 200
    assert site.get("/metrics").status_code == 200 and site.metric("refused") == 3


def test_bodies_that_are_too_long() -> None:
    site = Site(max_body=100)
    assert "100 bytes" in error_of(site.post(content=b"{" + b" " * 100), 413)["message"]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 40
        raise AssertionError("all was read")

    # Whose length nobody says.
    assert error_of(site.post(content=pieces(), headers={"content-type": "application/json"}),
                    413)["code"] == "body_too_long"
    assert site.ask(prompt="a").status_code == 200


def test_bodies_that_are_too_long_together() -> None:
    """Those that are not whole are counted, however their clients go."""
    site = Site(max_body=100)
    wait, told = asyncio.Event(), []

    async def never() -> AsyncIterator[bytes]:
        yield b" " * 90
        await wait.wait()

    async def check() -> None:
        site.app.middleware_stack = site.app.build_middleware_stack()
        held = site.app.middleware_stack
        while not isinstance(held, Guard):
            held = held.app
        held._most_held = 400
        slow = [asyncio.create_task(site.send("POST", "/v1/completions", content=never())) for _ in range(4)]
        while held._held < 360:
            await asyncio.sleep(0.01)
        told.append(await site.send("POST", "/v1/completions", content=never()))
        for each in slow:
            each.cancel()
        await asyncio.wait(slow)
        assert held._held == 0
        told.append(await site.send("POST", "/v1/completions", json={"model": "tiny", "prompt": "a"}))

    asyncio.run(check())
    assert error_of(told[0], 503)["code"] == "busy" and told[1].status_code == 200


def test_more_answers_than_there_may_ever_be(site: Site) -> None:
    """To come again later would be of no use."""
    for wants in ({"prompt": "a", "n": 4}, {"prompt": ["a", "b"], "n": 2}):
        error = error_of(site.ask(**wants), 400)
        assert error["param"] == "n" and "4 answers to one request are more than this server takes at once, 3" in \
            error["message"]
    assert site.ask(prompt="a", n=3).status_code == 200


def test_what_is_known_of_prompts_is_told_to_those_who_sent_them() -> None:
    """Another key, user or cache key, and another server, has another salt; servers of one secret have the same."""
    def salts(**front: Any) -> list[int]:
        site = Site(**front)
        for key in front.get("api_keys", ("",)):
            for wants in ({}, {"user": "a"}, {"user": "b"}, {"prompt_cache_key": "a"}, {"safety_identifier": "a"},
                          {"user": "a", "prompt_cache_key": "b"}):
                for _ in range(2):
                    answer = site.post(json={"model": "tiny", "prompt": "x", **wants},
                                       headers={"authorization": f"Bearer {key}"} if key else {})
                    assert answer.status_code == 200, answer.text
        return [salt for *_, salt in site.engine.asked]

    apart, again = (salts(api_keys=("one", "two")) for _ in range(2))
    assert apart[::2] == apart[1::2] and len(set(apart)) == 12 and not set(apart) & set(again)
    assert len(set(salts())) == 6 and set(salts(shared_prefixes=True)) == {0}
    shared, others = (salts(api_keys=("one", "two"), secret=secret * 32) for secret in (b"a", b"b"))
    assert shared == salts(api_keys=("one", "two"), secret=b"a" * 32) and not set(shared) & set(others)


def test_several_keys() -> None:
    site = Site(api_keys=("one", "two"))
    codes = [site.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
             for key in ("one", "two", "three", "one two", "")]
    assert codes == [200, 200, 401, 401, 401]


def test_a_full_queue_reads_no_prompt(site: Site) -> None:
    site.engine.outstanding = 3
    for wants in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        assert error_of(site.ask(**wants), 429)["code"] == "queue_full"
    assert site.words.calls == 0


def test_prompts_that_are_read_have_places(site: Site) -> None:
    async def check() -> None:
        site.words.free.clear()
        body = {"model": "tiny", "prompt": "a"}
        waiting = [asyncio.create_task(site.send("POST", "/v1/completions", json=body)) for _ in range(3)]
        while site.words.calls == 0:
            await asyncio.sleep(0.01)
        assert (await site.send("POST", "/v1/completions", json=body)).status_code == 429
        site.words.free.set()
        assert [(await each).status_code for each in waiting] == [200] * 3
        assert (await site.send("POST", "/v1/completions", json=body)).status_code == 200
    asyncio.run(check())


def test_prompts_of_clients_that_are_gone_are_not_read(site: Site) -> None:
    async def ask(gone: asyncio.Event) -> None:
        body = [{"type": "http.request", "body": json.dumps({"model": "tiny", "prompt": "a"}).encode()}]

        async def receive() -> Any:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        await site.app({"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
                        "headers": [(b"content-type", b"application/json")]}, receive, send)

    async def check() -> None:
        site.words.free.clear()
        gone = asyncio.Event()
        asked = [asyncio.create_task(ask(gone)) for _ in range(3)]
        while site.words.calls == 0:
            await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait_for(asyncio.gather(*asked), DEADLINE_S)  # Though the first one is still being read.
        site.words.free.set()
        assert (await site.send("POST", "/v1/completions", json={"model": "tiny", "prompt": "a"})).status_code == 200
    asyncio.run(check())
    assert site.words.calls == 2 and len(site.engine.asked) == 1 and site.metric("given_up") == 3


def test_a_server_that_ends_reads_no_more(site: Site) -> None:
    async def check() -> None:
        site.words.free.clear()
        async with site.app.router.lifespan_context(site.app):
            body = {"model": "tiny", "prompt": "a"}
            asked = [asyncio.create_task(site.send("POST", "/v1/completions", json=body)) for _ in range(3)]
            while site.words.calls == 0:
                await asyncio.sleep(0.01)
        site.words.free.set()
        await asyncio.wait(asked, timeout=DEADLINE_S)
        assert all(each.done() for each in asked)
    asyncio.run(check())
    assert site.words.calls == 1


def test_texts_that_cannot_fit_are_not_made_tokens_of(site: Site) -> None:
    text = "a" * (LIMIT * 16 + 1)
    for wants in ({"prompt": text}, {"prompt": ["a", text]}, {"messages": [{"role": "user", "content": text}]}):
        assert error_of(site.ask(**wants), 400)["code"] == "context_length_exceeded"
    assert site.words.calls == 0


@pytest.mark.parametrize(("wants", "words"), [
    ({"prompt": [1, "a"]}, "^prompt: 1: Input should be a valid integer$"),
    ({"prompt": [[1], [2, "a"]]}, "^prompt: 1.1: Input should be a valid integer$"),
    ({"prompt": [True]}, "^prompt: it must be a text, tokens, or a list of either$"),
    ({"prompt": {}}, "^prompt: it must be a text"),
    ({"prompt": ["a"] * 129}, "^prompt: 129 prompts are too many"),
    ({"stop": ["a"] * 17}, "^stop: .*at most 16 items"),
    ({"stop": "a" * 1025}, "^stop.0: .*at most 1024 characters"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "^logit_bias: 301 tokens; at most 300"),
    ({"logit_bias": {"5000": 1}}, "^token 5000 is none"),
    ({"stop_token_ids": [1] * 129}, "^stop_token_ids: .*at most 128"),
    ({"seed": 1 << 64}, "^seed: "),
    *(({name: value}, f"^{name}[:.]") for name, values in {
        "max_tokens": ("1", 1.0, True, 1.5), "temperature": ("1", True), "top_p": ("0.5",), "n": ("1", True, 1.0),
        "seed": ("1", True), "stream": ("true", 1), "ignore_eos": (1, "yes"), "top_k": ("5",), "logprobs": ("1", True),
        "presence_penalty": ("1", True), "stream_options": ({"include_usage": 1},), "user": (1,), "stop": ([1],),
        "logit_bias": ({"1_0": 1}, {"\u0661": 1}, {" 1": 1}, {"1": "2"}, {"1": True}, {"-1": 1}, {"01": 1}, [1], {
            "1" * 5000: 1}),
    }.items() for value in values),
    ({f"field{number}": 1 for number in range(100)}, "102 fields; it may have 64"),
])
def test_limits_of_fields(site: Site, wants: dict, words: str) -> None:
    error = error_of(site.ask(**{"prompt": "a", **wants}), 400)
    assert re.search(words, error["message"]), error


def test_null_means_the_default(site: Site) -> None:
    names = ("n", "presence_penalty", "frequency_penalty", "stream", "stop", "logit_bias", "seed", "max_tokens",
             "stream_options", "stop_token_ids", "ignore_eos", "top_k", "user")
    nulls = dict.fromkeys(names)
    assert site.ask(prompt="a", **nulls).status_code == 200
    assert site.engine.asked[-1][1][0][0].max_tokens == 16
    messages = [{"role": "user", "content": "a"}]
    assert site.ask(messages=messages, **nulls, chat_template_kwargs=None, tools=None).status_code == 200
    assert site.ask(messages=messages, parallel_tool_calls=True).status_code == 200


def test_fields_that_are_not_known(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Those of other servers are ignored, with a note; those that would change the answer are refused."""
    for _ in range(3):
        assert site.ask(prompt="a", cache_prompt=True, **{"x\n" * 100: 1}).status_code == 200
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == 2 and "'cache_prompt'" in notes[0] and len(notes[1]) < 300 and "\n" not in notes[1]
    for name in ("guided_json", "functions", "use_beam_search", "prompt_logprobs"):
        error = error_of(site.ask(prompt="a", **{name: 1}), 400)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    site.ask(prompt="a", **{f"field{number}": 1 for number in range(60)})
    site.ask(prompt="a", **{f"other{number}": 1 for number in range(60)})
    assert len(caplog.records) == 64  # It does not fill a disk.


def test_openapi(site: Site) -> None:
    told = site.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health"} <= told["paths"].keys()
    assert "response_format" in told["components"]["schemas"]["ChatRequest"]["properties"]
    for calls in told["paths"].values():
        for call in calls.values():  # Also those that the web server itself gives.
            assert {"200", "400", "408", "413", "503"} <= call["responses"].keys() and "422" not in call["responses"]
    for path, status, body in (("/v1/models", 200, None), ("/v1/models/tiny", 200, None), ("/v1/models/x", 404, None),
                               ("/health", 200, None), ("/tokenize", 200, {"prompt": "the cat"}),
                               ("/tokenize", 200, {"prompt": "the cat", "return_token_strs": True}),
                               ("/detokenize", 200, {"tokens": [1]}), ("/detokenize", 400, {"tokens": ["x"]})):
        answer = asyncio.run(site.send("GET" if body is None else "POST", path, **({"json": body} if body else {})))
        route = "/v1/models/{model}" if path.startswith("/v1/models/") else path
        call = told["paths"][route]["get" if body is None else "post"]
        schema = call["responses"][str(status)]["content"]["application/json"]["schema"]
        assert answer.status_code == status and fits(answer.json(), schema, told["components"]["schemas"]), answer.text
    assert error_of(Site(api_keys=("secret",)).get("/openapi.json"), 401)


def test_tokens_of_texts_and_texts_of_tokens(site: Site) -> None:
    def ask(path: str, **wants: Any) -> httpx.Response:
        return asyncio.run(site.send("POST", f"/{path}", json=wants))

    ids = tokenizer().encode("the cat é")
    told = ask("tokenize", model="tiny", prompt="the cat é", return_token_strs=True).json()
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), LIMIT)
    assert told["token_strs"][-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert ask("detokenize", tokens=ids).json() == {"prompt": "the cat é"}
    messages = [{"role": "user", "content": "hi"}]
    for asks in (True, False):
        told = ask("tokenize", messages=messages, add_generation_prompt=asks).json()
        assert tokenizer().decode(told["tokens"]) == "<|user|>hi<|end|>" + "<|assistant|>" * asks
    for path, wants in (("tokenize", {}), ("tokenize", {"prompt": "a", "messages": messages}),
                        ("tokenize", {"prompt": "a" * 100_000}), ("tokenize", {"messages": [{}]}),
                        ("detokenize", {"tokens": [5000]}), ("detokenize", {"tokens": ["a"]})):
        error_of(ask(path, **wants), 400)
    assert error_of(ask("tokenize", model="other", prompt="a"), 404)


def test_tokens_that_are_echoed_are_their_text() -> None:
    """Some tokenizers would take the spaces before punctuation out of what they decode."""
    cleans = copy.deepcopy(tokenizer())
    cleans.clean_up_tokenization_spaces = True
    cleans.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    words = Words()
    words.decode = cleans.decode
    answer = Site(words).ask(prompt=tokenizer().encode("the cat ."), echo=True)
    assert answer.json()["choices"][0]["text"] == "the cat .fine"


def test_stops_that_are_empty(site: Site) -> None:
    for stop in ("", [], ["", "x"], None):
        assert site.ask(prompt="a", stop=stop).status_code == 200
        assert site.engine.asked[-1][1][0][0].stop == (("x",) if stop and "x" in stop else ())


def test_one_model(site: Site) -> None:
    assert site.get("/v1/models/tiny").json() == site.get("/v1/models").json()["data"][0]
    assert error_of(site.get("/v1/models/some/other"), 404)["code"] == "model_not_found"


def test_errors_have_one_form(site: Site) -> None:
    for path in ("/docs", "/redoc", "/v1/embeddings"):
        assert path in error_of(site.get(path), 404)["message"]
    assert "GET is not served" in error_of(site.get("/v1/completions"), 405)["message"]
    kind = {"content-type": "application/json"}
    assert "is no JSON" in error_of(site.post(content=b"{bad", headers=kind), 400)["message"]
    assert "JSON in UTF-8" in error_of(site.post(content=b'{"prompt": "\xff"}', headers=kind), 400)["message"]
    error_of(site.post(content=b"[" * 200_000, headers=kind), 400)
    assert "JSON object" in error_of(site.post(content=b'{"model": "tiny"}', headers={"content-type": "text/plain"}),
                                     400)["message"]


def test_halves_of_surrogates(site: Site) -> None:
    half, kind = r"\ud800", {"content-type": "application/json"}

    def post(path: str, body: str) -> httpx.Response:
        return site.post(path, content=body.encode(), headers=kind)

    assert error_of(post("completions", '{"model": "%s", "prompt": "a"}' % half), 404)["param"] == "model"
    assert "surrogate" in error_of(post("completions", '{"model": "tiny", "prompt": "%s"}' % half), 400)["message"]
    assert "JSON object" not in error_of(post("completions", '{"model": "tiny", "prompt": "a", "%s": 1}' % half),
                                         400)["message"]
    chat = '{"model": "tiny", "messages": [{"role": "user", "content": %s}]}'
    assert "surrogate" in error_of(post("chat/completions", chat % f'"{half}"'), 400)["message"]
    error_of(post("chat/completions", chat % f'[{{"type": "{half}"}}]'), 400)
    wrong = error_of(post("completions", '{"model": "tiny", "prompt": "a", "logit_bias": {"%s": 1}}' % half), 400)
    assert "is no token" in wrong["message"] and half in wrong["message"]
    site.engine.text = "\ud800"
    for stream in (False, True):
        answer = site.ask(prompt="a", stream=stream)
        assert answer.status_code == 200 and half in answer.text


def test_errors_do_not_send_back_what_they_are_about(site: Site) -> None:
    text = "x" * 100_000
    for wants in ({"model": text}, {"stop": [text]}, {"logit_bias": {text: 1}}, {"user": {text: text}},
                  {"metadata": text}, {"service_tier": [text]}):
        answer = site.ask(**{"prompt": "a", **wants})
        assert answer.status_code in (400, 404) and len(answer.content) < 2000, wants.keys()
    for answer in (site.ask(messages=[{"role": "user", "content": [{"type": text}]}]), site.get(f"/{text[:60_000]}"),
                   site.ask(messages=[{"role": "user", "content": "a"}], chat_template_kwargs={"messages": text}),
                   site.get(f"/v1/models/{text[:60_000]}")):
        assert answer.status_code in (400, 404) and len(answer.content) < 2000


def test_metrics_of_an_engine_that_is_lost(site: Site) -> None:
    site.engine.status = Status(running=4, waiting=2, forwards=7)
    for lost, numbers in ((None, (1, 4, 2, 7)), ("gone", (0, 0, 0, 7))):
        site.engine.lost = lost
        lines = site.get("/metrics").text.splitlines()
        assert all(f"sluice_{name} {number}.0" in lines for name, number in zip(
            ("engine_up", "running", "waiting", "forwards_total"), numbers))


def test_an_engine_that_is_lost_is_counted(site: Site) -> None:
    site.engine.lost = "gone"
    assert error_of(site.ask(prompt="a"), 503)["code"] == "engine_lost"
    assert site.metric("failed") == 1
