"""What the papers' figures ask of a model's attention, of that in tests/data/testbed; papers/ has a file for each:
pages, pages that hold a share of the softmax (PSA, Fig. 2); tokens, tokens that a share takes (Tactic, Table 1);
recall, pages that cross the link where some are kept (ArkVale's recall cache, PSA's unified pool); heads, pattern and
sparsity of each head (FlexPrefill's heat maps); blocks, its block size, representative queries and selection; sparse,
answers after prompts that were attended so; bits, estimates by copies of few bits (Twilight, Fig. 5); codes, tokens
that copies of keys find, by their bits; tactic, what Tactic argues from, and what it gives a query head by itself;
selectors, what they leave for Twilight's pruner.

`python benchmarks/paper_figures.py pages --model ../tests/data/testbed >pages.json` from python/; `--svg FILE` draws.
Dense attention decodes, so that what is counted does not depend on what a policy misses."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch
from papers import bits, blocks, codes, heads, pages, recall, selectors, sparse, tactic
from papers import tokens as tokens_
from papers.attention import Prompts
from testbed_tasks import make, tokens
from transformers import AutoModelForCausalLM

FIGURES = {"pages": pages, "tokens": tokens_, "recall": recall, "heads": heads, "blocks": blocks,
           "sparse": sparse, "bits": bits, "codes": codes, "tactic": tactic, "selectors": selectors}
WHOLE_PROMPTS = {"heads", "blocks", "sparse"}  # Not what is decoded behind them.


def version() -> str:
    project = (Path(__file__).parents[2] / "CMakeLists.txt").read_text()
    found = re.search(r"^project\(sluice VERSION (\S+)", project, re.MULTILINE)
    return found[1] if found else "unknown"


def processor() -> str:
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", default="niah,kv", help="(%(default)s)")
    parser.add_argument("--length", type=tokens, default=8192, help="of prompts, in tokens, 8K (%(default)s)")
    parser.add_argument("--count", type=int, default=2, help="prompts for each task (%(default)s)")
    parser.add_argument("--steps", type=int, default=32,
                        help="newest tokens that are looked at; heads, blocks and sparse look at the prompt "
                             "(%(default)s)")
    parser.add_argument("--seed", type=int, default=4242, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--svg", type=Path)
    return parser


def main() -> None:
    wants = parser().parse_args()
    torch.set_num_threads(wants.threads)
    model = AutoModelForCausalLM.from_pretrained(wants.model, dtype=torch.float32, trust_remote_code=False)
    texts = [make(task, wants.length, wants.seed + index) for task in wants.tasks.split(",")
             for index in range(wants.count)]
    prompts = Prompts(model, [(text["prompt"], text["answer"]) for text in texts],
                      None if wants.figure in WHOLE_PROMPTS else wants.steps)
    rows = FIGURES[wants.figure].figure(prompts)
    config = {name: str(value) for name, value in vars(wants).items() if name not in ("svg", "threads")}
    json.dump({"command": "paper_figures.py", "version": version(), "host": {"cpu": processor(), "gpu": None},
               "config": config, "results": {wants.figure: rows}}, sys.stdout, indent=1)
    sys.stdout.write("\n")
    if wants.svg and hasattr(FIGURES[wants.figure], "draw"):
        FIGURES[wants.figure].draw(rows, wants.svg)


if __name__ == "__main__":
    main()
