"""The reference of C++ that tools/lab/site/cpp_reference.py makes has everything that the headers declare and say."""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADERS = sorted((ROOT / "include" / "sluice").glob("*.hpp"))
# What begins at the left: types, and functions and values of the namespace.
DECLARED = re.compile(
    r"^(?:(?:struct|class|enum class) (?:alignas\(\d+\) )?(?P<type>[\w:]+)|(?:using (?P<alias>\w+) =)|"
    r"(?:(?:\[\[nodiscard\]\]|inline|constexpr|template <.*>)\s)*[\w:<>*&]+(?: [\w:<>*&]+)* [*&]?"
    r"(?P<name>\w+)(?:\(|\[\]| ?[={;]))")


def generator():
    spec = importlib.util.spec_from_file_location("cpp_reference", ROOT / "tools" / "lab" / "site" / "cpp_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = generator()
PAGES = REFERENCE.pages_of(ROOT / "include" / "sluice")
# As it is read, but with the marks of the headers.
ALL = html.unescape("\n".join(PAGES.values())).replace("\\*", "*")
for mark, word in REFERENCE.MARKS.items():
    ALL = ALL.replace(f"*{word}*", f"@{mark}")


def public(text: str) -> list[str]:
    """Lines of a header without those of namespaces `detail` and private parts."""
    text = re.sub(r"^namespace detail \{.*?^\}  // namespace detail$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ private:$.*?^\};$", "};", text, flags=re.DOTALL | re.MULTILINE).splitlines()


def part_of(header: Path) -> str:
    """What the pages have of one header."""
    parts = re.findall(rf"^## sluice/{header.name}$(.*?)(?=^## |\Z)", ALL, flags=re.DOTALL | re.MULTILINE)
    assert len(parts) == 1, f"{header.name} is there {len(parts)} times"
    return parts[0]


def declared(lines: list[str]) -> list[str]:
    """Names at the left of a header's lines; members and forward declarations are not there."""
    found = [(match["type"] or match["alias"] or match["name"], line) for line in lines
             if (match := DECLARED.match(line)) and not re.match(r"(struct|class) \w+;|namespace|return|//", line)]
    return [name for name, line in found]


def missing(header: Path) -> list[str]:
    lines, part = public(header.read_text()), part_of(header)
    headings = set(re.findall(r"^### (\S+)$", part, flags=re.MULTILINE))
    comments = [line.partition("///")[2].removeprefix("<").strip() for line in lines if "///" in line]
    # Every function with a comment has its name on the page, members included; so has every value.
    return [f"### {name}" for name in declared(lines) if name not in headings] + \
        [comment for comment in comments if comment not in part]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_nothing_is_missing(header: Path) -> None:
    assert missing(header) == []


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.name)
def test_members_are_there(header: Path) -> None:
    """Words of every public declaration: no member is lost. Bodies of functions, and what no comment goes before, may
    be left out."""
    lines = public(header.read_text())
    part = part_of(header)
    for at, line in enumerate(lines[:-1]):
        follows = lines[at + 1]
        if line.strip().startswith("///") and follows.strip() and not follows.strip().startswith("//"):
            name = re.search(r"(\w+)(?= ?[({=;\[,])", re.sub(r"template <.*?>|\[\[nodiscard\]\]", "", follows))
            assert name is None or re.search(rf"\b{name[1]}\b", part), f"{header.name}: {follows}"


def test_what_is_looked_for_is_found() -> None:
    lines = ["struct A {", "struct B;", "enum class C : int {", "using D = int;", "inline constexpr float kE = 1.f;",
             "[[nodiscard]] constexpr std::uint32_t bytes_of(DType type) noexcept {", "void validate(const A& a);",
             "  int member = 0;", "class alignas(64) F final {", "struct std::hash<A> {",
             "[[nodiscard]] const std::vector<G>& presets();"]
    assert declared(lines) == ["A", "C", "D", "kE", "bytes_of", "validate", "F", "std::hash", "presets"]
    assert public("a\nnamespace detail {\nb\n}  // namespace detail\nclass X {\n private:\n  c\n};\nd") == \
        ["a", "", "class X {", "};", "d"]


def test_pages_have_places_in_the_menu() -> None:
    menu = (ROOT / "tools" / "lab" / "site" / "mkdocs.yml").read_text()
    assert all(f"reference/{page}.md" in menu for page in PAGES)


def test_bodies_are_cut_and_strings_are_none() -> None:
    items = REFERENCE.items_of('/// a\nint f(int x = g("}")) {\n  return x;\n}\n/// b\nstruct S {\n  S() : x_{1} {}\n'
                               ' private:\n  int x_;\n};\nint y = 65\'536;  ///< c\n')
    assert [item.code for item in items[:1]] == ['int f(int x = g("}"));']
    assert items[0].comment == ["a"] and items[2].code == "int y = 65'536;  ///< c"
    assert "x_" not in "".join(REFERENCE.of_type(items[1]))


def test_comments_become_prose() -> None:
    """Their paragraphs, lists and @ lines are ones of the page. What is aligned stays as it is."""
    comment = ["Of `a < b` and T* < U*:", "- one", "  that goes on", "- two", "Then this.", "@throws Error if not",
               "@param `@param` it"]
    assert REFERENCE.prose(comment) == [
        "Of `a < b` and T\\* &lt; U\\*:", "", "- one", "  that goes on", "- two", "", "Then this.", "",
        "*Throws* Error if not", "", "*Parameter* `@param` it", ""]
    assert REFERENCE.prose(["a:", "  x   1", "  y   2"]) == ["```text", "a:\n  x   1\n  y   2", "```", ""]
