#!/usr/bin/env python3
"""A report of lines of JSON: lines.py FILE VERSION."""

import json
import pathlib
import subprocess
import sys


def gpu():
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def cpu():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "unknown")


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: lines.py FILE VERSION")
    found = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines() if line.startswith("{")]
    if not found:
        sys.exit(f"lines.py: error: {sys.argv[1]} has no line of JSON; the benchmark printed no result")
    print(json.dumps({"host": {"gpu": gpu(), "cpu": cpu()}, "version": sys.argv[2].split()[-1],
                      "results": {"models": found}}, indent=1))


if __name__ == "__main__":
    main()
