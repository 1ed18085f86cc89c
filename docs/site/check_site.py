"""See that every link of a built site leads somewhere in it, and that no page loads from elsewhere.

    python docs/site/check_site.py site

What rustdoc has written (site/rust) is linked to, but its own links are checked by rustdoc. Links
that leave the site are listed with `--external`, and never followed.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

# Attributes that make a browser load something at once, by tag.
_LOADS = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        loaded = given.get(_LOADS.get(tag, ""))
        if loaded and given.get("rel") not in {"canonical", "next", "prev", "alternate"}:
            self.loads.append(loaded)


def _pages(site: Path) -> dict[str, _Page]:
    return {
        path.relative_to(site).as_posix(): _Page(path.read_text())
        for path in sorted(site.rglob("*.html"))
        if not path.is_relative_to(site / "rust")
    }


def external(site: Path) -> list[str]:
    """Return the links that leave the site."""
    return sorted(
        {link for page in _pages(site).values() for link in page.links if _elsewhere(link)}
    )


def findings(site: Path) -> Iterator[str]:
    """Yield what is wrong, a line each."""
    pages = _pages(site)
    for name, page in pages.items():
        for address in page.loads:
            if _elsewhere(address):
                yield f"{name} loads {address}"
        for address in {*page.links, *page.loads}:
            if _elsewhere(address) or address.startswith(("data:", "mailto:")):
                continue
            if name == "404.html" and address.startswith("/"):
                address = address[1:]  # made for the root of a server
            path, _, anchor = address.partition("#")
            target = name
            if path:
                joined = posixpath.join(posixpath.dirname(name), unquote(path.partition("?")[0]))
                target = posixpath.normpath(joined)
            if not (site / target).exists():
                yield f"{name} points at {target}, which is not there"
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                yield f"{name} points at {target}#{anchor}, which is not there"
    for sheet in sorted(site.rglob("*.css")):
        if not sheet.is_relative_to(site / "rust"):
            for address in re.findall(r"(?:url\(|@import )\s*[\"']?([^\"')]+)", sheet.read_text()):
                if _elsewhere(address):
                    yield f"{sheet.relative_to(site)} loads {address}"


def _elsewhere(address: str) -> bool:
    return re.match(r"(?:https?:)?//", address) is not None


def main() -> int:
    """Print what is wrong, or what leaves the site; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="the folder of the built site")
    parser.add_argument("--external", action="store_true", help="list the links that leave it")
    asked = parser.parse_args()
    if asked.external:
        print(*external(asked.site), sep="\n")
        return 0
    found = sorted(set(findings(asked.site)))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
