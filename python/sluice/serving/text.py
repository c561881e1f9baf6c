"""Tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of an answer's tokens as they come. Together the pieces are what its tokens are decoded to at once."""

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        """`special`: special tokens are part of the text."""
        self._tokenizer, self._skip = tokenizer, not special
        self._ids: list[int] = []
        # Text before `_read` is told; what is decoded begins at `_first`: how a token reads depends on those before.
        self._first = self._read = 0
        self._told = ""  # Of the window from `_first` on.

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._first)
        # Bytes of a character that is not complete decode to one such mark at the end; all before it stays.
        whole = not text.endswith(_UNKNOWN)
        piece = self._tell(text if whole else text[:-1])
        if whole and text:
            self._first, self._read = self._read, len(self._ids)
            self._told = self._decode(self._first)
        return piece

    def end(self) -> str:
        """What is left: of a character that was not completed, its mark."""
        return self._tell(self._decode(self._first))

    def _tell(self, text: str) -> str:
        piece = text[len(self._told):]
        if piece:
            self._told = text
        return piece

    def _decode(self, first: int) -> str:
        return self._tokenizer.decode(self._ids[first:], skip_special_tokens=self._skip,
                                      clean_up_tokenization_spaces=False)


class StopTexts:
    """Ends an answer before the first of some texts that it has. Holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.found = False

    def push(self, piece: str) -> str:
        """What may be told now. Nothing any more once one was found."""
        if self.found:
            return ""
        text = self._held + piece
        # The one that is complete first, so that nothing depends on how the text is cut; of several the longest.
        places = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[:min(places)[1]]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def end(self) -> str:
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
