"""A chat with a person at a terminal: lines that are asked for, commands, and what an answer took."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass

from sluice.figures import Memory

HELP = """\
/help    this
/status  what the newest answer took
/quit    ends the chat, as Ctrl-D and Ctrl-C twice do
Ctrl-C stops an answer, and what there is of it stays. Arrow keys bring lines back. A line that begins with // begins
with / for the model."""


@dataclass
class Took:
    """What an answer took, so far."""

    began: float
    prompt: int = 0  #: tokens
    answer: int = 0  #: tokens
    first_s: float | None = None  #: until the first token
    newest_s: float = 0  #: until the newest one
    memory: Memory | None = None  #: of the engine, while it was written

    def take(self, count: int, memory: Memory) -> None:
        """The answer has so many tokens."""
        self.newest_s = time.monotonic() - self.began
        self.first_s = self.newest_s if self.first_s is None else self.first_s
        self.answer, self.memory = count, memory

    def line(self) -> str:
        """For people."""
        if self.first_s is None or self.memory is None:
            return "[no answer yet]"
        told = [f"{self.prompt + self.answer:,} tokens, {self.answer:,} of them new",
                f"near {size(self.memory.near_pages_used)}, far {size(self.memory.far_pages_used)}",
                f"{self.first_s:.1f} s to the first"]
        if self.answer > 1:
            told.append(f"{(self.newest_s - self.first_s) / (self.answer - 1) * 1000:.0f} ms a token")
        return f"[{'; '.join(told)}]"


def size(count: int) -> str:
    """Of bytes."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count / 1024:.0f} KiB"


class Lines:
    """What is typed, or comes from a file or another program: then each line is said to the model as it is."""

    def __init__(self) -> None:
        self.of_a_person = sys.stdin.isatty()
        if self.of_a_person:
            with contextlib.suppress(ImportError):  # Some Pythons are built without; then lines cannot be brought back.
                import readline  # noqa: F401  (input() uses it)

    def next(self, took: Took | None) -> str:
        """The next line for the model. `took`: the newest answer.
        @throws EOFError at the end, KeyboardInterrupt"""
        while True:
            line = self._typed()
            if not self.of_a_person or not line.startswith("/"):
                return line
            if line.startswith("//"):
                return line[1:]
            command = line.split()[0]
            if command in ("/quit", "/exit"):
                raise EOFError
            if command == "/status":
                print(took.line() if took else "[no answer yet]", file=sys.stderr, flush=True)
            else:
                print(HELP if command == "/help" else f"there is no {command}\n{HELP}", file=sys.stderr, flush=True)

    def _typed(self) -> str:
        if not self.of_a_person:
            return input()
        try:
            return input("> ")
        except KeyboardInterrupt:  # What was typed is dropped; a second one in a row ends the chat.
            print("\n(Ctrl-C once more, Ctrl-D or /quit ends the chat)", file=sys.stderr, flush=True)
            return input("> ")
