"""What docs/papers.md says below its tables of results, and its smaller tables, computed anew."""

from __future__ import annotations

import re
from statistics import median

from test_figures import figure, raw, reports
from test_papers import (CHUNKS, ONE, PAGE, SECTIONS, equal_accuracy, held, list_of, near, prompt, rows_of, section,
                         tactic_512k)


def faster_than_topk(k: int | str) -> str:
    """At 4K, 16K, 64K and 128K tokens, by the median of the runs' own ratios."""
    rows = [row for row in raw("lfps_speed.json")["rows"] if row["k"] == k]
    assert [row["length_tokens"] >> 10 for row in rows] == [4, 16, 64, 128]
    return list_of((median(topk / lfps for topk, lfps in zip(row["topk_us"], row["lfps_us"], strict=True))
                    for row in rows), 1)


def test_k_of_lfps() -> None:
    rows = {(row["k"], row["length_tokens"] >> 10, row["method"]): row for row in raw("lfps_k.json")["rows"]}
    shown = rows_of("LFPS", "k")
    assert [int(k.replace(",", "")) for k in shown] == [64, 128, 512, 2048]

    def cells(k: int, method: str, key: str, form: str) -> str:
        return ", ".join(form.format(rows[k, length, method][key]) for length in (4, 16, 64, 128))

    for line in [line for line in section("LFPS").splitlines() if re.match(r"\| [\d,]+ \|", line)]:
        k = int(line.split("|")[1].replace(",", ""))
        assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == [
            faster_than_topk(k), cells(k, "lfps", "topk_overlap", "{:.0%}"),
            cells(k, "lfps", "coverage_mean", "{:.2f}"), cells(k, "topk", "coverage_mean", "{:.2f}")]
    proposed = [round(rows[2048, length, "lfps"]["expanded_share"] * (length << 10), -1) for length in (4, 16, 64, 128)]
    assert [f"{count:,.0f}" for count in proposed] == ["400", "710", "1,740", "2,290"]
    assert "about 400, 710, 1,740 and 2,290\nkeys per query head" in PAGE
    assert f"With k = 2% this core has {faster_than_topk('2%')} x exact top-k." in PAGE
    (paper,) = re.findall(r"\| x exact top-k at 4K, 16K, 64K, 128K \| ([\d., ]+), -; abstract: up to 9\.6 \|", PAGE)
    assert "it gains as much over its own exact top-k at\n16K and 64K as the paper's series says" in PAGE
    own, theirs = ([float(cell) for cell in cells.split(", ")][1:3] for cells in (faster_than_topk(128), paper))
    assert len(theirs) == 2 and all(a >= b for a, b in zip(own, theirs, strict=True))
    assert f"k = 2% is {round(0.02 * (128 << 10)):,} tokens at 128K" in PAGE


def test_bypass_of_a_real_checkpoint() -> None:
    found = raw("lfps_bypass_smollm2.json")["rows"]
    rows = {row["policy"].replace("lfps:", "lfps | bypass=0.85,"): row for row in found}
    table = section("LFPS").partition("| policy |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip(" `").replace("\x01", "|") for cell in line.replace("\\|", "\x01").strip("|").split("|")]
             for line in table]
    assert {cells[0] for cells in shown} == set(rows) - {"full"}
    for name, *cells in shown:
        row = rows[name]
        share = 100 * row["bypassed"]
        assert cells == [f"{share:.1f}%" if share else "0%", figure(row["kl_over_floor"])]
    lowest, highest = rows["lfps | bypass=off"]["kl_mean_95"]
    assert all(lowest < rows[cells[0]]["kl_mean"] < highest for cells in shown)
    assert "All KLs lie in the 95% interval of `bypass=off`'s." in PAGE


def test_selectors_before_a_pruner() -> None:
    rows = {row["policy"]: row for row in raw("twilight_selectors_smollm2.json")["rows"]}
    pruner = "int4 | top_p=0.95 | near=0,sinks=4,recent=0 | dense=2"
    assert f"The pruner is `{pruner}`." in " ".join(PAGE.split())
    policies = {"all tokens; pruned: `twilight`": ("full", "twilight"),
                "`quest`": ("quest", f"pages:box,budget=1024 | {pruner} | page=16"),
                "`double_sparsity:budget=1024 | dense=2`": ("double_sparsity:budget=1024 | dense=2",
                                                            f"labels:budget=1024 | {pruner}"),
                "`double_sparsity`, the preset: 6.25%, no dense layers": ("double_sparsity",)}
    table = section("Twilight").partition("| selector |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip().replace("\x01", "|") for cell in line.replace("\\|", "\x01").strip(" |").split("|")]
             for line in table]
    assert [name for name, *_ in shown] == list(policies)
    for name, *cells in shown:
        found = [f"{figure(row['kl_over_floor'])}; {row['attended']:.0%}" for row in map(rows.get, policies[name])]
        assert cells == found + ["-"] * (2 - len(found))


# ---- What is said below the tables


def test_flexprefill_is_said_to_do_what_it_did() -> None:
    def said(words: str) -> None:
        assert words in " ".join(section("FlexPrefill").split()), words

    dense = prompt("vertical_slash", "dense", ONE, "total_ms")
    said(f"an H200 where dense attention takes {dense:.0f} ms")
    one, chunks = ([prompt("vertical_slash", "flexprefill@0.95", chunk, key) for key in ("select_ms", "total_ms")]
                   for chunk in (ONE, CHUNKS))
    said(f"At gamma 0.95, choosing lines takes {one[0]:.1f} ms of {one[1]:.0f} ms in one piece and "
         f"{chunks[0]:.0f} ms of {chunks[1]:.0f} ms in chunks")
    parts = raw("prompt_budgets.json")["parts"]
    lines, packed = ([row for row in parts[part]["results"]["prefill"]
                      if (row["structure"], row["method"]) == ("vertical_slash", "flexprefill@0.8")][0]
                     for part in ("lines", "packed"))
    said(f"covers {lines['coverage_mean']:.2f} of the softmax with {lines['blocks_share']:.0%} of the blocks; without "
         f"it {packed['blocks_share']:.0%} of the blocks cover {packed['coverage_mean']:.2f}")
    blocks, coverage = ([prompt("query_aware", "flexprefill@0.95", ONE, key, f"flex-tau-{tau}")
                         for tau in ("0", "0.1", "0.2", "0.3")] for key in ("blocks_share", "coverage_mean"))
    said(f"With 0 none does, and {blocks[0]:.1%} of the blocks hold {coverage[0]:.2f} of the softmax. With 0.1 to 0.3, "
         f"{blocks[1]:.1%} of the blocks hold {coverage[1]:.2f}")
    assert len({f"{share:.1%}" for share in blocks[1:]}) == len({f"{share:.2f}" for share in coverage[1:]}) == 1
    covered = [prompt("vertical_slash", "flexprefill@0.9", ONE, "coverage_mean", f"flex-budget-{budget}")
               for budget in (128, 1024, 2048)]
    said(f"changes coverage in one piece by {max(covered) - min(covered):.3f} at most")


def test_what_lines_take() -> None:
    def faster(lines: bool, structure: str) -> str:
        chunked = [row for row in raw("flex_lines_h200.json")["rows"]
                   if (row["lines"], row["structure"], row["method"]) == (lines, structure, "flexprefill@0.9")
                   and row["chunk_tokens"] == CHUNKS]
        assert [row["length_tokens"] for row in chunked] == [8192, 32768, 131072]
        return list_of((row["speedup_over_dense"] for row in chunked), 1)

    said = " ".join(section("FlexPrefill").split())
    assert (f"is {faster(True, 'vertical_slash')} with `--lines` and {faster(False, 'vertical_slash')} without"
            in said)
    pairs = zip(faster(True, "query_aware").split(", "), faster(False, "query_aware").split(", "), strict=True)
    assert "On topics both are alike" in said and all(abs(float(a) - float(b)) < 0.15 for a, b in pairs)


def test_what_labels_and_unions_take() -> None:
    labels = {row["method"]: row["layer_us"] / 1000 for row in raw("labels_h200.json")["rows"]
              if row["length_tokens"] == 32768 and row["mode"] == "graph"}
    (pruned,) = [ms for policy, ms in labels.items() if policy.startswith("labels:budget=8192")]
    assert (f"takes {labels['twilight']:.2f} ms with `twilight`, {labels['double_sparsity']:.1f} ms with "
            f"`double_sparsity`, {pruned:.0f} ms pruned" in " ".join(section("Twilight").split()))
    union, own = ([row for row in raw("tactic_heads_h200.json")["rows"]
                   if (row["kv_heads"], row["method"], row["mode"]) == (heads, "tactic | int4", "graph")][0]
                  for heads in (8, 32))
    assert (f"{union['layer_us']:.0f} us at 32K, of which the union is {union['near_share']:.0%}. With a KV head each, "
            f"they read {own['near_share']:.0%} of their own keys in {own['layer_us']:.0f} us"
            in " ".join(section("Tactic").split()))


def test_prompts_of_real_checkpoints() -> None:
    columns = [[row for row in raw(name)["rows"] if row["tokens"] == tokens] for name, tokens in
               (("flex_smollm2.json", 4096), ("flex_qwen_h200.json", 8192), ("flex_qwen_h200.json", 30000))]
    shown = [line for line in section("FlexPrefill").partition("| prompts |")[2].partition("\n\n")[0].splitlines()[2:]]
    assert {len(column) for column in columns} == {len(shown), 2 * len(shown)}
    for line in shown:
        name, *cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        for cell, column in zip(cells, columns, strict=True):
            rows = [row for row in column if row["prefill"] == {"dense": "full"}.get(name, name.replace(" --lines", "+lines"))]
            assert [row["of"] for row in rows] in (["prose"], ["prose", "code"])
            assert cell == "; ".join([", ".join(figure(row["kl_over_floor"]) for row in rows),
                                      ", ".join(f"{row['prompt_blocks']:.0%}" for row in rows)])
    pairs = [[row for name in ("flexprefill@0.9", "flexprefill@0.9+lines") for row in column
              if (row["prefill"], row["of"]) == (name, of)] for column in columns
             for of in ("prose", "code") if any(row["of"] == of for row in column)]
    nearer = [packed["kl_mean"] / lines["kl_mean"] for packed, lines in pairs]
    more = [lines["prompt_blocks"] / packed["prompt_blocks"] for packed, lines in pairs]
    said = " ".join(section("FlexPrefill").split())
    assert f"it is {min(nearer):.0f} to {max(nearer):.0f} times as near to dense attention" in said
    assert f"computes {min(more):.1f} to {max(more):.1f} times as many blocks" in said


def test_psa_beside_arkvale() -> None:
    rows = {row["policy"]: row for row in raw("psa_arkvale.json")["rows"] if row["policy"] != "full"}
    table = section("PSA").partition("| policy |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip(" `") for cell in line.strip(" |").split("|")] for line in table]
    assert [name for name, *_ in shown] == [name for name in rows if not name.endswith(("=1024", "=1280"))]
    for name, *cells in shown:
        share = "100%" if name == "dense" else f"{rows[name]['attended']:.0%}"
        assert cells == [str(rows[name]["right"]), share] and rows[name]["prompts"] == 32
    (arkvale_under, arkvale), (psa_under, psa) = equal_accuracy("arkvale"), equal_accuracy("psa")
    assert f"lies between {arkvale_under / psa:.1f} and {arkvale / psa_under:.1f}." in section("PSA")


def test_psa_served_by_a_cpu() -> None:
    found = raw("psa_serve_cpu.json")
    dense, psa, arkvale = found["rows"]
    (cells,) = [cells for row, cells in rows_of("PSA").items() if row.startswith("answer tokens/s on a CPU")]
    assert "--kv-size 110M --host-size 600M" in found["command"]
    assert "dense has 110M of RAM, the others 600M more" in cells[2]
    assert (psa["policy"], arkvale["policy"]) == ("psa:mass=0.98", "arkvale:rank=layer,dense=0,budget=1792")
    batches, chunks = ([row[key] for row in (dense, psa, arkvale)] for key in ("largest_batch", "chunk_p50_ms"))
    assert "{}, {} and {} requests at a time".format(*batches) in cells[2]
    assert f"a chunk of a prompt takes {list_of((ms / 1000 for ms in chunks), 1, '; ')} s" in cells[2]


def test_shares_that_are_given_as_reasons() -> None:
    reasons = {row: cells for name in SECTIONS for row, cells in rows_of(name).items()}
    part = raw("serve_h200.json")["limit 100 ms, 15 s, graphs, policies of papers"]
    served_of = {row["policy"]: row for row in part["results"]["serve"] if row["held"]}
    for policy, row in (("stream/psa", "requests/s within the limits, x dense, psa"), ("arkvale", "the same, arkvale")):
        assert f"{served_of[policy]['attended_share']:.0%} of" in reasons[row][2]
    (quest,) = [row for row in reports(raw("lfps_h200.json"), "decode") if row["method"] == "hybrid/quest"]
    assert f"{quest['attended_share']:.0%} of" in reasons["the same, x Quest"][2]
    share = near("quest_8192_h200.json", "tactic | int4", 131072, 16, "near_share")
    assert f"{share:.0%} are attended" == reasons["the same, 128K"][2]
    assert f"{float(tactic_512k('1', 'near').strip('%')):.0f}% are attended" == reasons["the same, 512K"][2]
    (run,) = reports(raw("tactic_twilight_h200.json")["prompt-tactic"], "run")
    assert f"takes {run['ttft_ms'] / 1000:.1f} s" in reasons["k-means, share of the prompt's time"][2]
    dense = held("serve_h200.json", "limit 100 ms, 15 s, graphs", "dense")
    assert f"stays within these limits up to {dense:g}\nrequests/s" in PAGE
