"""Commands in the blocks of shell of README and the pages of docs/, and what tests make of them: those of the program
and of the package are run, smaller; all others are listed here, with the reason why they are not."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md")


def program() -> str | None:
    """The command, if it is built; in CI it may not be missing."""
    path = os.environ.get("SLUICE_COMMAND")
    return path if "CI" in os.environ or path and os.access(path, os.X_OK) else None


class Shown(NamedTuple):
    page: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        return " ".join(self.words)

    @property
    def place(self) -> str:
        """A name of the test."""
        return f"{self.page}: {self.line[:70]}"


def shown_in(page: str, text: str) -> list[Shown]:
    """The commands of a page's blocks, a line each, without remarks."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [Shown(page, words) for line in lines if (words := tuple(shlex.split(line, comments=True)))]


def is_of_program(words: tuple[str, ...]) -> bool:
    return words[0] in ("sluice", "./sluice")


def is_of_package(words: tuple[str, ...]) -> bool:
    return words[:3] == ("python", "-m", "sluice")


def script(words: tuple[str, ...]) -> bool:
    return os.access(ROOT / words[0], os.X_OK)


def extras(words: tuple[str, ...]) -> bool:
    """Whether what is installed is the package, and each extra one of its own."""
    found = re.fullmatch(r"\./python(?:\[(\w+)\])?", words[-1])
    named = (ROOT / "python" / "pyproject.toml").read_text()
    return found is not None and (found[1] is None or re.search(rf"^{found[1]} = \[", named, re.MULTILINE) is not None)


def presets(words: tuple[str, ...]) -> bool:
    named = (ROOT / "CMakePresets.json").read_text()
    return all(f'"name": "{words[at + 1]}"' in named for at, word in enumerate(words) if word == "--preset")


def always(words: tuple[str, ...]) -> bool:
    return True


# How a command begins that is not run by these tests: why, and what is looked at instead.
LISTED: dict[str, tuple[str, Callable[[tuple[str, ...]], bool]]] = {
    "tools/demo.sh": ("builds, for minutes", script),
    "tools/test.sh": ("builds and runs these tests", script),
    "tools/bootstrap.sh": ("installs packages and builds; .ci/run begins with it", script),
    ".ci/run": ("runs these tests", script),
    "export": ("where the program is; the tests have it from CMake", always),
    "cmake --preset": ("builds and runs these tests", presets),
    "cd build/release/tools/cli": ("where the program is; the tests have it from CMake", always),
    "cmake --install": ("tests/capi/outside installs the build", always),
    "cmake -G": ("tests/capi/outside builds such a project against the installed library", always),
    "cc forwards.c": ("tests/capi/outside/pkg_config.cmake compiles it against the installed library",
                      lambda words: (ROOT / "tools" / "examples" / words[1]).is_file()),
    "vllm serve": ("tests/vllm starts that server by its module", lambda words: "sluice.vllm.Worker" in words),
    "cpack": ("packs a release for a minute; what is packed is what tests/capi/outside installs", always),
    "docker": ("no container is built by the tests; test_docs.py looks at the Dockerfile",
               lambda words: (ROOT / "docker" / "Dockerfile").is_file()),
    "python3 -m venv": ("an environment of its own: tests/wheel makes one",
                        lambda words: "pip" not in words or extras(words)),
    "CUDAARCHS=80;90a pip wheel": ("compiles CUDA code for minutes; tests/wheel builds a wheel without", extras),
    "pip install": ("needs the network; tests/wheel builds and installs the package without", extras),
    "python tools/lab/benchmarks/search.py": ("minutes on a GPU: evaluation/test_search.py runs it", always),
    "python tools/lab/routing/measure.py": ("minutes: tools/lab/routing/tests measures a small model", always),
    "python tools/lab/routing/report.py": ("reads what measure.py leaves: tools/lab/routing/tests does", always),
    "torchrun": ("several processes for minutes: serving/test_tensor_parallel.py runs them", always),
}


def listed(shown: Shown) -> list[str]:
    return [start for start in LISTED if (shown.line + " ").startswith(start + " ")]


COMMANDS = [command for page in PAGES for command in shown_in(page.name, page.read_text())]
OF_THE_PROGRAM = [command for command in COMMANDS if is_of_program(command.words)]
OF_THE_PACKAGE = [command for command in COMMANDS if is_of_package(command.words)]
