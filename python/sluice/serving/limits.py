"""What cannot be answered as it is too long, or has no tokens of the model, is refused before the engine has it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sluice.serving.fields import Refused
from sluice.serving.process import Ready
from sluice.serving.protocol import ChatRequest, CompletionRequest

_LEAST_LONGEST = 16  # Characters: some texts become shorter before they become tokens.


class Limits:
    """Of a model."""

    def __init__(self, ready: Ready, tokenizer: Any) -> None:
        self._limit, self._vocabulary = ready.limit, ready.vocabulary
        # No text of more characters fits: a token has no more than the longest.
        longest = max(map(len, tokenizer.get_vocab()), default=0)
        self._characters = ready.limit * max(longest, _LEAST_LONGEST)

    def check_length(self, prompt: str | list[int], param: str) -> None:
        """Refuses what cannot fit, before it is made tokens of."""
        if not isinstance(prompt, str):
            return
        if len(prompt) > self._characters:
            raise Refused(400, f"the prompt has {len(prompt)} characters, which are more than the model's "
                               f"{self._limit} tokens", code="context_length_exceeded", param=param)
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise Refused(400, "the prompt has a surrogate without its other half, which is no text", param=param) \
                from None

    def check(self, wants: CompletionRequest | ChatRequest, prompts: list[list[int]]) -> None:
        """Refuses what the engine would, before anything is sent."""
        param, limit = wants.prompt_field, self._limit
        for ids in prompts:
            if not ids:
                raise Refused(400, "the prompt has no tokens; it must have one", param=param)
            # A limit that the request did not set is cut to the room that there is.
            most = wants.most() if wants.model_fields_set & {"max_tokens", "max_completion_tokens"} else None
            if len(ids) + (most or 1) > limit and (len(ids) >= limit or most is not None):
                asked = f", and {most} more are asked for" if most else ""
                raise Refused(400, f"the prompt has {len(ids)} tokens{asked}; prompt and answer together may have "
                                   f"{limit}", code="context_length_exceeded", param=param)
            self.check_tokens(ids, param)
        self.check_tokens(wants.logit_bias, "logit_bias")

    def check_tokens(self, ids: Collection[int], param: str) -> None:
        last = self._vocabulary - 1
        strange = [token for token in (min(ids, default=0), max(ids, default=0)) if not 0 <= token <= last]
        if strange:
            raise Refused(400, f"token {strange[0]} is none of the model's, which are in [0, {last}]", param=param)
