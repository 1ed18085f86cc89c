"""Rounding errors of the exponentials, proved by Gappa where it is installed.

The scripts are made of the source's constants and of the bounds in docs/soundness.md, and are held
against those in tests/soundness/gappa, which anybody can run by hand. `CERTK_BLESS=1` writes them
anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from flint import ctx

from budget_page import BITS, Budget
from gappa_scripts import Scripts
from repository import ROOT

FOLDER = ROOT / "tests" / "soundness" / "gappa"
GAPPA = shutil.which("gappa")
with ctx.workprec(BITS):
    SCRIPTS = Scripts(Budget()).all()
    # Four fifths of every bound.
    TOO_MUCH = Scripts(Budget(), "0.8").all()
# Before it gives these up Gappa looks at more and more pieces, for minutes.
ENDLESS = {"checker_series.g", "checker_reduction_positive.g"}
# These take longest of the others, and are of the same kind; `make prove` has them.
SLOW = {"horner_f64.g", "checker_reduction.g"}
# `make prove` says so where it is missing; a run of all tests goes on.
needs_gappa = pytest.mark.skipif(
    GAPPA is None, reason="gappa is not installed; on Debian: apt-get install gappa"
)


def _proves(script: str) -> bool:
    assert GAPPA is not None
    done = subprocess.run([GAPPA], input=script, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    assert done.returncode == 0 or "not satisfied" in done.stderr, done.stderr
    return done.returncode == 0


def test_scripts_are_those_of_the_source_and_the_page() -> None:
    if os.environ.get("CERTK_BLESS"):
        for name, script in SCRIPTS.items():
            (FOLDER / name).write_text(script)
    assert {path.name: path.read_text() for path in FOLDER.glob("*.g")} == SCRIPTS


@needs_gappa
@pytest.mark.parametrize("name", SCRIPTS)
def test_bounds_are_proved(name: str) -> None:
    assert _proves((FOLDER / name).read_text())


@needs_gappa
@pytest.mark.parametrize(
    "name",
    [
        *sorted(TOO_MUCH.keys() - ENDLESS - SLOW),
        *(pytest.param(name, marks=pytest.mark.heavy) for name in sorted(SLOW)),
    ],
)
def test_bounds_that_are_too_small_are_not(name: str) -> None:
    assert not _proves(TOO_MUCH[name])
