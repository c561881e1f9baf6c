"""A request that has not ended: its tokens, and the text that they make."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from sluice.serving.requests import Chosen, Event, Request
from sluice.serving.sampling import Past
from sluice.serving.text import Detokenizer, StopTexts


class Live:
    """What a loop knows of a request."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request = request
        self.ids = list(request.prompt)  # And the answer's.
        self.past = Past(request.sampling, request.prompt)
        self.sequence: int | None = None
        self.cached: int | None = None  # Tokens of the prompt that were found.
        self._detokenizer = Detokenizer(tokenizer, prompt=request.prompt)
        self._stops = StopTexts(request.sampling.stop)
        self._untold: list[Chosen] = []  # Tokens whose text is held back.

    def take(self, chosen: Chosen, end_ids: Set[int], limit: int) -> Event:
        """The answer's next token, and what there is to tell of it. `end_ids`: with which the model ends an answer.
        `limit`: tokens of prompt and answer together."""
        wants = self.request.sampling
        self.ids.append(chosen.token)
        self.past.add(chosen.token)
        ends = chosen.token in wants.stop_ids or (chosen.token in end_ids and not wants.ignore_eos)
        text, finish = "", "stop" if ends else None
        if not ends:
            self._untold.append(chosen)
            text = self._stops.push(self._detokenizer.push(chosen.token))
            if self._stops.found:
                finish = "stop"
            elif self.past.answered == wants.max_tokens or len(self.ids) >= limit:
                finish = "length"
        if finish is not None and not self._stops.found:
            text += self._stops.push(self._detokenizer.end())
            finish = "stop" if self._stops.found else finish
            text += self._stops.end()
        tokens: tuple[Chosen, ...] = ()
        if text or finish:
            tokens, self._untold = tuple(self._untold), []
        return Event(self.request.number, text, tokens, self.past.answered, self.cached, finish)
