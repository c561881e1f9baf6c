"""No message is lost by a chat template, and turns end with what it ends them with."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import transformers
from sluice.errors import InvalidArgument
from sluice.serving.load import end_ids
from sluice.serving.template import rendered, turn_ends
from small import END, bare_model, tokenizer

TURNS = ("{% for m in messages %}{% if m.role in roles %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endif %}"
         "{% endfor %}")


def with_template(template: str) -> transformers.PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer())
    made.chat_template = template
    return made


def knows(*roles: str, otherwise: str = "") -> transformers.PreTrainedTokenizerFast:
    known = TURNS.replace("roles", str(list(roles)))
    return with_template(known.replace("{% endif %}", "{% else %}" + otherwise + "{% endif %}"))


def said(*turns: str) -> list[dict]:
    return [dict(zip(("role", "content"), turn.split(":", 1))) for turn in turns]


RAISES = "{{ raise_exception('no such role') }}"


@pytest.mark.parametrize("otherwise", ["", RAISES])
def test_developer_messages_are_system_messages(otherwise: str) -> None:
    messages = said("developer:be brief ", "user:hi")
    assert rendered(knows("developer", "user", otherwise=otherwise), messages) == \
        "<|developer|>be brief<|end|><|user|>hi<|end|>"
    assert rendered(knows("system", "user", otherwise=otherwise), messages) == \
        "<|system|>be brief<|end|><|user|>hi<|end|>"


def test_messages_that_are_lost_are_refused() -> None:
    of = knows("user", "assistant")
    for lost, role in (("system", "system"), ("developer", "system"), ("tool", "tool")):
        with pytest.raises(InvalidArgument, match=rf"leaves out messages\[1\], of role {role}"):
            rendered(of, said("user:hi", f"{lost}:hi"))
    assert rendered(of, said("user:hi", "system: ")) == "<|user|>hi<|end|>"  # It has nothing to lose.
    calls = {"role": "assistant", "content": "let me see", "tool_calls": [{}]}
    dropped = with_template("{% for m in messages %}{% if not m.tool_calls %}{{ m.content }}{% endif %}{% endfor %}")
    assert rendered(dropped, [*said("user:hi"), calls]) == "hi"
    with pytest.raises(Exception, match="no such role"):
        rendered(knows("user", otherwise=RAISES), said("system:a", "user:hi"))


def test_contents_that_a_template_changes() -> None:
    thinks = with_template("{% for m in messages %}{{ m.content.split('</think>')[-1] | tojson }}{% endfor %}")
    assert rendered(thinks, said('user:a "b"', "assistant:<think>no</think>yes")) == '"a \\"b\\"""yes"'


def test_how_turns_end() -> None:
    end = tokenizer().convert_tokens_to_ids(END)
    assert turn_ends(tokenizer()) == {end}
    assert turn_ends(with_template("{% for m in messages %}{{ m.content }} \n<|system|>{% endfor %}")) == \
        {tokenizer().convert_tokens_to_ids("<|system|>")}
    assert turn_ends(with_template("{% for m in messages %}{{ m.content }}\n{% endfor %}")) == set()
    assert turn_ends(with_template(RAISES)) == turn_ends(with_template(None)) == set()


def test_ends_of_all_that_have_some() -> None:
    model = copy.deepcopy(bare_model("llama"))
    def ends(generation: object, config: object, eos: str | None, template: str | None) -> frozenset[int]:
        model.generation_config.eos_token_id, model.config.eos_token_id = generation, config
        of = with_template(template)
        of.eos_token = eos
        return end_ids(model, of)

    user, assistant, system = (tokenizer().convert_tokens_to_ids(f"<|{each}|>")
                               for each in ("user", "assistant", "system"))
    assert ends(None, None, None, None) == frozenset()
    assert ends([50, 51], None, None, None) == {50, 51}
    assert ends(None, user, None, None) == {user}
    assert ends(None, [assistant, 60], None, None) == {assistant}  # 60 is a word.
    assert ends(None, None, "<|system|>", None) == {system}
    assert ends(user, assistant, "<|system|>", "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}") == \
        {user, assistant, system, 0}
    assert end_ids(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=7))) == {7}
