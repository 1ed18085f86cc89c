"""Names of the interface in code (`ck.select`, `bounds.pinsker(...)`) become links."""

from __future__ import annotations

import re
from collections.abc import Set
from html import unescape

from api_pages import MODULES, public_names

# Code in links and in headings stays as it is; so do blocks.
_CODE = re.compile(
    r"<(?P<whole>a|pre|h\d|autoref)\b.*?</(?P=whole)>|<code>(?P<code>[^<]*)</code>", re.S
)
# `select` alone may be the command; `bounds.pinsker` is nothing else.
_NAME = re.compile(r"(?:(?:ck|certk_rs)\.|(?=\w+\.\w))([\w.]*\w)(?:\(.*\))?", re.S)


def known() -> set[str]:
    """Return the whole names that have a place on a page."""
    found = {each for module in MODULES for each in (module.name, *module.members)}
    for module in MODULES:
        if not module.members:
            found |= {f"{module.name}.{each}" for each in public_names(module.name)}
    return found


def linked(html: str, names: Set[str]) -> str:
    """Return a page's HTML with links to these names, which mkdocs-autorefs then makes links."""

    def link(match: re.Match[str]) -> str:
        name = _NAME.fullmatch(unescape(match["code"] or ""))
        if name is None or f"certk_rs.{name[1]}" not in names:
            return match[0]
        return f'<autoref identifier="certk_rs.{name[1]}">{match[0]}</autoref>'

    return _CODE.sub(link, html)
