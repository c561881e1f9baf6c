"""Means over windows of what measure.py left: `python tools/lab/routing/report.py routing.jsonl`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Found = dict[str, Any]


def mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def cells(found: list[Found]) -> dict[tuple[str, int], list[Found]]:
    """Windows by model and tokens; other lines say how these were measured."""
    found = [row for row in found if "model" in row]
    keys = dict.fromkeys((row["model"], row["tokens"]) for row in found)
    return {key: [row for row in found if (row["model"], row["tokens"]) == key] for key in keys}


def over_floor(windows: list[Found], part: Callable[[Found], Found]) -> float:
    """Mean KL of a part of each window by the mean floor."""
    return mean(part(window)["kl"] for window in windows) / mean(window["floor"] for window in windows)


def of_bound(by: str, bound: float) -> Callable[[Found], Found]:
    return lambda window: next(each for each in window["bounds"] if (each["by"], each["bound"]) == (by, bound))


def of_single(policy: str, budget: int) -> Callable[[Found], Found]:
    wanted = policy, budget
    return lambda window: next(each for each in window["singles"] if (each["policy"], each["budget"]) == wanted)


def alone(part: Callable[[Found], Found], policy: str) -> Callable[[Found], Found]:
    return lambda window: next(each for each in part(window)["alone"] if each["policy"] == policy)


def _line(name: str, windows: list[Found], part: Callable[[Found], Found]) -> str:
    tokens, used = (mean(part(window)[key] for window in windows) for key in ("tokens", "bytes"))
    return f"  {name:42} KL x floor {over_floor(windows, part):7.1f}  tokens {tokens:6.0f}  KiB {used / 1024:6.1f}"


def table(found: list[Found]) -> str:
    lines = []
    for (model, tokens), windows in cells(found).items():
        floor, look, prompt = (mean(row[key] for row in windows) for key in ("floor", "look_s", "prompt_s"))
        lines.append(f"{model}, {tokens} tokens, {len(windows)} windows: floor {floor:.5f}, look {look:.1f} s, "
                     f"{look / prompt:.0%} of the prompt's time")
        for each in windows[0]["singles"]:
            name = f"{each['policy']}, budget {each['budget']}"
            lines.append(_line(name, windows, of_single(each["policy"], each["budget"])))
        for each in windows[0]["bounds"]:
            part = of_bound(each["by"], each["bound"])
            given = ", ".join(f"{name} {mean(part(row)['shares'][name] for row in windows):.0%}"
                              for name in each["shares"] if name != "kv_heads_without_samples")
            lines.append(_line(f"bound {each['bound']} by {each['by']}", windows, part) +
                         f"  {given}; same later {mean(part(row)['same_policy_later'] for row in windows):.0%}")
            lines.append(_line("  chosen 512 tokens before", windows, lambda row: part(row)["earlier_choice"]))
            lines += [_line(f"  {row['policy']} alone", windows, alone(part, row["policy"])) for row in each["alone"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("found", type=Path, help="what measure.py --out left")
    print(table([json.loads(line) for line in parser.parse_args().found.read_text().splitlines()]))


if __name__ == "__main__":
    main()
