"""Policies that fail while others are evaluated."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from sluice.errors import Error


class Failures:
    """Policies that did not get to their end, and why. What was found for the others is kept."""

    def __init__(self, before_message: Callable[[], None] = lambda: None) -> None:
        """`before_message` clears what stands in the line of standard error."""
        self.reasons: dict[str, str] = {}
        self._before_message = before_message

    @contextlib.contextmanager
    def of(self, policy: str) -> Iterator[None]:
        """Ends the block if the policy fails in it, and says so on standard error."""
        with self.of_all([policy]):
            yield

    @contextlib.contextmanager
    def of_all(self, policies: Sequence[str]) -> Iterator[None]:
        """Likewise of those that have an engine in common, but for what has failed before."""
        try:
            yield
        except (Error, RuntimeError, MemoryError) as error:  # RuntimeError: what torch raises.
            self._before_message()
            for policy in policies:
                if policy not in self.reasons:
                    self.reasons[policy] = f"{type(error).__name__}: {error}"
                    print(f"sluice: the policy {policy} has failed and is not among the results: {error}",
                          file=sys.stderr, flush=True)
