"""/v1/responses: what becomes of its input, how answers look, and OpenAI's own client against a real server."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server import Server
from sluice.serving.answers import Shown
from sluice.serving.requests import Chosen, Event
from sluice.serving.response_form import ResponseForm
from sluice.serving.responses import ResponsesRequest
from sluice.serving.tokens import TokenBytes
from small import bare_model, expected, text_of, tokenizer
from test_api import Site, error_of
from test_tools import FORMS, TEMPLATES, of_template, written

TOOLS = [{"type": "function", "name": name, "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "maxLength": 8}}, "required": ["place"],
    "additionalProperties": False}, "strict": True} for name in ("weather", "tides")]
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
needs_guides = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None,
                                  reason="the package llguidance is not installed")


def ask(site: Site, **wants: Any) -> httpx.Response:
    return site.post("responses", json={"model": "tiny", **wants})


def prompt_of(site: Site) -> str:
    """What the engine was asked last."""
    return tokenizer().decode(site.engine.asked[-1][0][0])


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def tooled() -> Site:
    """Its template knows tools."""
    words = Site().words
    words.chat_template = TEMPLATES["tags"]
    words.apply_chat_template = of_template(TEMPLATES["tags"]).apply_chat_template
    return Site(words=words)


def test_a_text_with_instructions(site: Site) -> None:
    told = ask(site, input="the cat", instructions="be brief", max_output_tokens=7, store=False, seed=3).json()
    assert prompt_of(site) == "<|system|>be brief<|end|><|user|>the cat<|end|><|assistant|>"
    sampling = site.engine.asked[-1][1][0][0]
    assert (sampling.max_tokens, sampling.seed, sampling.guide) == (7, 3, None)
    (item,) = told["output"]
    assert item["content"] == [{"type": "output_text", "text": "fine", "annotations": [], "logprobs": []}]
    assert (told["status"], item["status"], told["store"], told["error"]) == ("completed", "completed", False, None)
    assert told["usage"]["output_tokens"] == 1 and told["usage"]["input_tokens"] > 0
    assert told["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_a_conversation_with_calls(tooled: Site) -> None:
    items = [{"role": "developer", "content": "be brief"},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the "},
                                                             {"type": "input_text", "text": "tides?"}]},
             {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
              "content": [{"type": "output_text", "text": "Well.", "annotations": []}]},
             {"type": "function_call", "call_id": "a", "name": "tides", "arguments": '{"place": "Brest"}'},
             {"type": "function_call", "call_id": "b", "name": "tides", "arguments": '{"place": "Cork"}'},
             {"type": "function_call_output", "call_id": "a", "output": "high at noon"},
             {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "low"}]}]
    answer = ask(tooled, input=items, tools=[{"type": "function", "name": "tides", "strict": True}])
    assert answer.status_code == 200, answer.text
    said = prompt_of(tooled)
    assert said.index("be brief") < said.index("the tides?") < said.index("Brest") < said.index("Cork") < \
        said.index("Well.") < said.index("<|tool|>high at noon") < said.index("<|tool|>low")
    assert said.count("<|assistant|>") == 2 and '"strict"' not in said


def test_calls_of_tools(tooled: Site) -> None:
    tooled.engine.text = "Well.\n" + written("tags", [{"name": "tides", "arguments": {"place": "Brest"}}])
    message, call = ask(tooled, input="a", tools=TOOLS).json()["output"]
    assert message["content"][0]["text"] == "Well." and call["type"] == "function_call"
    assert (call["name"], call["arguments"], call["status"]) == ("tides", '{"place": "Brest"}', "completed")
    events = events_of(ask(tooled, input="a", tools=TOOLS, stream=True))
    done = next(each for each in events if each["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"], done["output_index"]) == ("tides", '{"place": "Brest"}', 1)
    assert [each["type"] for each in events[-1]["response"]["output"]] == ["message", "function_call"]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    told = []
    for each in answer.text.strip().split("\n\n"):
        name, data = each.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    assert [each["sequence_number"] for each in told] == [*range(len(told))]
    return told


def test_the_order_of_events(site: Site) -> None:
    events = events_of(ask(site, input="a", stream=True))
    assert [each["type"].removeprefix("response.") for each in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed"]
    assert len({each["item_id"] for each in events if "item_id" in each}) == 1
    assert events[-1]["response"]["id"] == events[0]["response"]["id"] and events[0]["response"]["output"] == []


def test_answers_are_what_the_client_declares(site: Site, tooled: Site) -> None:
    """All its fields, of its types."""
    tooled.engine.text = "Well.\n" + written("tags", [{"name": "tides", "arguments": {"place": "Brest"}}])
    declared = TypeAdapter(ResponseStreamEvent)
    for where, wants in ((site, {"instructions": "b", "metadata": {"a": "b"}}), (tooled, {"tools": TOOLS}),
                         (site, {"include": ["message.output_text.logprobs"], "top_logprobs": 2})):
        for event in events_of(ask(where, input="a", stream=True, **wants)):
            declared.validate_python(event)
        Response.model_validate(ask(where, input="a", **wants).json())


def form(wants: dict[str, Any], **shown: Any) -> ResponseForm:
    return ResponseForm("tiny", TokenBytes(tokenizer()), Shown(**shown),
                        ResponsesRequest(model="tiny", input="a", **wants))


def test_answers_that_end_for_their_length_have_no_text_or_fail() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1, "prompt_tokens_details": {
        "cached_tokens": 0}}
    told = form({}).whole([Event(1, "so", finish="length")], usage)
    assert told["status"] == told["output"][0]["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    (empty,) = form({}).whole([Event(1, "", finish="stop")], usage)["output"]
    assert empty["content"][0]["text"] == ""
    failed = form({}).failed({"error": {"message": "lost"}})
    assert failed["response"]["status"] == "failed" and failed["response"]["error"]["message"] == "lost"


def test_probabilities_come_with_their_text() -> None:
    include = {"include": ["message.output_text.logprobs"]}
    halves = tokenizer().encode("é")
    shown = form(include, logprobs=True)
    first = list(shown.pieces(0, Event(1, "", (Chosen(halves[0], -1.0),))))
    then = list(shown.pieces(0, Event(1, "é", (Chosen(halves[1], -2.0),), finish="stop")))
    assert first == [] and [each["logprob"] for each in then[2]["logprobs"]] == [-1.0, -2.0]
    assert [each["bytes"] for each in then[2]["logprobs"]] == [[0xC3], [0xA9]]


@pytest.mark.parametrize(("wants", "param", "words"), [
    ({"store": True}, "store", "store is not served: nothing is stored"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "input has the whole conversation"),
    ({"background": True}, "background", "not served"), ({"conversation": "c"}, "conversation", "not served"),
    ({"prompt": {"id": "p"}}, "prompt", "not served"), ({"truncation": "auto"}, "truncation", "not served"),
    ({"include": ["file_search_call.results"]}, "include", "file_search_call.results"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
    ({"input": []}, "input", "at least 1"), ({"input": None}, "input", "required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input",
     r"input\[0\] has a part of type input_image; only text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", r"input\[0\] is of type item_reference"),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input", r"input\[0\] must have call_id"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "[1]"}]}, "input",
     r"input\[0\] must have arguments that are an object"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "[" * 100_000}]}, "input",
     "object in JSON"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "needs schema"),
    ({"response_format": {"type": "json_object"}}, "response_format", "give text.format"),
    ({"max_completion_tokens": 3}, "max_completion_tokens", "give max_output_tokens"),
    ({"logprobs": True}, "logprobs", "give include"), ({"return_token_ids": True}, "return_token_ids", "not served"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", "none"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input", r"input\[0\] must have call_id"),
    ({"input": [{"role": "user"}]}, "input", r"input\[0\] must have a text"), ({"input": [{"content": "a"}]}, "input",
                                                                               r"input\[0\] must have a role"),
    ({"input": [{"role": "user", "content": [{"type": []}]}]}, "input", "part of type"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no tools"),
    ({"tools": TOOLS}, "tools", "tools are not served"), ({"n": 2}, "n", "1"), ({"max_tokens": 3}, "max_tokens", "give max_output"),
    ({"max_output_tokens": 0}, "max_output_tokens", ""), ({"max_output_tokens": 10_000}, "input", "10000 more"),
    ({"functions": []}, "functions", "not served"), ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "")])
def test_requests_that_are_refused(site: Site, wants: dict[str, Any], param: str, words: str) -> None:
    error = error_of(ask(site, **{"input": "a", **wants}), 400)
    assert error["param"] == param and re.search(words, error["message"]), error


def test_an_engine_that_is_lost_while_it_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: Any) -> Any:
        yield 0, Event(1, "half", count=1)
        yield 0, Event(1, error="lost")

    monkeypatch.setattr(type(site.engine), "__aiter__", fails)
    events = events_of(ask(site, input="a", stream=True))
    assert events[-1]["type"] == "response.failed" and "lost" in events[-1]["response"]["error"]["message"]
    assert error_of(ask(site, input="a"), 500)["type"] == "server_error"


def test_openais_client(shared: Server) -> None:
    client = shared.client()
    ids = tokenizer().encode("<|system|>be brief<|end|><|user|>the cat<|end|><|assistant|>")
    want = text_of(expected(bare_model("llama"), ids, 24))
    wants = {"input": "the cat", "instructions": "be brief", "max_output_tokens": 24, **GREEDY}
    answer = client.responses.create(**wants)
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == (want, "incomplete", 24)
    assert answer.usage.input_tokens == len(ids) and answer.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(stream=True, **wants))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == want
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == want
    stops = {"ignore_eos": True, "stop": want[20:23]}
    with client.responses.stream(**{**wants, "extra_body": stops}) as stream:  # The client's own account of events.
        assert stream.get_final_response().output_text == want[: want.index(want[20:23])]
    told = client.responses.create(**{**wants, "max_output_tokens": 3}, top_logprobs=2, include=[
        "message.output_text.logprobs"]).output[0].content[0]
    assert len(told.logprobs) == 3 and len(told.logprobs[0].top_logprobs) == 2
    with pytest.raises(openai.BadRequestError, match="store is not served"):
        client.responses.create(store=True, **wants)


@needs_guides
def test_openais_client_with_a_schema(shared: Server) -> None:
    schema = {"type": "object", "properties": {"cat": {"enum": ["sat", "ran"]}}, "required": ["cat"],
              "additionalProperties": False}
    answer = shared.client().responses.create(model="tiny", input="the cat", max_output_tokens=100, text={
        "format": {"type": "json_schema", "name": "cats", "schema": schema, "strict": True}})
    assert json.loads(answer.output_text)["cat"] in ("sat", "ran") and answer.status == "completed"


@needs_guides
def test_a_tool_that_has_to_be_called(tooled: Site) -> None:
    tooled.engine.text = written("tags", [{"name": "tides", "arguments": {"place": "Brest"}}]).removeprefix(
        FORMS["tags"].before)
    for choice in ("required", {"type": "function", "name": "tides"}):
        (call,) = ask(tooled, input="a", tools=TOOLS, tool_choice=choice).json()["output"]
        assert call["name"] == "tides" and tooled.engine.asked[-1][1][0][0].guide
    error = error_of(ask(tooled, input="a", tools=TOOLS, tool_choice={"type": "function", "name": "x"}), 400)
    assert "none of the tools" in error["message"]
    assert error_of(ask(tooled, input="a", text={"format": {"type": "json_schema", "schema": {"type": "x"}}}),
                    400)["param"] == "text"
