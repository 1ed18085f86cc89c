"""Notebooks run as they are shown: what is stored in them is what they say when they are run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import notebooks
from repository import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_there_are_two() -> None:
    assert [path.name for path in NOTEBOOKS] == ["quickstart.ipynb", "top_k_theory.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_what_is_stored_is_what_is_shown(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("safetensors")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text())
    shown = notebooks.run(notebook, path.name)
    cells = notebooks.code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell, outputs in zip(cells, shown, strict=True):
        assert notebooks.texts(cell["outputs"]) == notebooks.texts(outputs)
        # A picture is there where one is drawn; its bytes are matplotlib's affair.
        assert notebooks.pictures(cell["outputs"]) == notebooks.pictures(outputs)
    assert sum(notebooks.pictures(outputs) for outputs in shown) == 1
    assert path.stat().st_size < 100_000


def test_the_runner() -> None:
    def told(*sources: str) -> list[list[str]]:
        cells = [{"cell_type": "code", "source": [source]} for source in sources]
        ran = notebooks.run(
            {"cells": [{"cell_type": "markdown", "source": ["1 / 0"]}, *cells]}, "x"
        )
        return [notebooks.texts(outputs) for outputs in ran]

    assert told("x = 1", "print(x)\nx + 1", "x;", "None") == [[], ["1\n", "2"], [], []]
    with pytest.raises(ZeroDivisionError):
        told("1 / 0")
