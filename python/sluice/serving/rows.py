"""The rows of a forward: which tokens they are, and whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sluice.admission import TurnItem
from sluice.options import PlanItem
from sluice.serving.live import Live
from sluice.serving.sampling import likelihoods


class Rows:
    """Of items, each of which is a part of a request."""

    def __init__(self, items: Sequence[TurnItem], lives: Sequence[Live]) -> None:
        """`lives`: the items' requests."""
        self.plan = [PlanItem(live.sequence, item.tokens, item.prefill) for item, live in zip(items, lives)]
        self.ids: list[int] = []
        """Of all tokens."""

        self.kept: list[int] = []
        """Rows whose logits are wanted."""

        self._outputs: list[int] = []  # Which of those are outputs; others are of prompts.
        self._prompts: list[tuple[Live, range, int]] = []  # Places in a prompt, and their first among those kept.
        for item, live in zip(items, lives):
            unread = live.unread(item.first, item.tokens)
            if unread:
                self._prompts.append((live, unread, len(self.kept)))
            self.kept.extend(len(self.ids) + place - 1 - item.first for place in unread)
            self.ids.extend(live.ids[item.first : item.first + item.tokens])
            if item.output:
                self._outputs.append(len(self.kept))
                self.kept.append(len(self.ids) - 1)

    def outputs(self, logits: torch.Tensor) -> torch.Tensor:
        """Those of outputs, of logits [kept, vocabulary]. Prompts are told of the others."""
        for live, places, at in self._prompts:
            most = live.request.sampling.prompt_logprobs
            live.read(likelihoods(logits[at : at + len(places)], [live.ids[place] for place in places], most))
        return logits if len(self._outputs) == len(self.kept) else logits[self._outputs]
