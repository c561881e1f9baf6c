"""python -m sluice doctor, eval, serve, run or chat"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys

from sluice import _structs as structs
from sluice._library import library
from sluice._reporting import told
from sluice.evaluation.command import add_command as add_eval
from sluice.serving.arguments import check_texts, in_arguments
from sluice.serving.command import add_commands


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def doctor() -> int:
    """Prints what there is; 1 if the library cannot be loaded."""
    print(f"python        {platform.python_version()}")
    for name in ("numpy", "torch", "transformers", "fastapi"):
        print(f"{name:13} {_package(name)}")
    try:
        found = library()
    except ImportError as reason:
        print(f"sluice        {reason}")
        return 1
    print(f"sluice        {found.version}")
    print(f"ABI           {found.abi_version}, this package needs {structs.ABI_VERSION}")
    print(f"library       {found.path}")
    gpus = found.cuda_devices()
    print(f"GPUs          {gpus or '0: no driver for CUDA 13 or newer shows one, or the library was built without nvcc'}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sluice", description="Sluice for Python.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this machine has: versions, the library's path, GPUs").set_defaults(
        call=lambda _: doctor())
    add_commands(commands)
    add_eval(commands)
    try:
        arguments = parser.parse_args()
        check_texts(arguments)
        return arguments.call(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        line, code = told(error, in_arguments)
        sys.stderr.write(line)
        return code


if __name__ == "__main__":
    raise SystemExit(main())
