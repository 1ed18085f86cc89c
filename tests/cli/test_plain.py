"""Nothing foreign reaches a terminal or a page as anything but text."""

from __future__ import annotations

import ast
import html
import io
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs._cli import terminal
from certk_rs._display.page import Section, Table, page
from certk_rs._display.plain import escaped, plain
from cli_fixtures import (
    Said,
    cache_tensors,
    certk,
    forge,
    raw_file,
    safetensors_bytes,
    said,
    tensor,
    write_cache,
)
from page_reader import Page

Captured = pytest.CaptureFixture[str]

CLEAR, LINE, TURN, STYLE, SCRIPT = (
    "\x1b[2J", "\nall outputs hold", "\u202e", "[bold]", "<script>alert('x')</script>",
)  # fmt: skip
HOSTILE = f"{CLEAR}{LINE}\r{TURN}\u2028{STYLE}[/nothing]\x7f\x9b{SCRIPT}\"'&\ud800\u200b\U000e0041"
# As it may stand in the name of a file.
NAME = HOSTILE.replace("/", "|").replace("\ud800", "\udcff")


def plainly(code: int, *arguments: object) -> Said:
    """Run the command line; what it says must be printable, and its exit code this one."""
    found = said(*arguments)
    assert found.code == code
    for text in (found.out, found.err):
        assert all(line.isprintable() for line in text.split("\n")), text
        assert not any(line.startswith("all outputs hold") for line in text.split("\n"))
    return found


def refused(*arguments: object) -> str:
    """The one line of a call that must fail."""
    found = plainly(2, *arguments)
    assert found.out == ""
    assert found.err.startswith("certk: error: ")
    assert found.err.count("\n") == 1
    return found.err


def test_plain_text() -> None:
    assert plain("as it is: ä 中 \\ ' \"") == "as it is: ä 中 \\ ' \""
    assert plain("a\nb\x1b\u202e\udcff\U000e0041") == "a\\nb\\x1b\\u202e\\udcff\\U000e0041"
    for code in range(sys.maxunicode + 1):
        text = escaped(chr(code))
        assert text.isprintable()
        assert text == chr(code) or text.isascii()
    long = plain("\n" * 100_000)
    assert len(long) < 20_000
    assert "... (92000 characters) ..." in long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory whose name is hostile, and with it that of everything in it."""
    path = tmp_path / NAME
    path.mkdir()
    return path


def hostile_cache(path: Path, **more: Any) -> None:
    tensors = cache_tensors() | {HOSTILE: tensor(np.zeros(2), "F32")} | more
    path.write_bytes(safetensors_bytes(tensors, None))


def test_prune_and_verify(folder: Path) -> None:
    cache, out = folder / f"{NAME}.safetensors", folder / f"out{NAME}"
    hostile_cache(cache)
    done = plainly(0, "prune", cache, "-o", out, "--eps", "0.1")
    assert "\\x1b[2J\\nall outputs hold" in done.out
    assert "[bold][|nothing]" in done.out
    assert "1 tensors that are not named like" in done.err
    assert "holds: 24 tail masses" in plainly(0, "verify", out, "--against", cache).out
    plainly(0, "verify", out)
    body = json.loads(plainly(0, "verify", out, "--against", cache, "--json").out)
    assert body["outputs"][0]["output"] == str(out / cache.name)
    # Findings, in names that a forger chose.
    target = out / cache.name
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    assert "DOES NOT HOLD" in plainly(1, "verify", out, "--against", cache).out
    content[-1] ^= 1
    target.write_bytes(content)
    edit_header(target, with_a_tensor)
    found = plainly(1, "verify", out)
    assert f"{plain(CLEAR + LINE)}" in found.out
    assert "do not hold (first:" in found.err


def edit_header(path: Path, edit: Callable[[dict[str, Any], int], bytes]) -> None:
    """Change the header of an output; told of the length of its data, `edit` returns more data."""
    stop = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8:stop]), path.read_bytes()[stop:]
    more = edit(header, len(data))
    path.write_bytes(raw_file(json.dumps(header), data + more))


def with_a_tensor(header: dict[str, Any], end: int) -> bytes:
    """Add a tensor that no output has."""
    header[HOSTILE] = {"dtype": "I64", "shape": [3], "data_offsets": [end, end + 24]}
    return bytes(24)


def with_metadata(header: dict[str, Any], _: int) -> bytes:
    header["__metadata__"][HOSTILE] = HOSTILE
    return b""


def without_json(header: dict[str, Any], _: int) -> bytes:
    header["__metadata__"]["certk"] = HOSTILE
    return b""


NAMES = f"layers.{{i}}.{{key|value|query}}{HOSTILE}"
FORGERIES: dict[str, Callable[[Path], None]] = {
    "library": lambda path: forge(path, say=lambda body: body.update(library=HOSTILE)),
    "names": lambda path: forge(path, say=lambda body: body.update(names=NAMES)),
    "options": lambda path: forge(
        path, say=lambda body: body["options"].update({"granularity": HOSTILE, HOSTILE: HOSTILE})
    ),
    "metadata": lambda path: edit_header(path, with_metadata),
    "not json": lambda path: edit_header(path, without_json),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_certificates(name: str, tmp_path: Path) -> None:
    cache, out = tmp_path / "x.safetensors", tmp_path / "out"
    write_cache(cache)
    assert certk("prune", cache, "-o", out, "--eps", "0.1") == 0
    FORGERIES[name](out / cache.name)
    for against in ((), ("--against", cache)):
        code = certk("verify", out, *against)
        assert code in (0, 1)
        plainly(code, "verify", out, *against)


def test_errors_about_a_cache(folder: Path) -> None:
    cache, good = folder / "x.safetensors", cache_tensors()
    nan = {f"layers.0.key{HOSTILE}": tensor(np.full((1, 2, 24, 4), np.nan), "F32")}
    renamed = {name: good[name] for name in good if name != "layers.0.key"} | nan
    entry = '"shape":[1],"data_offsets":[0,4]'
    for content in (
        safetensors_bytes(renamed, None),
        safetensors_bytes(good, {"scale": HOSTILE}),
        safetensors_bytes(good | {"layers.0.key": tensor(np.zeros((2, 3)), "F32")}, None),
        raw_file(f'{{{json.dumps(HOSTILE)}:{{"dtype":{json.dumps(HOSTILE)},{entry}}}}}', bytes(4)),
        raw_file("{" + HOSTILE.replace("\ud800", ""), bytes(4)),
    ):
        cache.write_bytes(content)
        refused("prune", cache, "-o", folder / "o", "--eps", "0.1")
        refused("analyze", cache)
    refused("verify", "--against", cache, cache)
    plainly(1, "verify", cache)


def test_select(folder: Path) -> None:
    scores, many = folder / f"{NAME}.npy", folder / f"{NAME}.npz"
    np.save(scores, np.zeros((2, 4), np.float32))
    call = ("select", scores, "--eps", "0.1", "-o", folder / "keep.npz")
    assert plain(str(folder / "keep.npz")) in plainly(0, *call).out
    assert "exists already" in refused(*call)
    with zipfile.ZipFile(many, "w") as archive:
        for name in ("a.npy", f"{HOSTILE}.npy".replace("\ud800", "")):
            archive.write(scores, name)
    line = refused("select", many, "--eps", "0.1")
    assert "holds the arrays a, \\x1b[2J\\nall outputs hold" in line
    scores.write_bytes(b"\x93NUMPY\x01\x00" + bytes([250, 0]) + HOSTILE.encode("utf-8", "replace"))
    refused("select", scores, "--eps", "0.1")


def test_arguments(folder: Path) -> None:
    """Names that the shell makes of a star are foreign, too."""
    (folder / "text").write_bytes(b"\xff")
    for arguments in (
        (NAME,),
        (f"--{NAME}",),
        ("select", NAME, "--eps", "0.1"),
        ("select", NAME, "--eps", "0.1", "--kind", NAME),
        ("prune", NAME, "-o", folder, "--eps", NAME),
        ("prune", NAME, "-o", folder, "--eps", "0.1", "--max-keep", NAME),
        ("prune", NAME, "-o", folder, "--eps", "0.1", "--names", HOSTILE),
        ("verify", NAME),
        ("capture", "--model", NAME, "--text", folder / "text", "-o", folder / NAME),
        ("analyze", NAME, "--html", folder / NAME / "page"),
    ):
        refused(*arguments)


@pytest.mark.parametrize("error", [RuntimeError, CertkError, OSError, KeyError, MemoryError])
def test_messages_of_exceptions(
    folder: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(5, HOSTILE, NAME) if error is OSError else error(HOSTILE)

    monkeypatch.setattr("certk_rs._jobs.plan.make_plan", broken)
    refused("prune", "x", "-o", folder / "o", "--eps", "0.1")


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def test_progress_labels_and_none_of_a_quiet_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, screen = folder / f"{NAME}.safetensors", Terminal()
    write_cache(cache)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("TERM", "xterm")
    assert certk("analyze", cache, "--eps", "0.1") == 0
    text = screen.getvalue()
    assert f"analyzing {plain(cache.name)}" in text
    for foreign in (CLEAR, LINE, TURN, "\x9b", "\u2028"):
        assert foreign not in text
    assert certk("analyze", cache, "--eps", "0.1", "-q") == 0
    assert screen.getvalue() == text


def test_tables_have_no_markup(capsys: Captured) -> None:
    terminal.print_table((STYLE, f"{HOSTILE}2"), [(HOSTILE, "[red]x[/red]")])
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.split("\n"))
    assert "[bold]" in out
    assert "[red]x[/red]" in out
    assert "[/nothing]" in out


def read(text: str) -> Page:
    assert all(line.isprintable() for line in text.split("\n"))
    reader = Page(text)
    assert "script" not in reader.tags
    assert not any(name.startswith("on") for name in reader.attributes)
    return reader


def test_pages() -> None:
    """Every place of a page, text and attributes."""
    evil = f'{HOSTILE}" onload="x'
    rows = [(evil, evil)] * 30
    sections = [
        Section(evil, [evil], ["<svg></svg>"], [Table((evil, "b"), rows, evil)], evil)
        for _ in range(3)
    ]
    reader = read(page(evil, evil, sections, evil))
    assert reader.tags.count("section") == 0
    assert reader.ids == [plain(evil)] * 3
    assert reader.text.count("<script>") > 180
    assert html.escape(plain(evil)) in page(evil, evil, sections, evil)


def test_the_page_of_an_analysis(folder: Path) -> None:
    cache, target = folder / f"{NAME}.safetensors", folder / f"{NAME}.html"
    write_cache(cache)
    done = plainly(0, "analyze", cache, "--eps", "0.1", "--html", target)
    assert plain(str(cache)) in done.out.splitlines()[0]
    reader = read(target.read_text(encoding="utf-8"))
    assert plain(cache.name) in reader.text


def test_labels_of_a_plot() -> None:
    from certk_rs._display.page import pyplot, svg

    figure, axis = pyplot().subplots()
    axis.plot([0, 1], label=HOSTILE.replace("\ud800", ""))
    axis.set(title=HOSTILE.replace("\ud800", ""))
    axis.legend()
    with pytest.warns(UserWarning, match="Glyph"):
        drawn = svg(figure)
    assert "svg" in read(page("A page", "", [Section("A plot", [], [drawn])], "")).tags


def test_nothing_is_printed_but_through_here() -> None:
    """One module prints, and what it prints passes through `plain`; pages escape likewise."""
    package = Path(terminal.__file__).parents[1]
    fine = {
        "print(plain(line), flush=True)",
        "print(f'certk: {plain(line)}', file=sys.stderr, flush=True)",
        "print(plain(line), file=sys.stderr)",
        "print(text)",  # what Answer made of it, see below
        "html.escape(plain(text))",
        "html.escape(text)",  # of a summary, line by line, as `text` is there
    }
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called, text = ast.unparse(node.func), ast.unparse(node)
                prints = called.split(".")[-1] in ("print", "echo", "secho")
                writes = called in ("sys.stdout.write", "sys.stderr.write")
                if prints or writes or called == "html.escape":
                    assert text in fine, f"{file.name}: {text}"
                    found.add(text)
    assert found == fine


def test_json_is_ascii(folder: Path) -> None:
    scores = folder / "ä\u202e\x7f.npy"
    np.save(scores, np.zeros((2, 4), np.float32))
    text = plainly(0, "select", scores, "--eps", "0.1", "--json").out
    assert text.isascii()
    assert json.loads(text)["scores"] == str(scores)
