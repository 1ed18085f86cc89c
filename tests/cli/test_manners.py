"""What every command does alike: help, completion, tables, logging, and what is refused."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import _log
from certk_rs._cli import terminal
from certk_rs._cli.commands import BRIEF
from certk_rs._cli.tree import tree
from cli_fixtures import certk, write_cache
from fresh_process import run_python
from repository import EXAMPLE, ROOT

Captured = pytest.CaptureFixture[str]
COMMANDS = list(BRIEF)
PLAN = ("plan", "--n", "100", "--sigma", "2", "--eps", "0.1")


# ------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_short_name_everywhere(command: str, capsys: Captured) -> None:
    assert certk(command, "--help") == 0
    text, errors = capsys.readouterr()
    assert certk(command, "-h") == 0
    assert capsys.readouterr() == (text, errors)
    assert text.startswith(f"Usage: certk {command} [OPTIONS]")
    assert "-h, --help" in text
    if command != "completion":
        for option in ("-q, --quiet", "-v, --verbose", "--config FILE", "--no-config", "--json"):
            assert option in text


def test_options_keep_their_names_where_hints_are_read_as_python_3_10_does() -> None:
    """There, typing.get_type_hints puts Optional around what has None for its default."""
    code = """
import inspect, typing
read = typing.get_type_hints

def as_of_old(thing, *rest, **more):
    hints = read(thing, *rest, **more)
    if inspect.isfunction(thing):
        for name, parameter in inspect.signature(thing).parameters.items():
            if parameter.default is None and name in hints:
                hints[name] = typing.Union[hints[name], None]
    return hints

typing.get_type_hints = as_of_old
from certk_rs import cli
for command in ("prune", "verify"):
    assert cli.main([command, "-h"]) == 0
"""
    ran = run_python(code)
    assert ran.returncode == 0, ran.stderr
    prune, verify = ran.stdout.split("Usage: certk verify")
    for option in ("--eps EPS|RULE|FILE", "--bytes SIZE", "--jobs N"):
        assert option in prune
    for option in ("--against CACHE", "--jobs N", "--sample F|N"):
        assert option in verify


def test_help_of_all_commands_is_whole_lines_and_an_example(capsys: Captured) -> None:
    assert certk("--help") == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for name, said in BRIEF.items():
        assert any(re.fullmatch(rf"  {name} +{re.escape(said)}", line) for line in lines), name
    assert "..." not in text.partition("\n")[2]
    assert max(map(len, lines)) <= 80
    shown = [line.split()[1] for line in lines[lines.index("Example:") + 1 :]]
    assert shown == ["demo", "capture", "analyze", "prune", "verify"]


def test_help_of_prune_puts_every_option_into_a_group(capsys: Captured) -> None:
    command = tree().commands["prune"]
    grouped = [name for names in command.panels.values() for name in names]
    own = {p.name for p in command.params if p.param_type_name == "option"}
    assert sorted(grouped) == sorted(own - {"quiet", "verbose", "config", "no_config"})
    assert certk("prune", "--help") == 0
    text = capsys.readouterr().out
    titles = ["Arguments", *command.panels, "Common options"]
    assert re.findall(r"^(\w.*):$", text, re.M) == titles
    assert re.search(r"\nHow small:\n  --eps EPS.*\nSets:\n  --granularity", text, re.S)


def test_the_version(capsys: Captured) -> None:
    for option in ("-V", "--version"):
        assert certk(option) == 0
        assert capsys.readouterr().out == f"certk {ck.__version__}\n"


def test_bare_certk_shows_its_help_and_fails(capsys: Captured) -> None:
    assert certk("-h") == 0
    text = capsys.readouterr().out
    assert certk() == 2
    assert capsys.readouterr() == ("", text)


@pytest.mark.parametrize(
    ("arguments", "words", "helps"),
    [
        (["prun"], r"there is no command 'prun': did you mean prune\?", "certk"),
        (["Plan"], r"there is no command 'Plan': did you mean plan\?", "certk"),
        (["rep"], r"there is no command 'rep': did you mean report\?", "certk"),
        # The words of these are the parser's, and differ between its versions.
        (["--zzz"], r"No such option:? '?--zzz'?", "certk"),
        (["plan"], "Missing option '--n'", "certk plan"),
        (["select"], "Missing argument 'SCORES'", "certk select"),
        ([*PLAN, "x"], r"Got unexpected extra arguments?(\(s\))? \(x\)", "certk plan"),
    ],
)
def test_usage_errors_name_the_help_that_helps(
    arguments: list[str], words: str, helps: str, capsys: Captured
) -> None:
    assert certk(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"certk: error: {words} \(see {helps} --help\)\n", err), err


def test_an_unknown_command_is_told_all_there_are(capsys: Captured) -> None:
    assert certk("zzz") == 2
    assert f"there are {', '.join(COMMANDS)} (see certk --help)" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_prints_a_script(shell: str, capsys: Captured) -> None:
    assert certk("completion", shell) == 0
    text, errors = capsys.readouterr()
    assert f"_CERTK_COMPLETE=complete_{shell}" in text or "_CERTK_COMPLETE = " in text
    assert errors == ""
    assert "\\t" not in text
    assert certk("completion", "tcsh") == 2


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["pr"], ["prune"]),
        (["prune", "--gr"], ["--granularity"]),
        (["prune", "--granularity", ""], ["head", "layer", "token"]),
        (["completion", "f"], ["fish"]),
        (["select", ""], []),  # left to the shell, which knows files
    ],
)
def test_bash_completes(words: list[str], found: list[str], tmp_path: Path) -> None:
    """By the script itself, in a folder whose configuration file is broken."""
    (tmp_path / "certk.toml").write_text("[")
    (tmp_path / "certk").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m certk_rs "$@"\n')
    (tmp_path / "certk").chmod(0o755)
    script = (
        'eval "$(certk completion bash)"; COMP_WORDS=(certk "$@"); COMP_CWORD=$#; '
        'complete -p certk > /dev/null && _certk_completion certk; echo "${COMPREPLY[*]}"'
    )
    paths = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
    }
    done = subprocess.run(
        ["bash", "-c", script, "bash", *words], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False, env=os.environ | paths,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.split() == found


# ------------------------------------------------------------------------------------ tables

HEADS = ("name", "a", "b", "c" * 10)
ROWS = [("x", "1", "2", "3"), ("y" * 10, "4", "5", "6")]


def table(capsys: Captured, columns: int, **options: Any) -> list[str]:
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        terminal.print_table(HEADS, ROWS, must=False, **options)
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_columns_that_do_not_fit_are_named(capsys: Captured) -> None:
    full = table(capsys, 100)
    assert full[0].split() == list(HEADS)
    assert "Left out" not in " ".join(full)
    lines = table(capsys, 30)
    assert lines[0].split() == ["name", "a", "b"]
    assert max(map(len, lines[:-2])) <= 30
    assert " ".join(lines).endswith(
        "Left out, for want of room: cccccccccc (see --json, or a wider terminal)."
    )
    told = " ".join(table(capsys, 21, elsewhere="--json, --html"))
    assert "Left out, for want of room: b, cccccccccc (see --json, --html, or" in told


def test_columns_go_in_the_order_given_and_the_rest_stays(capsys: Captured) -> None:
    lines = table(capsys, 30, drop=[1, 2], left=[3])
    assert lines[0].split() == ["name", HEADS[3]]
    assert lines[2].split() == ["x", "3"]
    assert "Left out, for want of room: a, b (" in " ".join(lines)
    # What may not go is printed, however narrow the terminal.
    assert table(capsys, 5, drop=[])[0].split() == list(HEADS)


def test_in_a_file_nothing_is_left_out(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    heads = [f"column {i}" for i in range(40)]
    terminal.print_table(heads, [["x"] * 40], must=False)
    out = capsys.readouterr().out
    assert all(heading in out for heading in heads)
    assert "Left out" not in out


def test_a_narrow_terminal_is_told_what_is_left_out(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert certk("analyze", EXAMPLE, "-v") == 0
    out = " ".join(capsys.readouterr().out.split())
    left_out = (
        "Left out, for want of room: rule, 1 gap, 8 cuts, at least, effective, 1/sum P^2 (see"
    )
    assert left_out in out
    monkeypatch.setenv("COLUMNS", "200")
    assert certk("analyze", EXAMPLE, "-v") == 0
    assert "Left out" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------ logging


def test_verbose_tells_more_the_more_often_it_is_given(capsys: Captured) -> None:
    assert certk(*PLAN) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert certk(*PLAN, "-v") == 0
    same, err = capsys.readouterr()
    assert same == out
    assert f"certk: info: certk {ck.__version__}, {ck.simd_level()}\n" in err
    assert "debug" not in err
    assert certk(*PLAN, "-vv") == 0
    assert "certk: debug: arguments: ['plan', " in capsys.readouterr().err
    assert certk(*PLAN, "--verbose", "--verbose", "-q", "--json") == 0
    assert "certk: debug: " in capsys.readouterr().err
    # Nothing of it stays.
    assert certk(*PLAN) == 0
    assert capsys.readouterr().err == ""
    assert logging.getLogger("certk_rs").level == logging.NOTSET
    [handler] = logging.getLogger("certk_rs").handlers
    assert isinstance(handler, logging.NullHandler)


def test_what_is_logged_is_shown_as_plain_lines(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talks(*_: object, **__: object) -> None:
        log = _log.logger("jobs.test")
        log.info("escape %s", "\x1b[2J")
        log.debug("two\nlines")
        log.warning("no %d", "number")  # a mistake of whoever logs
        raise RuntimeError("enough")

    monkeypatch.setattr("certk_rs.gaussian.plan", talks)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert certk(*PLAN, "-vv") == 2
    err = capsys.readouterr().err
    assert "certk: info: escape \\x1b[2J\n" in err
    assert "certk: debug: two\ncertk: debug: lines\n" in err
    # A report of what was not expected has where it was.
    assert "certk: debug: RuntimeError: enough\n" in err
    assert all(line.startswith("certk: ") for line in err.splitlines())
    assert certk(*PLAN) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_library_is_silent_unless_somebody_listens() -> None:
    code = (
        "import certk_rs, sys; assert 'logging' not in sys.modules or 'certk_rs._log' not in "
        "sys.modules; from certk_rs._log import logger; logger('x').warning('hello'); "
        "import logging; logging.basicConfig(level=10, format='%(name)s %(message)s'); "
        "logger('x').debug('hi')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == "certk_rs.x hi\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_means_no_bars(
    quiet: bool, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(tmp_path / "x.safetensors")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    arguments = ("analyze", tmp_path / "x.safetensors", "--eps", "0.1")
    assert certk(*arguments, *(["-q"] if quiet else [])) == 0
    assert ("analyzing" in screen.getvalue()) != quiet


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("name", ["x.npy", "x", "x.csv", "x.npz.gz", "npz"])
def test_a_selection_is_not_written_under_a_name_that_says_something_else(
    name: str, tmp_path: Path, capsys: Captured
) -> None:
    np.save(tmp_path / "s.npy", np.zeros((2, 9)))
    arguments = ("select", tmp_path / "s.npy", "--eps", "0.1", "-o")
    assert certk(*arguments, tmp_path / name) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"which are written as \.npz: call it \S+\.npz\n$", err)
    assert [path.name for path in tmp_path.iterdir()] == ["s.npy"]
    assert certk(*arguments, tmp_path / "X.NPZ") == 0
    assert ck.Selection.load(tmp_path / "X.NPZ").shape == (2, 9)


# ------------------------------------------------------------------------------------ the wheel


def test_the_example_is_a_file_of_the_package() -> None:
    """All of the folder `python` goes into the wheel, and nothing is left out of it again."""
    assert EXAMPLE.is_relative_to(ROOT / "python" / "certk_rs")
    manifest = (ROOT / "pyproject.toml").read_text()
    build = manifest.partition("[tool.maturin]")[2].partition("\n[")[0]
    assert 'python-source = "python"' in build
    assert "exclude" not in build
    ignored = subprocess.run(
        ["git", "check-ignore", str(EXAMPLE)], cwd=ROOT, capture_output=True, check=False
    )
    assert ignored.returncode != 0


@pytest.mark.heavy  # builds a wheel in release mode: minutes
def test_the_wheel_holds_the_example(tmp_path: Path) -> None:
    import zipfile

    pytest.importorskip("maturin")
    command = [sys.executable, "-m", "maturin", "build", "--release", "-o", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=1800)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        place = EXAMPLE.relative_to(ROOT / "python").as_posix()
        assert archive.read(place) == EXAMPLE.read_bytes()
    assert any(name.endswith("licenses/LICENSE-APACHE") for name in names)


def test_demo_needs_no_checkout(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert certk("demo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verify"]["holds"] is True
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_that_closes_within_a_table_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        terminal.print_table(("layer", "kept"), [("0", "1")])
