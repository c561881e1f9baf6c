"""Pages of the site made of the C++ headers: every declaration that is public, after its comment.

No parser of C++: it knows the headers' own style, one declaration after its comment, and cuts bodies of functions. What
is private or in a namespace `detail` is left out. python/tests/test_reference.py says if anything else is."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

# Page: title, what it is about, headers in the order of reading. Headers that no page names are on the last one.
PAGES = {
    "cpp_engine": ("C++: the engine", "What a program needs that embeds the engine.", (
        "engine", "engine_options", "engine_stats", "bucket", "cuda", "admission", "prefill", "audit", "trace")),
    "cpp_values": ("C++: policies and values", "What calls of the engine are made of.", (
        "policy", "page_rules", "shape", "tensor", "units", "error", "run_clock")),
    "cpp_devices": ("C++: devices", "The contract that a device fulfils.", ()),
}
TYPE = re.compile(
    r"(?:template\s*<[^{;]*?>\s*)?(?:struct|class|enum(?:\s+class)?|union)\s+(?:(?:\[\[\w+\]\]|alignas\(\w+\))\s*)?([\w:]+)")
INDENT = 2
MARKS = {"throws": "Throws", "return": "Returns", "param": "Parameter"}
MARK = re.compile(rf"@({'|'.join(MARKS)})\b")


class Item(NamedTuple):
    comment: list[str]  # lines of ///, without it
    code: str           # as declared, bodies of functions cut off; empty: a comment of its own
    body: str           # of a type, between its braces
    plain: list[str]    # lines of // before it


def past(text: str, at: int) -> int:
    """The first place behind a comment, a string or a character that begins here; else the next place."""
    if text.startswith("//", at):
        return text.index("\n", at)
    if text[at] == '"' or (text[at] == "'" and not (at and text[at - 1].isalnum())):  # Not the ' of 65'536.
        end = at + 1
        while text[end] != text[at]:
            end += 2 if text[end] == "\\" else 1
        return end + 1
    return at + 1


def end_of(text: str, at: int) -> tuple[int, int, int]:
    """Of the declaration that begins here: its end, where its outermost brace opens, and where what is shown of a
    function ends; -1 for what there is not."""
    depth, brace, shown, called = 0, -1, -1, False
    is_type = TYPE.match(text, at) is not None
    start = at
    while at < len(text):
        char = text[at]
        if depth == 0 and called and shown < 0 and not is_type:
            single_colon = char == ":" and text[at - 1] != ":" and text[at + 1] != ":"
            if char == "{" or single_colon:
                shown = at
        if char in "({[":
            if char == "{" and depth == 0 and brace < 0:
                brace = at
            depth += 1
        elif char in ")}]":
            depth -= 1
            called |= depth == 0 and char == ")" and not text[start : at + 1].endswith("operator()")
            rest = text[at + 1 :].lstrip()
            if depth == 0 and char == "}" and shown >= 0 and not rest.startswith((";", ",", "{")):
                return at + 1, brace, shown
        elif char == ";" and depth == 0:
            return at + 1, brace, shown
        at = past(text, at)
    raise ValueError(f"no end: {text[start : start + 80]!r}")


def items_of(text: str) -> list[Item]:
    """What is declared in a text, that of namespaces included."""
    found: list[Item] = []
    comment: list[str] = []
    plain: list[str] = []
    public, at = True, 0

    def flush() -> None:
        nonlocal comment, plain
        if comment and public:
            found.append(Item(comment, "", "", []))
        comment, plain = [], []

    while at < len(text):
        line = text[at : text.find("\n", at) if "\n" in text[at:] else len(text)]
        bare = line.strip()
        begin = at + len(line) - len(line.lstrip())
        if not bare:
            flush()
        elif bare.startswith("///"):
            comment.append(bare[3:].removeprefix(" "))
        elif bare.startswith("//"):
            plain.append(bare)
        elif match := re.match(r"(public|private|protected):$", bare):
            public = match[1] == "public"
        elif match := re.match(r"namespace (\S+) \{$", bare):
            flush()
            end, brace, _ = end_of(text[: matching(text, begin + len(bare) - 1)] + ";", begin)
            if "detail" not in match[1].split("::"):
                found += items_of(text[brace + 1 : end - 2])
            at = end
            continue
        else:
            end, brace, shown = end_of(text, begin)
            rest = text[end : text.find("\n", end) if "\n" in text[end:] else len(text)]
            after = rest.rstrip() if re.match(r"\s*//", rest) else ""
            whole = text[begin:end]
            code = text[begin:shown].rstrip() + ";" if shown >= 0 else whole
            is_type = TYPE.match(whole) is not None and brace >= 0
            if public and not re.match(r"(class|struct) \w+;$", whole):
                body = text[brace + 1 : end - 2] if is_type else ""
                found.append(Item(comment, code + after, body, plain))
            comment, plain = [], []
            at = end + len(rest) + 1
            continue
        at += len(line) + 1
    flush()
    return found


def matching(text: str, at: int) -> int:
    """Behind the brace that closes the one that opens here."""
    depth = 0
    while True:
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at + 1
        at = past(text, at)


def is_function(code: str) -> bool:
    head = re.split(r"=(?!=)|///<", re.sub(r"operator\s*[^\s(]+", "operator", code), maxsplit=1)[0]
    while (less := re.sub(r"<[^<>]*>", "", head)) != head:  # std::function<void()> is none.
        head = less
    return "(" in head and not re.match(r"using\b|static_assert", code) and "{" not in head.partition("(")[0]


def name_of(code: str) -> str:
    """The name that is declared."""
    bare = re.sub(r"//.*", "", code)
    bare = re.sub(r"\[\[\w+\]\]\s*", "", bare)
    if match := TYPE.match(bare):
        return match[1]
    if match := re.search(r"\busing\s+(\w+)\s*=", bare):
        return match[1]
    if match := re.search(r"(operator\s*(?:\(\)|[^\s(]+))\s*\(", bare):
        return match[1]
    if is_function(code):
        return re.search(r"(~?\w+)\s*\(", re.sub(r"template\s*<[^>]*>\s*", "", bare))[1]
    return re.search(r"(\w+)(?:\[[^\]]*\])*\s*(?:[={;]|$)", bare)[1]


def fenced(language: str, lines: str) -> list[str]:
    return [f"```{language}", lines.rstrip("\n"), "```", ""]


def prose(comment: list[str]) -> list[str]:
    """A comment as Markdown: its paragraphs, lists and @ lines. One that aligns its lines keeps them."""
    if any(line.startswith(" ") and not in_list(comment, at) for at, line in enumerate(comment)):
        return fenced("text", "\n".join(comment))
    page: list[str] = []
    for at, line in enumerate(comment):
        begins = line.startswith("@") or line.startswith("- ") != comment[at - 1].startswith(("- ", "  "))
        page += [""] if at and begins and not line.startswith("  ") else []
        # Code is between backticks, and stays as it is.
        parts = line.split("`")
        page.append("`".join(part if at % 2 else worded(part) for at, part in enumerate(parts)))
    return [*page, ""]


def worded(text: str) -> str:
    """Text as Markdown, with words for its @ marks."""
    return MARK.sub(lambda mark: f"*{MARKS[mark[1]]}*", text.replace("<", "&lt;").replace("*", "\\*"))


def in_list(comment: list[str], at: int) -> bool:
    """Whether an indented line goes on with an entry of a list."""
    before = [line for line in comment[:at] if not line.startswith("  ")]
    return comment[at].startswith("  ") and not comment[at].startswith("   ") and bool(before) and before[-1].startswith("- ")


def of_type(item: Item) -> list[str]:
    """A type: what it has, then each of its functions that has a comment."""
    members = [] if re.match(r"enum|union", item.code) else items_of(item.body)
    if not members:
        return fenced("cpp", item.code)
    name, inside, page = name_of(item.code), [], []
    heading = ""
    for member in members:
        if member.comment and is_function(member.code) and not member.body:
            called = f"{name}::{name_of(member.code)}"
            page += [] if called == heading else [f"#### {called}", ""]
            heading = called
            page += prose(member.comment)
            page += fenced("cpp", textwrap.dedent(" " * INDENT + member.code))
            continue
        inside += [" " * INDENT + "/// " + line for line in member.comment]
        inside += [" " * INDENT + line for line in member.plain]
        inside += [" " * INDENT + member.code] if member.code else []
    head = item.code[: item.code.index("{", TYPE.match(item.code).end())] + "{"
    return fenced("cpp", "\n".join([head, *inside, "};"])) + page


def of_header(name: str, text: str) -> list[str]:
    """A header as a part of a page."""
    page = [f"## sluice/{name}.hpp", "", f"`#include \"sluice/{name}.hpp\"`", ""]
    lines = text.replace("\\\n", "").splitlines()
    code = "\n".join("" if line.startswith("#") else line for line in lines) + "\n"
    heading = ""
    for item in items_of(code):
        if item.code:
            called = name_of(item.code)
            page += [] if called == heading else [f"### {called}", ""]
            heading = called
        if item.comment:
            page += prose(item.comment)
        if item.code:
            page += of_type(item) if item.body else fenced("cpp", textwrap.dedent(item.code))
    return page


def pages_of(folder: Path) -> dict[str, str]:
    """The pages, by name, of the headers in a folder."""
    headers = {path.stem: path.read_text() for path in sorted(folder.glob("*.hpp"))}
    named = [name for _, _, names in PAGES.values() for name in names]
    others = [name for name in headers if name not in named]
    pages = {}
    for at, (page, (title, about, names)) in enumerate(PAGES.items()):
        lines = [f"# {title}", "", about, ""]
        for name in (*names, *(others if at == len(PAGES) - 1 else ())):
            lines += of_header(name, headers[name])
        pages[page] = "\n".join(lines)
    return pages
