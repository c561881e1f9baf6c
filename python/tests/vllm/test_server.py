"""vLLM's server with Sluice, as a user starts it: the plug-in is found by its entry point, and OpenAI's client gets
text, tools and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from servers import Server

WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"enum": ["Delft", "Gouda"]}}, "required": ["town"],
                   "additionalProperties": False}}}
SCHEMA = {"type": "object", "properties": {"open": {"type": "boolean"}, "gates": {"type": "integer", "maximum": 9}},
          "required": ["open", "gates"], "additionalProperties": False}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"), smollm2, "--max-model-len", "512", "--max-num-seqs", "4",
                     "--max-num-batched-tokens", "256", "--dtype", "float32", "--enforce-eager",
                     "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
                     "--additional-config.sluice.policy", "full",
                     "--additional-config.sluice.host_bytes", "128MiB")
    try:
        started.wait()
        assert started.process.poll() is None, "".join(started.said)
        yield started
    finally:
        started.close()


def test_it_says_what_it_does(server: Server) -> None:
    said = "".join(server.said)
    assert re.search(r"Sluice keeps 30 layers of keys and values \(f32, policy full\) in 0.12 GiB of host memory", said)
    assert "Every prompt is read whole: the worker, which knows others, is in another process" in said
    assert "Sluice.vllm" not in said and "Traceback" not in said


def test_text(server: Server) -> None:
    client = server.client()
    options = {"model": "served", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**options)
    assert "Paris" in whole.choices[0].text
    assert whole.usage.prompt_tokens == 5 and whole.usage.completion_tokens == 12
    pieces = [each.choices[0].text for each in client.completions.create(stream=True, **options)]
    assert "".join(pieces) == whole.choices[0].text and len(pieces) > 4
    chat = client.chat.completions.create(model="served", messages=[{"role": "user", "content": "Say hello."}],
                                          max_tokens=16, temperature=0, logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.content and len(chat.choices[0].logprobs.content) > 2


def test_tools(server: Server) -> None:
    chat = server.client().chat.completions.create(
        model="served", messages=[{"role": "user", "content": "How is the weather in Delft?"}], tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=96, temperature=0)
    assert chat.choices[0].message.tool_calls, chat.choices[0]
    call = chat.choices[0].message.tool_calls[0].function
    assert call.name == "weather" and json.loads(call.arguments)["town"] in ("Delft", "Gouda")


def test_response_format(server: Server) -> None:
    chat = server.client().chat.completions.create(
        model="served", messages=[{"role": "user", "content": "Which gates are open?"}], max_tokens=48, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "gates", "schema": SCHEMA}})
    answer = json.loads(chat.choices[0].message.content)
    assert isinstance(answer["open"], bool) and answer["gates"] <= 9 and len(answer) == 2


def test_errors_and_metrics(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="512"):
        server.client().completions.create(model="served", prompt="word " * 600, max_tokens=1)
    figures = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert re.search(r"^vllm:generation_tokens_total\{.*\} [1-9]", figures, re.MULTILINE)
    assert re.search(r"^vllm:num_preemptions_total\{.*\} 0", figures, re.MULTILINE)


def test_a_refusal_is_the_reason_that_the_command_gives(smollm2: Path, tmp_path: Path) -> None:
    refused = Server(tmp_path, smollm2, "--kv-cache-dtype", "fp8", "--max-model-len", "512")
    try:
        refused.wait()
        assert refused.ended() != 0
        assert "--kv-cache-dtype fp8: Sluice keeps keys and values of the model's type" in "".join(refused.said)
    finally:
        refused.close()
