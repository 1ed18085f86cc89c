"""Reads the HTML pages that commands write."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Counts what is drawn and collects what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            outside = name in ("src", "href", "xlink:href") and value
            if outside and not str(value).startswith(("#", "data:")):
                self.fetched.append(str(value))
