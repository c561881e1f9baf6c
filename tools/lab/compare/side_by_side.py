"""Results of `sluice bench` and of other kernels, side by side."""

from __future__ import annotations

from shapes import Shape

DENSE = "sluice dense"


def of_report(report: dict) -> list[dict]:
    """What is compared of a report of `sluice bench gpu` or `sluice bench prefill`: forwards in graphs, where there are
    any, and whole prompts."""
    ragged = report["config"]["ragged"]
    rows = report["results"].get("attention")
    if rows is None:
        return [line(r, ragged, DENSE, r["total_ms"] * 1e3) for r in report["results"].get("prefill", [])
                if r["chunk_tokens"] == r["length_tokens"]]
    modes = {r["mode"] for r in rows}
    return [line(r, ragged, name_of(r), r["layer_us"]) | {"coverage": r["coverage_mean"]} for r in rows
            if r["mode"] is None or r["mode"] == "graph" or "graph" not in modes]


def line(row: dict, ragged: int, kernel: str, us: float) -> dict:
    return {"shape": str(Shape(row["rows"], row["length_tokens"], ragged)), "kernel": kernel, "us": us}


def name_of(row: dict) -> str:
    return DENSE if row["placement"] is None else f"{row['placement']}/{row['method']}"


def unique(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def table(lines: list[dict]) -> str:
    """Markdown: a row for each shape that others were measured with, microseconds and in brackets how many times as long as
    our dense kernel; below it what has no time, and why."""
    shapes = unique([each["shape"] for each in lines if "shape" in each and "coverage" not in each])
    entries = {(each["shape"], each["kernel"]): each for each in lines if each.get("shape") in shapes}
    kernels = unique([kernel for _, kernel in entries])
    shown = ["| us, (x dense) | " + " | ".join(kernels) + " |", "|---|" + "--:|" * len(kernels)]
    for shape in shapes:
        unit = entries.get((shape, DENSE), {}).get("us")
        shown.append(f"| {shape} | " + " | ".join(cell(entries.get((shape, kernel)), unit) for kernel in kernels) + " |")
    lacking = [f"- {each['kernel']}{', ' + each['shape'] if 'shape' in each else ''}: {each['error']}" for each in lines
               if "error" in each]
    return "\n".join([*shown, *([""] if lacking else []), *lacking])


def cell(entry: dict | None, unit: float | None) -> str:
    if entry is None or "error" in entry:
        return "-"
    shown = f"{entry['us']:,.0f}" if entry["us"] >= 1000 else f"{entry['us']:.1f}"
    return shown if unit is None else f"{shown} ({entry['us'] / unit:.2f})"
