"""Figures of docs/papers.md are those of docs/data, computed anew: its tables, and what is said below them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from test_figures import CONTEXTS, DATA, ROOT, figure, found_of, layer, raw, reports

PAGE = (ROOT / "docs" / "papers.md").read_text()
SECTIONS = ("LFPS", "FlexPrefill", "PSA", "Twilight", "Tactic")


def section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def rows_of(name: str, header: str = "result") -> dict[str, list[str]]:
    """Cells of the rows of a section's table behind the first two: of results, what Sluice has comes first."""
    table = section(name).partition(f"\n| {header} |")[2].partition("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip().replace("\x01", "|") for cell in line.replace("\\|", "\x01").strip("|").split("|")]
             for line in lines]
    return {row[0].replace("`", ""): row[2:] for row in cells}


def noted(name: str, column: str, **wanted: str) -> str:
    """Of the last row of a page of raw data that has these cells."""
    header: list[str] = []
    found = []
    lines = (DATA / name).read_text().splitlines()
    for line, below in zip(lines, lines[1:]):
        cells = [cell.strip(" `").replace("\x01", "|") for cell in line.replace("\\|", "\x01").strip("|").split("|")]
        if below.startswith(("|--", "|:-")):
            header = cells
        elif all(dict(zip(header, cells)).get(key) == value for key, value in wanted.items()):
            found.append(dict(zip(header, cells))[column])
    return found[-1]


def list_of(values: Iterable[float], digits: int = 2, between: str = ", ") -> str:
    return between.join(f"{value:.{digits}f}" for value in values)


def span(values: Iterable[float], digits: int = 2) -> str:
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


# ---- LFPS


def core(run: str, key: str, method: str = "lfps") -> list[float]:
    """At 4K, 16K, 64K and 128K tokens."""
    rows = {row["length_tokens"]: row for row in reports(raw("papers.json")["runs"][run], "attention")
            if row["method"] == method}
    return [rows[length << 10][key] for length in (4, 16, 64, 128)]


def served(method: str) -> float:
    (row,) = [row for row in reports(raw("lfps_h200.json"), "decode") if row["method"] == method]
    return row["tokens_per_s"]


def kl(policy: str) -> str:
    found = real("kl_over_floor", policy)
    return f"{figure(min(found))} to {figure(max(found))}"


LFPS: dict[str, Callable[[], str]] = {
    "x exact top-k at 4K, 16K, 64K, 128K": lambda: list_of(core("lfps_sweep_mha", "speedup_over_topk"), 1),
    "x dense, likewise": lambda: list_of(core("lfps_sweep_mha", "speedup_over_dense"), 1),
    "keys scored, alpha 0.1, at 4K, 128K": lambda: "{0:.1%}, {3:.1%}".format(
        *core("lfps_alpha", "expanded_share", "lfps:alpha=0.1")),
    "8 sequences, whole model": lambda: f"{served('hybrid/lfps'):.0f} tokens/s on 16 cores",
    "the same, x Quest": lambda: f"{served('hybrid/lfps') / served('hybrid/quest'):.1f}",
    "the same, x exact top-k": lambda: f"{served('hybrid/lfps') / served('hybrid/topk'):.1f}",
    "the same, x dense in GPU memory": lambda: f"{served('hybrid/lfps') / served('dense'):.2f}",
    "KL x floor": lambda: kl("lfps"),
}

# ---- FlexPrefill


def prompt(structure: str, method: str, chunk: int, key: str, part: str = "flex-gamma-high") -> float:
    found = raw("flex_h200.json" if part.startswith("flex") else "prompts_h200.json")[part]
    (row,) = [row for row in reports(found, "prefill")
              if (row["structure"], row["method"], row["chunk_tokens"], row["length_tokens"]) ==
              (structure, method, chunk, 131072)]
    return row[key]


def both(method: str, chunk: int, key: str, form: Callable[[float], str]) -> list[str]:
    minference = method.startswith("minference")
    return [form(prompt(structure, method, chunk, key,
                        f"prefill-patterns-{structure}" if minference else "flex-gamma-high"))
            for structure in ("vertical_slash", "query_aware")]


def faster(method: str, chunk: int) -> list[str]:
    return both(method, chunk, "speedup_over_dense", "{:.1f}".format)


ONE, CHUNKS = 131072, 8192
MINFERENCE = "minference@vertical_slash:1000+6096"
FLEXPREFILL: dict[str, Callable[[], list[str]]] = {
    "x dense, gamma 0.95, prompt in one piece": lambda: faster("flexprefill@0.95", ONE),
    "x dense, gamma 0.95, chunks of 8,192": lambda: faster("flexprefill@0.95", CHUNKS),
    "x dense, gamma 0.95, auto, chunks of 8,192": lambda: faster("auto@0.95", CHUNKS),
    "x dense, gamma 0.9, one piece": lambda: faster("flexprefill@0.9", ONE),
    "blocks computed, gamma 0.95, one piece": lambda: both("flexprefill@0.95", ONE, "blocks_share", "{:.1%}".format),
    "coverage, gamma 0.95, one piece": lambda: both("flexprefill@0.95", ONE, "coverage_mean", "{:.2f}".format),
    "MInference, x dense, one piece": lambda: faster(MINFERENCE, ONE),
    "MInference, coverage, one piece": lambda: both(MINFERENCE, ONE, "coverage_mean", "{:.2f}".format),
}

# ---- PSA


def held(name: str, part: str, policy: str) -> float:
    found = raw(name)[part]
    (row,) = [row for row in found.get("results", found)["held"] if row["policy"] == policy]
    return row["rate_per_s"]


def serving(policy: str) -> str:
    dense = held("serve_h200.json", "limit 100 ms, 15 s, graphs", "dense")
    own = held("psa_int4_h200.json", "serve", policy) if "int4" in policy else held(
        "serve_h200.json", "limit 100 ms, 15 s, graphs, policies of papers", policy)
    return f"{own / dense:.1f} ({own:g} and {dense:g} requests/s)"


def serving_500() -> str:
    rows = [row for row in raw("psa_serve_500_h200.json")["rows"] if row["held"]]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    dense, *own = (max(row["rate_per_s"] for row in rows if row["policy"] == policy) for policy in policies)
    assert policies == ["dense", "psa:mass=0.98", "psa:mass=0.98 | int4", "arkvale:rank=layer,dense=0,budget=1792"]
    return (f"{list_of((rate / dense for rate in own), 1, '; ')} "
            f"({', '.join(f'{rate:g}' for rate in own)} and {dense:g} requests/s)")


def psa_layers(placement: str) -> str:
    found = raw("psa_int4_h200.json")
    return list_of(layer(found, "psa | int4", length, rows=rows, placement=placement)["speedup_over_dense"]
                   for length, rows in ((8192, 1), (32768, 1), (131072, 1), (32768, 8)))


def equal_accuracy(method: str) -> tuple[float, float]:
    """The most that is attended where a method has less than 98% of dense accuracy, and the least where it has that."""
    rows = raw("psa_arkvale.json")["rows"]
    (dense,) = [row["right"] for row in rows if row["policy"] == "dense"]
    own = [row for row in rows if row["policy"].startswith(method)]
    return (max(row["attended"] for row in own if row["right"] < 0.98 * dense),
            min(row["attended"] for row in own if row["right"] >= 0.98 * dense))


PSA: dict[str, Callable[[], str]] = {
    "answer tokens/s on a CPU: dense; psa:mass=0.98; ArkVale with 1,792 tokens": lambda: list_of(
        (row["answer_tokens_per_s"] for row in raw("psa_serve_cpu.json")["rows"]), 1, "; "),
    "tokens attended at 98% of dense accuracy, less than ArkVale": lambda: (
        f"{equal_accuracy('arkvale')[1] / equal_accuracy('psa')[1]:.1f} times"),
    "requests/s within the limits, x dense, psa": lambda: serving("stream/psa"),
    "the same, psa | int4": lambda: serving("hybrid/psa | int4"),
    "the same, arkvale": lambda: serving("arkvale"),
    "the same, limit 500 ms: psa:mass=0.98; psa:mass=0.98 | int4; ArkVale with 1,792 tokens": serving_500,
    "layer, psa | int4, all in GPU memory, x dense": lambda: psa_layers("near"),
    "layer, psa | int4, 3.5% in GPU memory, x dense": lambda: psa_layers("hybrid"),
    "KL x floor": lambda: kl("psa"),
}

# ---- Twilight and Tactic

BATCHES = (1, 4, 8, 16)


def near(name: str, method: str, length: int, rows: int, key: str = "layer_us") -> float:
    return layer(raw(name), method, length, rows=rows)[key]


def over_quest(quest: str, length: int, rows: int) -> float:
    us = {method: near("quest_8192_h200.json", method, length, rows) for method in (quest, "twilight")}
    return us[quest] / us["twilight"]


def quest_8192(rows: int) -> str:
    return f"{over_quest('quest:budget=8192', 32768, rows):.2f}"


def quest_preset() -> str:
    return span(over_quest("quest", length, rows) for length in (8192, 32768) for rows in (*BATCHES, 64)
                if (length, rows) != (32768, 64))


def beside(kernel: str) -> str:
    rows = raw("decode_beside_h200.json")["results"]["beside"]
    us = {row["kernel"]: row["us"] for row in rows if row["shape"] == "16x32K"}
    return f"{us[kernel] / us['near/twilight']:.2f}"


def token_ms(method: str, batch: int = 8) -> float:
    (row,) = [row for row in reports(raw("tactic_twilight_h200.json")["decode-tokens-32K"], "decode")
              if (row["method"], row["batch"]) == (method, batch)]
    return row["tpot_p50_ms"]


def real(key: str, policy: str) -> list[float]:
    return [row[key] for context in CONTEXTS for row in found_of(policy, *context) if "kl_over_floor" in row]


def kmeans() -> dict[int, dict]:
    return {row["length_tokens"]: row for row in reports(raw("tactic_twilight_h200.json")["clusters"], "clusters")}


def tactic(length: int, policy: str = "tactic | int4") -> list[float]:
    return [row["speedup_over_dense"] for name in ("quest_8192_h200.json", "tactic_twilight_h200.json")
            for row in reports(raw(name), "attention")
            if (row["method"], row["mode"]) == (policy, "graph") and row["length_tokens"] == length]


def tactic_512k(rows: str, column: str) -> str:
    return noted("default_h200.md", column, policy="tactic | int4", tokens="524288", rows=rows)


def tactic_prompt() -> str:
    (run,) = reports(raw("tactic_twilight_h200.json")["prompt-tactic"], "run")
    return f"{32 * kmeans()[32768]['cluster_ms'] / run['ttft_ms']:.0%}"


TWILIGHT: dict[str, Callable[[], str]] = {
    "x Quest with the same 8,192 candidates": lambda: quest_8192(16),
    "the same, one sequence": lambda: quest_8192(1),
    "x Quest as preset": quest_preset,
    "x FlashAttention-2": lambda: beside("torch flash"),
    "x FlashInfer": lambda: beside("FlashInfer tensor cores"),
    "x dense": lambda: f"{near('quest_8192_h200.json', 'twilight', 32768, 16, 'speedup_over_dense'):.2f}",
    "time per token, x dense": lambda: f"{token_ms('dense') / token_ms('near/twilight'):.2f}",
    "time per token, x Quest": lambda: f"{token_ms('near/quest') / token_ms('near/twilight'):.2f}",
    "tokens pruned": lambda: f"{100 * (1 - max(real('attended', 'twilight'))):.0f} to "
                             f"{100 * (1 - min(real('attended', 'twilight'))):.0f}%",
    "perplexity, x dense": lambda: span(real("perplexity_ratio", "twilight"), 3),
    "KL x floor: twilight; quest": lambda: f"{kl('twilight')}; {kl('quest')}",
}
TACTIC: dict[str, Callable[[], str]] = {
    "x dense, target 90%, up to 32K tokens": lambda: span(tactic(8192) + tactic(32768)),
    "the same, 128K": lambda: span(tactic(131072)),
    "the same, 512K": lambda: "; ".join(tactic_512k(rows, "x dense") for rows in "18"),
    "x dense, target 70%": lambda: "; ".join(
        f"{near('quest_8192_h200.json', 'tactic:mass=0.7 | int4', length, rows, 'speedup_over_dense'):.2f}"
        for length, rows in ((32768, 16), (131072, 4), (131072, 16))),
    "time per token, x dense": lambda: f"{token_ms('dense') / token_ms('near/tactic | int4'):.2f}",
    "k-means behind a prompt of 32K, 64K, 128K": lambda: list_of(
        32 * row["cluster_ms"] / 1000 for row in kmeans().values()) + " s",
    "k-means, share of the prompt's time": tactic_prompt,
    "KL x floor": lambda: kl("tactic"),
}

ALL = {name: globals()[name.upper()] for name in SECTIONS}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_row_is_computed(name: str) -> None:
    shown, computed = rows_of(name), ALL[name]
    assert shown
    for row, cells in shown.items():
        if cells[0] == "not measured":
            continue
        assert row in computed, f"{row}: nothing computes it"
        value = computed[row]()
        assert cells[: len(value)] == value if isinstance(value, list) else cells[0] == value, row
    assert set(computed) <= set(shown)


def test_the_page_is_short_and_every_row_can_be_made_anew() -> None:
    assert len(PAGE.split()) <= 4000
    for name in SECTIONS:
        for row, cells in rows_of(name).items():
            assert cells[0] == "not measured" or cells[-1].startswith("`"), f"{row}: no command makes it"
