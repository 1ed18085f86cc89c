"""Nothing foreign reaches a terminal or a page as anything but text."""

from __future__ import annotations

import ast
import html
import io
import json
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs._cli import terminal
from certk_rs._display.page import Section, Table, page
from certk_rs._display.plain import escaped, plain
from certk_rs.cache_format import read_certificate
from cli_fixtures import (
    cache_tensors,
    certk,
    raw_file,
    rewrite,
    safetensors_bytes,
    tensor,
    write_cache,
)

Captured = pytest.CaptureFixture[str]

CLEAR, LINE, TURN, STYLE, SCRIPT = (
    "\x1b[2J", "\nall outputs hold", "\u202e", "[bold]", "<script>alert('x')</script>",
)  # fmt: skip
HOSTILE = f"{CLEAR}{LINE}\r{TURN}\u2028{STYLE}[/nothing]\x7f\x9b{SCRIPT}\"'&\ud800\u200b\U000e0041"
# As it may stand in the name of a file.
NAME = HOSTILE.replace("/", "|").replace("\ud800", "\udcff")


def shown(capsys: Captured) -> tuple[str, str]:
    """What was printed, all of it printable."""
    out, err = capsys.readouterr()
    for text in (out, err):
        assert all(line.isprintable() for line in text.split("\n")), text
        assert not any(line.startswith("all outputs hold") for line in text.split("\n"))
    return out, err


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


def test_prune_and_verify(folder: Path, capsys: Captured) -> None:
    cache, out = folder / f"{NAME}.safetensors", folder / f"out{NAME}"
    hostile_cache(cache)
    assert certk("prune", cache, "-o", out, "--eps", "0.1") == 0
    said, warned = shown(capsys)
    assert "\\x1b[2J\\nall outputs hold" in said
    assert "[bold][|nothing]" in said
    assert "1 tensors that are not named like" in warned
    assert certk("verify", out, "--against", cache) == 0
    assert "holds: 24 tail masses" in shown(capsys)[0]
    assert certk("verify", out) == 0
    assert certk("verify", out, "--against", cache, "--json") == 0
    assert json.loads(shown(capsys)[0].splitlines()[-1])["outputs"][0]["output"] == str(
        out / cache.name
    )
    # Findings, in names that a forger chose.
    target = out / cache.name
    arrays = {HOSTILE: np.zeros(3, np.int64)}
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    assert certk("verify", out, "--against", cache) == 1
    assert "DOES NOT HOLD" in shown(capsys)[0]
    content[-1] ^= 1
    target.write_bytes(content)
    rewrite_with(target, arrays)
    assert certk("verify", out) == 1
    said, failed = shown(capsys)
    assert f"{plain(CLEAR + LINE)}" in said
    assert "do not hold (first:" in failed


def rewrite_with(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Put tensors into an output that no output has."""
    stop = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8:stop]), path.read_bytes()[stop:]
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        offsets, data = [len(data), end], data + array.tobytes()
        header[name] = {"dtype": "I64", "shape": list(array.shape), "data_offsets": offsets}
    path.write_bytes(raw_file(json.dumps(header), data))


@pytest.mark.parametrize("field", ["library", "names", "granularity", "metadata", "not json"])
def test_certificates(tmp_path: Path, field: str, capsys: Captured) -> None:
    cache, out = tmp_path / "x.safetensors", tmp_path / "out"
    write_cache(cache)
    assert certk("prune", cache, "-o", out, "--eps", "0.1") == 0
    target = out / cache.name
    if field in ("library", "names"):
        text = {"library": HOSTILE, "names": f"layers.{{i}}.{{key|value|query}}{HOSTILE}"}
        rewrite(target, lambda arrays: None, **{field: text[field]})
    else:
        stop = 8 + int.from_bytes(target.read_bytes()[:8], "little")
        header, data = json.loads(target.read_bytes()[8:stop]), target.read_bytes()[stop:]
        metadata = header["__metadata__"]
        if field == "metadata":
            metadata[HOSTILE] = HOSTILE
        elif field == "not json":
            metadata["certk"] = HOSTILE
        else:
            said = json.loads(metadata["certk"])
            said["options"] |= {"granularity": HOSTILE, HOSTILE: HOSTILE}
            metadata["certk"] = json.dumps(said)
            with pytest.raises(ValueError, match=r"\w"):
                read_certificate(metadata["certk"])
        target.write_bytes(raw_file(json.dumps(header), data))
    capsys.readouterr()
    for against in ((), ("--against", cache)):
        assert certk("verify", out, *against) in (0, 1)
        shown(capsys)


def test_errors_about_a_cache(folder: Path, capsys: Captured) -> None:
    cache, commands = folder / "x.safetensors", (("prune", "-o", folder / "o"), ("analyze",))
    nan = {f"layers.0.key{HOSTILE}": tensor(np.full((1, 2, 24, 4), np.nan), "F32")}
    good = cache_tensors()
    renamed = {name: good[name] for name in good if name != "layers.0.key"} | nan
    pattern = f"layers.{{i}}.{{key{HOSTILE}|value|query}}".replace("\ud800", "")
    for tensors, metadata, names in (
        (renamed, None, None),
        (good, {"scale": HOSTILE}, None),
        (good, {"causal_offset": HOSTILE}, None),
        (good | {"layers.0.key": tensor(np.zeros((2, 3)), "F32")}, None, None),
        ({HOSTILE: tensor(np.zeros(2), "F32")}, None, None),
        (renamed, None, pattern),
        (good, None, HOSTILE),
    ):
        cache.write_bytes(safetensors_bytes(tensors, metadata))
        for command, *more in commands:
            if names is not None:
                more += ["--names", names]
            assert certk(command, cache, "--eps", "0.1", *more) == 2
            out, err = shown(capsys)
            assert out == ""
            assert err.startswith("certk: error: ")
            assert err.count("\n") == 1
    quoted = json.dumps(HOSTILE)
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    for text in (
        f"{{{quoted}:{entry},{quoted}:{entry}}}",
        f'{{{quoted}:{{"dtype":{quoted},"shape":[1],"data_offsets":[0,4]}}}}',
        f'{{{quoted}:{{"dtype":"F32","shape":{quoted},"data_offsets":[0,4]}}}}',
        f'{{{quoted}:{{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}}}',
        f'{{{quoted}:{{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}}}',
        "{" + HOSTILE.replace("\ud800", ""),
    ):
        cache.write_bytes(raw_file(text, bytes(4)))
        for command, *more in (("verify", "--against", cache), ("analyze",)):
            assert certk(command, cache, *more) == 2
            assert shown(capsys)[1].count("\n") == 1
        assert certk("verify", cache) == 1
        shown(capsys)


def test_select(folder: Path, capsys: Captured) -> None:
    scores, many = folder / f"{NAME}.npy", folder / f"{NAME}.npz"
    np.save(scores, np.zeros((2, 4), np.float32))
    assert certk("select", scores, "--eps", "0.1", "-o", folder / "keep.npz") == 0
    assert plain(str(folder / "keep.npz")) in shown(capsys)[0]
    assert certk("select", scores, "--eps", "0.1", "-o", folder / "keep.npz") == 2
    assert "exists already" in shown(capsys)[1]
    with zipfile.ZipFile(many, "w") as archive:
        for name in ("a.npy", f"{HOSTILE}.npy".replace("\ud800", "")):
            archive.write(scores, name)
    assert certk("select", many, "--eps", "0.1") == 2
    assert "holds the arrays a, \\x1b[2J\\nall outputs hold" in shown(capsys)[1]
    assert certk("select", folder, "--eps", "0.1") == 2
    assert certk("select", folder / "none", "--eps", "0.1") == 2
    assert "No such file" in shown(capsys)[1]
    scores.write_bytes(b"\x93NUMPY\x01\x00" + bytes([250, 0]) + HOSTILE.encode("utf-8", "replace"))
    assert certk("select", scores, "--eps", "0.1") == 2
    shown(capsys)


def test_arguments(folder: Path, capsys: Captured) -> None:
    """What the shell makes of a star is foreign as well."""
    for arguments in (
        (NAME,),
        (f"--{NAME}",),
        ("select", NAME, "--eps", NAME),
        ("select", NAME, "--eps", "0.1", "--kind", NAME),
        ("prune", NAME, "-o", folder, "--eps", "0.1"),
        ("prune", NAME, "-o", folder, "--eps", "0.1", "--max-keep", NAME),
        ("verify", NAME),
        ("verify", f"--{NAME}"),
        ("capture", "--model", NAME, "--text", folder / NAME, "-o", folder / "o"),
        ("capture", "--model", NAME, "--text", folder / "text", "-o", folder / NAME),
        ("analyze", NAME, "--html", folder / NAME / "page"),
        ("plan", "--n", NAME, "--sigma", "1", "--eps", "0.1"),
        ("demo", "--data", NAME),
    ):
        (folder / "text").write_bytes(b"\xff")
        assert certk(*arguments) == 2
        out, err = shown(capsys)
        assert out == ""
        assert err.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError, CertkError, OSError, KeyError, MemoryError])
def test_messages_of_exceptions(
    folder: Path, error: type[Exception], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(5, HOSTILE, NAME) if error is OSError else error(HOSTILE)

    monkeypatch.setattr("certk_rs.jobs.prune.make_plan", broken)
    assert certk("prune", "x", "-o", folder / "o", "--eps", "0.1") == 2
    assert shown(capsys)[1].count("\n") == 1


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def test_progress_labels(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, screen = folder / f"{NAME}.safetensors", Terminal()
    write_cache(cache)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setenv("TERM", "xterm")
    assert certk("analyze", cache, "--eps", "0.1") == 0
    shown(capsys)
    text = screen.getvalue()
    assert f"analyzing {plain(cache.name)}" in text
    for foreign in (CLEAR, LINE, TURN, "\x9b", "\u2028"):
        assert foreign not in text


def test_tables_have_no_markup(capsys: Captured) -> None:
    terminal.print_table((STYLE, f"{HOSTILE}2"), [(HOSTILE, "[red]x[/red]")])
    out, _ = shown(capsys)
    assert "[bold]" in out
    assert "[red]x[/red]" in out
    assert "[/nothing]" in out


class Reader(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    assert all(line.isprintable() for line in text.split("\n"))
    reader = Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert not any(name.startswith("on") for name, _ in reader.attributes)
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
    assert [value for name, value in reader.attributes if name == "id"] == [plain(evil)] * 3
    assert reader.text.count("<script>") > 180
    assert html.escape(plain(evil)) in page(evil, evil, sections, evil)


def test_the_page_of_an_analysis(folder: Path, capsys: Captured) -> None:
    cache, target = folder / f"{NAME}.safetensors", folder / f"{NAME}.html"
    write_cache(cache)
    assert certk("analyze", cache, "--eps", "0.1", "--html", target) == 0
    assert plain(str(cache)) in shown(capsys)[0].splitlines()[0]
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
        "console.print(table)",
        "_console(max(width, console.width)).print(table)",
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
                if called in ("table.add_row", "table.add_column"):
                    assert "_cell" in ast.unparse(node.args[0]), f"{file.name}: {text}"
    assert found == fine


def test_json_is_ascii(folder: Path, capsys: Captured) -> None:
    scores = folder / "ä\u202e\x7f.npy"
    np.save(scores, np.zeros((2, 4), np.float32))
    assert certk("select", scores, "--eps", "0.1", "--json") == 0
    said = capsys.readouterr().out
    assert said.isascii()
    assert said.removesuffix("\n").isprintable()
    assert json.loads(said)["scores"] == str(scores)
