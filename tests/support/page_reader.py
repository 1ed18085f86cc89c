"""Reads the HTML pages that commands write, as a browser does."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser


@dataclass
class ShownTable:
    caption: str = ""
    heads: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


class Page(HTMLParser):
    """Tags, names of attributes, ids and texts; tables and paragraphs; what would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.tables: list[ShownTable] = []
        self.paragraphs: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.append(name)
            if name == "id":
                self.ids.append(str(value))
            outside = name in ("src", "href", "xlink:href") and value
            if outside and not str(value).startswith(("#", "data:")):
                self.fetched.append(str(value))
        if tag == "table":
            self.tables.append(ShownTable())
        elif tag == "tr" and self.tables and self.tables[-1].heads:
            self.tables[-1].rows.append([])
        elif tag == "th":
            self.tables[-1].heads.append("")
        elif tag == "td":
            self.tables[-1].rows[-1].append("")
        elif tag == "p":
            self.paragraphs.append("")
        if tag in ("th", "td", "caption", "p"):
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside == "caption":
            self.tables[-1].caption += data
        elif self._inside == "th":
            self.tables[-1].heads[-1] += data
        elif self._inside == "td":
            self.tables[-1].rows[-1][-1] += data
        elif self._inside == "p":
            self.paragraphs[-1] += data


def tables_of(text: str) -> dict[str, ShownTable]:
    """By caption; the table without one is under ""."""
    tables = Page(text).tables
    found = {table.caption: table for table in tables}
    assert len(found) == len(tables)
    return found
