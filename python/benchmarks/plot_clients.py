"""A picture of what `clients.py` has measured: throughput and times against clients.

`python benchmarks/plot_clients.py ../docs/data/clients.json ../docs/clients.svg` from python/. The file is a list of
runs, each with the lines of `clients.py` as its `results`. It needs matplotlib."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from papers.drawing import BLUE, RED, plt, save


def draw(runs: list[dict], file: Path) -> None:
    rows = sorted((row for run in runs for row in run["results"]), key=lambda row: row["clients"])
    clients = [row["clients"] for row in rows]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(9.6, 2.9), layout="constrained")
    left.plot(clients, [row["tokens_s"] for row in rows], "o-", color=BLUE)
    left.set(title="throughput, tokens/s", ylim=(0, None))
    for axes, name, title in ((middle, "ttft", "first token, ms"), (right, "tpot", "between tokens, ms")):
        axes.plot(clients, [row[f"{name}_p50_ms"] for row in rows], "o-", color=BLUE, label="median")
        axes.plot(clients, [row[f"{name}_p99_ms"] for row in rows], "s--", color=RED, label="99%")
        axes.set(title=title, yscale="log")
        axes.legend(frameon=False)
    for axes in (left, middle, right):
        axes.set(xlabel="clients at once", xscale="log")
        axes.set_xticks(clients, [str(each) for each in clients])
        axes.minorticks_off()
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("svg", type=Path)
    wants = parser.parse_args()
    draw(json.loads(wants.runs.read_text()), wants.svg)


if __name__ == "__main__":
    main()
