"""The dated tables of the benchmarks as pages, and the list of them, newest first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from site_map import RESULTS, ROOT, place_of


@dataclass(frozen=True)
class Result:
    """One file of results: a block with a head of facts, an empty line, and tables."""

    path: Path
    facts: dict[str, str]
    tables: str

    @property
    def about(self) -> str:
        """Of which bench it is."""
        script = re.search(r"bench_(\w+)\.py", self.facts["command"])
        return script[1] if script else "all"

    @property
    def title(self) -> str:
        """Its day and its bench."""
        return f"{self.facts['date'][:10]}: {self.about}"

    @property
    def place(self) -> str:
        """Return the place of its page."""
        return place_of(self.path.relative_to(ROOT).as_posix())


def results() -> list[Result]:
    """All of them, newest first."""
    found = [_read(path) for path in sorted((ROOT / RESULTS).glob("*.md"))]
    return sorted(found, key=lambda each: each.facts["date"], reverse=True)


def pages() -> Iterator[tuple[str, str]]:
    """Return the place and the text of each page, the list of all first."""
    found = results()
    yield "performance/index.md", _index(found)
    for each in found:
        yield each.place, _page(each)


def _read(path: Path) -> Result:
    text = path.read_text()
    inside = re.fullmatch(r"```\w*\n(.*)```\s*(.*)", text, re.S)
    if inside is None:
        raise ValueError(f"{path} is not one block of facts and tables")
    head, _, tables = inside[1].partition("\n\n")
    facts, name = dict[str, str](), ""
    for line in head.splitlines():
        if line.startswith(" "):  # goes on
            facts[name] += " " + line.strip()
        else:
            name, _, value = line.partition(": ")
            facts[name] = value
    rest = f"\n{inside[2]}" if inside[2] else ""
    return Result(path, facts, f"```text\n{tables}```\n{rest}")


def _index(found: list[Result]) -> str:
    lines = [
        "# Measured",
        "",
        "Every table has its date, its machine and the command that made it. "
        "[Benchmarks](benchmarks.md) says what is measured, how, and how to read it.",
        "",
        "| date | bench | machine | commit |",
        "|---|---|---|---|",
    ]
    for each in found:
        link = f"[{each.about}]({each.place.removeprefix('performance/')})"
        lines.append("| {date} | {link} | {cpu} | {commit} |".format(link=link, **each.facts))
    return "\n".join(lines) + "\n"


def _page(each: Result) -> str:
    facts = [f"| {name} | {value} |" for name, value in each.facts.items()]
    lines = [
        f"# {each.title}",
        "",
        f"`{each.facts['command']}`, {each.facts['date']}, {each.facts['cpu']}",
        "",
        each.tables,
        "",
        "## Machine and versions",
        "",
        "| | |",
        "|---|---|",
        *facts,
        "",
    ]
    return "\n".join(lines)
