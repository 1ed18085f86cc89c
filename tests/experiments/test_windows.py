"""The experiments on windows run as a reader would run them, and their figures are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import window_fit

from cli_fixtures import write_cache
from fresh_process import run_script
from repository import EXAMPLE, ROOT

EPS = 0.05
EXPERIMENTS = ROOT / "experiments"


def fewest(shares: np.ndarray, eps: float) -> int:
    ordered = np.sort(shares)[::-1]
    # Tails summed from the small end, where they are small.
    tails = np.cumsum(ordered[::-1])[::-1] - ordered
    return int((tails > eps).sum()) + 1


@pytest.mark.parametrize("causal", [False, True])
def test_losses_are_what_float64_says(tmp_path: Path, causal: bool) -> None:
    path = tmp_path / "x.safetensors"
    metadata = {"causal_offset": "0"} if causal else {}
    tensors = write_cache(path, m=64, n=64, d=4, dtype="F32", spread=1.3, metadata=metadata)
    found = window_fit.measure(path, EPS)
    layer = found["layers"][1]
    shares, values, needed = [], [], {}
    for head in range(4):
        q, k, v = (tensors[f"layers.1.{r}"][0] for r in ("query", "key", "value"))
        scores = q[head] @ k[head // 2].T / 2
        for n in (16, 32, 64):
            rows = [(i, i + 1) for i in range(n // 2, n)] if causal else [(i, n) for i in range(64)]
            own = [np.exp(scores[i, :sees] - scores[i, :sees].max()) for i, sees in rows]
            shares += (own := [row / row.sum() for row in own])
            values += [v[head // 2][:sees] for _, sees in rows]
            needed[1, head, n] = np.mean([fewest(row, EPS) for row in own])
    for head in layer["heads"]:
        assert head["k"] == pytest.approx(needed.pop((1, head["head"], head["n"])))
    assert not needed
    n = np.array([len(row) for row in shares])
    k = np.array([fewest(row, EPS) for row in shares])
    sizes = [window_fit.equal_sizes(n, c, k.sum())[0] for c in (0.0, layer["fit"]["C"])]
    assert [one["rule"] for one in layer["losses"]] == ["fixed k", "alpha n^C", "certified"]
    for one, chosen in zip(layer["losses"], [*sizes, k], strict=True):
        masses, errors = [], []
        for row, value, size in zip(shares, values, chosen, strict=True):
            kept = np.argsort(-row, kind="stable")[:size]
            masses.append(1 - row[kept].sum())
            errors.append(np.linalg.norm(row @ value - row[kept] @ value[kept] / row[kept].sum()))
        assert one["kept"] == k.sum()
        assert one["mean_mass"] == pytest.approx(np.mean(masses), rel=1e-9)
        longest = np.array(masses)[n > 32].mean()
        assert one["longest_mass"] == pytest.approx(longest, rel=1e-9)
        assert one["worst_mass"] == pytest.approx(max(masses), rel=1e-9)
        assert one["over"] == pytest.approx(np.mean(np.array(masses) > EPS))
        assert one["error"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert layer["losses"][2]["over"] == 0


def test_a_known_law_is_found(tmp_path: Path) -> None:
    """One key in eight is heavy, all heavy ones alike."""
    from safetensors.numpy import save_file

    key = np.zeros((1, 1, 512, 8), np.float32)
    key[0, 0, ::8, 0] = 20.0
    query = np.zeros((1, 1, 4, 8), np.float32)
    query[..., 0] = np.sqrt(8)
    path = tmp_path / "x.safetensors"
    save_file({"layers.0.query": query, "layers.0.key": key, "layers.0.value": key.copy()}, path)
    found = window_fit.measure(path, 0.01)["all"]
    assert [each["k"] for each in found["heads"]] == [2, 4, 8, 16, 32, 64]
    assert (found["fit"]["C"], found["fit"]["alpha"]) == pytest.approx((1, 1 / 8), abs=1e-6)
    fixed, power, certified = found["losses"]
    assert power["mean_mass"] == pytest.approx(certified["mean_mass"])
    assert fixed["longest_mass"] > 0.5


@pytest.mark.parametrize("exponent", [-0.7, 0.0, 0.001, 0.5, 1.0, 1.4])
def test_equal_sizes_are_those_of_the_law(exponent: float) -> None:
    n = np.random.default_rng(0).integers(1, 500, 300)
    for total in (300, 301, 5000, 31234, int(n.sum()) - 1, int(n.sum())):
        sizes, alpha = window_fit.equal_sizes(n, exponent, total)
        assert sizes.sum() == total
        assert ((sizes >= 1) & (sizes <= n)).all()
        # Off by rounding to one of the two next integers, but for a key or two of the rest.
        law = np.clip(alpha * n.astype(float) ** exponent, 1, n)
        assert np.sum(np.abs(sizes - law) >= 1 + 1e-6) <= 2


def test_window_fit_of_the_example(tmp_path: Path) -> None:
    told = run_script(EXPERIMENTS / "window_fit.py", EXAMPLE, "--out", tmp_path / "x.json")
    found: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())["all"]
    assert found["fit"]["C"] == pytest.approx(0.956, abs=5e-4)
    assert found["fit"]["C_interval"] == pytest.approx([0.870, 1.043], abs=5e-4)
    fixed, power, certified = found["losses"]
    assert (fixed["over"], power["over"], certified["over"]) == pytest.approx(
        (0.198, 0.563, 0), abs=5e-4
    )
    assert "0.956 (0.870 to 1.043)" in told
    assert f"k = {fixed['alpha']:.1f}" in told


def test_a_given_exponent_and_budget_are_those_of_the_windows(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_cache(path, m=64, n=64, d=4, dtype="F32", spread=1.3)
    own = window_fit.measure(path, EPS)["all"]
    found = window_fit.measure(path, EPS, exponent=0.001, keys=5.5)["all"]
    fixed, power, certified = found["losses"]
    rows = 64 * 3 * len({(h["layer"], h["head"]) for h in found["heads"]})
    assert fixed["kept"] == power["kept"] == 5.5 * rows
    assert (found["exponent"], own["exponent"]) == (0.001, own["fit"]["C"])
    assert power["alpha"] == pytest.approx(fixed["alpha"], rel=0.01)
    # The law that is fitted, and certified selection, are as they were.
    assert (found["fit"], certified) == (own["fit"], own["losses"][2])
    for keys in (0.5, 38.0, float("nan")):
        with pytest.raises(SystemExit, match=r"--keys .*: give 1 to 37.3"):
            window_fit.measure(path, EPS, keys=keys)
    with pytest.raises(SystemExit, match="--exponent nan: give a C"):
        window_fit.measure(path, EPS, exponent=float("nan"))


def test_too_few_lengths_are_refused(tmp_path: Path) -> None:
    write_cache(tmp_path / "short.safetensors", n=63)
    with pytest.raises(SystemExit, match=r"2 lengths from 16 keys on.*smaller --shortest"):
        window_fit.measure(tmp_path / "short.safetensors", EPS)


@pytest.mark.heavy  # trains a model
def test_window_perplexity(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = run_script(EXPERIMENTS / "window_perplexity.py", "--quick", "--out", tmp_path)
    found = json.loads((tmp_path / "windows.json").read_text())
    dense, certified, power, fixed = found["rows"]
    assert [row["rule"] for row in found["rows"]] == [
        "all keys", "certified", "alpha n^C", "fixed k",
    ]  # fmt: skip
    assert found["ends"] == [32, 64, 128, 256]
    assert (dense["share"], dense["lost"]) == (1, 0)
    assert 0 < certified["share"] < 1
    assert certified["lost"] <= certified["worst"] <= 0.1 + 1e-6
    assert certified["proven"] <= 0.1
    for row in (power, fixed):
        # As many keys, but for what rounding of the total and equal scores make.
        assert row["kept"] == pytest.approx(certified["kept"], rel=1e-3)
        assert row["worst"] > certified["worst"]
    for row in found["rows"]:
        assert all(1 < each < 256 for each in row["perplexity"].values())
        assert row["all"] == pytest.approx(dense["all"], rel=0.01)
        assert f"{row['all']:.3f}" in told
    # Short rows fit into a fixed window, and nothing is lost there.
    assert fixed["perplexity"]["32"] == pytest.approx(dense["perplexity"]["32"], rel=1e-6)
