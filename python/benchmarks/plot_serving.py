"""A picture of what `sluice bench serve` has measured: times between tokens and waits by the rate of arrivals, with
the limits that a rate must hold.

`python benchmarks/plot_serving.py ../docs/psa_serving.svg FILE...` from python/. A file is a report of `bench serve`, or
has reports by name; those of windows shorter than `--seconds` are left out. It needs matplotlib."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from papers.drawing import beside, save


def reports(files: list[Path], seconds: float) -> list[dict]:
    found = []
    for file in files:
        document = json.loads(file.read_text())
        for report in [document] if "results" in document else document.values():
            if not isinstance(report, dict) or report.get("config", {}).get("seconds", 0) < seconds:
                continue
            rows = report.get("results", report)  # Some files keep the tables alone.
            if "serve" in rows and len(report["config"]["rates"]) > 1:  # One rate was run to see something else.
                found.append({"config": report["config"], "rows": rows["serve"]})
    return found


def same_limits(found: list[dict]) -> dict:
    """The config that all have in common, as rates under other limits cannot be compared."""
    names = ("shape", "kv_bytes", "prompt", "answer", "batch", "prefill_chunk", "tbt_limit_ms", "queue_limit_s")
    configs = {tuple(report["config"][name] for name in names) for report in found}
    if len(configs) != 1:
        raise SystemExit(f"plot_serving: runs differ in one of {', '.join(names)}: {sorted(map(str, configs))}")
    return dict(zip(names, configs.pop()))


def draw(found: list[dict], file: Path) -> None:
    limits = same_limits(found)
    by_policy: dict[str, dict[float, dict]] = {}
    for report in found:
        for row in report["rows"]:
            by_policy.setdefault(row["policy"], {})[row["rate_per_s"]] = row
    figure, (left, right) = beside(2)
    for policy, rows in by_policy.items():
        rates = sorted(rows)
        for axes, name in ((left, "tbt_p99_ms"), (right, "queued_p50_s")):
            line, = axes.plot(rates, [rows[rate][name] for rate in rates], "-", label=policy)
            for rate in rates:  # Filled: the rate held both limits.
                inside = line.get_color() if rows[rate]["held"] else "none"
                axes.plot([rate], [rows[rate][name]], "o", color=line.get_color(), markerfacecolor=inside)
    left.axhline(limits["tbt_limit_ms"], color="black", lw=0.8, ls=":")
    right.axhline(limits["queue_limit_s"], color="black", lw=0.8, ls=":")
    left.set(title="between tokens, 99%, ms", xlabel="requests a second", ylim=(0, None))
    right.set(title="waits to be admitted, median, s", xlabel="requests a second", ylim=(0, None))
    left.legend(frameon=False, fontsize=7)
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("svg", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals, at least (%(default)s)")
    wants = parser.parse_args()
    found = reports(wants.files, wants.seconds)
    if not found:
        parser.error(f"no report of bench serve of {wants.seconds:g} s or more in these files")
    draw(found, wants.svg)


if __name__ == "__main__":
    main()
