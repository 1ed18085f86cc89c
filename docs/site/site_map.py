"""Map files of the repository to pages of the site, and links between files to links of pages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Pages whose sources are elsewhere, beside those of docs/, which are where they are.
PAGES = {
    "benches/README.md": "performance/benchmarks.md",
    "examples/README.md": "examples/all.md",
    "examples/data/README.md": "examples/data.md",
    "examples/quickstart.ipynb": "examples/quickstart.md",
    "examples/top_k_theory.ipynb": "examples/top_k_theory.md",
    "examples/service/README.md": "examples/service.md",
    "experiments/README.md": "experiments/scripts.md",
    "fuzz/README.md": "fuzz.md",
    "tests/vectors/README.md": "vectors.md",
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
PAGES |= {
    path.relative_to(ROOT).as_posix(): f"experiments/{path.name}"
    for path in (ROOT / "experiments" / "outcomes").glob("*.md")
}
# What has a page that says the same, or lists it.
INSTEAD = {
    ".": "readme.md",
    "docs": "readme.md",
    "benches": "performance/benchmarks.md",
    "benches/results": "performance/index.md",
    "examples": "examples/all.md",
    "examples/candle": "examples/all.md",
    "examples/data": "examples/data.md",
    "examples/service": "examples/service.md",
    "experiments": "experiments/scripts.md",
    "experiments/outcomes": "papers.md",
    "fuzz": "fuzz.md",
    "tests/vectors": "vectors.md",
}
RESULTS = "benches/results/"
# Files of the repository that are no pages, and that pages point at.
SHOWN = "repository/"

_LINK = re.compile(r"(\]\(\s*)([^)\s]+)")
_ITEM = re.compile(r"([*+-]|1\.) +\S")
_LATER_ITEM = re.compile(r"\s*([*+-]|\d+\.) +\S")


def place_of(path: str) -> str:
    """Return the place of a file or folder of the repository in the site, a path below docs/.

    Raises:
        ValueError: There is no such file, or it is a folder without a page.
    """
    found = PAGES.get(path) or INSTEAD.get(path)
    if found is not None:
        return found
    whole = ROOT / path
    if path.startswith(RESULTS) and path.endswith(".md"):
        return "performance/" + path.removeprefix(RESULTS)
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not whole.is_file():
        raise ValueError(f"{path} is no file of the repository")
    return SHOWN + (path if is_binary(whole) else f"{path}.md")


def is_binary(path: Path) -> bool:
    """Return whether a file is taken as it is, not read."""
    return path.suffix in {".safetensors", ".png", ".svg", ".npz", ".npy"}


def targets(text: str, source: str) -> list[str]:
    """Return the paths in the repository that a file points at."""
    found = list[str]()

    def note(part: str) -> str:
        for match in _LINK.finditer(part):
            path = _path(match[2], source)
            if path is not None:
                found.append(path)
        return part

    _around_links(text, note)
    return found


def rewritten(text: str, source: str, page: str) -> str:
    """Return a file's text with links that hold on its page."""

    def point(part: str) -> str:
        return _LINK.sub(lambda match: match[1] + _target(match[2], source, page), part)

    return _around_links(text, point)


def _around_links(text: str, change: Callable[[str], str]) -> str:
    """Change what is no fenced code; a link's words may be code."""
    parts = re.split(r"(^ *```.*?^ *```[^\S\n]*$)", text, flags=re.M | re.S)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def _path(target: str, source: str) -> str | None:
    """Return the path in the repository that a link leads to; None if it leads elsewhere."""
    if re.match(r"[a-z]+:|#", target):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target.partition("#")[0]))


def _target(target: str, source: str, page: str) -> str:
    path = _path(target, source)
    if path is None:
        return target
    place = posixpath.relpath(place_of(path), posixpath.dirname(page) or ".")
    return place + "".join(target.partition("#")[1:])


def without_hidden(text: str) -> str:
    """Return the text without the lines of Rust that rustdoc runs and does not show."""

    def shown(block: re.Match[str]) -> str:
        return re.sub(r"^# .*\n", "", block[0], flags=re.M)

    return re.sub(r"^```rust\n.*?^```$", shown, text, flags=re.M | re.S)


def linked(html: str, addresses: Mapping[str, str]) -> str:
    """Return a page's HTML with links from the names of files that are pages (docs/files.md).

    Args:
        html: What the page shows; names in code and in links are left as they are.
        addresses: What is linked to, by the paths of the files in the repository.
    """

    def link(name: re.Match[str]) -> str:
        address = addresses.get(name[0])
        return name[0] if address is None else f'<a href="{address}">{name[0]}</a>'

    parts = re.split(r"(<(a|pre|code|title)\b.*?</\2>|<[^>]*>)", html, flags=re.S)
    # Each separator comes with its inner group.
    texts = [re.sub(r"\b[\w/]+\.md\b", link, part) for part in parts[::3]]
    return "".join(
        each for text, sign in zip(texts, [*parts[1::3], ""], strict=True) for each in (text, sign)
    )


def spaced(text: str) -> str:
    """Return the text with an empty line before each list, as MkDocs needs it."""
    lines, fenced, before = list[str](), False, ""
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        begins = _ITEM.match(line) and before.strip() and not before.startswith((" ", "#"))
        if begins and not fenced and not _LATER_ITEM.match(before):
            lines.append("")
        fenced ^= fence
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"
