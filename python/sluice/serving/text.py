"""Tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # Tokens of a prompt: more than separate a word from the text before it.
_UNRESOLVED = 8  # Tokens that a character may take, at most: it has 4 bytes, and a token has one at least.


class Detokenizer:
    """The text of an answer's tokens as they come. Together the pieces are what its tokens are decoded to at once, but
    for tokens whose bytes are no text: these give marks, of which decoders that look at all bytes have more."""

    def __init__(self, tokenizer: Any, special: bool = False, prompt: Sequence[int] = ()) -> None:
        """`special`: special tokens are part of the text. `prompt`: what the text comes behind, whose last words decide
        whether the first one has a space."""
        self._tokenizer, self._skip = tokenizer, not special
        self._ids = list(prompt[-_CONTEXT:])
        # A character that the prompt does not complete is no part of the answer.
        if self._decode(self._ids).endswith(_UNKNOWN):
            self._ids = []
        # Text before `_read` is told; what is decoded begins at `_first`: how a token reads depends on those before.
        self._first, self._read = 0, len(self._ids)
        self._text = self._decode(self._ids)  # Of the window from `_first` on,
        self._told = self._text  # and what of it is told.

    def push(self, token: int) -> str:
        self._ids.append(token)
        before, self._text = self._text, self._decode(self._ids[self._first:])
        # A token that is left out must not begin a window: decoders take a space from the first one.
        if self._text == before and not self._decode([token, token]):
            self._ids.pop()
            return ""
        # Bytes of a character that is not complete decode to such marks at the end, one or one each; all before stays.
        whole = self._text.rstrip(_UNKNOWN)
        if whole != self._text and len(self._ids) - self._read < _UNRESOLVED:
            return self._tell(whole)
        held = int(whole != self._text)  # What is flushed may end within a character.
        piece = self._tell(self._text[:len(self._text) - held])
        if self._text:
            self._first, self._read = self._read, len(self._ids)
            self._text = self._decode(self._ids[self._first:])
            self._told = self._text[:len(self._text) - int(held and self._text.endswith(_UNKNOWN))]
        return piece

    def end(self) -> str:
        """What is left: of a character that was not completed, its mark."""
        return self._tell(self._text)

    def _tell(self, text: str) -> str:
        piece = text[len(self._told):]
        if piece:
            self._told = text
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


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
        first = max(len(text) - len(stop) + 1, 0)
        while (first := text.find(stop[0], first)) >= 0:
            if stop.startswith(text[first:]):
                return len(text) - first
            first += 1
        return 0
