"""Figures of README and the pages of docs/ are those of docs/data, computed anew."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data"
DEFAULT = "exact | int4 | sample=256 | page=32"
CONTEXTS = (("smollm2", 8192), ("qwen05", 8192), ("qwen05", 30000))


def table(page: str, header: str) -> dict[str, list[str]]:
    """Rows of the table whose header begins so, by their first cell."""
    text = (ROOT / page).read_text()
    assert text.count(f"\n| {header}") == 1, f"{page} has {text.count(header)} tables that begin with {header}"
    lines = text.partition(f"\n| {header}")[2].splitlines()[2:]
    rows = [line for line in lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]]
    cells = [[cell.strip().replace("\x01", "|") for cell in row.replace("\\|", "\x01").strip("|").split("|")] for row in rows]
    return {re.sub(r"[`*]", "", row[0]): row[1:] for row in cells}


def raw(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def reports(found: Any, section: str) -> Iterable[dict]:
    """All rows of a section of results, however deep their report lies."""
    if isinstance(found, dict):
        rows = (found.get("results") or {}).get(section) if isinstance(found.get("results"), dict) else None
        yield from rows if rows is not None else (row for each in found.values() for row in reports(each, section))


def layer(found: Any, method: str, length: int, **more: Any) -> dict:
    """The row of `bench gpu` in a graph; the last of those that there are."""
    wanted = {"method": method, "length_tokens": length, "mode": None if method == "dense in HBM" else "graph", **more}
    return [row for row in reports(found, "attention") if all(row[key] == value for key, value in wanted.items())][-1]


def figure(value: float) -> str:
    """As pages write it: two digits behind one, else whole; from 1,000 on with commas."""
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


# ---- accuracy


def found_of(policy: str, model: str, tokens: int) -> list[dict]:
    rows = [json.loads(line) for line in (DATA / "real_h200.jsonl").read_text().splitlines()]
    name = DEFAULT.replace("sample=256", policy.partition(" | ")[2] or "sample=256") if policy.startswith("sluice") else policy
    return [row for row in rows if (row["model"], row["tokens"]) == (model, tokens) and
            row["policy"].removesuffix(" | page=32") == name.removesuffix(" | page=32")]


def floors(policy: str, model: str, tokens: int) -> str:
    by_text = {row["of"]: row["kl_over_floor"] for row in found_of(policy, model, tokens) if "kl_over_floor" in row}
    cells = [figure(by_text[text]) if text in by_text else "-" for text in ("prose", "code")]
    return ", ".join("1" if cell == "1.0" and policy == "full" else cell for cell in cells)


def shares(policy: str, key: str) -> str:
    found = [row[key] for context in CONTEXTS for row in found_of(policy, *context) if "kl_over_floor" in row]
    least, most = (f"{100 * value:#.2g}".rstrip(".") for value in (min(found), max(found)))
    return "100%" if min(found) == 1 else f"{least} to {most}%"


POLICIES = table("docs/accuracy.md", "policy | SmolLM2")


@pytest.mark.parametrize("policy", POLICIES)
def test_accuracy(policy: str) -> None:
    name = policy.removesuffix(", the floor")
    assert POLICIES[policy][:3] == [floors(name, *context) for context in CONTEXTS]
    assert POLICIES[policy][3] == f"{shares(name, 'attended')}; {shares(name, 'bytes')}"


def test_readme_has_these_figures() -> None:
    shown = table("README.md", "policy | SmolLM2")
    assert len(shown) >= 4
    for policy, cells in shown.items():
        *kl, both = POLICIES[policy.removesuffix(" (default)")]
        assert cells == [*kl, both.partition(";")[0]]


def equal_answers(row: dict) -> str:
    equal = f"{row['same_answer'] * row['prompts']:.0f}"
    return equal if row["prompts"] == 96 else f"{equal} of {row['prompts']}"


def test_equal_answers() -> None:
    shown = table("docs/accuracy.md", "policy | 16K")
    assert shown
    for policy, cells in shown.items():
        for tokens, cell in zip((16384, 30000), cells, strict=True):
            rows = [row for row in found_of(policy, "qwen05", tokens) if row["of"] == "answers"]
            assert [cell] == ([equal_answers(row) for row in rows] or ["-"])


def test_quantized_checkpoints() -> None:
    rows = {(row["checkpoint"], row["policy"]): row for row in raw("quantized_h200.json")["rows"]}
    shown = table("docs/serving.md", "checkpoint | KL of")
    assert {name for name, _ in rows} == set(shown)
    for name, cells in shown.items():
        full, sluice = rows[name, "full"], rows[name, "sluice"]
        assert cells == [f"{full['kl_mean']:.4f}", f"{sluice['kl_mean']:.4f}",
                         f"{full['same_token']:.1%}, {sluice['same_token']:.1%}",
                         ", ".join(f"{row['same_answer'] * row['prompts']:.0f} of {row['prompts']}" for row in (full, sluice))]


def test_sinks_and_recent_tokens() -> None:
    def kls(policy: str) -> dict[tuple, float]:
        return {(*context, row["of"]): row["kl_mean"] for context in CONTEXTS for row in found_of(policy, *context)
                if "kl_over_floor" in row}

    default = kls(DEFAULT)
    changes = [abs(value / default[cell] - 1)
               for near in ("sinks=4,recent=32", "sinks=4,recent=64", "sinks=4,recent=256", "sinks=16,recent=128",
                            "sinks=64,recent=128")
               for cell, value in kls(DEFAULT.replace(" | page", f" | near=0%,{near} | page")).items()]
    assert len(changes) == 30
    said = " ".join((ROOT / "docs/accuracy.md").read_text().split())
    assert f"change `sample=256`'s KL by at most {100 * max(changes):.0f}%." in said


HEADS = ("bypass", "streaming", "history", "sample")


def kl_at(used: float, points: list[list[float]]) -> str:
    """Of (KL, tokens, bytes) by bytes, on a line of the logarithm; a dash where all read more."""
    for (before, _, low), (behind, _, high) in zip(points, points[1:]):
        if low <= used <= high:
            return figure(before * (behind / before) ** ((used - low) / (high - low)))
    return "-"


def test_policies_by_head() -> None:
    rows = [json.loads(line) for line in (DATA / "routing.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "model" in row]
    mean = statistics.fmean

    def part(row: dict, bound: float, by: str = "query head") -> dict:
        (found,) = [each for each in row["bounds"] if (each["by"], each["bound"]) == (by, bound)]
        return {**found, **{each["policy"] + " alone": each for each in found["alone"]}}

    shown, seen = table("docs/accuracy.md", "model, tokens, bound"), []
    for name, cells in shown.items():
        model, tokens, bound = name.split(", ")
        wanted = {"SmolLM2": "smollm2", "Qwen2.5": "qwen05"}[model], {"4K": 4096, "8K": 8000}[tokens]
        windows = [row for row in rows if (row["model"], row["tokens"]) == wanted]
        found = [part(row, float(bound.strip("%")) / 100) for row in windows]
        floor = mean(row["floor"] for row in windows)

        def means(of: list[dict]) -> list[float]:
            return [mean(each["kl"] for each in of) / floor, *(mean(each[key] for each in of) for key in ("tokens", "bytes"))]

        routed, history, sample = map(means, (found, *([each[f"{policy} alone"] for each in found]
                                                       for policy in ("history", "sample"))))
        draws = [means([single for row in windows for single in row["singles"]
                        if (single["policy"], single["budget"]) == ("sample", count)]) for count in (16, 64, 256)]
        share = {policy: mean(each["shares"][policy] for each in found) for policy in HEADS}
        given = ", ".join(f"{100 * share[policy]:.0f}" for policy in HEADS)
        assert cells == [f"{given}%", f"{figure(routed[0])}; {routed[1]:.0f}; {routed[2] / 1024:.0f}",
                         *(f"{figure(alone[0])}; {alone[2] / 1024:.0f}" for alone in (history, sample)),
                         kl_at(routed[2], draws)]
        assert sample[1] == pytest.approx(routed[1], rel=0.05)
        group = {"SmolLM2": 3, "Qwen2.5": 7}[model]
        tables = share["history"] * group * 2 * wanted[1] * 4
        seen.append((sample[0] < routed[0], tables / 1024, (routed[2] + tables) / sample[2],
                     [each["kl"] / row["floor"] for each, row in zip(found, windows)]))
    assert list(shown) == [f"{model}, {bound}" for model in ("SmolLM2, 4K", "SmolLM2, 8K", "Qwen2.5, 4K")
                           for bound in ("10%", "20%")]
    nearer, tables, over, by_window = zip(*seen)
    assert sum(nearer) > len(nearer) / 2 and sum(ratio > 0.99 for ratio in over) == 5
    text = " ".join((ROOT / "docs/accuracy.md").read_text().split())
    assert f"{min(tables):.0f} to {max(tables):.0f} KiB in float32" in text
    assert f"by up to {max(max(kls) / min(kls) for kls in by_window):.1f} times." in text
    look = [100 * row["look_s"] / row["prompt_s"] for row in rows]
    same = [100 * part(row, bound)["same_policy_later"] for row in rows for bound in (0.1, 0.2, 0.4)]
    assert f"Judging takes {min(look):.0f} to {max(look):.0f}% of the prompt's time" in text
    assert f"{min(same):.0f} to {max(same):.0f}% of the heads got the same policy" in text


# ---- speed


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_default_policy(page: str) -> None:
    shown = table(page, "tokens | dense in" if page == "README.md" else "tokens | dense | `sluice` | x dense")
    assert set(shown) == {"8K", "32K", "128K", "512K"}
    for tokens, cells in shown.items():
        report = raw("default_h200.json")["d1-512" if tokens == "512K" else "d1"]
        length = int(tokens[:-1]) << 10
        row, dense = layer(report, DEFAULT, length), layer(report, "dense in HBM", length)
        short: Callable[[float], str] = lambda us: f"{us:.3g}"  # noqa: E731
        attended = 100 * (row["near_share"] + row["far_share"] + row["fetched_share"])
        assert cells == [short(dense["layer_us"]), short(row["layer_us"]), f"{row['speedup_over_dense']:.2f}",
                         f"{attended:.0f}%" if attended > 9.5 else f"{attended:.1f}%"]


def test_all_near() -> None:
    found = raw("default_h200.json")
    near = {tokens: layer(found[f"near-{tokens}"], DEFAULT, int(tokens[:-1]) << 10) for tokens in ("8K", "32K", "128K")}
    assert all(row["far_share"] == 0 for row in near.values())
    times = [f"{row['layer_us']:.1f}" for row in near.values()]
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert f"{times[0]}, {times[1]} and {times[2]} us" in text


def test_batches_share_far_tokens() -> None:
    found, shown = raw("shared_h200.json"), table("docs/benchmarks.md", "batch, near tokens | dense")
    for line, name, length in (("64 x 8K without a pattern, 25%", "u64x8K", 8), ("32 x 8K, 10%", "s32x8K", 8),
                               ("16 x 32K without a pattern, 25%", "u16x32K", 32)):
        alone, shared = (layer(found[f"{name}-{share}"], DEFAULT, length << 10) for share in ("0", "auto"))
        assert shown[line] == [f"{value:,.0f}" for value in (shared["dense_us"], alone["layer_us"], shared["layer_us"],
                                                             shared["waited_us"])]
        assert alone["fetched_share"] == 0 < shared["fetched_share"]
    near = [layer(found["s64x8K-near" if rows == 64 else "s16-near"], DEFAULT, length << 10)
            for rows, length in ((64, 4), (64, 8), (16, 8), (16, 16))]
    text = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    for key in ("layer_us", "dense_us"):
        *first, last = (f"{row[key]:.0f}" for row in near)
        assert f"{', '.join(first)} and {last} us" in text


def test_bounds_on_the_error() -> None:
    shown = table("docs/benchmarks.md", "policy | 8K | 32K | 128K")
    assert len(shown) == 4
    for policy, cells in shown.items():
        method = DEFAULT.replace("sample=256", policy.partition(" | ")[2] or "sample=256")
        report = raw("error_h200.json")["d1-new-2" if method == DEFAULT else "d1-more"]
        assert cells == [f"{layer(report, method, length << 10)['layer_us']:.3g}" for length in (8, 32, 128)]


def test_vllm() -> None:
    rows = [json.loads(line) for line in (DATA / "vllm_h200.jsonl").read_text().splitlines()]
    fits = {8064: 16, 32640: 4, 130944: 1}
    shown = table("docs/benchmarks.md", "sequences | FlashAttention-3")
    assert len(shown) == 8
    for name, cells in shown.items():
        batch, tokens = name.split(" x ")
        length = {"8K": 8064, "32K": 32640, "128K": 130944}[tokens]

        def of(label: str, batch: int, length: int = length) -> dict:
            (row,) = [row for row in rows if (row.get("label"), row.get("length"), row.get("batch")) == (label, length, batch)]
            return row

        own = of("own", int(batch))
        ours = of("sluice-16-shared" if name == "64 x 8K" else "sluice-16", int(batch))
        fitting = of("own", min(int(batch), fits[length]))
        assert cells == [figure(own["ms_per_step"]) if own["ms_per_step"] < 9.95 else f"{own['ms_per_step']:.3g}",
                         f"{ours['ms_per_step']:.3g}" if ours["ms_per_step"] > 9.95 else figure(ours["ms_per_step"]),
                         f"{ours['tokens_per_s'] / fitting['tokens_per_s']:.2f}"]


def test_rates_of_vllm() -> None:
    rows = [json.loads(line) for line in (DATA / "vllm_h200.jsonl").read_text().splitlines()]
    served = {(row["label"], row["rate"]): row for row in rows if (row["what"], row.get("step")) == ("serve", "rate")}
    assert all(row["failed"] == 0 for row in served.values())

    def shown(rate: float, what: str) -> list[str]:
        pairs = [[served[label, rate][f"{p}_{what}_ms"] for p in ("p50", "p99")] for label in ("own", "sluice")]
        return ["; ".join(f"{ms:,.0f}" if ms >= 9.95 else f"{ms:.1f}" for ms in pair) for pair in pairs]

    for rate, cells in table("docs/benchmarks.md", "requests/s | first token, vLLM").items():
        assert cells == shown(float(rate), "ttft") + shown(float(rate), "tpot")
    (long,) = [row for row in rows if (row.get("label"), row.get("step")) == ("sluice-512K-8b", "decode")]
    assert (f"capped at 16 GiB of GPU memory: {long['ttft_s']:.0f} s to the first token, {long['ms_per_step']:.1f} ms per "
            "token" in (ROOT / "docs/benchmarks.md").read_text())


def test_papers_policies() -> None:
    shown = table("docs/benchmarks.md", "policy | 8K | x dense")
    assert len(shown) == 20
    for policy, cells in shown.items():
        name = "dense in HBM" if policy == "dense" else policy
        rows = [layer(raw("presets_gpu.json")[tokens], name, length) for tokens, length in (("8K", 8192), ("32K", 32768))]
        ratios = ["1" if policy == "dense" else f"{row['speedup_over_dense']:.2f}" for row in rows]
        assert cells == [cell for row, ratio in zip(rows, ratios, strict=True)
                         for cell in (f"{row['layer_us']:,.0f}", ratio)]


def test_other_libraries() -> None:
    def us(name: str, shape: str, kernel: str) -> float:
        (row,) = [row for row in raw(name)["results"]["beside"] if (row["shape"], row["kernel"]) == (shape, kernel)]
        return row["us"]

    for batch, cells in table("docs/benchmarks.md", "batch | FlashAttention-3").items():
        shape = batch.replace(" to ", "-").replace(" ", "")
        other, ours = (us("decode_since_h200.json", shape, kernel) for kernel in ("FlashAttention-3", "sluice dense"))
        assert cells == [f"{other:.0f}", f"{ours:.0f}", f"{other / ours:.2f}",
                         f"{us('decode_beside_h200.json', shape, 'FlashInfer tensor cores'):.0f}"]
    for tokens, cells in table("docs/benchmarks.md", "tokens | FlashAttention-3").items():
        other, ours = (us("prompt_since_h200.json", f"1x{tokens}", kernel) / 1000
                       for kernel in ("FlashAttention-3", "sluice dense"))
        assert [float(cell) for cell in cells[:2]] == [pytest.approx(other, rel=5e-3), pytest.approx(ours, rel=5e-3)]
        assert cells[2] == f"{ours / other:.2f}"


def test_one_core() -> None:
    rows = {row["length_tokens"]: row for row in reports(raw("papers.json")["runs"]["lfps_sweep"], "attention")
            if row["method"] == "lfps"}
    for tokens, cells in table("docs/benchmarks.md", "tokens | `lfps`, x dense").items():
        row = rows[int(tokens[:-1]) << 10]
        scored = 100 * row["scored_share"]
        assert cells == [f"{row['speedup_over_dense']:.1f}", f"{row['speedup_over_topk']:.1f}",
                         f"{scored:.0f}%" if scored > 9.95 else f"{scored:.1f}%"]
