#!/usr/bin/env python3
"""Markdown tables from the JSON files that tools/record.sh wrote: record_tables.py DIR"""

import json
import pathlib
import sys


def rows(directory, pattern, table):
    found = []
    for file in sorted(directory.glob(pattern)):
        found += json.loads(file.read_text())["results"].get(table, [])
    return found


def cell(value, form="{:.2f}"):
    return "" if value is None else form.format(value)


def percent(value):
    return cell(value, "{:.1%}")


def code(policy):
    return "`" + policy.replace("|", "\\|") + "`"


def table(head, body):
    print("| " + " | ".join(head) + " |")
    print("|" + "|".join("---" if i == 0 else "--:" for i in range(len(head))) + "|")
    for line in body:
        print("| " + " | ".join(line) + " |")
    print()


def unique(values):
    return list(dict.fromkeys(values))


def print_tasks(found):
    cells = unique((r["task"], r["length_tokens"]) for r in sorted(found, key=lambda r: r["length_tokens"]))
    cells.sort(key=lambda c: (["niah", "multikey", "kv"].index(c[0]), c[1]))
    print("Accuracy\n")
    by_key = {(r["policy"], r["task"], r["length_tokens"]): r for r in found}
    policies = unique(r["policy"] for r in found)
    table(["policy"] + [f"{task} {length // 1024}K" for task, length in cells],
          [[code(p)] + [cell(by_key[p, t, n]["accuracy"]) if (p, t, n) in by_key else "" for t, n in cells]
           for p in policies])
    for task, length in [c for c in cells if c[0] == "kv"]:
        print(f"Cost on {task} {length // 1024}K\n")
        body = []
        for p in policies:
            r = by_key.get((p, task, length))
            if r is None:
                continue
            body.append([code(p), cell(r["accuracy"]), percent(r["attended_share"]),
                         cell(r["scored_per_head_step"], "{:.0f}"), percent(r["near_bytes_share"]),
                         percent(r["far_bytes_share"]), cell(r["coverage_mean"], "{:.3f}"),
                         cell(r["coverage_p5"], "{:.3f}"), cell(r["answer_coverage"], "{:.3f}"),
                         cell(r["link_bytes_per_step"], "{:.0f}")])
        table(["policy", "accuracy", "attended", "keys scored", "near bytes", "far bytes", "coverage", "p5", "answer",
               "link B/step"], body)


def print_sweep(found):
    print("Promises and costs at 8K\n")
    table(["policy", "task", "accuracy", "attended", "far bytes", "coverage", "promise kept"],
          [[code(r["policy"]), r["task"], cell(r["accuracy"]), percent(r["attended_share"]),
            percent(r["far_bytes_share"]), cell(r["coverage_mean"], "{:.3f}"), percent(r["reached_share"])]
           for r in found])


def print_lost(found):
    print("Who lost the answer\n")
    table(["policy", "task", "accuracy", "layer", "head", "wanted", "kept"],
          [[code(r["policy"]), f"{r['task']} {r['length_tokens'] // 1024}K", cell(r["accuracy"]), str(r["layer"]),
            str(r["head"]), cell(r["wanted_mass"]), cell(r["kept_share"])] for r in found])


def print_needles(found):
    counts = sorted(unique(r["needles"] for r in found))
    by_key = {(r["policy"], r["needles"]): r for r in found}
    print("Needles\n")
    head = ["policy"] + [f"{n} needles found" for n in counts] + ["attended", "near bytes", "far bytes", "us/layer"]
    body = []
    for p in unique(r["policy"] for r in found):
        last = by_key[p, counts[-1]]
        body.append([code(p)] + [cell(by_key[p, n]["found"]) for n in counts] +
                    [percent(last["attended_share"]), percent(last["near_bytes_share"]),
                     percent(last["far_bytes_share"]), cell(last["layer_us"], "{:.0f}")])
    table(head, body)


def print_layers(found):
    print("Time per layer, us\n")
    lengths = sorted(unique(r["length_tokens"] for r in found))
    by_key = {(r["method"], r["placement"], r["length_tokens"]): r for r in found}
    head, body = ["policy"], []
    for n in lengths:
        head += [f"{n // 1024}K hybrid", "x dense", f"{n // 1024}K stream", "coverage"]
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
    by_key = {(r["policy"], r["prefill"], r["task"], r["length_tokens"]): r for r in found}
    ways = unique((r["policy"], r["prefill"]) for r in found)
    head = ["policy", "prefill"] + [f"{task} {n // 1024}K" for task, n in cells]
    table(head, [[code(p), w] + [cell(by_key[p, w, t, n]["accuracy"]) for t, n in cells] for p, w in ways])
    print("Ways to prefill: cost\n")
    body = []
    for task, n in cells:
        for way in unique(w for _, w in ways):
            r = by_key[ways[0][0], way, task, n]
            body.append([f"{task} {n // 1024}K", way, percent(r["blocks_share"]), percent(r["sparse_chunks_share"]),
                         cell(r["prefill_ms"], "{:.0f}")])
    table(["task", "prefill", "blocks computed", "chunks with a choice", "ms"], body)


def print_prefill_layer(found):
    print("Attention of one layer of a prompt\n")
    table(["structure", "length", "chunk", "method", "ms", "choice ms", "TFLOP/s", "x dense", "blocks", "coverage", "p5",
           "error", "query-aware"],
          [[r["structure"], f"{r['length_tokens'] / 1024:g}K", f"{r['chunk_tokens'] / 1024:g}K", r["method"],
            cell(r["total_ms"], "{:.3g}"), cell(r["select_ms"], "{:.3g}"), cell(r["tflops"], "{:.3g}"),
            cell(r["speedup_over_dense"]), percent(r["blocks_share"]), cell(r["coverage_mean"], "{:.3f}"),
            cell(r["coverage_p5"], "{:.3f}"), cell(r["output_error"], "{:.3f}"), percent(r["query_aware_share"])]
           for r in found])


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: record_tables.py DIR")
    directory = pathlib.Path(sys.argv[1])
    for pattern, name, show in (("tasks*.json", "eval", print_tasks), ("tasks*.json", "lost", print_lost),
                                ("sweep*.json", "eval", print_sweep),
                                ("needles*.json", "needles", print_needles), ("layers*.json", "attention", print_layers),
                                ("prefill-tasks*.json", "eval", print_prefill_tasks),
                                ("prefill-layer*.json", "prefill", print_prefill_layer)):
        found = rows(directory, pattern, name)
        if found:
            show(found)


if __name__ == "__main__":
    main()
