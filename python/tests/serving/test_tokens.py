"""Tokens as answers call them: bytes of the tokenizer's own alphabet, also of parts of characters."""

from __future__ import annotations

import re

import pytest
import transformers
from sluice.serving.answers import Form, Shown
from sluice.serving.live import Live
from sluice.serving.requests import Chosen, Event, Request, Sampling
from sluice.serving.text import Detokenizer
from sluice.serving.tokens import TokenBytes
from small import tokenizer
from test_text import byte_fallback
from tokenizers import Tokenizer, decoders, models

TEXTS = ("the cat sat", "naïve café\n\t", "日本語のテキスト", "👩‍👩‍👧 family", " leading", "x\x00\x7f\xad")


def joined(names: list[str]) -> str:
    """Text of tokens, as clients of OpenAI's join them."""
    told = b""
    for name in names:
        parts = re.fullmatch(r"bytes:((?:\\x[0-9a-f]{2})+)", name)
        told += bytes.fromhex(parts[1].replace("\\x", "")) if parts else name.encode()
    return told.decode()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_byte_level_tokens(text: str) -> None:
    tokens, ids = TokenBytes(tokenizer()), tokenizer().encode(text)
    assert b"".join(map(tokens.of, ids)) == text.encode()
    assert joined([tokens.name(each) for each in ids]) == text


def test_every_token_has_a_name_of_its_own() -> None:
    tokens = TokenBytes(tokenizer())
    names = [tokens.name(token) for token in range(len(tokenizer()))]
    assert len(set(names)) == len(names) and not any("\ufffd" in name for name in names)
    assert tokens.name(tokenizer().encode("é")[0]) == "bytes:\\xc3"
    assert tokens.name(0) == "<|end|>" and tokens.is_special(0) and not tokens.is_special(50)
    assert tokens.name(5000) == "token_id:5000"  # A model may have more outputs.


def test_bytes_of_sentencepiece() -> None:
    of = byte_fallback()
    tokens, ids = TokenBytes(of), [1, 4 + 0xF0, 4 + 0x9F, 4 + 0x98, 4 + 0x80, 2, 3, 1]
    assert b"".join(map(tokens.of, ids)).decode() == " hi😀 日 hi"
    assert [tokens.name(each) for each in ids[:3]] == [" hi", "bytes:\\xf0", "bytes:\\x9f"]


def test_words() -> None:
    bare = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    bare.decoder = decoders.WordPiece()
    tokens = TokenBytes(transformers.PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="[UNK]"))
    assert tokens.name(1) == "play" and tokens.of(1) == b"play"


def told(ids: list[int], tops: dict[int, list[int]], text: str, chat: bool = False, cut: int | None = None) -> dict:
    """Probabilities of these tokens, in one answer or in two pieces. `tops`: likely tokens of some."""
    chosen = [Chosen(each, -0.1, tuple((one, -0.1 * (rank + 1)) for rank, one in enumerate(tops.get(at, [each]))))
              for at, each in enumerate(ids)]
    form = Form("tiny", chat, TokenBytes(tokenizer()), Shown(logprobs=True))
    if cut is None:
        return form.whole([Event(1, text, tuple(chosen), finish="stop")], {})["choices"][0]["logprobs"]
    detokenizer, pieces = Detokenizer(tokenizer()), []
    pushed = [detokenizer.push(each) for each in ids]
    for part in (slice(0, cut), slice(cut, None)):
        event = Event(1, "".join(pushed[part]), tuple(chosen[part]))
        pieces += [piece["choices"][0]["logprobs"] for piece in form.pieces(0, event)]
    return {name: [each for piece in pieces for each in piece[name]] for name in pieces[0]}


def test_probabilities_of_parts_of_a_character() -> None:
    ids = tokenizer().encode("é日a")
    halves = tokenizer().encode("é")
    found = told(ids, {0: halves}, "é日a")
    assert len(found["top_logprobs"][0]) == 2
    assert all(name in top for name, top in zip(found["tokens"], found["top_logprobs"]))
    assert found["text_offset"] == [0, 0, 1, 1, 1, 2] and joined(found["tokens"]) == "é日a"
    assert told(ids, {}, "é日a", cut=3)["text_offset"] == found["text_offset"]
    bytes_of = [entry["bytes"] for entry in told(ids, {}, "é日a", chat=True)["content"]]
    assert sum(bytes_of, []) == list("é日a".encode()) and all(len(each) == 1 for each in bytes_of)


def test_offsets_stay_within_the_text() -> None:
    ids = tokenizer().encode("axyz")
    assert told(ids, {}, "a")["text_offset"] == [0, 1, 1, 1]  # "xyz" was a stop text.
    found = told([ids[0], 0, ids[1]], {}, "ax")
    assert found["text_offset"] == [0, 1, 1]  # An end that was ignored is no text,
    assert told([0], {}, "", chat=True)["content"][0]["bytes"] is None  # and has no bytes.


def test_names_that_are_alike() -> None:
    of = byte_fallback()
    of.add_tokens(["A"])
    alike, other = len(of) - 1, 4 + ord("A")
    form = Form("tiny", False, TokenBytes(of), Shown(logprobs=True))
    for chosen in (alike, other):
        top = tuple((each, -1.0) for each in (other, alike))
        found = form.whole([Event(1, "A", (Chosen(chosen, -1.0, top),), finish="stop")], {})["choices"][0]["logprobs"]
        assert len(found["top_logprobs"][0]) == 2 and found["tokens"] == ["A"]
        assert f"token_id:{other if chosen == alike else alike}" in found["top_logprobs"][0]


@pytest.mark.parametrize(("prompt", "answer", "want"), [
    ([0, 1], [1, 3], " hi日"),  # Behind a word, a space joins the answer.
    ([1, 2], [1], " hi"),
    ([0], [1, 3], "hi日"),  # Nothing is there that it could be joined to.
    ([], [1], "hi"),
    ([1, 4 + 0xE6], [4 + 0x97], "\ufffd"),  # A character that the prompt does not complete.
])
def test_an_answer_is_decoded_behind_its_prompt(prompt: list[int], answer: list[int], want: str) -> None:
    of = byte_fallback()
    live = Live(Request(1, prompt, Sampling(max_tokens=len(answer))), of)
    text = "".join(live.take(Chosen(each), 100).text for each in answer)
    assert text == want
    if "\ufffd" not in want:
        whole = of.decode(prompt + answer, skip_special_tokens=True)
        assert of.decode(prompt, skip_special_tokens=True) + text == whole
