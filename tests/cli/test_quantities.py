"""Numbers as people write them, on the command line and in files; and how each option shows one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import typer

from certk_rs._cli.commands import BRIEF
from certk_rs._cli.options import AT_LEAST_ONE, COUNT, NUMBER, SIZE, WHOLE
from certk_rs._cli.tree import tree
from cli_fixtures import certk

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("0", 0), ("4096", 4096), ("1e6", 10**6), ("1E6", 10**6), ("1_000_000", 10**6),
        ("2.5e3", 2500), ("1.0", 1), (" 7 ", 7), ("+3", 3), ("10e-1", 1), ("0e999999999", 0),
        ("9223372036854775807", 2**63 - 1), (5, 5), (1e6, 10**6), ("9e18", 9 * 10**18),
        # A float would round it.
        ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_whole_numbers(given: Any, number: int) -> None:
    assert COUNT(given) == number
    assert type(COUNT(given)) is int


@pytest.mark.parametrize(
    "given",
    [
        "", "x", "1.5", "1e-1", "1__0", "_1", "1_", "0x10", "1e", "nan", "inf", "1 000", "1,000",
        "\u0661", "--", "1.00000000000000000000000000000000000001", 1.5, True, None, [], "1k",
        float("nan"), float("inf"),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_refused_in_words(given: Any) -> None:
    for reader in (COUNT, WHOLE, AT_LEAST_ONE):
        with pytest.raises(typer.BadParameter, match=r"is not a whole number: give one such as"):
            reader(given)


@pytest.mark.parametrize("given", ["9223372036854775808", "1e19", "1e999999999", 1e300])
def test_what_fits_no_64_bits_is_refused_at_once(given: Any) -> None:
    with pytest.raises(typer.BadParameter, match=r"is beyond 2\^63"):
        COUNT(given)


def test_counts_have_a_least_one() -> None:
    assert WHOLE("-3") == -3
    with pytest.raises(typer.BadParameter, match=r"'-3' is too small: give 0 or more"):
        COUNT("-3")
    with pytest.raises(typer.BadParameter, match=r"'0' is too small: give 1 or more"):
        AT_LEAST_ONE("0")


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("0", 0), ("4096", 4096), ("1e6", 10**6), ("512MB", 512 * 10**6), ("1GiB", 2**30),
        ("1.5GiB", 3 * 2**29), ("512 MB", 512 * 10**6), ("1kB", 1000), ("1KiB", 1024),
        ("2tb", 2 * 10**12), ("7B", 7), (123, 123), (1e9, 10**9), ("1_000kB", 10**6),
    ],
)  # fmt: skip
def test_sizes(given: Any, size: int) -> None:
    assert SIZE(given) == size


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("512M", r"say MB \(10\^n\) or MiB \(2\^n\)"), ("x", "give bytes"), ("", "give bytes"),
        ("1XB", "give bytes"), ("-1", "whole number"), ("0.5B", "whole number"),
        ("1e30", "below 2"), ("9e9GB", "give bytes"), ("99999999PB", "below 2"), (True, "give"),
        (1.5, "whole number"), ("1..5MB", "give bytes"), (None, "give bytes"),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_in_words(given: Any, words: str) -> None:
    with pytest.raises(typer.BadParameter, match=words):
        SIZE(given)


def test_numbers() -> None:
    assert [NUMBER(each) for each in ("1e-3", ".5", 1, "1_0.5")] == [0.001, 0.5, 1.0, 10.5]
    for given in ("x", "", "5%", True, None, 10**400):
        with pytest.raises(typer.BadParameter, match=r"is not a number: give one such as 0\.05"):
            NUMBER(given)


def test_commands_read_them(tmp_path: Path, capsys: Captured) -> None:
    assert certk("plan", "--n", "1e4", "--sigma", "3", "--eps", "1e-2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["n"] == 10_000
    np.save(tmp_path / "s.npy", np.zeros((2, 50)))
    arguments = ("select", tmp_path / "s.npy", "--eps", "0.5", "--json")
    for max_keep, kept in (("1e1", 20), ("1_0", 20), ("0.1", 10), ("1", 2), ("1e-1", 10)):
        assert certk(*arguments, "--max-keep", max_keep) == 0
        assert json.loads(capsys.readouterr().out)["kept"] == kept
    assert certk(*arguments, "--keep-first", "3.5") == 2
    assert "'--keep-first': '3.5' is not a whole number" in capsys.readouterr().err
    assert certk(*arguments[:3], "much") == 2
    assert "'--eps': 'much' is not a number" in capsys.readouterr().err


def options() -> Iterator[tuple[str, str, Any, Any]]:
    """Command, name, type and declaration of every option and argument."""
    for name, command in tree().commands.items():
        for parameter in inspect.signature(command.callback).parameters.values():
            if parameter.name != "context" and name != "completion":
                declared, info = get_args(parameter.annotation)[:2]
                yield name, parameter.name, declared, info


def test_every_number_is_read_by_one_of_these_readers() -> None:
    """Or `1e6` is read here and refused there."""
    lacking = [
        f"{command}: {name}"
        for command, name, declared, info in options()
        if {int, float} & {declared, *get_args(declared)}
        and info.parser is None
        and not getattr(info, "count", False)
    ]
    assert not lacking, "give them parser=COUNT or another one of _cli/options.py"


def test_every_metavar_can_be_read(capsys: Captured) -> None:
    """No name of a Python type, and an upper-case word for whatever is not a choice."""
    for command in BRIEF:
        assert certk(command, "--help") == 0
        text = capsys.readouterr().out
        for ugly in ("<int", "<float", "<str", "<path", "<list", "RANGE", "lambda", "INTEGER"):
            assert ugly not in text, f"certk {command} --help: {ugly}"
        assert "TEXT" not in text
        assert "..." * 2 not in text
