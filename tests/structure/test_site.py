"""The site of the documentation has every page, and what is made into pages is made right.

`make docs` builds it, strictly, and follows every link: that runs before a change lands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import api_links
import api_pages
import command_pages
import notebook_page
import result_pages
from check_site import external, findings
from doc_pages import pages
from repository import ROOT
from site_map import PAGES, linked, place_of, rewritten, spaced, targets, without_hidden

# What registries of packages show, which is the beginning of the README.
NO_PAGES = {"docs/package.md"}
# Made by the hook, from no single file.
MADE = {"api/index.md", "commands.md", "performance/index.md"}


def navigation() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    nav = re.sub(r"^ *# .*\n", "", nav, flags=re.M)
    found = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", nav, re.M)
    titles = re.findall(r"^ +- [^:\n]+:$", nav, re.M)
    assert len(found) + len(titles) == len(nav.strip().splitlines())
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == sorted(
        {place_of(page) for page in pages() if page not in NO_PAGES}
        | {place for place in PAGES.values() if place.startswith("examples/")}
        | MADE
    )


def test_every_module_has_its_place() -> None:
    folder = ROOT / "python" / "certk_rs"
    there = {
        path.stem
        for path in folder.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists())
        and (path.stem == "__init__" or not path.stem.startswith("_"))
    } | {"__main__"}
    shown = {each.name.partition(".")[2] or "__init__" for each in api_pages.MODULES}
    shown -= {"_jobs"}  # private, but for the results that are shown of it
    assert there == shown | api_pages.ELSEWHERE.keys()


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    import certk_rs as ck

    found = api_pages.pages()
    assert found.keys() == {"api/index.md", *map(api_pages.place, api_pages.MODULES)}
    for name in ck.__all__:
        module = found.get(f"api/{name}.md")
        assert module or f"::: certk_rs.{name}\n" in found["api/certk_rs.md"], name
    assert api_pages.public_names("certk_rs") == ck.__all__
    assert "plan" in api_pages.public_names("certk_rs.gaussian")  # which has no __all__
    assert "::: certk_rs.torch.select_mask\n" in found["api/torch.md"]


def test_the_page_of_commands_has_every_option() -> None:
    from certk_rs._cli.tree import tree

    page = command_pages.page()
    for name, command in tree().commands.items():
        part = page.partition(f"## certk {name}\n")[2].partition("\n## ")[0]
        common = page.partition("## Common options\n")[2]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                for option in parameter.opts:
                    assert re.search(rf"^`.*{option}\b.*`$", part + common, re.M), (name, option)
    assert "Tail mass that a row may lose, 0 &lt;= eps &lt; 1. \\[required\\]" in page


def test_dated_tables_are_pages() -> None:
    made = dict(result_pages.pages())
    files = sorted((ROOT / "benches" / "results").glob("*.md"))
    assert made.keys() == {"performance/index.md", *(f"performance/{each.name}" for each in files)}
    for file in files:
        page = made[f"performance/{file.name}"]
        date = re.search(r"^date: (.*)$", file.read_text(), re.M)
        assert date is not None
        assert f"| date | {date[1]} |" in page
        assert date[1] in made["performance/index.md"]
        # Every line of the tables.
        assert set(file.read_text().partition("\n\n")[2].splitlines()) - {"```"} <= set(
            page.splitlines()
        )
    days = [each.facts["date"] for each in result_pages.results()]
    assert days == sorted(days, reverse=True)


def test_a_notebook_is_a_page() -> None:
    text, pictures = notebook_page.page(ROOT / "examples" / "quickstart.ipynb")
    assert text.startswith("# Quick start")
    assert "sel = ck.select(scores, 0.01)" in text
    assert "```text\nSelection of 1024 rows" in text
    assert [content[:4] for content in pictures.values()] == [b"\x89PNG"]
    assert all(f'src="{name}"' in text for name in pictures)


def test_links_of_files_become_links_of_pages() -> None:
    text = (
        "[a](../benches/README.md#how), [`b`](files.md#x), [c](https://x.org), [d](#e)\n"
        "```sh\n[f](../g.md)\n```\n[h](../src/lib.rs) ![i](figures/growth.png)\n"
    )
    assert rewritten(text, "docs/cluster.md", "cluster.md") == (
        "[a](performance/benchmarks.md#how), [`b`](files.md#x), [c](https://x.org), [d](#e)\n"
        "```sh\n[f](../g.md)\n```\n[h](repository/src/lib.rs.md) ![i](figures/growth.png)\n"
    )
    assert targets(text, "docs/cluster.md") == [
        "benches/README.md", "docs/files.md", "src/lib.rs", "docs/figures/growth.png",
    ]  # fmt: skip
    there = rewritten("[a](docs/cli.md)", "CONTRIBUTING.md", "deep/er/page.md")
    assert there == "[a](../../cli.md)"
    with pytest.raises(ValueError, match=r"nowhere\.md is no file"):
        rewritten("[a](../nowhere.md)", "docs/cli.md", "cli.md")


def test_lists_are_lists_and_hidden_lines_hidden() -> None:
    assert spaced("a\n* b\n* c\n") == "a\n\n* b\n* c\n"
    for same in ("# a\n* b\n", "a\n\n1. b\n2. c\n", "* a\n  b\n* c\n", "```\na\n* b\n```\n"):
        assert spaced(same) == same
    assert without_hidden("```rust\na\n# b\n```\n# c\n") == "```rust\na\n```\n# c\n"


def test_files_that_are_named_become_links() -> None:
    html = '<p title="docs/a.md">{}, <code>docs/a.md</code>, docs/b.md.</p>'
    link = '<a href="a.html">docs/a.md</a>'
    made = linked(html.format("docs/a.md"), {"docs/a.md": "a.html"})
    assert made == html.format(link)
    assert linked(made, {"docs/a.md": "a.html"}) == made


def test_names_in_code_become_links() -> None:
    names = api_links.known()
    assert {"certk_rs.select", "certk_rs.bounds.single_gap", "certk_rs.guard.Guard"} <= names
    assert {"certk_rs.bounds", "certk_rs.torch", "certk_rs.__version__"} <= names
    there = '<autoref identifier="certk_rs.bounds.pinsker"><code>bounds.pinsker</code></autoref>'
    assert api_links.linked("<code>bounds.pinsker</code>", names) == there
    for code in ("ck.select", "certk_rs.select", "certk_rs.select(scores, &quot;a&quot;)"):
        there = f'<autoref identifier="certk_rs.select"><code>{code}</code></autoref>'
        assert api_links.linked(f"<p><code>{code}</code></p>", names) == f"<p>{there}</p>"
    for same in (
        "<code>ck.nothing</code>", "<code>select</code>", "<code>ck.select, ck.certify</code>",
        "<h2><code>ck.select</code></h2>", '<a href="x"><code>ck.select</code></a>',
        "<pre><code>ck.select</code></pre>",
    ):  # fmt: skip
        assert api_links.linked(same, names) == same


def test_what_a_built_site_lacks_is_found(tmp_path: Path) -> None:
    (tmp_path / "rust").mkdir()
    (tmp_path / "rust" / "index.html").write_text('<a href="nowhere.html">')
    (tmp_path / "a.css").write_text("")
    right = '<link rel=stylesheet href="a.css"><a id="x" href="https://x.org">'
    right += '<a href="rust/index.html">'
    (tmp_path / "index.html").write_text(right + '<a href="#x"><a href="index.html#x">')
    assert list(findings(tmp_path)) == []
    assert external(tmp_path) == ["https://x.org"]
    for wrong, told in {
        '<a href="b.html">': "points at b.html, which is not there",
        '<a href="#y">': "points at index.html#y, which is not there",
        '<img src="https://x.org/a.png">': "loads https://x.org/a.png",
        '<script src="//x.org/a.js">': "loads //x.org/a.js",
        '<link rel="stylesheet" href="https://x.org/a.css">': "loads https://x.org/a.css",
    }.items():
        (tmp_path / "index.html").write_text(right + wrong)
        assert list(findings(tmp_path)) == [f"index.html {told}"]
    (tmp_path / "index.html").write_text(right)
    (tmp_path / "a.css").write_text("@font-face { src: url('https://x.org/a.woff') }")
    assert list(findings(tmp_path)) == ["a.css loads https://x.org/a.woff"]
