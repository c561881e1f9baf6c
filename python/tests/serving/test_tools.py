"""Tools: how templates write calls, calls in texts, and answers that follow a schema."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable

import pytest
import transformers
from sluice.errors import InvalidArgument, Unsupported
from sluice.serving import guides
from sluice.serving.answers import Form, Shown
from sluice.serving.guides import grammar_of
from sluice.serving.loop import Loop
from sluice.serving.requests import Event
from sluice.serving.tokens import TokenBytes
from sluice.serving.tools import CallForm, call_form
from small import greedy, prompt_ids, run, tokenizer
from test_api import Site, error_of

needs_guides = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None,
                                  reason="the package llguidance is not installed")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["place"], "additionalProperties": False}}} for name in ("weather", "tides")]

# As models have them: Qwen's and Hermes', Llama's, Mistral's.
HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
TAIL = "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
EACH = "{% for c in m.tool_calls or [] %}"
TEMPLATES = {
    "tags": HEAD + EACH + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | '
            "tojson }}}\n</tool_call>{% endfor %}" + TAIL,
    "bare": HEAD + EACH + '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
            "{% endfor %}" + TAIL,
    "list": HEAD + "{% if m.tool_calls %}[TOOL_CALLS] [{% endif %}" + EACH +
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
            "{{ ', ' if not loop.last }}{% endfor %}{{ ']' if m.tool_calls }}" + TAIL,
}
FORMS = {"tags": CallForm("<tool_call>", "<tool_call>\n", "name", "arguments", False),
         "bare": CallForm("", "", "name", "parameters", False),
         "list": CallForm("[TOOL_CALLS]", "[TOOL_CALLS] ", "name", "arguments", True)}


def of_template(template: str) -> transformers.PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer())
    made.chat_template = template
    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_how_calls_are_written(name: str) -> None:
    assert call_form(of_template(TEMPLATES[name])) == FORMS[name]


@pytest.mark.parametrize(("template", "words"), [
    (HEAD + TAIL, "has no tools"), (TAIL.replace("{{ m", "{% for m in messages %}{{ m", 1), "has no tools"),
    (HEAD + EACH + "<call>{{ c.function.name }}({{ c.function.arguments.mark_key }})</call>{% endfor %}" + TAIL,
     "no JSON"), ("{{ raise_exception('none of that') }}", "none of that")])
def test_templates_without_calls(template: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        call_form(of_template(template))


def written(name: str, calls: list[dict]) -> str:
    """What a model writes that calls tools, by its template."""
    turns = [{"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00001", "type": "function", "function": call} for call in calls]}]
    text = of_template(TEMPLATES[name]).apply_chat_template(turns, tools=None, tokenize=False)
    return text.removeprefix("<|assistant|>").removesuffix("<|end|>")


def answers(name: str, text: str, size: int | None, finish: str = "stop", **more: object) -> tuple:
    """Content, calls and why it ends, whole or in pieces."""
    form = Form("tiny", True, TokenBytes(tokenizer()), Shown(calls=FORMS[name], tools=TOOLS, **more))
    if size is None:
        choice = form.whole([Event(1, text, finish=finish)], {})["choices"][0]
        told = choice["message"]
        return told["content"] or "", told.get("tool_calls", []), choice["finish_reason"]
    events = [Event(1, text[at : at + size]) for at in range(0, len(text), size)] + [Event(1, finish=finish)]
    content, calls = "", []
    for event in events:
        for piece in form.pieces(0, event):
            choice = piece["choices"][0]
            content += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls", [])
    return content, calls, choice["finish_reason"]


@pytest.mark.parametrize("size", [None, 1, 7, 1000])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read(name: str, size: int | None) -> None:
    wants = [{"name": "weather", "arguments": {"place": "Málaga {\"}"}}, {"name": "tides", "arguments": {"days": 3}}]
    head = "" if name == "bare" else "Let me see. "  # A call without a beginning is all there is.
    content, calls, finish = answers(name, head + written(name, wants), size)
    assert (content, finish) == (head.rstrip(), "tool_calls")
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == \
        [(call["name"], call["arguments"]) for call in wants]
    assert len({call["id"] for call in calls}) == 2 and {call["type"] for call in calls} == {"function"}
    assert len(answers(name, written(name, wants), size, most_calls=1)[1]) == 1
    for text in ("no call at all", written(name, [{"name": "nonesuch", "arguments": {}}]), written(name, wants)[:-30]):
        content, calls, finish = answers(name, text, size)
        assert text.strip().startswith(content.strip()) and finish == ("tool_calls" if calls else "stop")
        assert calls or content.strip() == text.strip()


def test_a_request_with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    site, messages = Site(), [{"role": "user", "content": "a"}]
    assert "no tools" in error_of(site.ask(messages=messages, tools=TOOLS), 400)["message"]
    site.words.chat_template = TEMPLATES["tags"]
    site.words.apply_chat_template = of_template(TEMPLATES["tags"]).apply_chat_template
    site = Site(words=site.words)
    site.engine.text = "Well.\n" + written("tags", [{"name": "tides", "arguments": {"place": "Brest"}}])
    message = site.ask(messages=messages, tools=TOOLS).json()["choices"][0]
    assert message["finish_reason"] == "tool_calls" and message["message"]["content"] == "Well."
    (call,) = message["message"]["tool_calls"]
    assert call["function"] == {"name": "tides", "arguments": '{"place": "Brest"}'}
    # What comes back is rendered with objects for arguments.
    more = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "high at noon"}]
    assert site.ask(messages=more, tools=TOOLS[1:]).status_code == 200
    assert '"arguments": {"place": "Brest"}' in tokenizer().decode(site.engine.asked[-1][0][0])
    assert site.ask(messages=messages, tools=TOOLS, tool_choice="none").json()["choices"][0]["finish_reason"] == "stop"
    for wants in ({"tools": [{}]}, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
                  {"tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "sometimes"}):
        error_of(site.ask(messages=messages, **wants), 400)
    for text in ("{", "[" * 100_000):
        bad = [*messages, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": text}}]}]
        assert "messages[1].tool_calls" in error_of(site.ask(messages=bad), 400)["message"]
    monkeypatch.setattr(guides, "missing", lambda: "the package llguidance is not installed")
    assert "not installed" in error_of(site.ask(messages=messages, tools=TOOLS, tool_choice="required"), 400)["message"]


@needs_guides
@pytest.mark.parametrize("name", ["tags", "list"])
def test_a_tool_that_has_to_be_called(make_loop: Callable[..., Loop], name: str) -> None:
    form = FORMS[name]
    loop = make_loop()
    for seed in range(4):
        request = greedy(seed + 1, tokenizer().encode(form.before), 200, temperature=1.0, seed=seed, ignore_eos=False,
                         guide=grammar_of(form.schema(TOOLS)), special=True)
        told = run(loop, [request])
        assert told.last(seed + 1).finish == "stop"
        content, calls, finish = answers(name, told.text(seed + 1), 3, begun=True)
        assert (content, finish, len(calls)) == ("", "tool_calls", 1)
        assert calls[0]["function"]["name"] in ("weather", "tides")
        assert set(json.loads(calls[0]["function"]["arguments"])) <= {"place", "days"}


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "é"]},
                                           "ages": {"type": "array", "items": {"type": "integer", "maximum": 9,
                                                                               "minimum": 0}, "maxItems": 2}},
          "required": ["name", "kind", "ages"], "additionalProperties": False}


@needs_guides
def test_answers_that_follow_a_schema(make_loop: Callable[..., Loop]) -> None:
    """A model of random weights would say anything."""
    loop = make_loop(end_ids=[0, 3])
    guided = [greedy(number, prompt_ids(20, number), 150, temperature=1.0, seed=number, ignore_eos=False,
                     guide=grammar_of(SCHEMA)) for number in range(1, 5)]
    told = run(loop, [*guided, greedy(9, [5], 20)])
    for number in range(1, 5):
        assert told.last(number).finish == "stop", told.text(number)
        found = json.loads(told.text(number))
        assert found.keys() == {"name", "kind", "ages"} and found["kind"] in ("cat", "é") and len(found["ages"]) <= 2
    assert len(told.tokens(9)) == 20  # Others are as they would be.


@needs_guides
def test_schemas_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for schema in ({"type": "nonsense"}, {"$ref": "#/nowhere"}, {"type": "string", "pattern": "("}):
        with pytest.raises(InvalidArgument, match="JSON schema is not served"):
            grammar_of(schema)
    site, messages = Site(), [{"role": "user", "content": "a"}]
    for wants in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}):
        assert site.ask(messages=messages, response_format=wants).status_code == 200
        assert site.engine.asked[-1][1][0][0].guide
    assert site.ask(messages=messages, response_format={"type": "text"}).status_code == 200
    assert site.engine.asked[-1][1][0][0].guide is None
    for wants in ({"type": "json_schema"}, {"type": "yaml"}, {},
                  {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}):
        error_of(site.ask(messages=messages, response_format=wants), 400)
    monkeypatch.setattr(guides, "missing", lambda: "the package llguidance is not installed")
    error = error_of(site.ask(messages=messages, response_format={"type": "json_object"}), 400)
    assert error["code"] == "unsupported_parameter" and "not installed" in error["message"]


@needs_guides
def test_a_grammar_that_leads_nowhere_fails_its_request_alone(make_loop: Callable[..., Loop],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop()
    monkeypatch.setattr(guides.Guide, "take", lambda self, _: setattr(self, "error", "it is too large"))
    told = run(loop, [greedy(1, [5], 20, guide=grammar_of(SCHEMA)), greedy(2, [5], 20)])
    assert "cannot follow its grammar: it is too large" in told.last(1).error and len(told.tokens(2)) == 20
