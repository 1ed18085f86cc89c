"""`certk windows`: its figures against float64 from the file, equal compute, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import gaussian, windows
from certk_rs._cli.tree import tree
from certk_rs._jobs.adaptive_k import adaptive_k, best, rule_k
from certk_rs._jobs.prefixes import SHORTEST, halved
from certk_rs._jobs.window_recipe import equal_sizes
from certk_rs.errors import CertkError
from cli_fixtures import certk, write_cache
from repository import EXAMPLE
from signalled import certk_signalled

Captured = pytest.CaptureFixture[str]
EPS = 0.05


def recipe(capsys: Captured, *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert certk("windows", *arguments, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    body = json.loads(out)
    assert body["command"] == "windows"
    [cache] = body["caches"]
    return dict(cache)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def fewest(shares: np.ndarray, eps: float) -> int:
    ordered = np.sort(shares)[::-1]
    # Tails summed from the small end, where they are small.
    tails = np.cumsum(ordered[::-1])[::-1] - ordered
    return int((tails > eps).sum()) + 1


def rows_of(tensors: dict[str, np.ndarray], layer: int, head: int, group: int) -> Any:
    q, k, v = (tensors[f"layers.{layer}.{r}"][0] for r in ("query", "key", "value"))
    return q[head] @ k[head // group].T / np.sqrt(q.shape[-1]), v[head // group]


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path / "x.safetensors"
    return path, write_cache(path, m=20, n=64, d=4, dtype="F32", spread=1.3)


def test_every_head_at_every_length_needs_what_float64_says(capsys: Captured, small: Any) -> None:
    path, tensors = small
    found = recipe(capsys, path, "--eps", EPS)
    assert found["eps"] == EPS
    assert not found["causal"]
    assert len(found["heads"]) == 8
    points = {None: [], 0: [], 1: []}
    for head in found["heads"]:
        scores, _ = rows_of(tensors, head["layer"], head["head"], 2)
        assert [each["n"] for each in head["lengths"]] == [16, 32, 64]
        for length in head["lengths"]:
            n = length["n"]
            k = np.mean([fewest(row, EPS) for row in softmax(scores[:, :n])])
            assert length["k"] == pytest.approx(k)
            assert (length["rows"], length["keys"]) == (20, n)
            for group in (None, head["layer"]):
                points[group].append((n, k))
    for group, said in [(None, found["all"]), *((each["layer"], each) for each in found["layers"])]:
        fitted = windows.fit(*np.transpose(points[group]))
        assert said["fit"]["C"] == pytest.approx(fitted.C)
        assert said["fit"]["C_interval"] == pytest.approx(fitted.C_interval)
        assert said["fit"]["points"] == len(points[group])


def test_windows_keep_as_many_keys_and_lose_what_float64_says(capsys: Captured, small: Any) -> None:
    path, tensors = small
    found = recipe(capsys, path, "--eps", EPS)
    shares, values = [], []
    for head in range(4):
        scores, value = rows_of(tensors, 1, head, 2)
        for n in (16, 32, 64):
            shares += list(softmax(scores[:, :n]))
            values += [value[:n]] * len(scores)
    n = np.array([len(row) for row in shares])
    total = sum(fewest(row, EPS) for row in shares)
    layer = found["layers"][1]
    sizes = {
        "fixed k": equal_sizes(n, 0.0, total)[0],
        "alpha n^C": equal_sizes(n, layer["fit"]["C"], total)[0],
        "certified": np.array([fewest(row, EPS) for row in shares]),
    }
    assert [loss["rule"] for loss in layer["losses"]] == list(sizes)
    for loss in layer["losses"]:
        masses, errors = [], []
        for row, value, k in zip(shares, values, sizes[loss["rule"]], strict=True):
            kept = np.argsort(-row, kind="stable")[:k]
            masses.append(1 - row[kept].sum())
            errors.append(np.linalg.norm(row @ value - row[kept] @ value[kept] / row[kept].sum()))
        assert loss["kept"] == total
        assert loss["mean_mass"] == pytest.approx(np.mean(masses), rel=1e-9)
        assert loss["longest_mass"] == pytest.approx(np.mean(np.array(masses)[n == 64]), rel=1e-9)
        assert loss["worst_mass"] == pytest.approx(max(masses), rel=1e-9)
        assert loss["over"] == pytest.approx(np.mean(np.array(masses) > EPS))
        assert loss["error"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert layer["losses"][2]["over"] == 0
    assert layer["losses"][2]["worst_mass"] <= EPS


def test_one_window_for_all_layers_keeps_what_all_need(capsys: Captured, small: Any) -> None:
    found = recipe(capsys, small[0], "--shortest", 4)
    for said in (found["all"], *found["layers"]):
        assert len({loss["kept"] for loss in said["losses"]}) == 1
    assert found["all"]["losses"][0]["kept"] == sum(
        layer["losses"][0]["kept"] for layer in found["layers"]
    )
    assert found["all"]["heads"] == 8
    assert found["all"]["adaptive"] is None
    assert [each["n"] for each in found["all"]["lengths"]] == [4, 8, 16, 32, 64]


def test_a_query_of_a_causal_cache_sees_its_own_prefix(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = write_cache(
        path, layers=1, m=70, n=70, dtype="F32", metadata={"causal_offset": "0"}
    )  # fmt: skip
    found = recipe(capsys, path, "--eps", EPS, "--shortest", 8)
    assert found["causal"]
    for head in found["heads"]:
        scores, _ = rows_of(tensors, 0, head["head"], 2)
        assert [each["n"] for each in head["lengths"]] == [8, 17, 35, 70]
        for length in head["lengths"]:
            sees = range(length["n"] // 2 + 1, length["n"] + 1)
            k = [fewest(softmax(scores[i - 1, :i]), EPS) for i in sees]
            assert (length["rows"], length["keys"]) == (len(sees), np.mean(sees))
            assert length["k"] == pytest.approx(np.mean(k))
    assert found["layers"][0]["losses"][2]["over"] == 0


def test_a_law_that_is_known_is_found(capsys: Captured, tmp_path: Path) -> None:
    """One key in so many is heavy, all heavy ones alike: k is a known share of n."""
    from safetensors.numpy import save_file

    n, d = 512, 8
    key = np.zeros((1, 1, n, d), np.float32)
    key[0, 0, ::8, 0] = 20.0
    query = np.zeros((1, 1, 4, d), np.float32)
    query[..., 0] = np.sqrt(8)
    path = tmp_path / "x.safetensors"
    save_file({"layers.0.query": query, "layers.0.key": key, "layers.0.value": key.copy()}, path)
    found = recipe(capsys, path, "--eps", 0.01)
    [layer] = found["layers"]
    assert [each["k"] for each in layer["lengths"]] == [2, 4, 8, 16, 32, 64]
    assert layer["fit"]["C"] == pytest.approx(1, abs=1e-6)
    assert layer["fit"]["alpha"] == pytest.approx(1 / 8)
    [fixed, power, certified] = layer["losses"]
    assert power["alpha"] == pytest.approx(1 / 8)
    assert power["mean_mass"] == pytest.approx(certified["mean_mass"])
    assert fixed["alpha"] > 126 / 6  # short rows keep at most what they have
    assert fixed["longest_mass"] > 0.5


@pytest.mark.parametrize("exponent", [-0.7, 0.0, 0.001, 0.5, 1.0, 1.4])
def test_equal_sizes_are_those_of_the_law(exponent: float) -> None:
    n = np.random.default_rng(0).integers(1, 500, 300)
    for total in (300, 301, 5000, 31234, int(n.sum()) - 1, int(n.sum())):
        sizes, alpha = equal_sizes(n, exponent, total)
        assert sizes.sum() == total
        assert (sizes >= 1).all()
        assert (sizes <= n).all()
        # Off by rounding to one of the two next integers, but for a key or two of the rest.
        law = np.clip(alpha * n.astype(float) ** exponent, 1, n)
        assert np.sum(np.abs(sizes - law) >= 1 + 1e-6) <= 2


def test_the_recipe_shows_its_tables(capsys: Captured, small: Any) -> None:
    path, _ = small
    assert certk("windows", path, "--eps", 0.1, "-q") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines()[1:])) <= 80
    out = " ".join(out.split())
    for text in ("n^", "95 % interval", "k = ", "certified", "stand for a shorter context"):
        assert text in out
    other = path.with_name("other.safetensors")
    other.write_bytes(path.read_bytes())
    assert certk("windows", path, other, path) == 0  # a file that is named twice is one
    assert capsys.readouterr().out.count("What is lost") == 2


def test_the_rule_is_judged_on_rows_that_it_was_not_fitted_to() -> None:
    rng = np.random.default_rng(1)
    heads = [sigma * rng.standard_normal((40, 3000)) for sigma in (1.0, 2.5)]
    heads[1][:, 2000:] = -np.inf
    found = adaptive_k(lambda: heads, 0.01)
    holds, needed, ratios = [], [], []
    for scores in heads:
        seen = scores[:, : int((scores[0] > -np.inf).sum())]
        sigma = seen[::2].std(axis=1).mean()
        n = seen.shape[1]
        k = np.ceil(gaussian.keep_fraction(sigma, 0.01) * n)
        need = np.array([fewest(row, 0.01) for row in softmax(seen)])
        ratios += list(need[::2] / (gaussian.keep_fraction(sigma, 0.01) * n))
        holds += list(need[1::2] <= k)
        needed += list(need[1::2] / n)
    assert found.rows == 40
    assert found.holds == pytest.approx(np.mean(holds))
    assert found.needed == pytest.approx(np.mean(needed))
    assert found.factor == pytest.approx(np.sort(ratios)[39])
    assert found.holds <= found.holds_with_factor
    assert found.kept <= found.kept_with_factor
    # Normal scores: the rule is right in the mean, and a little more holds nearly always.
    assert found.kept == pytest.approx(found.needed, rel=0.02)
    assert 1 < found.factor < 1.15
    assert found.holds_with_factor > 0.9
    with pytest.raises(CertkError, match="no rows"):
        adaptive_k(list, 0.01)


def test_parts_of_the_rule() -> None:
    n = np.array([1, 10, 1000])
    share = float(gaussian.keep_fraction(2.0, 0.1))
    assert rule_k(2.0, n, 0.1).tolist() == [1, int(np.ceil(10 * share)), int(np.ceil(1000 * share))]
    assert rule_k(2.0, n, 0.1, 1e9).tolist() == n.tolist()
    # Next to no share is one key, and a factor raises that.
    assert rule_k(60.0, n, 0.1).tolist() == [1, 1, 1]
    assert rule_k(60.0, n, 0.1, 4.5).tolist() == [1, 5, 5]
    frozen = np.concatenate([np.zeros((8, 200)), np.full((8, 3), 900.0)], axis=1)
    found = adaptive_k(lambda: [frozen], 0.01)
    assert (found.holds, found.factor, found.holds_with_factor) == (0, 3, 1)
    assert best(np.array([[1.0, 3.0, 3.0, 2.0]]), np.array([2])).tolist() == [[0, 1, 1, 0]]
    assert best(np.array([[1.0, 1.0, 1.0]]), np.array([2])).tolist() == [[1, 1, 0]]
    assert halved(512) == [16, 32, 64, 128, 256, 512]
    assert halved(70, 8) == [8, 17, 35, 70]
    assert halved(7, 8) == []


def test_too_few_lengths_are_refused_with_a_remedy(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "short.safetensors"
    write_cache(path, n=63)
    assert certk("windows", path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "2 lengths from 16 keys on (31, 63)" in err
    assert "smaller --shortest" in err
    assert certk("windows", path, "--shortest", 4) == 0
    # Queries of the end of a text see all about as many keys.
    causal = tmp_path / "causal.safetensors"
    write_cache(causal, n=512, m=8, metadata={"causal_offset": "504"})
    capsys.readouterr()
    assert certk("windows", causal) == 2
    assert "1 lengths from 16 keys on (512)" in (err := capsys.readouterr().err)
    assert "of whole texts, not of their last queries" in err


def test_windows_refusals(capsys: Captured, tmp_path: Path) -> None:
    for arguments, words in [
        ((), "CACHE"),
        ((tmp_path / "none.safetensors",), "does not exist"),
        ((tmp_path,), "no .safetensors file"),
        ((EXAMPLE, "--eps", "0"), "eps is 0"),
        ((EXAMPLE, "--eps", "1"), "eps is 1"),
        ((EXAMPLE, "--eps", "-1"), "give a number from 1e-300"),
        ((EXAMPLE, "--eps", "nan"), "eps is nan"),
        ((EXAMPLE, "--eps", "x"), "--eps"),
        ((EXAMPLE, "--names", "x"), "--names"),
        ((EXAMPLE, "--names", "x.{i}.{a|b|c}"), "no tensor is named like"),
        ((EXAMPLE, "--shortest", "0"), "shortest"),
    ]:
        capsys.readouterr()
        assert certk("windows", *arguments) == 2
        out, err = capsys.readouterr()
        assert (out, words in err, err.count("\n")) == ("", True, 1), err


def test_the_default_of_shortest_is_that_of_the_function() -> None:
    [shortest] = [p for p in tree().commands["windows"].params if p.name == "shortest"]
    assert shortest.default == SHORTEST


def test_windows_can_be_interrupted(tmp_path: Path) -> None:
    function = "certk_rs._jobs.window_recipe:scores_of"
    ended = certk_signalled(["windows", EXAMPLE], function, tmp_path / "calls", at=3)
    assert (ended.code, ended.out, ended.err) == (130, "", "certk: interrupted\n")
    assert ended.calls == 3
