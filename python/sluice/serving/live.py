"""A request that has not ended: its tokens, and the text that they make."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

from sluice.serving.requests import Chosen, Event, Request
from sluice.serving.sampling import Past
from sluice.serving.text import Detokenizer, StopTexts

if TYPE_CHECKING:
    from sluice.serving.guides import Guide


class Live:
    """What a loop knows of a request."""

    def __init__(self, request: Request, tokenizer: Any, end_ids: Set[int] = frozenset(),
                 guide: Guide | None = None) -> None:
        """`end_ids`: with which the model ends an answer. `guide`: what the answer follows."""
        wants = request.sampling
        self.request, self._end_ids = request, end_ids
        self.ids = list(request.prompt)  # And the answer's.
        self.past = Past(wants, request.prompt, wants.stop_ids | (frozenset() if wants.ignore_eos else end_ids), guide)
        self.sequence: int | None = None
        self.named = False  # It has begun with what is known of its tokens, and others may begin with them.
        self.cached: int | None = None  # Tokens of the prompt that were found.
        # Of the prompt's tokens, as far as probabilities are known: the first one has none.
        self._prompt: list[Chosen] = [] if wants.prompt_logprobs is None else [Chosen(request.prompt[0])]
        self._detokenizer = Detokenizer(tokenizer, wants.special, request.prompt)
        self._stops = StopTexts(request.sampling.stop)
        self._untold: list[Chosen] = []  # Tokens whose text is held back.

    def unread(self, first: int, tokens: int) -> range:
        """Of the prompt's tokens behind those at `first` and so many, which are to be told of and have not been."""
        if not self._prompt:
            return range(0)
        return range(max(first + 1, len(self._prompt)), min(first + tokens + 1, len(self.request.prompt)))

    def read(self, told: Sequence[Chosen]) -> None:
        """What there is to tell of the prompt's next tokens."""
        self._prompt.extend(told)

    def take(self, chosen: Chosen, limit: int) -> Event:
        """The answer's next token, and what there is to tell of it. `limit`: tokens of prompt and answer together."""
        wants, first = self.request.sampling, self.past.answered == 0
        prompt = tuple(self._prompt) if first else ()
        if wants.max_tokens == 0:
            return Event(self.request.number, cached=self.cached, prompt=prompt, finish="length")
        self.ids.append(chosen.token)
        self.past.add(chosen.token)
        early = self.past.answered < wants.min_tokens
        ends = chosen.token in wants.stop_ids or (chosen.token in self._end_ids and not wants.ignore_eos)
        text, finish = "", "stop" if ends else None
        if not ends:
            self._untold.append(chosen)
            piece = self._detokenizer.push(chosen.token)
            text = piece if early else self._stops.push(piece)
            if self._stops.found or self.past.guide is not None and self.past.guide.done:
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
        return Event(self.request.number, text, tokens, self.past.answered, self.cached, prompt,
                     chosen if ends else None, finish)
