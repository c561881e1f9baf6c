"""What each token of a vocabulary stands for: its bytes, and how answers call it."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # Of SentencePiece.


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: printable ones of Latin 1 as they are, others from 256
    on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = (byte for byte in range(256) if byte not in plain)
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + at): byte for at, byte in enumerate(others)}}


def _decoders(told: Any) -> Iterator[str]:
    """The kinds of a tokenizer's decoders, as its file has them."""
    for each in (told or {}).get("decoders", [told]):
        if each:
            yield each["type"]


class TokenBytes:
    """Of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kinds = set(_decoders(json.loads(decoder.__getstate__()) if decoder is not None else None))
        self._by_bytes = "ByteLevel" in kinds
        # Without a decoder that is known the vocabulary tells.
        self._by_pieces = bool(kinds & {"ByteFallback", "Metaspace"}) or not kinds and "<0x00>" in tokenizer.get_vocab()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {number: str(token) for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}.union(tokenizer.all_special_ids)
        self._known: dict[int, bytes] = {}

    def is_special(self, token: int) -> bool:
        """Whether texts leave it out."""
        return token in self._special

    def of(self, token: int) -> bytes:
        """As it is within a text: a space that a text's first token would lose is there."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # The model has more outputs than the tokenizer tokens.
            return b""
        if self._by_bytes and all(letter in _byte_alphabet() for letter in piece):
            return bytes(_byte_alphabet()[letter] for letter in piece)
        if self._by_pieces:
            found = _BYTE.fullmatch(piece)
            return bytes([int(found[1], 16)]) if found else piece.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False).encode()

    def name(self, token: int) -> str:
        """As answers call it: its text; if it is a part of a character, its bytes as OpenAI writes them."""
        told = self.of(token)
        try:
            return told.decode() if told or token in self._added else f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in told)


class Offsets:
    """Where tokens begin in the text that they make, in characters. One that goes on with a character has the place
    behind all that are complete."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens, self._decoder = tokens, codecs.getincrementaldecoder("utf-8")("replace")
        self._characters, self.begun = 0, False

    def push(self, tokens: Sequence[int], most: int) -> list[int]:
        """The offsets of the next tokens. None is beyond `most`, the text's length: a stop text is cut off, and its
        tokens are not."""
        found, self.begun = [], True
        for token in tokens:
            found.append(min(self._characters, most))
            if not self._tokens.is_special(token):
                self._characters += len(self._decoder.decode(self._tokens.of(token)))
        return found
