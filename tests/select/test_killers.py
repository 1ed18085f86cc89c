"""The named killers: each row broke an earlier version of the arithmetic, or somebody else's.

Every killer states its answer where it is known by hand; all go through the oracle as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from cases import Case
from checks import certificate_faults, keep_mask, selection_faults
from generators import BFLOAT16

F32_MAX = float(np.finfo(np.float32).max)
F32_MIN = float(np.finfo(np.float32).min)


def solve(
    scores: Any, eps: float, dtype: Any = np.float32, *, prove: bool = False, **options: Any
) -> Any:
    """Select one row, and hold the Selection and its two certificates against the oracle."""
    stored = np.asarray(scores, dtype=np.float64).astype(dtype)[None, :]
    if "mask" in options:
        options["mask"] = np.asarray(options["mask"])[None, :]
    case = Case(stored, np.array([eps]), name="killer", **options)
    sel = ck.select(stored, case.eps, prove_minimal=prove, **case.select_options())
    assert selection_faults(case, sel) == []
    keep = keep_mask(case, sel.indptr, sel.indices)
    for independent in (False, True):
        cert = ck.certify(stored, sel, eps=eps, independent=independent, **case.row_options())
        assert certificate_faults(case, keep, cert) == []
        assert cert.holds[0] or sel.status[0] == ck.Status.OVER_BUDGET
    return sel


def certify_one(scores: Any, keep: list[int], dtype: Any = np.float32, **options: Any) -> Any:
    """Certify one row's kept set, both ways, against the oracle; the kernels' answer."""
    stored = np.asarray(scores, dtype=np.float64).astype(dtype)[None, :]
    case = Case(stored, np.array([0.5]), name="killer", **options)
    mask = np.zeros(stored.shape, dtype=bool)
    mask[0, keep] = True
    for independent in (True, False):
        cert = ck.certify(stored, [keep], independent=independent, **case.row_options())
        assert certificate_faults(case, mask, cert, with_eps=False) == []
    return cert


def test_a_tail_at_the_edge_of_exp_is_not_zero() -> None:
    """(0, -103.6) keep {0}: a flushed weight must not become a tail mass of 0."""
    cert = certify_one([0.0, -103.6], [0])
    assert cert.tail_mass_upper[0] >= 1.0164647e-45


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16])
def test_a_budget_below_every_flushed_weight(dtype: Any) -> None:
    """(0, -200) at eps = 1e-80: e^-200 = 1.4e-87 fits, and nobody may claim it fits at 0."""
    sel = solve([0.0, -200.0], 1e-80, dtype)
    assert sel.k[0] in (1, 2)
    assert sel.k[0] == 2 or sel.tail_mass_upper[0] >= 1.38e-87


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_of_the_scaled_score_far_from_zero(dtype: Any) -> None:
    """s = 1e5 with scale 0.1: fl(scale * s) - c has lost the difference."""
    scores = 1e5 - np.arange(64) * np.float64(0.0078125) * 3
    for eps in (0.5, 0.1, 0.01, 1e-6):
        solve(scores, eps, dtype, scale=0.1)
        solve(-scores, eps, dtype, scale=-0.1)


def test_largest_floats_with_a_tiny_scale() -> None:
    """+-3.4e38 with scale 1e-38: s - c overflows float32, the scaled gap is 6.8."""
    sel = solve([3.4e38, -3.4e38], 0.01, scale=1e-38)
    assert sel.k[0] == 1
    sel = solve([3.4e38, -3.4e38, 3.4e38], 1e-4, scale=1e-38)
    assert sel.k[0] == 3
    solve([F32_MAX, F32_MIN, 0.0, 1e38], 0.01, scale=-1e-38)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BFLOAT16])
def test_finfo_min_masks_on_a_whole_row(dtype: Any) -> None:
    """An additive mask of finfo.min everywhere leaves an EMPTY row, not a uniform one."""
    import ml_dtypes

    lowest = ml_dtypes.finfo(dtype).min
    sel = solve([1.0, 2.0, 3.0], 0.1, mask=np.full(3, lowest, dtype=dtype))
    assert sel.status[0] == ck.Status.EMPTY
    sel = solve([1.0, 2.0, 3.0], 0.1, mask=np.array([lowest, 0.0, lowest], dtype=dtype))
    assert sel.row(0).tolist() == [1]


def test_stored_finfo_min_is_a_score_like_any_other() -> None:
    """Scores (not masks) of finfo.min on a whole row are equal scores."""
    sel = solve([F32_MIN] * 4, 0.25, prove=True)
    assert sel.k[0] == 3
    assert sel.minimal[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BFLOAT16])
def test_two_weights_that_overflow_when_added(dtype: Any) -> None:
    """[3e38, 3e38] as probs: the sum is beyond float32."""
    sel = solve([3e38, 3e38], 0.5, dtype, kind="probs", prove=True)
    assert sel.row(0).tolist() == [0]
    assert sel.tail_mass_upper[0] == 0.5
    sel = solve([3e38, 3e38], 0.499, dtype, kind="probs")
    assert sel.k[0] == 2


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BFLOAT16])
def test_uniform_rows_are_decided_in_integers(kind: str, dtype: Any) -> None:
    """Four entries at eps = 1/4: three are enough, exactly; just below, all four are needed."""
    sel = solve([0.7] * 4, 0.25, dtype, kind=kind, prove=True)
    assert sel.row(0).tolist() == [0, 1, 2]
    assert sel.minimal[0]
    assert sel.tail_mass_upper[0] == 0.25
    sel = solve([0.7] * 4, np.nextafter(0.25, 0.0), dtype, kind=kind, prove=True)
    assert sel.k[0] == 4
    assert sel.minimal[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_two_equal_keys_at_a_half(dtype: Any) -> None:
    """n = 2 at eps = .5: one key is enough, and the other half is exactly lost."""
    sel = solve([-4.25, -4.25], 0.5, dtype, prove=True)
    assert sel.row(0).tolist() == [0]
    assert sel.tail_mass_upper[0] == 0.5
    assert sel.minimal[0]
    sel = solve([0.0, 1e-3], 0.5, dtype, prove=True)
    assert sel.row(0).tolist() == [1]
    assert sel.minimal[0]


def test_a_tie_spoilt_by_a_weight_that_underflows() -> None:
    """(0, 0, -1e38) at 1/2: with one zero kept a little *more* than half is lost."""
    for low in (-1e38, -3000.0, -200.0, -100.0):
        sel = solve([0.0, 0.0, low], 0.5, prove=True)
        assert sel.k[0] == 2
    certify_one([0.0, 0.0, -1e38], [0])
    certify_one([0.0, 0.0, -1e38], [2])


def test_a_tie_over_many_keys_with_scale_0() -> None:
    """Scale 0 makes all finite entries equal; -inf stays masked; the lowest positions are kept."""
    scores = np.array([1e30, -np.inf, -3.0, 7.0, 0.0, 5.0])
    sel = solve(scores, 0.2, scale=0.0, prove=True)
    assert sel.row(0).tolist() == [0, 2, 3, 4]
    assert sel.minimal[0]


def test_nucleus_of_a_saturated_sum() -> None:
    """131072 equal bf16 weights: a bf16 or f32 running sum stops growing long before the end."""
    n = 131072
    for dtype in (BFLOAT16, np.dtype(np.float32)):
        sel = solve(np.full(n, 2.0**-17), 0.25, dtype, kind="probs", prove=True)
        assert sel.k[0] == 3 * n // 4
        sel = solve(np.zeros(n), 0.25, dtype, prove=True)
        assert sel.k[0] == 3 * n // 4


def test_the_boundary_in_the_last_bits() -> None:
    """Weights that halve, eps = 2**-j up to 3 float64 steps: k turns at the exact step."""
    scores = -np.arange(40) * np.log(2.0)
    for j in (1, 4, 11, 20):
        eps = 2.0**-j
        for steps in range(-3, 4):
            solve(scores, eps + steps * np.spacing(eps), np.float64, prove=True)
            solve(scores, eps + steps * np.spacing(eps), np.float32, prove=True)


def test_mass_left_far_below_the_top() -> None:
    """A million-to-one row: many small weights add up to more than the budget."""
    scores = np.concatenate([[0.0], np.full(4095, -20.0)])
    sel = solve(scores, 1e-6, prove=True)
    assert sel.k[0] > 1
    solve(np.concatenate([[0.0], np.full(65536, -87.0)]), 1e-30)
    solve(np.concatenate([[0.0], np.full(65536, -88.0)]), 1e-30)


def test_range_beyond_exp_with_forced_keys_only() -> None:
    """The kept keys may all underflow against the rest: the tail mass is then 1, not NaN."""
    sel = solve([-200.0, -300.0, 0.0, 1.0], 0.5, keep_first=2, max_keep=2)
    assert sel.status[0] == ck.Status.OVER_BUDGET
    assert sel.tail_mass_upper[0] == 1.0
    sel = solve([0.0, 0.0, 1e4], 1 - 2.0**-53, keep_first=1)
    assert sel.status[0] == ck.Status.CERTIFIED
    certify_one([-200.0, 0.0], [0])
    certify_one([-1e30, 1e30], [0])
    certify_one([-1e308, 1e308], [0], np.float64)
    certify_one([-1e308, 1e308], [1], np.float64)


def test_differences_that_overflow_float64() -> None:
    """s - c = -3.4e308 is clamped, whatever the scale."""
    scores = [1.7e308, -1.7e308, 1.7e308, 0.0]
    for scale in (1.0, -1.0, 1e3, 1e-308, 1e-310):
        for eps in (0.5, 0.1, 1e-300):
            solve(scores, eps, np.float64, scale=scale, prove=True)


def test_additive_masks_that_cancel_the_score() -> None:
    """scale * s + mask as real numbers: only the sum counts, not the size of its parts."""
    scores = np.array([1e6, 1e6 - 1, 1e6 - 2, 1e6 + 1])
    mask = np.array([-1e5, -1e5 + 0.1, -1e5 + 0.25, -1e5 - 0.1])
    for eps in (0.5, 0.2, 0.01):
        solve(scores, eps, np.float64, scale=0.1, mask=mask, prove=True)
        solve(scores, eps, np.float32, scale=0.1, mask=mask.astype(np.float32), prove=True)


def test_a_bias_of_one_row_is_no_mask() -> None:
    """One entry of the bias is 5 and all others 0, so the bias is not the mask it looks like."""
    bias = np.zeros(200)
    bias[3] = 5.0
    assert 3 in solve(np.zeros(200), 0.1, mask=bias.astype(np.float16)).row(0)
    assert solve(np.zeros(200), 0.1, mask=np.zeros(200, np.float16)).k[0] == 180


@pytest.mark.parametrize(
    ("scores", "mask", "scale"),
    [
        ([1e30, 1e30, 0.0], [-1e30, -1e30 + 1e14, 0.0], 1.0),
        ([1e15, 1e15, 1e15], [0.25, 0.5, -1e15], 1.0),
        ([-1e308, -0.9e308], [1.7e308, 1.7e308], 10.0),
        ([1e308, 0.9e308], [1e308, 1e308], 1e3),
    ],
)
def test_additive_masks_too_large_are_refused_or_right(
    scores: list[float], mask: list[float], scale: float
) -> None:
    """Sums that round give an error or a true certificate, never a false one."""
    refusal = "mask"
    for options in ({}, {"max_keep": 1}):
        try:
            solve(scores, 0.1, np.float64, mask=np.array(mask), scale=scale, **options)
        except ck.CertkError as error:
            refusal = str(error)
    assert "mask" in refusal


def test_order_by_the_stored_score_not_by_its_weight() -> None:
    """Neighbouring floats have one float32 weight; the larger score is still the better key."""
    base = np.float32(-3.0)
    up = np.nextafter(base, np.float32(0.0))
    sel = solve(np.array([base, base, up, base]), 0.74, np.float32, prove=True)
    assert 2 in sel.row(0).tolist()
    sel = solve(np.array([base, base, up, base]), 0.74, np.float32, scale=-1.0, prove=True)
    assert sel.row(0).tolist() == [0, 1]
    tiny = np.array([1.0, 1.0 + 2.0**-52, 1.0])
    sel = solve(tiny, 0.6, np.float64, scale=1e-30, prove=True)
    assert 1 in sel.row(0).tolist()
