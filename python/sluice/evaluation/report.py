"""What eval tells: tables for people, and JSON."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sluice.errors import InvalidArgument
from sluice.evaluation.policies import FLOOR

_READ_NOTE = (f"{FLOOR} is the floor: the model's own attention in other sums. attended, bytes read: tokens, and keys, "
              "values and what was read to choose, as shares of dense attention's")
_TEXT_NOTE = ("Tokens of the text that choose as if decoded one by one, against the model's own attention (dense). "
              f"KL(dense || policy) in nats. [...]: 95% by bootstrap of windows. {_READ_NOTE}")
_TASK_NOTE = ("Greedy answers. same answer: token by token as dense attention's. [...]: Wilson's 95%. only dense, only "
              f"policy: answers that one of the two alone has right; p: exact McNemar test of these. {_READ_NOTE}")


def text_table(summaries: Sequence[dict[str, Any]]) -> str:
    header = ["policy", "perplexity", "x dense", "KL mean", "x floor", "KL p99", "KL max", "same token", "attended",
              "bytes read"]
    rows = []
    for each in summaries:
        against = [_with(each["perplexity_ratio"], each["perplexity_ratio_95"], "{:.4f}"),
                   _with(each["kl_mean"], each["kl_mean_95"], "{:.2g}"), _times(each["kl_over_floor"]),
                   f"{each['kl_p99']:.2g}",
                   f"{each['kl_max']:.2g}", _percent(each["same_token"])]
        rows.append([each["policy"], _with(each["perplexity"], each["perplexity_95"], "{:.4g}"),
                     *(["-"] * len(against) if each["policy"] == "dense" else against), *_read(each)])
    return f"{_TEXT_NOTE}\n\n{grid([header, *rows], words=1)}"


def task_table(summaries: Sequence[dict[str, Any]]) -> str:
    header = ["task", "length", "policy", "prompts", "accuracy", "only dense", "only policy", "p", "same answer",
              "attended", "bytes read"]
    rows = []
    for each in summaries:
        against = [str(each["only_dense"]), str(each["only_policy"]), f"{each['p_value']:.2g}",
                   _percent(each["same_answer"])]
        rows.append([each["task"], str(each["length"]), each["policy"], str(each["prompts"]),
                     _with(each["accuracy"], each["accuracy_95"], "{:.2f}"),
                     *(["-"] * len(against) if each["policy"] == "dense" else against), *_read(each)])
    return f"{_TASK_NOTE}\n\n{grid([header, *rows], words=3)}"


def _with(value: float, interval: tuple[float, float] | None, form: str) -> str:
    if interval is None:
        return form.format(value)
    return f"{form.format(value)} [{form.format(interval[0])}, {form.format(interval[1])}]"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _read(each: dict[str, Any]) -> list[str]:
    """What is attended, and the bytes that are read. Where a policy chose nothing, words say so."""
    if each["attended"] is None:
        return ["-", "-"]
    whole = " (attended whole)" if each["whole"] else ""
    return [_percent(each["attended"]) + whole, _percent(each["bytes"])]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def grid(cells: Sequence[Sequence[str]], words: int) -> str:
    """A Markdown table, its first row the header. The first `words` columns but for numbers are aligned left."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]  # A bar would end the cell.
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(cells[0]))]
    left = [column < words and not cells[-1][column].isdecimal() for column in range(len(widths))]
    lines = ["| " + " | ".join(cell.ljust(width) if at_left else cell.rjust(width)
                               for cell, width, at_left in zip(row, widths, left)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if at_left else ":") for width, at_left in zip(widths, left)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: null, which is "not a result"."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Target:
    """Where results go: a file that has all of it or stays as it was, standard output ("-"), or nowhere (None)."""

    def __init__(self, path: str | None, option: str) -> None:
        self._path, self._option = path, option
        self._made: Path | None = None

    def write(self, results: dict[str, Any]) -> bool:
        """As write_text()."""
        return self.write_text(json.dumps(finite(results), allow_nan=False) + "\n")

    def write_text(self, text: str) -> bool:
        """What the file does not take, as on a full disk, goes to standard output, and standard error says so:
        False."""
        if self._path == "-":
            sys.stdout.write(text)
        elif self._made is not None:
            try:
                self._made.write_text(text, "utf-8")
                self._made.replace(self._path)
            except OSError as error:
                print(f"sluice: {self._option} {self._path} was not written: {error}; standard output has it",
                      file=sys.stderr, flush=True)
                sys.stdout.write(text)
                return False
            self._made = None
        return True


@contextlib.contextmanager
def target(path: str | None, option: str = "--json") -> Iterator[Target]:
    """`option` names the path.
    @throws InvalidArgument, before anything has run, if there cannot be such a file"""
    made = Target(path, option)
    if path not in (None, "-"):
        if Path(path).is_dir():
            raise InvalidArgument(f"{option}: {path} is a folder; name a file")
        try:
            handle, name = tempfile.mkstemp(prefix=f".{Path(path).name}.", dir=Path(path).absolute().parent)
        except OSError as error:
            raise InvalidArgument(f"{option}: {path} cannot be written: {error.strerror}") from None
        os.fchmod(handle, 0o666 & ~_umask())  # mkstemp makes files for their owner alone.
        os.close(handle)
        made._made = Path(name)
    try:
        yield made
    finally:
        if made._made is not None:
            made._made.unlink(missing_ok=True)


def _umask() -> int:
    """There is no way to read it but to set it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class Progress:
    """How much has run: a line on standard error, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began, self._shown = total, 0, time.monotonic(), False

    def told(self, what: str) -> None:
        """One more of `total` has run."""
        self._done += 1
        if not sys.stderr.isatty():
            return
        seconds = int((time.monotonic() - self._began) / self._done * (self._total - self._done))
        print(f"\reval: {self._done} of {self._total}, {what}, {seconds // 60}:{seconds % 60:02} left\033[K", end="",
              file=sys.stderr, flush=True)
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._shown = False
