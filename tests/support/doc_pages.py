"""The code blocks of a page, and how a reader would run them: in their order, in one folder."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
import types
from dataclasses import dataclass
from typing import Any

from repository import ROOT

_FENCE = re.compile(r"^( *)```(.*)$")
# What differs from one model, machine or terminal to another.
_NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?|\.\d+")
_RULE = re.compile("─+")


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    """Of its first line, from 1."""
    text: str


def pages() -> list[str]:
    """Every page of the repository, but those that scripts have written."""
    made = {"build", "dist", "out", "site", "target"}
    folders = (each for each in ROOT.iterdir() if each.is_dir() and each.name not in made)
    found = {
        *ROOT.glob("*.md"),
        *(page for each in folders if each.name[0] != "." for page in each.rglob("*.md")),
    }
    names = (page.relative_to(ROOT).as_posix() for page in found)
    made_pages = ("benches/results/", "experiments/outcomes/")
    return sorted(name for name in names if not name.startswith(made_pages))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as forges spell them."""
    plain = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    titles = re.findall(r"^(?:#+ (.*)|(.*)\n(?:=+|---+))$", plain, re.M)
    found: set[str] = set()
    for title in (one or other for one, other in titles if one or other):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        more = (f"{name}-{i}" for i in itertools.count(1))
        found.add(name if name not in found else next(each for each in more if each not in found))
    return found


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page; an open one is an error."""
    found: list[Block] = []
    language, start, lines = "", 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif start == 0:
            language, start, lines = fence[2].strip(), number + 1, []
        else:
            assert not fence[2].strip(), f"line {number}: a block inside the one of line {start}"
            found.append(Block(language, start, "\n".join(lines) + "\n"))
            start = 0
    assert start == 0, f"the block of line {start} is never closed"
    return found


def run_page(page: str, names: dict[str, Any]) -> None:
    """Run the Python and shell blocks of a page in the current folder.

    A text block is what the block before it prints, but for numbers: its lines are there in that
    order, and "..." stands for others.

    Args:
        page: Its path in the repository.
        names: What the page takes for given.
    """
    module = types.ModuleType("__main__")  # classes of a block have to be found
    module.__dict__.update(names)
    printed = ""
    for block in blocks((ROOT / page).read_text()):
        where = f"{page}, line {block.line}"
        if block.language == "python":
            # Line numbers of errors are those of the page.
            code = compile("\n" * (block.line - 1) + block.text, page, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, module.__dict__)
            printed = out.getvalue()
        elif block.language == "sh":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                for line in block.text.splitlines():
                    run_line(line, where)
            printed = out.getvalue()
        elif block.language == "text":
            assert_printed(block.text, printed, where)
        elif block.language == "toml":
            check_dependencies(block.text, where)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "bibtex":
            check_references(block.text, where)
        else:
            # Rust blocks are run by `cargo test --doc` (src/lib.rs).
            assert block.language == "rust", f"{where}: a block in {block.language!r}"


def assert_printed(text: str, printed: str, where: str) -> None:
    """See that the lines of a text, but "...", are printed in their order, numbers aside."""
    left = iter([plain(line) for line in printed.splitlines()])
    for line in text.splitlines():
        assert line.strip() == "..." or plain(line) in left, f"{where}: {line!r} is not printed"


def plain(line: str) -> str:
    """A line without what its numbers and the width of its columns say."""
    return " ".join(_RULE.sub("─", _NUMBER.sub("0", line)).split())


def check_dependencies(text: str, where: str) -> None:
    """See that a manifest of Cargo asks for what our crate has."""
    ours = (ROOT / "Cargo.toml").read_text()
    name = re.search(r'^name = "(.*)"$', ours, re.M)
    asked = re.findall(r"^([\w-]+) = (.*)$", text, re.M)
    assert name is not None
    assert [each for each, _ in asked] == [name[1]], where
    for feature in re.findall(r"features = \[(.*?)\]", asked[0][1]):
        for each in re.findall(r'"(.*?)"', feature):
            assert re.search(rf"^{each} = \[", ours, re.M), f"{where}: no feature {each}"


def check_references(text: str, where: str) -> None:
    """See that BibTeX has the titles, authors and numbers of arXiv that CITATION.cff has."""
    cited = (ROOT / "CITATION.cff").read_text().partition("references:")[2]
    entries = text.split("@misc")[1:]
    found = [dict(re.findall(r"(\w+) = \{(.*?)\}", entry)) for entry in entries]
    assert [f"arXiv:{each['eprint']}" for each in found] == re.findall(r"arXiv:[\d.]+", cited), (
        where
    )
    assert [each["title"] for each in found] == re.findall(r"title: (.*)", cited), where
    names = [name for each in found for name in each["author"].split(" and ")]
    families, given = (re.findall(rf"{kind}-names: (.*)", cited) for kind in ("family", "given"))
    assert names == [f"{f}, {g}" for f, g in zip(families, given, strict=True)], where


def run_line(line: str, where: str) -> None:
    """Run a command of ours; of others, see that what they name is there.

    Not run: targets of make, which are what runs this; scripts (tests/structure/test_examples.py
    runs those of examples/, and benches take minutes); what installs, since that asks the network.
    """
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[:1] == ["certk"]:
        from certk_rs.cli import main

        assert main(words[1:]) == 0, f"{where}: {line}"
    elif words[:1] == ["make"]:
        targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(" ".join(targets).split()), f"{where}: {line}"
    elif words[:1] == ["python"]:
        known(words[1], words[2:], where)
    elif words[:2] == ["pip", "install"]:
        told = (ROOT / "pyproject.toml").read_text()
        extras = [re.fullmatch(r"\.(?:\[(\w+)\])?", name) for name in words[2:]]
        missing = [
            name
            for name, extra in zip(words[2:], extras, strict=True)
            if not re.search(
                rf'"{re.escape(name)}[">=]'
                if extra is None
                else rf"(?m)^{extra[1] or 'dependencies'} = \[",
                told,
            )
        ]
        assert not missing, f"{where}: {missing} are in no extra"
    else:
        assert words in ([], ["cargo", "bench"]), f"{where}: {line!r} is not known to this test"


def known(script: str, arguments: list[str], where: str) -> None:
    """See that a script is there, and that it, or what lies beside it, knows the arguments."""
    path = ROOT / script
    assert path.is_file(), f"{where}: there is no {script}"
    told = "\n".join(file.read_text() for file in sorted(path.parent.rglob("*.py")))
    for word in arguments:
        option = word.startswith("-")
        section = re.fullmatch(r"[A-Z]\d?", word) is not None
        if option or section:
            assert f'"{word}"' in told, f"{where}: {word}"
