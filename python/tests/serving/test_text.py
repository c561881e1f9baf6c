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


def byte_fallback() -> transformers.PreTrainedTokenizerFast:
    """As Llama 2 has it: characters that are no tokens are one token a byte, and the first space is taken away."""
    vocabulary = {"<unk>": 0, "\u2581hi": 1, "\u2581": 2, "日": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    bare = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    bare.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    bare.add_special_tokens(["<unk>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare)


@pytest.mark.parametrize("text", ["é", "日本語のテキスト", "😀😀!", "naïve 👩‍👩‍👧 x", "日😀é日x"])
def test_characters_of_one_token_a_byte(text: str) -> None:
    by_byte, utf8 = byte_fallback(), [4 + byte for byte in text.encode()]
    for ids in (utf8, [1, *utf8, 1], [2, 1, 3, *utf8, 3, 2, 2, *utf8, 1], [1, 0, 1, *utf8[:1], 0, *utf8[1:], 0, 1]):
        told = pieces(ids, by_byte)
        assert "".join(told) == by_byte.decode(ids, skip_special_tokens=True) and told[-1] == ""
        assert not any("\ufffd" in piece for piece in told)
        assert sum(map(bool, told)) >= len(text)  # Each as soon as it is complete.


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    for of, lone in ((tokenizer(), tokenizer().encode("é")[1]), (byte_fallback(), 4 + 0x80)):
        told = pieces([lone] * 100, of)
        assert max(map(len, told)) <= 9 and "".join(told).strip("\ufffd") == "" and len("".join(told)) > 80
        detokenizer = Detokenizer(of)
        decoded: list[int] = []
        decode = detokenizer._decode
        detokenizer._decode = lambda ids: decoded.append(len(ids)) or decode(ids)
        for _ in range(200):
            detokenizer.push(lone)
        assert max(decoded) <= 16
    # What comes after them is text again, wherever they are flushed.
    lone = tokenizer().encode("é")[1]
    for count in range(20):
        ids = [lone] * count + tokenizer().encode("日本é!")
        assert "".join(pieces(ids)) == text_of(ids)


def test_special_tokens_take_no_space_along() -> None:
    assert pieces([1, *[0] * 50, 1, 300, 1], byte_fallback()) == ["hi", *[""] * 50, " hi", "", " hi", ""]


def test_the_end_of_a_text_is_sought_quickly() -> None:
    compared = 0

    class Stop(str):
        def startswith(self, *of: str) -> bool:
            nonlocal compared
            compared += 1
            return super().startswith(*of)

    finder = StopTexts([Stop("stop" + "x" * 250)])
    assert finder.push("a" * 1000) == "a" * 1000 and compared == 0
    assert finder.push("a" * 1000 + "sto") == "a" * 1000 and compared == 1
