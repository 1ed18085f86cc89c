"""Limits of the prose: how long pages and sentences are, and how headings and docstrings begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_pages import pages
from repository import ROOT

# The history of releases is not edited, and what lies beside examples and tests is theirs.
PAGES = [
    page
    for page in pages()
    if page != "CHANGELOG.md" and not page.startswith(("examples/", "experiments/", "tests/"))
]
COUNTED = [page for page in PAGES if "/" not in page or page.startswith("docs/")]
QUESTION = re.compile(r"(?:What|How|Whether|Which|Why)\b")
LONGEST = 30
# Folders whose docstrings begin plainly, with all below them.
PLAIN = [
    "benches",
    "crates",
    "docs",
    "examples",
    "experiments",
    "fuzz",
    "packaging",
    "python",
    "src",
    "tests",
]


def prose(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page, without code, tables and pictures."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"^(?:#.*|\|.*|[=-]{3,}|    .*)$", "", text, flags=re.M)
    text = re.sub(r"^ *(?:[*+-]|\d+\.) ", "\n", text, flags=re.M)
    for paragraph in re.split(r"\n\s*\n", text):
        if joined := " ".join(paragraph.split()):
            yield joined


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph."""
    return re.split(r"(?<=[.!?])[)\"*]*\s+(?=[\"'(*]*(?:[A-Z0-9]|code\b))", paragraph)


def headings(text: str) -> list[str]:
    """Return the headings of a page."""
    plain = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    found = re.findall(r"^(?:#+ (.*)|(.+)\n(?:===+|---+))$", plain, re.M)
    return [one or other for one, other in found]


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented) and (told := ast.get_docstring(node)):
            yield told


def comments(path: Path) -> Iterator[str]:
    """Yield the documentation comments of a Rust file."""
    for block in re.findall(r"(?:^[ \t]*//[/!].*\n)+", path.read_text(), re.M):
        yield re.sub(r"^[ \t]*//[/!] ?", "", block, flags=re.M).strip()


def test_the_readme_and_the_map_are_short() -> None:
    assert len((ROOT / "README.md").read_text()) <= 6000
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 90


def test_the_pages_together_are_a_short_book() -> None:
    assert sum(len((ROOT / page).read_text().split()) for page in COUNTED) <= 30_700


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_plain_sentences(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not [each for each in headings(text) if QUESTION.match(each)]
    told = [each for paragraph in prose(text) for each in sentences(paragraph)]
    assert not [each for each in told if len(each.split()) > LONGEST]


def questions(folder: Path) -> list[str]:
    """Return the docstrings and comments of a folder that begin with a question word."""
    return [
        f"{path.name}: {told.splitlines()[0]}"
        for kind, read in (("*.py", docstrings), ("*.rs", comments))
        for path in sorted(folder.rglob(kind))
        for told in read(path)
        if QUESTION.match(told)
    ]


@pytest.mark.parametrize("folder", PLAIN)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    assert not questions(ROOT / folder)


def test_the_lint_itself(tmp_path: Path) -> None:
    text = "# Title\nOne `a b` two.\nThree four. Five [six](seven).\n\n* `x` y\n* z\n| a | b |\n"
    assert [sentences(each) for each in prose(text)] == [
        ["One code two.", "Three four.", "Five six."],
        ["code y"],
        ["z"],
    ]
    assert headings("Why\n---\n```sh\n# What\n```\n## B\n") == ["Why", "B"]
    assert QUESTION.match("What it does")
    assert not QUESTION.match("Whatever")
    (tmp_path / "a.py").write_text('"""Which."""\nclass A:\n    """Whatever."""\n')
    (tmp_path / "b.rs").write_text("//! How.\n/// Why\n/// What\nfn f() {}\n    /// Not\n")
    assert questions(tmp_path) == ["a.py: Which.", "b.rs: How."]
    (tmp_path / "b.rs").write_text("//! Fine.\n\n/// Why\n/// What\nfn f() {}\n    /// Not\n")
    assert questions(tmp_path) == ["a.py: Which.", "b.rs: Why"]
