"""Tables of the record's parts that time something, and of those whose rows are shown as they are."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "compare"))
import side_by_side
from shown import cell, code, percent, table, thousands, unique


def in_columns(title, *columns):
    """Rows as they are: pairs of a title and of what shows a row there."""
    def show(found):
        print(title + "\n")
        table([head for head, _ in columns], [[shown(row) for _, shown in columns] for row in found])
    return show


def number(key, form="{:.4g}"):
    return lambda row: cell(row.get(key), form)


def everything(title):
    """All columns that have something to say."""
    def show(found):
        print(title + "\n")
        keys = [key for key in unique(key for row in found for key in row)
                if any(row.get(key) is not None for row in found)]
        table(keys, [[f"{row[key]:.4g}" if isinstance(row.get(key), float) else str(row.get(key, "")).replace("|", "\\|") for key in keys]
                     for row in found])
    return show


def beside(name):
    def show(found):
        print(f"Beside other libraries: {name}\n")
        print(side_by_side.table(found) + "\n")
    return show


def part(row):
    return row["part"]


def print_layer(found):
    print("Decoding: one layer, us\n")
    table(["part", "tokens", "method", "placement", "rows", "mode", "us/layer", "p95", "dense", "x dense", "waited", "far",
           "coverage"],
          [[part(r), thousands(r["length_tokens"]), code(r["method"]), r["placement"] or "", str(r["rows"]), r["mode"] or "",
            cell(r["layer_us"], "{:.1f}"), cell(r["layer_p95_us"], "{:.1f}"), cell(r["dense_us"], "{:.1f}"),
            cell(r["speedup_over_dense"]), cell(r["waited_us"], "{:.1f}"), percent(r["far_share"]),
            cell(r["coverage_mean"])] for r in found])


def print_model(found):
    print("Decoding: whole models\n")
    table(["part", "tokens", "sequences", "memory, GiB", "method", "at once", "ms", "tokens/s", "x first",
           "attended", "near", "coverage"],
          [[part(r), thousands(r["length_tokens"]), str(r["batch"]),
            cell(r["kv_bytes"] / 2**30 if r["kv_bytes"] else None, "{:g}"), code(r["method"]), str(r["at_once"]),
            cell(r.get("tpot_p50_ms", r.get("forward_p50_ms"))), cell(r["tokens_per_s"], "{:.0f}"),
            cell(r["speedup_over_first"]), percent(r["attended_share"]), percent(r["near_hit_share"]),
            cell(r["coverage_mean"])] for r in found])


def print_serve(found):
    print("Requests as they come: times in ms, queueing in s\n")
    table(["policy", "rate", "held", "P99 between tokens", "p50", "queued p50", "first token p50", "p99", "tokens/s",
           "refused", "at once", "room", "attended", "near"],
          [[code(r["policy"]), cell(r["rate_per_s"], "{:g}"), {True: "yes", False: "no", None: ""}[r["held"]],
            cell(r["tbt_p99_ms"], "{:.1f}"), cell(r["tbt_p50_ms"], "{:.1f}"), cell(r["queued_p50_s"]),
            cell(r["ttft_p50_ms"], "{:.0f}"), cell(r["ttft_p99_ms"], "{:.0f}"), cell(r["answer_tokens_per_s"], "{:.0f}"),
            str(r["refused"]), str(r["largest_batch"]), str(r["room_tokens"]), percent(r["attended_share"]),
            percent(r["near_hit_share"])] for r in found])


def print_held(found):
    print("The highest of these rates that holds the limits\n")
    table(["policy", "rate", "x first", "P99 between tokens, ms", "tokens/s"],
          [[code(r["policy"]), cell(r["rate_per_s"], "{:g}") or "none", cell(r["speedup_over_first"]),
            cell(r["tbt_p99_ms"], "{:.1f}"), cell(r["answer_tokens_per_s"], "{:.0f}")] for r in found])


print_plan = in_columns(
    "Planned and measured, us per layer", ("policy", lambda row: code(row["policy"])), ("placement", number("placement", "{}")),
    ("dtype", number("kv_dtype", "{}")), ("tokens", number("length_tokens", "{}")), ("rows", number("rows", "{}")),
    ("layers", number("layers", "{}")), ("measured", number("measured_us", "{:.1f}")),
    ("planned", number("planned_us", "{:.1f}")), ("ratio", number("ratio", "{:.2f}")),
    ("within 20%", lambda row: "yes" if row["within_20_percent"] else "no"))
print_flex = in_columns(
    "FlexPrefill by gamma, budget and tau", ("part", part), ("structure", number("structure", "{}")),
    ("method", number("method", "{}")), ("ms", number("total_ms", "{:.3g}")), ("x dense", number("speedup_over_dense", "{:.2f}")),
    ("blocks", lambda row: percent(row["blocks_share"])), ("coverage", number("coverage_mean", "{:.3f}")),
    ("error", number("output_error", "{:.3f}")), ("query-aware", lambda row: percent(row["query_aware_share"])))
print_ablation = in_columns(
    "What crosses the link where the CPU chooses: parts of a layer, us, and what it may take", ("part", part),
    ("tokens", lambda row: thousands(row["length_tokens"])), ("policy", lambda row: code(row["method"])),
    ("prefetch", number("prefetch", "{}")), ("us/layer", number("layer_us", "{:.1f}")),
    ("x dense", number("speedup_over_dense", "{:.2f}")), ("choice", number("choice_us", "{:.1f}")),
    ("exposed", number("exposed_us", "{:.1f}")), ("goal", number("goal_us", "{:.1f}")),
    ("x goal", number("layer_over_goal", "{:.2f}")), ("attended", lambda row: percent(row["attended_share"])),
    ("of it near", lambda row: percent(row["near_hit_share"])), ("fetched", lambda row: percent(row["fetched_share"])),
    ("coverage", number("coverage_mean", "{:.3f}")), ("bypassed", lambda row: percent(row["bypassed_share"])))

print_layer_costs = in_columns(
    "What a layer takes beyond what it reads, us", ("tokens", lambda row: thousands(row["length_tokens"])),
    ("method", lambda row: code(row["method"])), ("placement", number("placement", "{}")), ("rows", number("rows", "{}")),
    ("mode", number("mode", "{}")), ("graph nodes", number("graph_nodes", "{:.2f}")), ("us/layer", number("layer_us", "{:.1f}")),
    ("scan", number("scan_us", "{:.1f}")), ("near", number("near_us", "{:.1f}")), ("far", number("far_us", "{:.1f}")),
    ("fixed", number("fixed_us", "{:.1f}")), ("calling", number("calling_us", "{:.1f}")),
    ("read GB/s", number("device_gbps", "{:.0f}")))

# Prefix of a part, table of its report, and what shows its rows.
PRINTERS = [("core-kernels", "kernels", everything("One core: kernels")),
            ("cpu-batches", "attention", everything("Batches on the CPU")),
            ("cpu-ragged", "attention", everything("Batches on the CPU, of several lengths")),
            ("cpu-threads-", "attention", everything("One layer on several cores")),
            ("cpu-threads-", "kernels", everything("Several cores: kernels")),
            ("cpu-engine", "attention", print_layer), ("presets", "attention", print_layer),
            *[("compare-" + name, "beside", beside(name)) for name in ("decode", "dense", "twilight", "prefill")],
            ("flex-", "prefill", print_flex),
            ("ablation", "pipeline", print_ablation), ("plan", "compared", print_plan), ("serve", "serve", print_serve), ("serve", "held", print_held),
            ("clusters", "clusters", everything("K-means of a prompt's keys, one layer")),
            ("prompt-", "run", everything("A prompt's time to its first token")),
            ("decode-costs-", "costs", print_layer_costs),
            ("decode-", "attention", print_layer), ("decode-", "decode", print_model),
            *[("model-" + name, "models", everything("Models of transformers: " + name))
              for name in ("generate", "logits", "loop", "beside")],
            ("real-", "models", everything("Models that others have trained")),
            *[("link", name, everything("Link: " + name))
              for name in ("transfers", "gather", "load", "latency", "pinning", "peak")]]
