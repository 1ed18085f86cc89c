"""Inputs by names, directories, patterns, lists and URLs, and the names of their outputs."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from certk_rs import CertkError
from certk_rs._files.location import locate
from certk_rs._files.new_file import write_text
from certk_rs._jobs.inputs import Source, expand

CACHES = ["a.safetensors", "sub/b.safetensors", "sub/deep/c.safetensors", "z.safetensors"]
OTHERS = [
    *(".hidden.safetensors", ".certk-0-1.partial", "notes.txt", ".git/x.safetensors"),
    *("sub/.certk/y.safetensors", "a.safetensors.bak", "index.json"),
]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in CACHES + OTHERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(sources: list[Source]) -> list[str]:
    return [source.name for source in sources]


def index(*parts: str) -> str:
    return json.dumps({"weight_map": {f"t{k}": part for k, part in enumerate(parts)}})


def test_directories_stand_for_the_caches_in_them(tree: Path) -> None:
    assert names(expand([tree])) == ["a.safetensors", "z.safetensors"]
    assert names(expand([tree], recursive=True)) == CACHES
    assert names(expand(["sub"], recursive=True)) == ["b.safetensors", "deep/c.safetensors"]
    found = expand(["."], recursive=True)
    assert [source.location.path.read_text() for source in found] == CACHES
    assert names(expand([f"file://{tree}/sub"])) == ["b.safetensors"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.safetensors", ["a.safetensors", "z.safetensors"]),
        ("*/*.safetensors", ["sub/b.safetensors"]),
        ("sub/*.safetensors", ["b.safetensors"]),
        ("**/*.safetensors", CACHES),
        ("**", CACHES),
        ("sub/**", ["b.safetensors", "deep/c.safetensors"]),
        ("s*", ["sub/b.safetensors"]),
        ("[az].safetensors", ["a.safetensors", "z.safetensors"]),
        ("?.safetensors", ["a.safetensors", "z.safetensors"]),
        ("n*.txt", ["notes.txt"]),
        (".hid*", [".hidden.safetensors"]),
        ("./sub/../*.safetensors", ["a.safetensors", "z.safetensors"]),
    ],
)
def test_patterns_stand_for_what_they_match(tree: Path, pattern: str, found: list[str]) -> None:
    assert names(expand([pattern])) == found
    assert names(expand([f"{tree}/{pattern}"])) == found


def test_a_file_of_that_very_name_goes_before_a_pattern(tree: Path) -> None:
    for name in ("[a].safetensors", "b*.safetensors", "bc.safetensors"):
        (tree / name).write_text("")
    assert names(expand(["[a].safetensors"])) == ["[a].safetensors"]
    assert names(expand(["b*.safetensors"])) == ["b*.safetensors"]
    (tree / "[a].safetensors").unlink()
    assert names(expand(["[a].safetensors"])) == ["a.safetensors"]


def test_a_list_on_standard_input_is_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(content: bytes) -> list[str]:
        return names(expand(["-"], listing=io.BytesIO(content)))

    assert listed(b"z.safetensors\r\n\nsub\n") == ["z.safetensors", "b.safetensors"]
    odd = "two\nlines \udcff.safetensors"
    (tree / odd).write_text("")
    assert listed(os.fsencode(odd) + b"\0a.safetensors\0") == [odd, "a.safetensors"]
    among = expand(["a.safetensors", "-", "sub"], listing=io.BytesIO(b"z.safetensors"))
    assert names(among) == ["a.safetensors", "z.safetensors", "b.safetensors"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a.safetensors\n")))
    assert names(expand(["-"])) == ["a.safetensors"]
    for given, content, words in [
        (["-"], b"\n", "no input"),
        (["-"], b"-\n", "holds -, itself"),
        (["-", "-"], b"a.safetensors", "given twice"),
    ]:
        with pytest.raises(CertkError, match=words):
            expand(given, listing=io.BytesIO(content))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(CertkError, match="closed"):
        expand(["-"])


def test_what_is_a_file_twice_is_taken_once(tree: Path) -> None:
    (tree / "link.safetensors").symlink_to("a.safetensors")
    (tree / "hard.safetensors").hardlink_to(tree / "z.safetensors")
    (tree / "again").symlink_to("sub")
    assert names(expand(["."])) == ["a.safetensors", "hard.safetensors"]
    assert names(expand(["link.safetensors", "a.safetensors"])) == ["link.safetensors"]
    thrice = ["a.safetensors", "./a.safetensors", tree / "sub/../a.safetensors"]
    assert names(expand(thrice)) == ["a.safetensors"]
    assert len(expand(["."], recursive=True)) == 4
    assert len(expand(["**/*.safetensors", "sub", "again"], recursive=True)) == 4


def test_loops_of_links_end(tree: Path) -> None:
    (tree / "sub/up").symlink_to(tree)
    (tree / "sub/deep/round").symlink_to("round")
    (tree / "self").symlink_to(".")
    assert len(expand(["."], recursive=True)) == 4
    assert len(expand(["**/*.safetensors"])) == 4


def test_directories_of_any_depth_are_walked(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):
        Path("d").mkdir()
        os.chdir("d")
    deepest = Path("x.safetensors")
    deepest.write_text("")
    os.chdir(tmp_path)
    assert names(expand(["."], recursive=True)) == ["d/" * 1200 + "x.safetensors"]
    # Others remove directories by recursion.
    for _ in range(1200):
        os.chdir("d")
    deepest.unlink()
    for _ in range(1200):
        os.chdir("..")
        Path("d").rmdir()


def test_a_link_that_leads_nowhere_is_told_when_it_is_opened(tree: Path) -> None:
    (tree / "sub/lost.safetensors").symlink_to("nowhere")
    assert names(expand(["sub"])) == ["b.safetensors", "lost.safetensors"]
    assert names(expand(["sub/lost.safetensors"])) == ["lost.safetensors"]


def test_an_index_stands_for_its_parts(tree: Path) -> None:
    (tree / "m.safetensors.index.json").write_text(index("a.safetensors", "z.safetensors"))
    assert names(expand(["."])) == ["m.safetensors"]
    assert names(expand(["*.safetensors", "m.safetensors.index.json"])) == ["m.safetensors"]
    assert names(expand(["m.safetensors.index.json"])) == ["m.safetensors"]
    (tree / "a-00001-of-00002.safetensors").write_text("")
    (tree / "a.safetensors.index.json").write_text("damaged")
    with pytest.raises(CertkError, match="have the same name"):
        expand(["*.safetensors", "a.safetensors.index.json"])
    (tree / "m.safetensors.index.json").unlink()
    (tree / "a.safetensors").unlink()
    # What it says cannot be read; its parts are no caches by themselves even so.
    assert names(expand(["."])) == ["a.safetensors", "z.safetensors"]


def test_two_of_one_name_are_refused(tree: Path) -> None:
    (tree / "sub/a.safetensors").write_text("other")
    with pytest.raises(CertkError, match=r"a.safetensors and sub/a.safetensors have the same name"):
        expand(["a.safetensors", "sub"])
    assert len(expand(["a.safetensors", "sub"], same_names=True)) == 3
    assert len(expand(["."], recursive=True)) == 5
    (tree / "x/a.safetensors").mkdir(parents=True)
    (tree / "x/a.safetensors/y.safetensors").write_text("")
    with pytest.raises(CertkError, match="name of the directory that"):
        expand(["a.safetensors", "x"], recursive=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no input: give at least one"),
        (["empty"], r"no input: there is no .safetensors file in empty.*--recursive"),
        (["nothing.safetensors"], "nothing.safetensors does not exist"),
        (["no*.safetensors"], "matches no file"),
        (["nowhere/*"], "matches no file"),
        (["nosuch://b/x"], "no installed file system"),
        (["s3:/b/x"], "two slashes"),
        ([""], "is no path"),
    ],
)
def test_what_means_no_file_is_refused(tree: Path, given: list[str], words: str) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(CertkError, match=words):
        expand(given)


def test_urls_expand_like_paths(tree: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    base = locate("memory://inputs")
    try:
        for name in CACHES + OTHERS:
            write_text(base / name, "")
        write_text(base / "m.safetensors.index.json", index("z.safetensors", "a.safetensors"))
        below = ["m.safetensors", "sub/b.safetensors", "sub/deep/c.safetensors"]
        assert names(expand(["memory://inputs"])) == ["m.safetensors"]
        assert names(expand(["memory://inputs/"], recursive=True)) == below
        assert names(expand(["memory://inputs/**/*.safetensors"])) == CACHES
        twice = expand(["memory://inputs/?.safetensors", "memory:///inputs/a.safetensors"])
        assert names(twice) == ["a.safetensors", "z.safetensors"]
        with pytest.raises(CertkError, match="memory://inputs/x does not exist"):
            expand(["memory://inputs/x"])
    finally:
        fsspec.filesystem("memory").store.clear()
