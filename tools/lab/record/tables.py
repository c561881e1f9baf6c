#!/usr/bin/env python3
"""Markdown tables from the JSON files that tools/lab/record.sh wrote: tables.py DIR PART...

A part is the name of a file without .json. Parts that are missing, or were interrupted, are named first.
"""

import json
import pathlib
import sys

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
        print("Missing: " + ", ".join(f"`{name}`" for name in lacking) + "; `tools/lab/record.sh DIR cuda --part NAME` "
              "measures one.\n")
    if reports:
        print_machines(reports)
    for prefix, name, show in [("prefill-layer-", "prefill", print_prefill_layer),
                               ("prefill-patterns-", "prefill", print_prefill_layer),
                               ("core-together", "attention", print_core("One core, four query heads share keys")),
                               ("core-apart", "attention", print_core("One core, no query heads share keys")),
                               *((f"core-k-{k}", "attention", print_core(f"One core, {k} tokens per query head"))
                                 for k in (64, 128, 256, 512, 1024, 2048)),
                               ("core-alpha", "attention", print_core("One core, thresholds of LFPS")),
                               ("core-bypass", "attention", print_core("One core, heads with sinks")),
                               *PRINTERS]:
        found = rows(reports, prefix, name)
        if found:
            show(found)
    print_seconds(directory, names)


if __name__ == "__main__":
    main()
