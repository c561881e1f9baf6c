"""Registers, shared memory and stack of every kernel in a binary, as a table: kernel_resources.py BINARY [CUOBJDUMP]

Variants of a template (element type, head size, group) are one line, from the least to the most. The stack has arrays
that are indexed and what registers have no room for. What a kernel asks for when it is launched, dynamic shared memory, is
not in the binary.
"""

import re
import subprocess
import sys


def resources(binary, cuobjdump):
    """(demangled name, {resource: number}) of each kernel."""
    lines = subprocess.run([cuobjdump, "-res-usage", binary], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [(match.group(1), dict(re.findall(r"(\w+):(\d+)", after)))
             for line, after in zip(lines, lines[1:]) if (match := re.search(r"Function ([^:]+):", line))]
    names = subprocess.run(["c++filt"], input="\n".join(name for name, _ in found), capture_output=True, text=True, check=True)
    return list(zip(names.stdout.splitlines(), (numbers for _, numbers in found)))


def base(name):
    """The function's own name, without return type, namespaces, template and other arguments."""
    return re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0].split("::")[-1]


def span(numbers):
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def main():
    binary, *rest = sys.argv[1:]
    kernels = {}
    for name, numbers in resources(binary, rest[0] if rest else "cuobjdump"):
        kernels.setdefault(base(name), []).append({key: int(number) for key, number in numbers.items()})
    if not kernels:
        sys.exit(f"{binary} has no kernels; give a binary that was built with CUDA")
    print("| kernel | variants | registers | static shared memory, bytes | stack, bytes |")
    print("|---|--:|--:|--:|--:|")
    for name, all_ in sorted(kernels.items()):
        columns = [span([numbers.get(key, 0) for numbers in all_]) for key in ("REG", "SHARED", "STACK")]
        print(f"| `{name}` | {len(all_)} | " + " | ".join(columns) + " |")


if __name__ == "__main__":
    main()
