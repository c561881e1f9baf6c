"""Pages of the site that are not files of docs/: README and its neighbours, and the reference."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import cpp_reference

ROOT = Path(__file__).resolve().parents[3]
# Pages of the root, by their name in the site.
PAGES = {"README.md": "index.md", **{name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}}
MODULES = {
    "python": ("Python: sluice", "sluice"),
    "transformers": ("Python: sluice.transformers", "sluice.transformers"),
}
# Lines of 120 columns fit beside the menu, code in tables breaks between words alone, and figures not at all.
STYLE = """.md-grid { max-width: 64rem; }
.md-typeset pre > code { font-size: 0.59rem; }
.md-typeset :is(td, th) code { word-break: normal; overflow-wrap: normal; }
.md-typeset td[style*="right"] { white-space: nowrap; }
.md-typeset thead:not(:has(th:not(:empty))) { display: none; }
"""
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]+)?\)")
RULE = re.compile(r"^/\* -+ (.+?) \*/$")


def on_files(files, config):
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=moved((ROOT / source).read_text(), "", files, config)))
    files.append(File.generated(config, "reference/c.md", content=c_reference((ROOT / "include/sluice.h").read_text())))
    for name, text in cpp_reference.pages_of(ROOT / "include/sluice").items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for name, (title, module) in MODULES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=f"# {title}\n\n::: {module}\n"))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri in PAGES.values() or page.file.src_uri.startswith("reference/"):
        return markdown
    return moved(markdown, "docs", files, config)


def moved(text, folder, files, config):
    """Links as they are in the repository, from `folder`, led to where the site has what they name."""

    def replace(match):
        if re.match(r"\w+:", match[1]):
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target in PAGES:
            return f"]({PAGES[target]}{match[2] or ''})"
        if target.startswith("docs/") and not target.startswith("docs/data/"):
            return f"]({target.removeprefix('docs/')}{match[2] or ''})"
        if not (ROOT / target).is_file():  # A broken link, or a folder: the strict build says so.
            return match[0]
        return f"]({copied(target, files, config)})"

    return LINK.sub(replace, unescaped(text))


def unescaped(text):
    """GitHub wants a bar escaped in code that is in a table, and Python-Markdown shows the escape."""
    return re.sub(r"^\|.*", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]), text,
                  flags=re.MULTILINE)


def copied(path, files, config):
    """The name in the site of a file of the repository: pictures and data as they are, all others as text."""
    name = f"files/{path}" + ("" if path.endswith((".svg", ".json")) else ".txt")
    if files.get_file_from_path(name) is None:
        files.append(File.generated(config, name, content=(ROOT / path).read_bytes()))
    return name


def c_reference(text):
    """A header as a page: its sections, and every declaration after its comment."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("///"))
    page = ["# C: sluice.h", ""]
    comment, code, depth = [], [], 0

    def flush():
        nonlocal comment, code
        if code:
            bare = " ".join(re.sub(r"//.*", "", line) for line in code).strip()
            names = re.findall(r"\b(sluice_\w+);$", bare) or re.findall(r"\b(sluice_\w+)\s*\(", bare) \
                or re.findall(r"\b(SLUICE_(?!API\b)\w+)", bare)
            page.extend([f"### {names[0]}", ""] if names else [])
        if comment:
            page.extend(cpp_reference.prose(comment))
        if code:
            page.extend(["```c", *code, "```", ""])
        comment, code = [], []

    for line in lines[start:]:
        if depth == 0 and (rule := RULE.match(line)):
            flush()
            page.extend([f"## {rule[1].strip().capitalize()}", ""])
        elif depth == 0 and line.startswith("///"):
            if code:
                flush()
            comment.append(line[3:].removeprefix(" "))
        elif depth == 0 and not line.strip():
            flush()
        elif line.startswith(("#if", "#else", "#endif", "#include", 'extern "C"')) or \
                re.match(r"#define SLUICE_API\b", line) or (depth == 0 and line.startswith("}")):
            continue
        else:
            code.append(line)
            depth += line.count("{") - line.count("}")
            if depth == 0 and line.rstrip().endswith(";"):
                flush()
    flush()
    return "\n".join(page)
