"""`certk reproduce`: every experiment runs, is computed, and shows up on one page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from certk_rs import reproduce
from certk_rs._page import Table
from certk_rs.errors import CertkError
from certk_rs.reproduce import EXPERIMENTS, Settings, gap_rules, run_experiments
from cli_fixtures import certk, write_cache
from test_analyze import Page

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "data" / "minilm_small.safetensors"
NAMES = [experiment.NAME for experiment in EXPERIMENTS]

Captured = pytest.CaptureFixture[str]


def figures(path: Path) -> object:
    body = json.loads(path.read_text(encoding="utf-8"))
    return body["data"]


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_computed_anew(name: str, tmp_path: Path) -> None:
    """Twice the same from one seed, shown on the page, with more than one digit in its sentence."""
    for folder in ("a", "b"):
        [done] = run_experiments(tmp_path / folder, [name], Settings(EXAMPLE, brief=True))
        assert done["name"] == name
        assert sum(c.isdigit() for c in done["seen"]) > 3
    assert figures(tmp_path / "a" / f"{name}.json") == figures(tmp_path / "b" / f"{name}.json")
    page = Page()
    page.feed((tmp_path / "a" / "index.html").read_text(encoding="utf-8"))
    assert page.fetched == []
    assert page.tags.count("svg") >= 1
    assert page.tags.count("h2") == 1
    assert len(page.ids) == len(set(page.ids))


def test_runs_add_up_on_one_page(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "page"
    assert certk("reproduce", "-o", out, "gap-rules", "--brief") == 0
    assert certk("reproduce", "-o", out, "rounding", "--brief", "--json") == 0
    page = Page()
    page.feed((out / "index.html").read_text(encoding="utf-8"))
    assert page.tags.count("h2") == 2
    assert sorted(path.name for path in out.iterdir()) == [
        "gap-rules.json", "index.html", "rounding.json",
    ]  # fmt: skip
    capsys.readouterr()


def test_simulations_depend_on_the_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        settings = Settings(EXAMPLE, brief=True, seed=seed)
        run_experiments(tmp_path / str(seed), ["gaussian-rule"], settings)
    one, other = (figures(tmp_path / str(seed) / "gaussian-rule.json") for seed in (0, 1))
    assert one != other


def test_what_cannot_run_is_left_out_or_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> dict[str, object]:
        raise AssertionError("it ran")

    needy = SimpleNamespace(**vars(gap_rules) | {"NAME": "needy", "NEEDS": ("no_such_module",)})
    needy.run = never
    monkeypatch.setattr(reproduce, "EXPERIMENTS", (needy, gap_rules))
    settings, told = Settings(EXAMPLE, brief=True), []
    [done] = run_experiments(tmp_path / "all", [], settings, warn=told.append)
    assert done["name"] == "gap-rules"
    assert len(told) == 1
    assert "no_such_module" in told[0]
    with pytest.raises(CertkError, match="needy needs no_such_module, not installed"):
        run_experiments(tmp_path / "x", ["gap-rules", "needy"], settings)
    assert not (tmp_path / "x").exists()


def test_an_experiment_is_one_file_and_one_registration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = SimpleNamespace(
        NAME="mine", TITLE="Mine", ABOUT="About.", NEEDS=(),
        run=lambda settings, tell: {"seen": "It is 42."},
        plots=lambda data: [], tables=lambda data: [Table(("a",), [("42",)])],
    )  # fmt: skip
    monkeypatch.setattr(reproduce, "EXPERIMENTS", (mine,))
    run_experiments(tmp_path, ["mine"], Settings(EXAMPLE))
    assert "It is 42." in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_refusals(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(CertkError, match="there is no experiment 'nothing'"):
        run_experiments(tmp_path / "x", ["nothing"], Settings(EXAMPLE))
    assert not (tmp_path / "x").exists()
    (tmp_path / "index.html").write_text("mine")
    with pytest.raises(CertkError, match="is not a page of certk reproduce"):
        run_experiments(tmp_path, ["rounding"], Settings(EXAMPLE))
    assert (tmp_path / "index.html").read_text() == "mine"
    assert certk("reproduce", "-o", tmp_path / "y", "--data", tmp_path / "none", "rounding") == 2
    assert "none" in capsys.readouterr().err
    assert certk("reproduce", "-o", tmp_path / "index.html", "rounding") == 2
    assert "is not a directory" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    ("shape", "metadata", "words"),
    [
        ({"n": 200}, {"causal_offset": "190"}, "is causal"),
        ({"n": 100}, None, "has 100 keys: the experiments need at least 128"),
    ],
)
def test_data_that_will_not_do_is_refused_first(
    shape: dict[str, int], metadata: dict[str, str] | None, words: str, tmp_path: Path
) -> None:
    write_cache(tmp_path / "x.safetensors", metadata=metadata, **shape)
    with pytest.raises(CertkError, match=words):
        run_experiments(tmp_path / "out", [], Settings(tmp_path / "x.safetensors", brief=True))
    assert not (tmp_path / "out").exists()


def test_layers_of_unequal_length_are_refused(tmp_path: Path) -> None:
    shapes = [(0, 128), (1, 256)]
    tensors = {
        f"layers.{i}.{role}": np.ones((1, 1, n, 4), np.float32)
        for i, n in shapes
        for role in ("query", "key", "value")
    }
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CertkError, match="layers of 128 and of 256 keys"):
        run_experiments(tmp_path / "out", [], Settings(tmp_path / "x.safetensors"))


def test_flat_data_end_without_a_crash(tmp_path: Path) -> None:
    write_cache(tmp_path / "x.safetensors", n=128, spread=0.0)
    settings = Settings(tmp_path / "x.safetensors", brief=True)
    [done] = run_experiments(tmp_path / "out", ["gap-rules"], settings)
    assert "save 0 %" in done["seen"]
    with pytest.raises(CertkError, match="changes no output"):
        run_experiments(tmp_path / "out", ["output-error"], settings)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_foreign_table_is_refused_before_anything_runs(text: str, tmp_path: Path) -> None:
    (tmp_path / "rounding.json").write_text(text)
    with pytest.raises(CertkError, match=r"rounding\.json is not a table"):
        run_experiments(tmp_path, ["gap-rules"], Settings(EXAMPLE, brief=True))
    assert not (tmp_path / "gap-rules.json").exists()
