"""Answers that follow a grammar: JSON, or JSON of a schema. The grammars are llguidance's, which finds the tokens that
may come next while an answer grows."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from typing import Any

import torch

from sluice.errors import InvalidArgument, Unsupported

_SPACES = r"[\x20\x0A]{0,16}"  # Between what JSON has: some models would go on with spaces for ever.


def missing() -> str | None:
    """Why no answer can follow a grammar; None if it can."""
    if importlib.util.find_spec("llguidance") is not None:
        return None
    return ("the package llguidance is not installed, by which answers follow a grammar: pip install "
            "'./python[guided]', in Sluice's sources, has it")


def grammar_of(schema: Any) -> str:
    """The grammar of JSON that a schema describes.
    @throws Unsupported if llguidance is not installed, InvalidArgument if it does not take the schema"""
    if (why := missing()) is not None:
        raise Unsupported(why)
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _SPACES})
        wrong = LLMatcher.validate_grammar(grammar)
    except Exception as error:
        wrong = str(error)
    if wrong:
        raise InvalidArgument(f"this JSON schema is not served: {' '.join(wrong.split())}")
    return grammar


class Guide:
    """What one answer follows."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._mask = torch.zeros((vocabulary + 31) // 32, dtype=torch.int32, device="cpu")
        self.error: str | None = None
        """Why it leads no further; None if it does."""

    @property
    def done(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return self.error is None and self._matcher.is_stopped()

    def take(self, token: int) -> None:
        """The answer's next token."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self.error = self._matcher.get_error() or f"token {token} is not what the grammar has"

    def allowed(self, tokens: int) -> torch.Tensor:
        """Which of so many tokens may come next, [tokens], on the CPU. None may after an error."""
        if self.error is None:
            try:
                self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), 4 * len(self._mask))
                self.error = self._matcher.get_error() or None
            except Exception as error:  # Such as a grammar that has become too large.
                self.error = str(error)
        if self.error is not None:
            return torch.zeros(tokens, dtype=torch.bool, device="cpu")
        bits = self._mask[:, None] >> torch.arange(32, dtype=torch.int32, device="cpu") & 1
        found = torch.zeros(tokens, dtype=torch.bool, device="cpu")
        found[: bits.numel()] = bits.flatten()[:tokens].bool()
        return found


class Guides:
    """Makes them for a model's tokens."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Iterable[int]) -> None:
        """`ends`: with which the model ends an answer."""
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, sorted(ends)
        self._tokens: Any = None  # A second or so is needed to make them, and not every server is asked for it.

    def of(self, grammar: str) -> Guide:
        """@throws InvalidArgument if the tokenizer or the grammar is not taken"""
        if (why := missing()) is not None:
            raise Unsupported(why)
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        try:
            if self._tokens is None:
                self._tokens = from_tokenizer(self._tokenizer, max(self._vocabulary, len(self._tokenizer)),
                                              self._ends or None)
            matcher = LLMatcher(self._tokens, grammar, log_level=0)
            wrong = matcher.get_error()
        except Exception as error:
            wrong = str(error)
        if wrong:
            raise InvalidArgument(f"no answer can follow this grammar: {' '.join(wrong.split())}")
        return Guide(matcher, self._tokens.vocab_size)
