"""Functions that return bounds are proved in a section of docs/soundness.md, or in their own file.

`proved_bounds.json` lists the functions of Rust by section and file. One whose description speaks
of a bound and which is not listed fails here, as does one that is listed and is gone. Of Python it
lists the files that compute bounds by themselves.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT

TABLE = json.loads((ROOT / "tests/structure/proved_bounds.json").read_text())
# Proofs that stand where the code does: the head of the file, or of its module.
OWN = "In the files themselves"
BOUND = re.compile(r"\b[Bb]ounds?\b")
RUST = re.compile(
    r"((?:^[ \t]*///[^\n]*\n)+)(?:[ \t]*#\[[^\n]*\n)*[ \t]*(?:pub(?:\([a-z]+\))? )?"
    r"(?:const )?(?:unsafe )?fn (\w+)",
    re.MULTILINE,
)
TESTS = re.compile(r"#\[cfg\(test\)\]\s*(?:pub(?:\(crate\))? )?mod tests")


def of_rust(path: Path) -> Iterator[str]:
    """Yield the functions of a Rust file whose first sentence speaks of a bound."""
    for comment, name in RUST.findall(TESTS.split(path.read_text())[0]):
        text = " ".join(line.strip().lstrip("/").strip() for line in comment.splitlines())
        if BOUND.search(text.split(". ")[0]):
            yield name


def found() -> dict[str, list[str]]:
    """Return the names of functions by file, in order and without repetition."""
    every = {}
    for path in sorted((ROOT / "src").rglob("*.rs")):
        if path.name != "tests.rs" and (names := sorted(set(of_rust(path)))):
            every[path.relative_to(ROOT).as_posix()] = names
    return every


def test_every_bound_has_a_proof() -> None:
    listed: dict[str, list[str]] = {}
    for files in TABLE.values():
        for file, names in files.items():
            if file.endswith(".rs"):
                listed.setdefault(file, []).extend(names)
            else:
                assert names == [], file
    assert {file: sorted(names) for file, names in listed.items()} == found()


def test_proofs_are_where_the_list_says() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/soundness.md").read_text(), re.MULTILINE)
    assert TABLE.keys() - {OWN} <= set(headings)
    for file in TABLE[OWN]:
        path = ROOT / file
        text = path.read_text()
        if path.suffix == ".py":
            told = ast.get_docstring(ast.parse(text)) or ""
        else:
            heads = [path, path.parent.with_suffix(".rs"), path.parent / "mod.rs"]
            told = "".join(
                "\n".join(re.findall(r"^//! ?(.*)$", head.read_text(), re.MULTILINE))
                for head in heads
                if head.exists()
            )
        assert len(told.split()) >= 25, f"{file}: its head proves nothing"
