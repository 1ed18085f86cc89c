"""The tables of a page that a command wrote, and its text, as a reader sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class ShownTable:
    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[ShownTable] = []
        self.text: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append(ShownTable())
        elif tag == "tr" and self.tables and self.tables[-1].heads:
            self.tables[-1].rows.append([])
        elif tag == "th":
            self.tables[-1].heads.append("")
        elif tag == "td":
            self.tables[-1].rows[-1].append("")
        elif tag == "p":
            self.text.append("")
        if tag in ("th", "td", "caption", "p"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "caption":
            self.tables[-1].caption += data
        elif self._inside == "th":
            self.tables[-1].heads[-1] += data
        elif self._inside == "td":
            self.tables[-1].rows[-1][-1] += data
        elif self._inside == "p":
            self.text[-1] += data


def tables_of(page: str) -> dict[str, ShownTable]:
    """By caption; the table without one is under ""."""
    reader = _Reader()
    reader.feed(page)
    found = {table.caption: table for table in reader.tables}
    assert len(found) == len(reader.tables)
    return found


def paragraphs_of(page: str) -> list[str]:
    """The texts of all paragraphs."""
    reader = _Reader()
    reader.feed(page)
    return reader.text
