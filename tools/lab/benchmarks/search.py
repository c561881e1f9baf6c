"""How near policies come to dense attention on real models: one table over models, texts, lengths and tasks.

    python tools/lab/benchmarks/search.py --model smollm2=DIR --model qwen=DIR --text prose --text code \\
      --tokens 8192,30000 --tasks qwen=FILE --policies "sluice;exact | int4 | sample=64" --out found.jsonl

with models as `tools/models.sh` fetches them. It measures what `python -m sluice eval` does, and loads
each model once. `--prefill "full;flexprefill@0.95;flexprefill@0.95+lines"` reads prompts in each of these ways; the
floor is that of prompts that are read densely. A line of --out is one policy on one text, or on one length of tasks,
and one way to read prompts; what --out has is not measured again, so that a run that was ended goes on where it was.
`--table` and `--by-policy` print what --out has, and run nothing."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sluice.errors import Error, InvalidArgument
from sluice.evaluation.failures import Failures
from sluice.evaluation.inputs import Tokenizer, read_tasks, read_windows
from sluice.evaluation.policies import FLOOR, split_policies, with_floor
from sluice.evaluation.report import grid
from sluice.serving.arguments import device_of, number, option, size

_KEPT = ("kl_mean", "kl_mean_95", "kl_over_floor", "kl_p99", "perplexity_ratio", "same_token", "accuracy", "right",
         "prompts", "same_answer", "attended", "whole", "bytes", "near_bytes", "far_bytes", "link_bytes",
         "choice_bytes", "prompt_blocks", "bypassed", "coverage")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What policies are compared on."""

    model: str
    of: str  #: a text, or "answers"
    tokens: int
    prefill: str = "full"  #: how prompts are read

    def key(self, policy: str) -> Key:
        return self.model, self.of, self.tokens, self.prefill, policy


Key = tuple[str, str, int, str, str]


def _key(row: dict[str, Any]) -> Key:
    return row["model"], row["of"], row["tokens"], row["prefill"], row["policy"]


class Found:
    """Lines of results, in a file that each is added to as soon as it is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [{"prefill": "full", **json.loads(line)} for line in lines]

    def lacking(self, cell: Cell, policies: Sequence[str]) -> list[str]:
        """Those that are not there, and the floor, which is measured with each run; none if all are."""
        known = set(map(_key, self.rows))
        left = [policy for policy in policies if cell.key(policy) not in known]
        return with_floor(left) if left else []

    def add(self, cell: Cell, results: Sequence[dict[str, Any]], seconds: float) -> None:
        known = set(map(_key, self.rows))
        floor = next((each for each in results if each["policy"] == FLOOR), {})
        if cell.prefill != "full":
            dense = dataclasses.replace(cell, prefill="full").key(FLOOR)
            floor = next((row for row in self.rows if _key(row) == dense), {})
        with self._path.open("a") as file:
            for each in results:
                if cell.key(each["policy"]) in known or each["policy"] == "dense" and cell.of != "answers":
                    continue
                row = {**dataclasses.asdict(cell), "policy": each["policy"], "seconds": round(seconds, 1),
                       "floor_same_answer": floor.get("same_answer"),
                       **{name: each[name] for name in _KEPT if name in each}}
                if cell.prefill != "full" and "kl_mean" in row:
                    row["kl_over_floor"] = row["kl_mean"] / floor["kl_mean"] if floor.get("kl_mean") else None
                file.write(json.dumps(row) + "\n")
                self.rows.append(row)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By model, text and length, the nearest policies first."""
    header = ["model", "on", "tokens", "prompts", "policy", "KL", "x floor", "x perplexity", "same", "floor's",
              "attended", "bytes"]
    cells = dict.fromkeys((row["model"], row["of"], row["tokens"]) for row in rows)
    places = {cell: place for place, cell in enumerate(cells)}

    def order(row: dict[str, Any]) -> tuple[int, float]:
        return (places[row["model"], row["of"], row["tokens"]],
                row["kl_mean"] if row["of"] != "answers" else -row["same_answer"])

    lines = []
    for row in sorted(rows, key=order):
        if row["of"] == "answers":
            measured = ["-", "-", "-", f"{row['same_answer']:.1%}", _share(row["floor_same_answer"])]
        else:
            measured = [f"{row['kl_mean']:.5f}", _number(row["kl_over_floor"]), f"{row['perplexity_ratio']:.4f}",
                        f"{row['same_token']:.1%}", "-"]
        lines.append([row["model"], row["of"], str(row["tokens"]), row["prefill"], row["policy"], *measured,
                      _share(row["attended"]) + (" (whole)" if row.get("whole") else ""), _share(row.get("bytes"))])
    return grid([header, *lines], words=5)


def by_policy(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each policy behind prompts that are read densely: in each column all cells of a model, in the order of
    the file."""
    rows = [row for row in rows if row["prefill"] == "full"]
    cells = list(dict.fromkeys((row["model"], row["of"], row["tokens"]) for row in rows))
    columns = list(dict.fromkeys((model, of == "answers") for model, of, _ in cells))
    header = ["policy"]
    for model, answers in columns:
        names = ", ".join(f"{of} {tokens}" for name, of, tokens in cells if (name, of == "answers") == (model, answers))
        header.append(f"{model}, {'same ' if answers else 'KL x floor: '}{names}")
    found = {(row["model"], row["of"], row["tokens"], row["policy"]): row for row in rows}
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        line = [f"`{policy}`"]
        for model, answers in columns:
            here = [found.get((*cell, policy)) for cell in cells if (cell[0], cell[1] == "answers") == (model, answers)]
            line.append(", ".join("-" if row is None else _share(row["same_answer"]) if answers else
                                  _number(row["kl_over_floor"]) for row in here))
        read = [row for cell in cells if (row := found.get((*cell, policy))) and row["attended"] is not None]
        lines.append([*line, *(", ".join(_share(row[name]) for row in read) for name in ("attended", "bytes"))])
    return grid([[*header, "attended", "bytes read"], *lines], words=1)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


class Search:
    """Measures one model."""

    def __init__(self, name: str, folder: str, wants: argparse.Namespace, found: Found,
                 ended: Callable[[], bool]) -> None:
        from sluice._transformers_support import longest
        from sluice.evaluation.decoding import Setup, own_attention
        from sluice.serving.load import end_ids, load_config, load_model

        self.name, self.wants, self.found, self.ended = name, wants, found, ended
        options = {"dense_tokens": 0, **dict(wants.option)}
        if wants.near_bytes is not None:
            options["near_bytes"] = wants.near_bytes
        config = load_config(folder).get_text_config(decoder=True)
        model = load_model(folder, wants.dtype, **own_attention(config)).to(device_of(wants)).eval()
        self.dense = self.setup = Setup(model, wants.prefill_rows, wants.host_bytes, options, wants.audit)
        self.context, self.ends = longest(config), end_ids(model)
        self.vocabulary = Tokenizer(folder)

    def read_prompts(self, prefill: str) -> None:
        """All from here on is measured behind prompts that are read so."""
        self.prefill = prefill
        self.setup = dataclasses.replace(self.dense, options={**self.dense.options, **prefill_options(prefill)})

    def texts(self) -> None:
        from sluice.evaluation.texts import score_windows, summaries

        for tokens in self.wants.tokens:
            for text in self.wants.text if tokens <= self.context else ():
                cell = Cell(self.name, Path(text).stem, tokens, self.prefill)
                for policies, failures in self._runs(cell, tokens, self.wants.score):
                    windows = read_windows(text, self.vocabulary, tokens, self.wants.windows, self.wants.seed)
                    began = time.monotonic()
                    scores = score_windows(self.setup, windows, self.wants.score, policies, _nothing, failures)
                    self.found.add(cell, summaries(scores, self.wants.seed), time.monotonic() - began)

    def tasks(self, path: str) -> None:
        from sluice.evaluation.answers import ALL, Rules, answer_tasks, summaries

        tasks = read_tasks(path, lambda: self.vocabulary, False)
        rules = Rules(24, None, False, functools.cache(lambda: self.vocabulary), self.ends)
        for length in dict.fromkeys(task.length for task in tasks):
            chosen = [task for task in tasks if task.length == length][: self.wants.prompts]
            cell = Cell(self.name, "answers", length, self.prefill)
            most = max(len(task.prompt) + rules.limit(task) for task in chosen)
            for policies, failures in self._runs(cell, most, rules.decode_prompt):
                began = time.monotonic()
                answers = answer_tasks(self.setup, chosen, rules, policies, _nothing, failures)
                made = summaries([dataclasses.replace(task, name=ALL) for task in chosen], answers)
                self.found.add(cell, made, time.monotonic() - began)

    def _runs(self, cell: Cell, tokens: int, rows: int) -> Iterator[tuple[list[list[str]], Failures]]:
        """What is to be measured, if anything: groups of policies, without those that are refused."""
        from sluice.evaluation.decoding import check, groups

        policies, failures, served = self.found.lacking(cell, self.wants.policies), Failures(), []
        if not policies or self.ended():
            return
        print(f"{cell.model}, {cell.of}, {cell.tokens} tokens, prompts {cell.prefill}", file=sys.stderr, flush=True)
        for policy in policies:
            with failures.of(policy):
                groups(self.setup, [policy], rows)
                served.append(policy)
        together = groups(self.setup, served, rows)
        for group in together:
            with failures.of_all(group):
                check(self.setup, group, tokens, rows)
        yield together, failures


def _nothing(_: str) -> None:
    pass


def prefill_options(name: str) -> dict[str, Any]:
    """Those of EngineOptions that read prompts so: `full`, or `flexprefill@GAMMA` or `auto@GAMMA`, with `+lines` behind
    it or not.
    @throws InvalidArgument"""
    way, at, rest = name.partition("@")
    gamma, _, lines = rest.partition("+")
    modes = {"full": "full", "flexprefill": "flex", "auto": "automatic"}
    try:
        if way not in modes or bool(at) == (way == "full") or lines not in ("", "lines"):
            raise ValueError
        return {} if way == "full" else {
            "prefill_mode": modes[way], "prefill_gamma": float(gamma), "prefill_lines": bool(lines)}
    except ValueError:
        raise InvalidArgument(f'--prefill: "{name}" is none; write full, flexprefill@GAMMA or auto@GAMMA, and +lines '
                              "behind it if blocks are chosen by lines") from None


def _prefills(text: str) -> list[str]:
    """The floor of all is of prompts that are read densely, and so these come first."""
    names = [name.strip() for name in text.split(";")]
    for name in names:
        prefill_options(name)
    return sorted(names, key=lambda name: name != "full")


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return (name, value) if equals else (Path(text).name, text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", type=_named, action="append", default=[], metavar="[NAME=]DIR")
    add("--text", action="append", default=[], help="a file, prose or code, as eval has them; may be repeated")
    add("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[8192],
        help="of a window, a comma list; what is longer than a model's context is left out (8192)")
    add("--windows", type=number(int, 1), default=4)
    add("--score", type=number(int, 1), default=128, help="last tokens of a window that are scored (%(default)s)")
    add("--tasks", type=_named, action="append", default=[], metavar="MODEL=FILE",
        help="as eval --make-tasks makes them")
    add("--prompts", type=number(int, 1), default=96, help="the first of each length (%(default)s)")
    add("--policies", default="full;sluice", type=split_policies)
    add("--prefill", default=["full"], type=_prefills, metavar="WAYS",
        help="semicolon list of full, flexprefill@GAMMA, auto@GAMMA, with +lines or not (full)")
    add("--out", type=Path, required=True, help="a line of JSON for each result")
    add("--audit", action="store_true", help="also report the heads that a bypass spared, and coverage")
    add("--table", action="store_true", help="of what --out has; run nothing")
    add("--by-policy", action="store_true", help="likewise, a line for each policy")
    add("--seconds", type=float, default=float("inf"), help="begin nothing new afterwards")
    add("--device")
    add("--dtype", default="auto")
    add("--host-bytes", type=size, default=2 << 30)
    add("--near-bytes", type=size)
    add("--prefill-rows", type=number(int, 1), default=2048)
    add("--option", type=option, action="append", default=[], metavar="NAME=VALUE")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    wants = arguments()
    found, began = Found(wants.out), time.monotonic()
    for name, folder in [] if wants.table or wants.by_policy else wants.model:
        search = Search(name, folder, wants, found, lambda: time.monotonic() - began > wants.seconds)
        for prefill in wants.prefill:
            search.read_prompts(prefill)
            search.texts()
            for path in [path for of, path in wants.tasks if of == name]:
                search.tasks(path)
    print((by_policy if wants.by_policy else table)(found.rows), end="")


if __name__ == "__main__":
    try:
        main()
    except Error as error:
        sys.exit(f"search.py: {error}")
