#!/usr/bin/env python3
"""Other libraries' attention on this GPU, and ours beside it in the same call.

One token's attention of batches (`decode`) and causal attention of a prompt (`prefill`), 32 query heads, 8 KV heads,
head_dim 128, bf16. A library that is not installed is named as missing, and no reason to stop. What a kernel gives is
held against attention in float32 before it is timed; a wrong one is not timed. Each is measured in a process of its own,
one after another, so that one that crashes is named and costs only its own figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from shapes import Shape, commands, read_shape
from side_by_side import of_report, table

SHAPES = {
    "decode": "4K 32K 128K 8x32K 32x8K 4x128K 16x1K-128K",
    "prefill": "4K 16K 64K 128K",
}


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=SHAPES)
    parser.add_argument("shapes", nargs="*", help="sequences x tokens, or with lengths from the shortest to the longest, "
                        f"each as many times as long as the next: 8x32K, 16x1K-128K (default: {SHAPES['decode']}; "
                        f"of prompts {SHAPES['prefill']})")
    parser.add_argument("--kernels", help="comma list of those to measure (default: all)")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention-3's extension (_C.abi3.so), where no package "
                        "flash_attn_3 or fa3_fwd is installed")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each kernel (default: 9)")
    parser.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="for each kernel and shape; what takes "
                        "longer is ended (default: 60)")
    parser.add_argument("--sluice", metavar="COMMAND", help="our command, to measure the same shapes beside them")
    parser.add_argument("--options", default="", help="options for it, in one argument (decode: --dense-only if none are "
                        "given; others say which --policies and --placements)")
    parser.add_argument("-o", "--format", choices=("md", "json"), default="md")
    parser.add_argument("--output", metavar="FILE", help="write the result there")
    args = parser.parse_intermixed_args(words)
    try:
        args.shapes = [read_shape(text) for text in args.shapes or SHAPES[args.what].split()]
    except ValueError as error:
        parser.error(str(error))
    if args.what == "prefill" and any(shape.rows > 1 for shape in args.shapes):
        parser.error("prompts are measured one at a time; give their lengths, like 16K")
    return args


def ours(command: str, what: str, shapes: list[Shape], options: list[str]) -> list[dict]:
    """Reports of `sluice bench` about these shapes. A run that fails is named; one that was interrupted has some rows."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        for words in commands(what, shapes, options):
            run = subprocess.run([command, *words, "-o", "json", "--output", str(file)], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE, text=True)
            if run.returncode != 0:
                print(f"sluice {' '.join(words)}: {run.stderr.strip()[-300:]}", file=sys.stderr)
            if file.exists():
                found.append(json.loads(file.read_text()))
                file.unlink()
    return found


def main(words: list[str]) -> int:
    args = arguments(words)
    import torch  # --help needs none.

    import kernels
    from apart import Task, measure_apart

    lines, missing, versions, gpu = [], [], {"torch": torch.__version__}, None
    for name in args.kernels.split(",") if args.kernels else kernels.makers(args.what, args.fa3):
        kind, measured = measure_apart(Task(args.what, name, args.fa3, args.rounds), args.shapes, args.limit)
        if kind.gpu is None and not measured:
            print("compare: error: torch finds no GPU here", file=sys.stderr)
            return 1
        gpu = kind.gpu or gpu
        lines += measured
        if kind.version:
            versions[name] = kind.version
        if kind.missing:
            missing.append({"kernel": name, "error": f"missing: {kind.missing}"})
    reports = ours(args.sluice, args.what, args.shapes, shlex.split(args.options)) if args.sluice else []
    lines += [line for report in reports for line in of_report(report)] + missing
    host = reports[0]["host"] if reports else {"cpu": platform.processor(), "gpu": gpu}
    result = {"tool": "compare", "version": reports[0]["version"] if reports else "not measured", "host": host,
              "config": {"what": args.what, "rounds": args.rounds, "options": args.options, "versions": versions},
              "results": {"beside": lines}}
    shown = json.dumps(result, indent=1) if args.format == "json" else f"{host['gpu']}, {versions}\n\n{table(lines)}"
    if args.output:
        Path(args.output).write_text(shown + "\n")
    else:
        print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
