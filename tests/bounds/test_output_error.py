"""Output error: every form is above the exact error, close to what its formula says, and named.

The oracle is an Arb matrix product over the stored numbers; the formulas are NumPy in float64.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flint import arb, arb_mat, fmpq

import certk_rs as ck
from certk_rs.output import OutputError, output_error, select_output
from oracle import Precision
from real_rows import Cache

BITS = 320
COMPETING = ("exact", "diameter", "ball", "spectral", "variance")
FORMS = (*COMPETING, "norm", "chi_square")
DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


@dataclass
class Row:
    """One row of n stored scores with its values (n, d) and the kept positions."""

    scores: np.ndarray
    values: np.ndarray
    kept: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    def weights(self) -> list[arb]:
        """Exact weights as balls, 0 where masked; the mask is boolean here."""
        scores = self.scores.astype(np.float64)
        visible = self.options.get("mask", np.ones(len(scores), bool))
        if self.options.get("kind") == "probs":
            return [arb(float(s)) if v else arb(0) for s, v in zip(scores, visible, strict=True)]
        scale = arb(self.options.get("scale", 1.0))
        seen = visible & (scores > -np.inf)
        # A common shift changes nothing and keeps the exponents near 0.
        logits = [scale * arb(float(s)) if v else None for s, v in zip(scores, seen, strict=True)]
        shift = max((float(x) for x in logits if x is not None), default=0.0)
        return [arb(0) if x is None else (x - arb(shift)).exp() for x in logits]

    def squared_error(self) -> arb:
        """||Attn - Attn_S||^2; an empty kept set gives the zero vector."""
        finite = self.scores.astype(np.float64)
        finite = finite[finite > -np.inf] * self.options.get("scale", 1.0)
        # Two outputs are subtracted that may differ by the smallest weight only.
        depth = 0 if self.options.get("kind") else int(3 * np.ptp(finite))
        with Precision(BITS + min(depth, 20_000) + 4000 * ("kind" in self.options)):
            weight = self.weights()
            n, d = self.values.shape
            # What is masked may hold anything.
            stored = self.values.astype(np.float64).tolist()
            used = [v if w != 0 else [0.0] * d for v, w in zip(stored, weight, strict=True)]
            kept = [w if k else arb(0) for w, k in zip(weight, self.kept, strict=True)]
            mean = arb_mat(2, n, weight + kept) * arb_mat(used)
            total, head = sum(weight, arb(0)), sum(kept, arb(0))
            if total == 0:
                return arb(0)
            gap = [mean[0, c] / total - (mean[1, c] / head if head != 0 else 0) for c in range(d)]
            return sum((x * x for x in gap), arb(0))

    def found(self) -> OutputError:
        return output_error(self.scores, self.values, self.kept, **self.options)


def above(bound: float, squared: arb) -> bool:
    """Return True if bound >= the square root for certain."""
    with Precision(4 * BITS):
        return bool(bound == np.inf) or bool(arb(float(bound)) ** 2 >= squared.upper()) or (
            bound == 0.0 and squared.contains(0)
        )  # fmt: skip


def formulas(row: Row) -> dict[str, float]:
    """Return the forms in float64, and the size of the terms that rounding is relative to."""
    with Precision(BITS):
        weight = np.array([float(w) for w in row.weights()])
    values = np.where((weight > 0)[:, None], row.values.astype(np.float64), 0.0)
    longest = np.linalg.norm(values[weight > 0], axis=1).max()
    values = values - values[weight > 0].mean(axis=0)
    p = weight / weight.sum()
    kept = row.kept & (weight > 0)
    tail = ~row.kept & (weight > 0)
    tau, odds = p[tail].sum(), p[tail].sum() / max(p[kept].sum(), 1e-300)
    mean_s, mean_t = (p[s] @ values[s] / p[s].sum() for s in (kept, tail))
    attn = p @ values
    spread = [((values[s] - m) ** 2).sum(axis=1) for s, m in ((weight > 0, attn), (kept, mean_s))]
    var_p = p[weight > 0] @ spread[0]
    var_s = p[kept] @ spread[1] / p[kept].sum()
    seen = values[weight > 0]
    top = np.linalg.eigvalsh(seen.T @ seen)[-1]
    distance = np.linalg.norm(values[kept][:, None] - values[tail][None], axis=2)
    return {
        "exact": tau * np.linalg.norm(mean_t - mean_s),
        "pair": tau * distance.max(),
        "centre": tau * np.linalg.norm(values[tail] - mean_s, axis=1).max(),
        "spectral": np.sqrt((p[tail] ** 2).sum()) * np.sqrt(top + len(seen) * mean_s @ mean_s),
        "variance": np.sqrt(odds) * np.sqrt(max(var_p - p[kept].sum() * var_s, 0.0)),
        "norm": 2 * tau * longest,
        "span": np.sqrt(odds) * np.linalg.norm(seen, axis=1).max(),
        "plain": np.sqrt(odds) * np.sqrt(var_p),
        "radius": tau * np.linalg.norm(seen, axis=1).max(),
    }


def make_row(seed: int) -> Row:
    """Gaussian, heavy-tailed, tied and far-apart scores; values of all shapes; kept sets too."""
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 2, 3, 5, 8, 17, 40, 64]))
    d = int(rng.choice([1, 2, 3, 7, 8, 9, 16, 33, 64]))
    scores = {
        0: lambda: rng.standard_normal(n) * rng.choice([0.1, 1.0, 4.0]),
        1: lambda: rng.standard_cauchy(n),
        2: lambda: rng.integers(0, 3, n).astype(float),
        3: lambda: rng.uniform(-400, 400, n),
        4: lambda: np.full(n, 1.5),
    }[int(rng.integers(5))]()
    scores = np.clip(scores, -6e4, 6e4).astype(DTYPES[int(rng.integers(4))])
    values = {
        0: lambda: rng.standard_normal((n, d)),
        1: lambda: rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-3, 3, (n, 1)),
        2: lambda: np.clip(rng.standard_cauchy((n, d)), -6e4, 6e4),
        3: lambda: rng.standard_normal((n, d)) + 1000.0,
        4: lambda: np.repeat(rng.standard_normal((1, d)), n, axis=0),
        5: lambda: np.where(rng.random((n, 1)) < 0.1, 3e4, 1e-3) * rng.standard_normal((n, d)),
        6: lambda: rng.integers(-1, 2, (n, d)).astype(float),
    }[int(rng.integers(7))]()
    values = np.clip(values, -6e4, 6e4).astype(DTYPES[int(rng.integers(4))])
    kept = np.zeros(n, bool)
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    size = int(rng.integers(0, n + 1)) if rng.random() < 0.2 else int(rng.integers(1, n + 1))
    kept[order[:size] if rng.random() < 0.7 else rng.permutation(n)[:size]] = True
    options: dict[str, Any] = {}
    which = rng.random()
    if which < 0.2:
        options["scale"] = float(rng.choice([-1.0, 0.0, 0.125, 1e-3, 3.7]))
    elif which < 0.3:
        scores = rng.random(n).astype(scores.dtype) ** 8
        options["kind"] = "probs"
    elif which < 0.45:
        options["mask"] = rng.random(n) < 0.7
        values[~options["mask"]] = np.nan
    return Row(scores, values, kept, options, f"seed {seed}")


def check(row: Row) -> OutputError:
    """Each form above the exact error, and the exact form hardly above."""
    found, squared = row.found(), row.squared_error()
    for form in FORMS:
        bound = float(getattr(found, form))
        assert above(bound, squared), f"{row.name}: {form} {bound} < sqrt({squared})"
    each = [float(getattr(found, form)) for form in FORMS]
    assert float(found.best) == min(each[: len(COMPETING)])
    assert str(found.which) == FORMS[int(np.argmin(each[: len(COMPETING)]))]
    return found


def tight(row: Row, found: OutputError) -> bool:
    """Against the formulas, where float64 can tell: no weight underflows, no mass is nearly 1."""
    with Precision(BITS):
        weights = row.weights()
        weight = np.array([float(w) for w in weights])
    visible = np.array([w != 0 for w in weights])
    if not visible.any() or not (weight[visible] > 1e-100 * weight.max()).all():
        return False
    share = weight[row.kept].sum() / weight.sum()
    if not (row.kept & visible).any() or not 1e-3 < share < 1 or (row.kept | ~visible).all():
        return False
    want = formulas(row)
    largest = np.abs(row.values[visible].astype(np.float64)).max()
    slack = 1e-11 * want["radius"] + 1e-13 * largest * (1 - share)
    low = want["exact"] * (1 - 1e-9) - slack
    assert low <= found.exact <= want["exact"] * (1 + 1e-11) + slack, row.name
    assert str(found.diameter_kind) == "pair"
    for form, name in (("diameter", "pair"), ("spectral", "spectral")):
        room = 1.02 if form == "spectral" else 1 + 1e-9
        bound = float(getattr(found, form))
        assert want[name] * (1 - 1e-7) - slack <= bound <= want[name] * room + slack, row.name
    # Var_P - (1 - tau) Var_S cancels in float64, so compare squares against their terms.
    lost = 1e-8 * (want["plain"] ** 2 + want["radius"] ** 2) + slack**2
    assert abs(float(found.variance) ** 2 - want["variance"] ** 2) <= lost, row.name
    assert found.variance <= want["plain"] * (1 + 1e-9) + slack, row.name
    # Means are known to 3072 * 2^-53 of a length: much, of the spread of values around a point.
    around = 1e-12 * want["span"]
    assert want["plain"] ** 2 - lost <= float(found.chi_square) ** 2, row.name
    assert float(found.chi_square) ** 2 <= (want["plain"] + around) ** 2 + lost, row.name
    assert found.variance <= found.chi_square * (1 + 1e-9) + slack, row.name
    assert found.diameter <= found.norm * (1 + 1e-9) + slack, row.name
    assert abs(found.norm - want["norm"]) <= 1e-9 * want["norm"] + slack, row.name
    assert found.ball >= want["centre"] * (1 - 1e-9) - slack
    assert found.ball <= 3 * want["radius"] * (1 + 1e-9) + slack
    return True


@pytest.mark.parametrize(
    "part", [*range(8), *(pytest.param(part, marks=pytest.mark.heavy) for part in range(8, 20))]
)
def test_random_rows(part: int) -> None:
    rows = [make_row(seed) for seed in range(part * 100, part * 100 + 100)]
    assert sum(tight(row, check(row)) for row in rows) > 25


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(40))
def test_many_random_rows(part: int) -> None:
    for seed in range(10_000 + part * 1000, 11_000 + part * 1000):
        check(make_row(seed))


@pytest.mark.heavy
def test_bounds_on_a_million_rows() -> None:
    """No form is below the error, as float64 computes it."""
    rng = np.random.default_rng(12)
    for part in range(8):
        rows, n, d = 125_000, 6, 2
        scores = rng.standard_normal((rows, n)) * (0.3, 1.0, 3.0, 9.0)[part % 4]
        values = rng.standard_normal((n, d)) + (0.0, 50.0)[part // 4]
        keep = rng.random((rows, n)) < 0.6
        keep[:, 0] = True
        weights = np.exp(scores)
        kept = weights * keep
        whole = weights @ values / weights.sum(axis=1, keepdims=True)
        error = np.linalg.norm(whole - kept @ values / kept.sum(axis=1, keepdims=True), axis=1)
        found = output_error(scores, values, keep)
        for form in (*FORMS, "best"):
            assert (getattr(found, form) >= error - 1e-14 * np.abs(values).max() * n).all(), form


def real(cache: Cache, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores (heads, m, n) in float32 and values (heads, n, d) of one layer of a cache."""
    query, key, value = (cache[f"layers.{layer}.{name}"] for name in ("query", "key", "value"))
    scores = (query @ np.swapaxes(key, -1, -2) * query.shape[-1] ** -0.5).astype(np.float32)
    shape = scores.shape[-3:]
    return scores.reshape(shape), value.reshape(value.shape[-3:])


@pytest.mark.parametrize("layer", range(6))
def test_real_rows(small_cache: Cache, layer: int) -> None:
    """Batched on real rows; and the forms above the exact error, of a few rows by the oracle."""
    scores, values = real(small_cache, layer)
    sel = ck.select(scores, 0.05)
    found = output_error(scores, values, sel)
    keep = sel.to_mask()
    assert (found.exact <= np.minimum.reduce([found.ball, found.diameter, found.spectral])).all()
    assert set(found.diameter_kind.flat) <= {"pair", "centre"}
    for head, i in itertools.product(range(scores.shape[0]), (0, scores.shape[1] - 1)):
        row = Row(scores[head, i], values[head], keep[head, i], name=f"{layer} {head} {i}")
        squared = row.squared_error()
        for form in FORMS:
            assert above(float(getattr(found, form)[head, i]), squared), (row.name, form)
        assert float(found.exact[head, i]) ** 2 <= float(squared) * (1 + 1e-9)
        want = formulas(row)
        diameter = want[str(found.diameter_kind[head, i])]
        assert abs(found.diameter[head, i] - diameter) <= 1e-9 * diameter
        assert want["spectral"] <= found.spectral[head, i] <= 1.01 * want["spectral"]
        assert abs(found.variance[head, i] - want["variance"]) <= 1e-9 * want["variance"]
        assert abs(found.chi_square[head, i] - want["plain"]) <= 1e-9 * want["plain"]
        assert abs(found.norm[head, i] - want["norm"]) <= 1e-9 * want["norm"]


# ------------------------------------------------------------------------------- exact answers


def test_two_keys_reach_the_diameter() -> None:
    """One kept, one dropped: exact, diameter and variance are all tau ||v_0 - v_1||."""
    scores, values = np.array([1.0, 0.0]), np.array([[3.0, 0.0], [0.0, 4.0]])
    found = output_error(scores, values, [0])
    want = 5.0 / (1.0 + np.e)
    for form in ("exact", "diameter", "variance"):
        assert want * (1 - 1e-15) <= float(getattr(found, form)) <= want * (1 + 1e-11)


def test_nothing_dropped_and_nothing_to_lose() -> None:
    rng = np.random.default_rng(1)
    scores, values = rng.standard_normal((3, 6)), rng.standard_normal((6, 4))
    for found in (
        output_error(scores, values, np.ones(6, bool)),
        output_error(scores, np.repeat(values[:1], 6, axis=0) / 3, np.eye(3, 6, dtype=bool)),
        output_error([[2.0]], [[1.0, np.pi]], [0]),
        output_error(scores, values, np.zeros(6, bool), lengths=0),
        output_error(scores, np.empty((6, 0)), np.eye(3, 6, dtype=bool)),
    ):
        # Equal values lose nothing, whatever their length.
        for form in (*COMPETING, "chi_square", "best"):
            assert (getattr(found, form) == 0.0).all(), form
        assert (found.which == "exact").all()


def test_an_empty_kept_set_loses_the_whole_output() -> None:
    rng = np.random.default_rng(2)
    scores, values = rng.standard_normal(9), rng.standard_normal((9, 5)) + 2
    row = Row(scores, values, np.zeros(9, bool))
    found = check(row)
    p = np.exp(scores) / np.exp(scores).sum()
    assert abs(found.exact - np.linalg.norm(p @ values)) < 1e-10
    assert found.variance == np.inf
    assert found.diameter == pytest.approx(np.linalg.norm(values, axis=1).max(), rel=1e-10)
    assert found.diameter_kind == "centre"
    check(Row(np.zeros(1), np.array([[3.0, 4.0]]), np.zeros(1, bool)))


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-204, 1e-160, 1e-3, 1.0, 1e300, 1.7e308])
def test_values_of_any_size(size: float) -> None:
    """A single value is its own centre; the zero vector is as far from it as it is long."""
    if size < 1.7e308:
        row = Row(np.zeros(2), np.array([[0.0, size, -size]] * 2), np.zeros(2, bool))
        assert check(row).exact <= float(size * np.sqrt(2)) * (1 + 1e-9) + 2e-323
    rng = np.random.default_rng(3)
    scores, values = rng.standard_normal(12), rng.uniform(-1, 1, (12, 3)) * size
    row = Row(scores, values, scores > 0)
    assert float(check(row).exact) <= float(row.squared_error().sqrt()) * (1 + 1e-9) + 5e-322
    # Large components do not hide what is lost.
    check(Row(np.zeros(2), np.array([[1e308, 0.0], [1e308, 5e-324]]), np.arange(2) == 0))


@pytest.mark.parametrize("kept", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
@pytest.mark.parametrize("depth", [50.0, 700.0, 760.0, 3000.0])
def test_scores_far_apart(kept: list[int], depth: float) -> None:
    """A side whose weights all underflow against the other keeps its own mean."""
    scores = np.array([0.0, -depth, -depth - 1])
    values = np.array([[1.0, 2.0], [-3.0, 5.0], [7.0, 0.5]])
    check(Row(scores, values, np.isin(np.arange(3), kept), name=f"{kept} {depth}"))


def test_probs_far_apart() -> None:
    scores = np.array([1e300, 1e-300, 5e-324])
    values = np.array([[1e-3], [2.0], [1e3]])
    for kept in ([0], [1], [2], [0, 1], [1, 2], []):
        check(Row(scores, values, np.isin(np.arange(3), kept), {"kind": "probs"}, f"{kept}"))


# ------------------------------------------------------------------------------------- shapes


def test_grouped_heads_and_query_axes() -> None:
    rng = np.random.default_rng(4)
    scores = rng.standard_normal((2, 6, 3, 20)).astype(np.float32)
    values = rng.standard_normal((2, 2, 20, 8)).astype(np.float16)
    sel = ck.select(scores, 0.2, causal_offset=17)
    found = output_error(scores, values, sel, causal_offset=17)
    assert found.best.shape == (2, 6, 3)
    for b, h, i in np.ndindex(2, 6, 3):
        alone = output_error(scores[b, h, i], values[b, h // 3], sel.row((b, h, i)), lengths=18 + i)
        # All rows of a head share its centre, so the bits may differ, and so may ball and spectral.
        for form in ("exact", "diameter", "variance"):
            assert getattr(found, form)[b, h, i] == pytest.approx(
                float(getattr(alone, form)), rel=1e-9
            )


def test_values_per_row_and_for_all_rows() -> None:
    rng = np.random.default_rng(5)
    scores, values = rng.standard_normal((4, 10)), rng.standard_normal((4, 10, 3))
    keep = scores > 0
    own = output_error(scores, values, keep).exact
    assert [float(output_error(*one).exact) for one in zip(scores, values, keep, strict=True)] == (
        own.tolist()
    )
    shared = output_error(scores, values[0], keep).exact
    assert shared[0] == pytest.approx(own[0], rel=1e-9)
    assert (shared[1:] != own[1:]).all()
    # Strided values are read in place.
    wide = np.repeat(values, 2, axis=1)[:, ::2]
    assert (output_error(scores, wide, keep).exact == own).all()


def test_results_are_frozen_and_pickle() -> None:
    found = output_error([1.0, 0.0], [[1.0], [2.0]], [0])
    again = pickle.loads(pickle.dumps(found))
    assert again.exact == found.exact
    assert not found.best.flags.writeable
    assert str(found.which) in repr(found)
    sel = select_output([1.0, 0.0], [[1.0], [2.0]], 1.0)
    assert pickle.loads(pickle.dumps(sel)).k == sel.k == 1
    assert "error <=" in repr(sel)


# ------------------------------------------------------------------------------------- budgets


def prefix_errors(row: Row) -> list[arb]:
    """Exact squared errors of the prefixes of 1, 2, ... keys."""
    scores = row.scores.astype(np.float64) * np.sign(row.options.get("scale", 1.0))
    order = np.argsort(-scores, kind="stable")
    hidden = ~row.options.get("mask", np.ones(len(scores), bool)) | (scores == -np.inf)
    if row.options.get("kind") == "probs":
        hidden |= scores == 0
    order = order[~hidden[order]]
    squares = []
    for k in range(1, len(order) + 1):
        kept = np.isin(np.arange(len(scores)), order[:k])
        squares.append(Row(row.scores, row.values, kept, row.options).squared_error())
    return squares


def check_budget(row: Row, out_tol: float, squares: list[arb]) -> Any:
    sel = select_output(row.scores, row.values, out_tol, **row.options)
    k = int(sel.k)
    if not squares:
        assert k == 0
        assert sel.selection.status == ck.Status.EMPTY
        return sel
    assert sel.error_upper <= out_tol
    assert above(float(sel.error_upper), squares[k - 1]), row.name
    with Precision(BITS):
        budget = arb(out_tol) ** 2
        if bool(sel.minimal):
            assert all(square > budget for square in squares[: k - 1]), row.name
        # What is clearly within the budget is never passed over.
        room = arb(out_tol) * arb(fmpq(10**8 - 1, 10**8)) - arb(1e-9) * size(row)
        if room > 0:
            assert not any(square < room**2 for square in squares[: k - 1]), row.name
    kept = sel.to_mask()
    cert = ck.certify(row.scores, kept, independent=True, **row.options)
    assert cert.tail_mass_lower <= sel.selection.tail_mass_upper
    assert sel.selection.tail_mass_lower <= cert.tail_mass_upper
    return sel


def size(row: Row) -> arb:
    return arb(float(np.nanmax(np.abs(row.values.astype(np.float64)), initial=0.0)) * 64)


def test_budgets_hold_and_nothing_shorter_does() -> None:
    minimal = total = 0
    for seed in range(120):
        row = make_row(seed + 5000)
        if len(row.scores) > 20:
            continue
        squares = prefix_errors(row)
        sizes = [float(s) ** 0.5 for s in squares] or [1.0]
        for out_tol in (0.0, 1e-3, float(np.median(sizes)), 0.999 * max(sizes), max(sizes) * 1.01):
            sel = check_budget(row, out_tol, squares)
            # A tie with the budget, or an error of exactly 0, may stay open.
            if out_tol not in (0.0, *sizes):
                minimal, total = minimal + int(sel.minimal), total + 1
    assert total > 200
    assert minimal >= 0.97 * total


@pytest.mark.parametrize("depth", [0.0, 1000.0])
def test_the_first_prefix_that_is_certified_is_taken(depth: float) -> None:
    """Also where rounding leaves every prefix open: all but one weight lost, or values alike."""
    rng = np.random.default_rng(31)
    for n in (3, 12, 40):
        scores = rng.standard_normal(n)
        scores[0] += depth + 5
        values = rng.standard_normal((n, 3)) if depth else 1 + 1e-15 * rng.standard_normal((n, 3))
        order = np.argsort(-scores)
        kept = np.array([np.isin(np.arange(n), order[:k]) for k in range(1, n)])
        exact = output_error(np.tile(scores, (n - 1, 1)), values, kept).exact
        for tol in np.concatenate([exact, exact * 0.999]):
            first = np.flatnonzero(np.append(exact, 0.0) <= tol)[0] + 1
            assert select_output(scores, values, tol).selection.k == first


def test_the_error_is_not_monotone() -> None:
    """A budget met by one key and by four, but not by two: the shortest is found."""
    scores = np.array([2.0, 1.0, 1.0, 0.0])
    values = np.array([[0.0], [1.0], [-1.0], [0.0]])
    squares = prefix_errors(Row(scores, values, scores > 5))
    assert [float(s) < 1e-20 for s in squares] == [True, False, True, True]
    sel = select_output(scores, values, 1e-6)
    assert sel.k == 1
    assert sel.minimal


@pytest.mark.parametrize("layer", range(6))
def test_budgets_on_real_rows(small_cache: Cache, layer: int) -> None:
    scores, values = real(small_cache, layer)
    typical = np.linalg.norm(values, axis=-1).mean()
    for share in (0.1, 0.01, 0.001):
        sel = select_output(scores, values, share * typical)
        assert sel.minimal.all()
        found = output_error(scores, values, sel.selection)
        assert (found.exact == sel.error_upper).all()
        assert (found.exact <= share * typical).all()
        # One key less: provably too much.
        k = sel.k[..., None]
        rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1, kind="stable")
        assert (sel.to_mask() == (rank < k)).all()
        less = output_error(scores, values, rank < np.maximum(k - 1, 1))
        assert (less.exact[sel.k > 1] > share * typical).all()


def test_budgets_per_row_and_masks() -> None:
    rng = np.random.default_rng(8)
    scores, values = rng.standard_normal((3, 30)), rng.standard_normal((30, 4))
    sel = select_output(scores, values, [0.5, 0.05, 0.0], lengths=[30, 20, 0])
    assert (sel.error_upper <= sel.out_tol).all()
    assert sel.k[2] == 0
    assert sel.selection.status.tolist() == [0, 0, int(ck.Status.EMPTY)]
    assert not sel.to_mask()[1, 20:].any()


# -------------------------------------------------------------------------------------- errors
