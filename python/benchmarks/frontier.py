"""Accuracy of all presets against time and bytes, as a picture and as a table, from what docs/data has of them.

`python benchmarks/frontier.py ../docs/data ../docs/frontier.svg` from python/; the table is printed, with the file of each
figure. It needs matplotlib. Accuracy and bytes are of `sluice eval`, times of `sluice bench gpu`: rows of one seed and of
the same tasks, lengths and prompts, and of one call on one machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Of a policy and a cell the first file counts: the one with most prompts, and today's default before that of the builds
# which made the others.
ANSWERS = ("presets.json", "quality_default.json", "quality.json", "baselines.json", "infinigen.json")
TIMES = "presets_gpu.json"
# The build of these times had another `sluice`, and today's as a composition. A file of a later build has no such row.
TIMED_AS = {"sluice": "sluice | top_k=max(64, 0.25%) | rest=mean | page=32"}
SEED, DECODED, PROMPTS, LENGTHS = 4242, 24, (8, 32), (2048, 8192)
TASKS = ("niah", "multikey", "kv")
LENGTH = 8192  # of bytes and times


class Point(NamedTuple):
    policy: str
    accuracy: float  # right answers of all cells, a share
    bytes_share: float  # read, of what dense attention reads
    mass: float  # of the softmax, that is attended; of the first file that has it, NaN if none does
    source: str
    layer_us: dict[int, float]  # by length
    dense_us: dict[int, float]


def reports(file: Path) -> Iterator[dict]:
    """Reports of `sluice` in a file: one, a list, or by name."""
    document = json.loads(file.read_text())
    if "results" in document:
        yield document
        return
    yield from document if isinstance(document, list) else (each for each in document.values() if isinstance(each, dict))


def answers(data: Path) -> Iterator[tuple[str, dict]]:
    """Rows of `eval` that are comparable, with their file, the first files first."""
    for name in ANSWERS:
        if not (data / name).exists():
            continue
        for report in reports(data / name):
            config = report["config"]
            if (config["seed"], config["decode_prompt"]) != (SEED, DECODED) or config["count"] not in PROMPTS:
                continue
            for row in report["results"].get("eval", []):
                if row["task"] in TASKS and row["length_tokens"] in LENGTHS:
                    yield name, row


def times(data: Path) -> tuple[dict[str, dict[int, float]], dict[int, float], str]:
    """Microseconds of a layer in a CUDA graph, if there are any, by policy and length; dense attention's; the GPU."""
    by_policy: dict[str, dict[int, float]] = {}
    dense, gpu = {}, ""
    for report in reports(data / TIMES):
        gpu = report["host"]["gpu"]
        rows = report["results"]["attention"]
        graphs = any(row["mode"] == "graph" for row in rows)
        for row in rows:
            if row["mode"] is None:
                dense[row["length_tokens"]] = row["layer_us"]
            elif row["mode"] == "graph" or not graphs:
                by_policy.setdefault(row["method"], {})[row["length_tokens"]] = row["layer_us"]
    for policy, row in TIMED_AS.items():
        if row in by_policy:
            by_policy[policy] = by_policy.pop(row)
    return by_policy, dense, gpu


def points(data: Path) -> tuple[list[Point], str]:
    """Of the policies that have all cells, by accuracy, then by time."""
    of_policy: dict[str, dict[tuple, tuple[str, dict]]] = {}
    masses: dict[str, dict[str, float]] = {}
    for name, row in answers(data):
        of_policy.setdefault(row["policy"], {}).setdefault((row["task"], row["length_tokens"]), (name, row))
        if row["length_tokens"] == LENGTH and row["coverage_mean"] is not None:
            masses.setdefault(row["policy"], {}).setdefault(row["task"], row["coverage_mean"])
    layer_us, dense_us, gpu = times(data)
    found = []
    for policy, cells in of_policy.items():
        rows = list(cells.values())
        if len(rows) != len(TASKS) * len(LENGTHS):
            continue
        mass = list(masses.get(policy, {}).values())
        long = [row for _, row in rows if row["length_tokens"] == LENGTH]
        found.append(Point(policy, sum(row["accuracy"] for _, row in rows) / len(rows),
                           sum(row["near_bytes_share"] + row["far_bytes_share"] for row in long) / len(long),
                           sum(mass) / len(mass) if mass else float("nan"), rows[0][0],
                           layer_us.get(policy, {}), dense_us))
    return sorted(found, key=lambda point: (-point.accuracy, point.layer_us.get(LENGTH, float("inf")), point.bytes_share)), gpu


def frontier(all_: list[Point], cost) -> list[Point]:
    """Those that nobody beats in accuracy at no more cost, by cost."""
    best, kept = -1.0, []
    for point in sorted((each for each in all_ if cost(each) is not None), key=lambda each: (cost(each), -each.accuracy)):
        if point.accuracy > best:
            kept.append(point)
            best = point.accuracy
    return kept


def table(all_: list[Point]) -> str:
    def us(point: Point, length: int) -> str:
        return f"{point.layer_us[length]:.0f}" if length in point.layer_us else ""

    lengths = sorted({length for point in all_ for length in point.layer_us})
    lines = ["| policy | right | read, of dense | softmax mass | " + " | ".join(f"us, {length // 1024}K" for length in lengths) +
             " | answers from |", "|---|--:|--:|--:|" + "--:|" * len(lengths) + "---|"]
    for point in all_:
        cells = [f"{point.accuracy:.2f}", f"{100 * point.bytes_share:.1f}%", f"{point.mass:.2f}",
                 *(us(point, length) for length in lengths), f"[{point.source}](data/{point.source})"]
        name = point.policy.replace("|", "\\|")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(all_: list[Point], gpu: str, file: Path) -> None:
    from papers.drawing import BLUE, GREEN, beside, save

    lengths = sorted({length for point in all_ for length in point.layer_us})
    costs = [("bytes at 8K, of dense", lambda point: point.bytes_share, BLUE),
             *((f"us a layer, {length // 1024}K", lambda point, length=length: point.layer_us.get(length), GREEN)
               for length in lengths)]
    presets = [point for point in all_ if "|" not in point.policy]  # Compositions have long names.
    figure, panels = beside(len(costs), height=3.4, sharey=True)
    for axes, (title, cost, colour) in zip(panels, costs):
        shown = [point for point in presets if cost(point) is not None]
        axes.scatter([cost(point) for point in shown], [point.accuracy for point in shown], s=14, color=colour, zorder=3)
        best = frontier(presets, cost)
        axes.step([cost(point) for point in best], [point.accuracy for point in best], where="post", color=colour, alpha=0.4)
        for i, point in enumerate(shown):
            axes.annotate(point.policy, (cost(point), point.accuracy), fontsize=5.5, rotation=35,
                          xytext=(2, 3 if i % 2 else -8), textcoords="offset points")
        axes.set(xlabel=title, xscale="log", ylim=(-0.05, 1.12))
    panels[0].set(ylabel="right answers, a share")
    figure.suptitle(f"times: {gpu}", fontsize=8)
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("svg", type=Path)
    wants = parser.parse_args()
    all_, gpu = points(wants.data)
    draw(all_, gpu, wants.svg)
    print(table(all_))


if __name__ == "__main__":
    main()
