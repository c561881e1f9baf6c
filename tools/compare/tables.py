"""Results of `sluice bench` and of other kernels, side by side."""

from __future__ import annotations

from shapes import Shape


def beside(result: dict) -> list[dict]:
    """What this comparison needs of a result of `sluice bench gpu` or `sluice bench prefill`: forwards in graphs, where
    there are any, and whole prompts."""
    ragged = result["config"]["ragged"]
    rows = result["results"].get("attention")
    if rows is None:
        return [{"shape": str(Shape(r["rows"], r["length_tokens"], ragged)), "kernel": f"sluice {r['method']}",
                 "us": r["total_ms"] * 1e3} for r in result["results"]["prefill"] if r["chunk_tokens"] == r["length_tokens"]]
    modes = {r["mode"] for r in rows}
    return [{"shape": str(Shape(r["rows"], r["length_tokens"], ragged)), "kernel": name_of(r), "us": r["layer_us"]}
            for r in rows if r["mode"] is None or r["mode"] == "graph" or "graph" not in modes]


def name_of(row: dict) -> str:
    return "sluice dense" if row["placement"] is None else f"{row['placement']}/{row['method']}"


def unique(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def table(result: dict) -> str:
    """Markdown: a row for each shape, microseconds (prompts: milliseconds), and in brackets how many times as long as our
    dense kernel."""
    prompts = result["what"] == "prefill"
    shapes = unique([each["shape"] for each in result["rivals"]])
    entries = {(each["shape"], each["kernel"]): each for each in result["rivals"] + result["ours"] if each["shape"] in shapes}
    kernels = unique([kernel for _, kernel in entries])
    lines = [f"{result['device']}, torch {result['torch']}; " + ("ms" if prompts else "us") + ", (times `sluice dense`)", "",
             "| shape | " + " | ".join(kernels) + " |", "|---|" + "--:|" * len(kernels)]
    for shape in shapes:
        unit = entries.get((shape, "sluice dense"), {}).get("us")
        cells = [cell(entries.get((shape, kernel)), unit, 1e-3 if prompts else 1) for kernel in kernels]
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    wrong = [f"{each['kernel']}, {each['shape']}: {each['error']}" for each in result["rivals"] if "error" in each]
    wrong += [f"{name} is missing: {why}" for name, why in result["missing"].items()]
    return "\n".join([*lines, *([""] if wrong else []), *(f"- {line}" for line in wrong)])


def cell(entry: dict | None, unit: float | None, scale: float) -> str:
    if entry is None or "error" in entry:
        return "-"
    shown = f"{entry['us'] * scale:.4g}"
    return shown if unit is None else f"{shown} ({entry['us'] / unit:.2f})"
