"""The manners of all commands: options from one table, help, completion, tables."""

from __future__ import annotations

import inspect
import io
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import certk_rs as ck
from certk_rs._cli import terminal
from certk_rs._cli.commands import BRIEF
from certk_rs._cli.tree import tree
from certk_rs._files.certificate import Options
from certk_rs._jobs.request import Request
from cli_fixtures import said
from fresh_process import run_python
from repository import EXAMPLE, ROOT

COMMANDS = list(BRIEF)
Captured = pytest.CaptureFixture[str]


# ------------------------------------------------------------------------------ options and help


def test_an_option_of_a_job_has_one_name_one_default_and_one_order() -> None:
    table = {field.name: field.default for field in fields(Request)}
    python = inspect.signature(ck.prune).parameters
    own = {name: each.default for name, each in python.items() if name in table}
    assert list(own.items()) == list(table.items())
    command = {each.name: each for each in tree().commands["prune"].params}
    assert [name for name in command if name in table] == list(table)
    for field in fields(Request):
        assert command[field.name].default == field.default, field.name
        assert command[field.name].help == field.metadata["help"]
    # And what a certificate records of it has its name there.
    recorded = Request.of(eps=0.1).recorded()
    settled = {field.name for field in fields(Options)} - recorded.keys()
    assert settled == {"layout", "holdout", "proof", "size", "hot", "key_bits", "value_bits"}
    assert recorded["granularity"] == "head"
    # Other commands have no say of their own about options of a job.
    for name, function in (("select", ck.select), ("verify", ck.verify), ("analyze", ck.analyze)):
        options = {each.name: each for each in tree().commands[name].params}
        for option, each in inspect.signature(function).parameters.items():
            if option in options and option in table and option != "eps":
                assert options[option].default == each.default, (name, option)
                assert options[option].help == command[option].help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_alike_everywhere(command: str) -> None:
    code, text, errors = said(command, "--help")
    assert (code, errors) == (0, "")
    assert said(command, "-h") == (code, text, errors)
    # Help is no result, of which --json would promise an object.
    assert said(command, "--json", "-h") == (code, text, errors)
    assert text.startswith(f"Usage: certk {command} [OPTIONS]")
    for option in ("-h, --help", "-q, --quiet", "--json"):
        assert option in text
    # No name of a Python type, and an upper-case word for all that is not a choice.
    for ugly in ("<int", "<float", "<str", "<path", "<list", "lambda", "TEXT", "..." * 2):
        assert ugly not in text, ugly


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
    options = ("--eps EPS|RULE|FILE", "--bytes N", "--jobs N", "--granularity head|layer|token")
    assert all(option in prune for option in options)
    assert all(option in verify for option in ("--against CACHE", "--jobs N", "--sample F|N"))


def test_help_of_all_commands_is_whole_lines_and_an_example() -> None:
    text = said("--help").out
    lines = text.splitlines()
    for name, brief in BRIEF.items():
        assert any(re.fullmatch(rf"  {name} +{re.escape(brief)}", line) for line in lines), name
    assert "..." not in text.partition("\n")[2]
    assert max(map(len, lines)) <= 80
    shown = [line.split()[1] for line in lines[lines.index("Example:") + 1 :]]
    assert shown == ["demo", "capture", "analyze", "prune", "verify"]
    assert said() == (2, "", text)  # bare certk shows it and fails


def test_help_of_prune_puts_every_option_into_a_group() -> None:
    command = tree().commands["prune"]
    grouped = [name for names in command.panels.values() for name in names]
    own = {p.name for p in command.params if p.param_type_name == "option"}
    assert sorted(grouped) == sorted(own - {"quiet"})
    text = said("prune", "--help").out
    assert re.findall(r"^(\w.*):$", text, re.M) == ["Arguments", *command.panels, "Common options"]
    assert re.search(r"\nHow small:\n  --eps EPS.*\nSets:\n  --granularity", text, re.S)


def test_the_version() -> None:
    for option in ("-V", "--version"):
        assert said(option) == (0, f"certk {ck.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["pr"], ["prune"]),
        (["prune", "--gr"], ["--granularity"]),
        (["prune", "--granularity", ""], ["head", "layer", "token"]),
        (["select", ""], []),  # left to the shell, which knows files
    ],
)
def test_bash_completes(words: list[str], found: list[str], tmp_path: Path) -> None:
    """By the script that --show-completion prints."""
    (tmp_path / "certk").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m certk_rs "$@"\n')
    (tmp_path / "certk").chmod(0o755)
    script = (
        'eval "$(_CERTK_COMPLETE=source_bash certk)"; COMP_WORDS=(certk "$@"); COMP_CWORD=$#; '
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


# ------------------------------------------------------------------------------ tables

HEADS = ("name", "a", "b", "c" * 10)
ROWS = [("x", "1", "2", "3"), ("y" * 10, "4", "5", "6")]


def table(capsys: Captured, columns: int, **options: Any) -> list[str]:
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        terminal.print_table(HEADS, ROWS, **options)
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
    # In the order given, and the rest stays.
    lines = table(capsys, 30, drop=[1, 2], left=[3])
    assert lines[0].split() == ["name", HEADS[3]]
    assert lines[2].split() == ["x", "3"]
    assert "Left out, for want of room: a, b (" in " ".join(lines)
    # Columns that may not go are printed, however narrow the terminal.
    assert table(capsys, 5, drop=[])[0].split() == list(HEADS)


def test_columns_are_straight_whatever_their_letters_take(capsys: Captured) -> None:
    terminal.print_table(("name", "k"), [("中文", "1"), ("ab", "22")], left=(0,))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["", "  name    k", f" {'─' * 11}", "  中文    1", "  ab     22", ""]


def test_in_a_file_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    heads = [f"column {i}" for i in range(40)]
    terminal.print_table(heads, [["x"] * 40])
    out = capsys.readouterr().out
    assert all(heading in out for heading in heads)
    assert "Left out" not in out


def test_a_pipe_that_closes_within_a_table_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        terminal.print_table(("layer", "kept"), [("0", "1")])


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
