"""`certk plan`: the figures of `gaussian.plan`, as a table or as one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from certk_rs import gaussian
from cli_fixtures import certk

Captured = pytest.CaptureFixture[str]
BASE = ("plan", "--n", 4096, "--sigma", 3, "--eps", 0.01)


def test_json_has_every_figure(capsys: Captured) -> None:
    assert certk(*BASE, "--json", "--seed", 5, "--threads", 1) == 0
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert err == ""
    want = gaussian.plan(4096, 3.0, 0.01, seed=5)
    assert (said.pop("command"), said.pop("schema")) == ("plan", 1)
    assert {"n", "k", "asymptotic_k", "frozen", "speedup", "worthwhile"} <= said.keys()
    assert said == {name: getattr(want, name) for name in said}


def test_the_table(capsys: Captured) -> None:
    assert certk(*BASE) == 0
    out, err = capsys.readouterr()
    want = gaussian.plan(4096, 3.0, 0.01)
    assert err == ""
    for text in ("n = 4096, sigma = 3, eps = 0.01", f"{want.k:.6g}", f"{want.asymptotic_k:.6g}"):
        assert text in out
    assert "Advice: prune." in out
    assert "Frozen" not in out


def test_frozen_dense_and_exact_rows_say_so(capsys: Captured) -> None:
    assert certk("plan", "--n", 128, "--sigma", 5, "--eps", 0.01) == 0
    assert "Frozen: sigma is past sqrt(2 ln n) = 3.115" in capsys.readouterr().out
    assert certk("plan", "--n", 4096, "--sigma", 0.5, "--eps", 0.01) == 0
    assert "Advice: leave dense." in capsys.readouterr().out
    assert certk("plan", "--n", 1, "--sigma", 0.5, "--eps", 0.01) == 0
    assert "exact" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--n", 0, "--sigma", 1, "--eps", 0.1), "n is 0"),
        (("--n", 10, "--sigma", -1, "--eps", 0.1), "sigma is -1"),
        (("--n", 10, "--sigma", "nan", "--eps", 0.1), "sigma is NaN"),
        (("--n", 10, "--sigma", 1, "--eps", 1), "eps is 1"),
        (("--n", 10, "--sigma", 1, "--eps", 0), "eps is 0"),
        (("--n", "x", "--sigma", 1, "--eps", 0.1), "--n"),
        (("--n", 10, "--sigma", 1), "--eps"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], words: str, capsys: Captured) -> None:
    assert certk("plan", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("certk: error:")
    assert err.count("\n") == 1
    assert words in err


def test_as_a_process() -> None:
    command = [sys.executable, "-m", "certk_rs", *map(str, BASE), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["advice"] == "prune"
