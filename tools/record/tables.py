#!/usr/bin/env python3
"""Markdown tables from the JSON files that tools/record.sh wrote: tables.py DIR PART...

A part is the name of a file without .json. Parts that are missing, or were interrupted, are named first.
"""

import json
import pathlib
import sys

from figure_tables import FIGURES
from shown import cell, code, percent, table, thousands, unique
from speed_tables import PRINTERS
from took import print_seconds


# What a part writes beside the file of its name.
FURTHER = {"ablation": ["ablation-sources", "ablation-sinks"], "link": ["link-pinning"],
           "cpu-engine": ["cpu-engine-all", "cpu-engine-128K", "cpu-engine-128K-all"],
           "decode-default": ["decode-default-long"], "decode-default-uniform": ["decode-default-uniform-long"],
           "decode-pattern-batch": ["decode-pattern-batch-64G"]}


def load(directory, names):
    """Reports by the name of their part, and what lacks."""
    reports, lacking = {}, []
    names = [each for name in names for each in (name, *FURTHER.get(name, []))]
    for name in names:
        file = directory / (name + ".json")
        if not file.exists():
            lacking.append(name)
            continue
        reports[name] = json.loads(file.read_text())
        if reports[name].get("interrupted"):
            lacking.append(name + " (interrupted: some rows)")
    return reports, lacking


def rows(reports, prefix, table_name):
    return [{"part": name, **row} for name, report in reports.items() if name.startswith(prefix)
            for row in report["results"].get(table_name, [])]


def print_tasks(found):
    cells = unique((r["task"], r["length_tokens"]) for r in sorted(found, key=lambda r: r["length_tokens"]))
    cells.sort(key=lambda c: (["niah", "multikey", "kv"].index(c[0]), c[1]))
    print("Accuracy\n")
    by_key = {(r["policy"], r["task"], r["length_tokens"]): r for r in found}
    policies = unique(r["policy"] for r in found)
    table(["policy"] + [f"{task} {thousands(length)}" for task, length in cells],
          [[code(p)] + [cell(by_key[p, t, n]["accuracy"]) if (p, t, n) in by_key else "" for t, n in cells]
           for p in policies])
    for task, length in [c for c in cells if c[0] == "kv"]:
        print(f"Cost on {task} {thousands(length)}\n")
        body = []
        for p in policies:
            r = by_key.get((p, task, length))
            if r is None:
                continue
            body.append([code(p), cell(r["accuracy"]), percent(r["attended_share"]),
                         cell(r["scored_per_head_step"], "{:.0f}"), percent(r["near_bytes_share"]),
                         percent(r["far_bytes_share"]), cell(r["coverage_mean"], "{:.3f}"),
                         cell(r["coverage_p5"], "{:.3f}"), cell(r["answer_coverage"], "{:.3f}"),
                         cell(r["promoted_per_head_step"], "{:.1f}")])
        table(["policy", "accuracy", "attended", "keys scored", "near bytes", "far bytes", "coverage", "p5", "answer",
               "brought"], body)


def print_sweep(found):
    print("Promises and costs at " + thousands(found[0]["length_tokens"]) + "\n")
    table(["policy", "task", "accuracy", "attended", "far bytes", "coverage", "promise kept"],
          [[code(r["policy"]), r["task"], cell(r["accuracy"]), percent(r["attended_share"]),
            percent(r["far_bytes_share"]), cell(r["coverage_mean"], "{:.3f}"), percent(r["reached_share"])]
           for r in found])


def print_lost(found):
    print("Who lost the answer\n")
    table(["policy", "task", "accuracy", "layer", "head", "wanted", "kept"],
          [[code(r["policy"]), f"{r['task']} {thousands(r['length_tokens'])}", cell(r["accuracy"]), str(r["layer"]),
            str(r["head"]), cell(r["wanted_mass"]), cell(r["kept_share"])] for r in found])


def print_needles(found):
    counts = sorted(unique(r["needles"] for r in found))
    by_key = {(r["policy"], r["needles"]): r for r in found}
    nothing = {}
    print("Needles\n")
    head = ["policy"] + [f"{n} needles found" for n in counts] + ["attended", "near bytes", "far bytes", "us/layer"]
    body = []
    for p in unique(r["policy"] for r in found):
        last = by_key.get((p, counts[-1]), nothing)
        body.append([code(p)] + [cell(by_key.get((p, n), nothing).get("found")) for n in counts] +
                    [percent(last.get("attended_share")), percent(last.get("near_bytes_share")),
                     percent(last.get("far_bytes_share")), cell(last.get("layer_us"), "{:.0f}")])
    table(head, body)


def print_layers(page, found):
    print(f"Time per layer, us, pages of {page}\n")
    lengths = sorted(unique(r["length_tokens"] for r in found))
    by_key = {(r["method"], r["placement"], r["length_tokens"]): r for r in found}
    head, body = ["policy"], []
    for n in lengths:
        head += [f"{thousands(n)} hybrid", "x dense", f"{thousands(n)} stream", "coverage"]
    for method in unique(r["method"] for r in found):
        line = [code(method) if by_key.get((method, "hybrid", lengths[0])) else method]
        for n in lengths:
            here = by_key.get((method, "hybrid", n)) or by_key.get((method, None, n)) or {}
            there = by_key.get((method, "stream", n), {})
            line += [cell(here.get("layer_us"), "{:.0f}"), cell((here or there).get("speedup_over_dense"), "{:.3g}"),
                     cell(there.get("layer_us"), "{:.0f}"), cell((here or there).get("coverage_mean"), "{:.3f}")]
        body.append(line)
    table(head, body)


def print_prefill_tasks(found):
    print("Ways to prefill: accuracy\n")
    cells = unique((r["task"], r["length_tokens"]) for r in found)
    cells.sort(key=lambda c: (["niah", "multikey", "kv"].index(c[0]), c[1]))
    by_key = {(r["policy"], r["prefill"], r["task"], r["length_tokens"]): r for r in found}
    ways = unique((r["policy"], r["prefill"]) for r in found)
    head = ["policy", "prefill"] + [f"{task} {thousands(n)}" for task, n in cells]
    table(head, [[code(p), w] + [cell(by_key.get((p, w, t, n), {}).get("accuracy")) for t, n in cells] for p, w in ways])
    print("Ways to prefill: cost\n")
    body = []
    for task, n in cells:
        for way in unique(w for _, w in ways):
            r = by_key.get((ways[0][0], way, task, n))
            if r is None:
                continue
            body.append([f"{task} {thousands(n)}", way, percent(r["blocks_share"]), percent(r["sparse_chunks_share"]),
                         cell(r["prefill_ms"], "{:.0f}")])
    table(["task", "prefill", "blocks computed", "chunks with a choice", "ms"], body)


def print_prefill_text(found):
    print("Ways to prefill: what follows a text\n")
    dense = {r["length_tokens"]: r["perplexity"] for r in found if r["prefill"] == "full"}
    table(["tokens", "prefill", "perplexity", "x dense prompts"],
          [[thousands(r["length_tokens"]), r["prefill"], cell(r["perplexity"], "{:.4f}"),
            cell(r["perplexity"] / dense[r["length_tokens"]], "{:.4f}") if r["length_tokens"] in dense else ""]
           for r in found])


def print_prefill_layer(found):
    print("Attention of one layer of a prompt\n")
    table(["structure", "length", "chunk", "method", "ms", "choice ms", "TFLOP/s", "x dense", "blocks", "coverage", "p5",
           "error", "query-aware"],
          [[r["structure"], f"{r['length_tokens'] / 1024:g}K", f"{r['chunk_tokens'] / 1024:g}K", r["method"],
            cell(r["total_ms"], "{:.3g}"), cell(r["select_ms"], "{:.3g}"), cell(r["tflops"], "{:.3g}"),
            cell(r["speedup_over_dense"]), percent(r["blocks_share"]), cell(r["coverage_mean"], "{:.3f}"),
            cell(r["coverage_p5"], "{:.3f}"), cell(r["output_error"], "{:.3f}"), percent(r["query_aware_share"])]
           for r in found])


def print_core(title):
    def show(found):
        print(title + "\n")
        table(["length", "method", "us", "x dense", "x topk", "scored", "overlap", "coverage", "error", "bypassed"],
              [[thousands(r["length_tokens"]), code(r["method"]), cell(r["time_us"], "{:.0f}"),
                cell(r["speedup_over_dense"]), cell(r["speedup_over_topk"]), percent(r["expanded_share"]),
                cell(r["topk_overlap"]), cell(r["coverage_mean"], "{:.3f}"), cell(r["output_error"], "{:.3f}"),
                percent(r["bypassed_share"])] for r in found])
    return show


def print_chosen_prefill(title):
    def show(found):
        print(title + "\n")
        table(["task", "prefill", "accuracy", "blocks computed"],
              [[f"{r['task']} {thousands(r['length_tokens'])}", r["prefill"], cell(r["accuracy"]),
                percent(r["blocks_share"])] for r in found])
    return show


def print_ablation(title):
    def show(found):
        print(title + "\n")
        table(["policy", "task", "accuracy", "overlap", "coverage", "answer", "scored", "attended"],
              [[code(r["policy"]), f"{r['task']} {thousands(r['length_tokens'])}", cell(r["accuracy"]),
                cell(r["overlap_mean"]), cell(r["coverage_mean"], "{:.3f}"), cell(r["answer_coverage"], "{:.3f}"),
                cell(r["scored_per_head_step"], "{:.0f}"), percent(r["attended_share"])] for r in found])
    return show


def print_text(found):
    print("Predictions of a text\n")
    table(["policy", "length", "tokens", "perplexity", "x dense", "KL", "worst", "same", "attended", "coverage"],
          [[code(r["policy"]), thousands(r["length_tokens"]), str(r["predicted_tokens"]), cell(r["perplexity"], "{:.3f}"),
            cell(r["perplexity_over_dense"], "{:.4f}"), cell(r["divergence_nats"], "{:.2g}"),
            cell(r["divergence_worst_nats"], "{:.2g}"), percent(r["same_prediction_share"]),
            percent(r["attended_share"]), cell(r["coverage_mean"], "{:.3f}")] for r in found])


def print_machines(reports):
    """Parts may come from several machines, and figures of different machines do not compare."""
    machines = unique((r["host"].get("gpu") or "no GPU", r["host"]["cpu"], r["version"]) for r in reports.values())
    print("Measured on " + "; and on ".join(f"{gpu}, {cpu}, Sluice {version}" for gpu, cpu, version in machines) + ".\n")


def main():
    if len(sys.argv) < 3:
        sys.exit("usage: tables.py DIR PART...")
    directory, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    reports, lacking = load(directory, names)
    if lacking:
        print("Missing: " + ", ".join(f"`{name}`" for name in lacking) + "; `tools/record.sh DIR cuda --part NAME` "
              "measures one.\n")
    if reports:
        print_machines(reports)
    pages = sorted({int(name.split("-")[1]) for name in reports if name.startswith("layers-")})
    layers = [(f"layers-{page}-", "attention", lambda found, page=page: print_layers(page, found)) for page in pages]
    for prefix, name, show in [("tasks-", "eval", print_tasks), ("tasks-", "lost", print_lost),
                               ("sweep", "eval", print_sweep), ("needles-", "needles", print_needles), *layers,
                               ("prefill-tasks-", "eval", print_prefill_tasks),
                               ("prefill-layer-", "prefill", print_prefill_layer),
                               ("prefill-others-", "eval", print_prefill_tasks),
                               ("prefill-papers", "eval", print_prefill_tasks),
                               ("prefill-text", "text", print_prefill_text),
                               ("prefill-patterns-", "prefill", print_prefill_layer),
                               ("prefill-chunk-", "eval", print_chosen_prefill("FlexPrefill by chunks, in their order")),
                               ("prefill-by-row", "eval", print_chosen_prefill("Query blocks choose for themselves")),
                               ("prefill-by-chunk", "eval", print_chosen_prefill("Query blocks choose together")),
                               ("history", "eval", print_ablation("What of LFPS earns what")), ("tactic", "eval", print_sweep),
                               ("targets", "eval", print_sweep),
                               ("estimates", "eval", print_ablation("Estimates: keys, and copies of 4 and 2 bits")),
                               ("text-", "text", print_text),
                               ("later-", "eval", print_tasks), ("later-", "lost", print_lost),
                               ("core-together", "attention", print_core("One core, four query heads share keys")),
                               ("core-apart", "attention", print_core("One core, no query heads share keys")),
                               ("core-alpha", "attention", print_core("One core, thresholds of LFPS")),
                               ("core-bypass", "attention", print_core("One core, heads with sinks")),
                               *PRINTERS, *FIGURES]:
        found = rows(reports, prefix, name)
        if found:
            show(found)
    print_seconds(directory, names)


if __name__ == "__main__":
    main()
