"""Hooks of MkDocs that make pages of other files, and links that hold on the site."""

from __future__ import annotations

import posixpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import api_links
import api_pages
import command_pages
import notebook_page
import result_pages
from site_map import (
    PAGES,
    RESULTS,
    ROOT,
    SHOWN,
    is_binary,
    linked,
    place_of,
    rewritten,
    spaced,
    targets,
    without_hidden,
)

# The page that a visitor sees first.
HOME = "start.md"
# Of each page that has one, its source in the repository: what its links are relative to.
_sources: dict[str, str] = {}
# What has a place on a page of the API.
_names: set[str] = set()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made of what there is behind the list of them."""
    _section(config.nav, "API").extend(
        {each.title: api_pages.place(each)} for each in api_pages.MODULES
    )
    _section(config.nav, "Performance").extend(
        {each.title: each.place} for each in result_pages.results()
    )
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose sources are not in docs/, then the files that pages point at."""
    _sources.clear()
    _names.update(api_links.known())
    for file in files.documentation_pages():
        _sources[file.src_uri] = f"docs/{file.src_uri}"
    texts = {**api_pages.pages(), **dict(result_pages.pages())}
    for each in result_pages.results():
        _sources[each.place] = each.path.relative_to(ROOT).as_posix()
    texts["commands.md"] = command_pages.page()
    for source, place in PAGES.items():
        _sources[place] = source
        if source.endswith(".ipynb"):
            texts[place], pictures = notebook_page.page(ROOT / source)
            for name, content in pictures.items():
                uri = posixpath.join(posixpath.dirname(place), name)
                files.append(File.generated(config, uri, content=content))
        else:
            texts[place] = (ROOT / source).read_text()
    for place, text in texts.items():
        files.append(File.generated(config, place, content=text))
    for path in (ROOT / RESULTS).glob("*.svg"):
        uri = f"performance/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    _add_shown(files, config)
    home = files.get_file_from_path(HOME)
    if home is not None:
        home.dest_uri = "index.html"
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make links between files links between pages, and lists lists."""
    place = page.file.src_uri
    if place in {each.place for each in result_pages.results()} | {"changelog.md"}:
        # Found, behind what explains.
        page.meta["search"] = {"boost": 0.2}
    text = rewritten(markdown, _sources[place], place) if place in _sources else markdown
    return spaced(without_hidden(text))


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Link to pages that are named as files, as docstrings do, and to what code names."""
    addresses = {}
    for place, source in _sources.items():
        file = files.get_file_from_path(place)
        if file is not None and file is not page.file:
            addresses[source] = file.url_relative_to(page.file)
    return api_links.linked(linked(html, addresses), _names)


def _add_shown(files: Files, config: MkDocsConfig) -> None:
    """Add what pages point at and what has no page: as a page with its text, or as it is."""
    asked = {
        path
        for place, source in _sources.items()
        if (file := files.get_file_from_path(place)) is not None
        for path in targets(file.content_string, source)
    }
    for path in sorted(asked):
        place = place_of(path)
        if not place.startswith(SHOWN) or files.get_file_from_path(place) is not None:
            continue
        whole = ROOT / path
        if is_binary(whole):
            files.append(File.generated(config, place, abs_src_path=str(whole)))
            continue
        text = f"# {path}\n\n````{whole.suffix.removeprefix('.')}\n{whole.read_text()}````\n"
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, place, content=text, inclusion=level))


def _section(nav: Any, title: str) -> list[Any]:
    """Return the section of the navigation with this title."""
    for item in nav or ():
        if isinstance(item, dict):
            for name, inside in item.items():
                if isinstance(inside, list):
                    if name == title:
                        return inside
                    try:
                        return _section(inside, title)
                    except LookupError:
                        continue
    raise LookupError(title)
