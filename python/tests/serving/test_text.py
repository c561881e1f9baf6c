"""Text comes in pieces that make up the whole, wherever tokens cut characters and stop texts."""

from __future__ import annotations

import random

import pytest
import transformers
from sluice.serving.text import Detokenizer, StopTexts
from small import text_of, tokenizer
from tokenizers import Tokenizer, decoders, models

TEXTS = ("the cat sat", "naïve café", "日本語のテキスト", "👩‍👩‍👧 family", " leading", "a\ufffdb", "\ufffd", "")


def pieces(ids: list[int], of: transformers.PreTrainedTokenizerFast | None = None) -> list[str]:
    detokenizer = Detokenizer(of or tokenizer())
    return [*(detokenizer.push(token) for token in ids), detokenizer.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_not_cut(text: str) -> None:
    ids = tokenizer().encode(text)
    told = pieces(ids)
    assert "".join(told) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in told)
        assert len(ids) < 20 or sum(map(bool, told)) > 3  # It does not all come at the end.


def test_bytes_that_are_no_text() -> None:
    random.seed(1)
    for tokens in (1, 2, 3, 50):
        for _ in range(50):
            ids = [random.randrange(len(tokenizer())) for _ in range(tokens)]
            assert "".join(pieces(ids)) == text_of(ids)
    half = tokenizer().encode("é")[:1]
    assert pieces(half) == ["", "\ufffd"]
    assert pieces([0, 0]) == ["", "", ""]  # Special tokens are no text.


def test_spaces_that_the_first_token_of_a_text_loses() -> None:
    bare = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581cat": 1, "s": 2}, unk_token="s"))
    bare.decoder = decoders.Metaspace()
    assert pieces([0, 1, 2, 1], transformers.PreTrainedTokenizerFast(tokenizer_object=bare)) == [
        "the", " cat", "s", " cat", ""]


@pytest.mark.parametrize(("stops", "text", "want"), [
    (["stop"], "it will stop here", "it will "),
    (["stop"], "it will sto", "it will sto"),
    (["aab"], "aaaab", "aa"),
    (["abab", "ba"], "xabab", "xa"),
    (["b", "ab"], "cab", "c"),
    (["x"], "x", ""),
    ([], "anything", "anything"),
])
def test_stop_texts(stops: list[str], text: str, want: str) -> None:
    for size in range(1, len(text) + 1):
        finder = StopTexts(stops)
        told = "".join(finder.push(text[at : at + size]) for at in range(0, len(text), size))
        if not finder.found:
            told += finder.end()
        assert (told, finder.found) == (want, want != text)
        assert finder.push("more") == ("" if finder.found else "more")


def test_nothing_is_held_back_for_no_reason() -> None:
    finder = StopTexts(["stop"])
    assert [finder.push(piece) for piece in ("its s", "o", " st")] == ["its ", "so", " "]
