"""Tables of the record's parts that draw what a model's attention is like."""

from shown import cell, code, percent, table


def print_heads(found):
    print("FlexPrefill: pattern and sparsity of heads\n")
    table(["gamma", "layer", "head", "distance", "query-aware", "blocks"],
          [[cell(r["gamma"]), str(r["layer"]), str(r["head"]), cell(r["divergence"]), percent(r["query_aware_share"]),
            percent(r["blocks_share"])] for r in found])


def print_blocks(found):
    print("FlexPrefill: block, representative queries, selection\n")
    table(["variant", "blocks", "coverage", "p5", "error", "query-aware"],
          [[r["variant"], percent(r["blocks_share"]), cell(r["coverage"], "{:.3f}"), cell(r["coverage_p5"], "{:.3f}"),
            cell(r["output_error"], "{:.3f}"), percent(r["query_aware_share"])] for r in found])


def print_sparse(found):
    print("FlexPrefill: answers by the size of a block\n")
    table(["variant", "prompts", "accuracy", "nats", "blocks"],
          [[r["variant"], str(r["prompts"]), cell(r["accuracy"]), cell(r["answer_nats"], "{:.2g}"),
            percent(r["blocks_share"])] for r in found])


def print_bits(found):
    print("Top-p by copies of few bits (Twilight, Fig. 5)\n")
    table(["top-p", "estimate", "tokens", "of a group", "mass", "reached", "overlap", "pruned"],
          [[cell(r["target"]), r["estimate"], cell(r["tokens"], "{:.0f}"), cell(r["tokens_group"], "{:.0f}"),
            cell(r["mass"], "{:.3f}"), percent(r["reached_share"]), cell(r["overlap"]), percent(r["pruned_share"])]
           for r in found])


def print_codes(found):
    print("Tokens that copies of keys find, by their bits\n")
    table(["code", "bits read", "overlap", "mass kept"],
          [[r["code"], cell(r["bits"]), cell(r["overlap"], "{:.3f}"), cell(r["mass_kept"], "{:.3f}")] for r in found])


def print_pages(found):
    print("Pages that a share of the softmax takes (PSA, Fig. 2)\n")
    table(["layer", "share", "order", "pages", "20%", "median", "80%", "mean"],
          [[str(r["layer"]), cell(r["share"]), r["order"], str(r["pages"]), cell(r["p20"], "{:.0f}"),
            cell(r["p50"], "{:.0f}"), cell(r["p80"], "{:.0f}"), cell(r["mean"], "{:.0f}")] for r in found])


def print_tokens(found):
    print("Tokens that a share of the softmax takes (Tactic, Table 1)\n")
    table(["target", "order", "of", "tokens"],
          [[percent(r["target"]), r["order"], str(r["visible"]), cell(r["tokens"], "{:.0f}")] for r in found])


def print_recall(found):
    print("Pages fetched per step and KV head\n")
    table(["policy", "pool", "room", "of", "fetched"],
          [[code(r["policy"]), r["pool"], percent(r["room"]), str(r["pages"]), cell(r["fetched"], "{:.1f}")]
           for r in found])


def print_tactic(found):
    """Of heads and curves the picture."""
    def print_kind(kind, title, *columns):
        own = [row for row in found if row["what"] == kind]
        print(title + "\n")
        table([key for key, _ in columns], [[cell(row[key], form) for key, form in columns] for row in own])

    print_kind("fit", "Tactic of a query head by itself", ("target", "{:.2f}"), ("tokens", "{:.0f}"), ("mass", "{:.3f}"),
               ("reached_share", "{:.1%}"))
    print_kind("order", "Softmax mass of the first tokens of an order", ("order", "{}"), ("tokens", "{}"),
               ("mass", "{:.3f}"))
    print_kind("distance", "Error of the output, by a number of tokens and by a share", ("by", "{}"), ("limit", "{}"),
               ("tokens", "{:.0f}"), ("error_mean", "{:.3f}"), ("error_p95", "{:.3f}"), ("of_bound_worst", "{:.2f}"))
    print_kind("union", "Tokens that a group's heads take apart and together", ("target", "{:.2f}"),
               ("tokens_apart", "{:.0f}"), ("tokens_together", "{:.0f}"))


def print_selectors(found):
    print("Selectors before Twilight's pruner\n")
    table(["selector", "top-p", "tokens", "of a group", "mass", "pruned"],
          [[r["selector"], cell(r["top_p"]), cell(r["tokens"], "{:.0f}"), cell(r["tokens_group"], "{:.0f}"),
            cell(r["mass"], "{:.3f}"), percent(r["pruned_share"])] for r in found])


# Prefix of a part, table of its report, and what shows its rows.
FIGURES = [("figure-pages", "pages", print_pages), ("figure-tokens", "tokens", print_tokens),
           ("figure-recall", "recall", print_recall), ("figure-heads", "heads", print_heads),
           ("figure-blocks", "blocks", print_blocks), ("figure-sparse", "sparse", print_sparse),
           ("figure-bits", "bits", print_bits), ("figure-codes", "codes", print_codes),
           ("figure-tactic", "tactic", print_tactic), ("figure-selectors", "selectors", print_selectors)]
