"""Bad input is a CertkError that names the argument, the place and the remedy, in one line."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certk_rs as ck

ROWS = np.zeros((2, 3, 5), dtype=np.float32)
ROW = np.zeros(5, dtype=np.float32)
FUNCTIONS = ("select", "certify", "keep_set")


def planted(value: float, dtype: Any = np.float32) -> np.ndarray:
    """ROWS with one bad entry at [1, 2, 3]."""
    rows = ROWS.astype(dtype)
    rows[1, 2, 3] = value
    return rows


def call(function: str, scores: Any, **options: Any) -> Any:
    """Any of the three functions with the options they share."""
    if function == "certify":
        keep = options.pop("keep", None)
        shape = np.shape(scores) if not hasattr(scores, "shape") else tuple(scores.shape)
        return ck.certify(scores, np.ones(shape, dtype=bool) if keep is None else keep, **options)
    return getattr(ck, function)(scores, options.pop("eps", 0.1), **options)


def refuse(*words: str, function: str = "select", scores: Any = ROWS, **options: Any) -> None:
    """The call raises CertkError with all these words in one line."""
    with pytest.raises(ck.CertkError) as caught:
        call(function, scores, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_bad_scores_name_the_place(function: str, dtype: Any) -> None:
    where = "scores[1, 2, 3]"
    refuse(where, "NaN", function=function, scores=planted(np.nan, dtype))
    refuse(where, "inf", function=function, scores=planted(np.inf, dtype))
    refuse(where, "inf", function=function, scores=planted(np.inf, dtype), scale=-1.0)
    refuse(where, "NaN", function=function, scores=planted(np.nan, dtype), kind="logprobs")
    for value in (np.nan, np.inf, -np.inf, -0.25):
        refuse(where, function=function, scores=planted(value, dtype), kind="probs")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 255, 257, 1025, 4097, 70001])
def test_a_bad_score_is_found_wherever_it_is(function: str, n: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.standard_normal((3, n)).astype(np.float32)
    for place in {0, n // 2, n - 1, int(rng.integers(n))}:
        for value, word in ((np.nan, "NaN"), (np.inf, "inf")):
            bad = rows.copy()
            bad[2, place] = value
            refuse(f"scores[2, {place}]", word, function=function, scores=bad)


def test_the_first_bad_score_is_named_for_any_number_of_threads() -> None:
    rows = np.zeros((300, 400), dtype=np.float32)
    rows[57:, 123:] = np.nan
    for threads in (1, 2, 8):
        refuse("scores[57, 123]", "NaN", scores=rows, threads=threads)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_weights_whose_sum_overflows_name_the_row(function: str) -> None:
    rows = np.full((2, 3), 0.25)
    rows[1] = 1e308
    refuse("scores[1]", function=function, scores=rows, kind="probs")


def test_one_row_is_named_by_its_position() -> None:
    row = ROW.copy()
    row[4] = np.nan
    refuse("scores[4]", "NaN", scores=row)
    flat = np.zeros(9, dtype=np.float32)
    flat[7] = np.nan
    refuse("scores", "NaN", scores=flat, indptr=np.array([0, 4, 9]))


@pytest.mark.parametrize("eps", [1.0, 1.5, -1e-300, -0.1, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("function", ["select", "keep_set"])
def test_eps_outside_its_range(eps: float, function: str) -> None:
    refuse("eps", function=function, eps=eps)
    each = np.full((2, 3), 0.1)
    each[1, 0] = eps
    refuse("eps[1, 0]", function=function, eps=each)
    refuse("eps", function="certify", eps=eps)


def test_minus_zero_is_a_budget_of_zero() -> None:
    assert ck.select(ROW, -0.0).k == 5


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_scale_must_be_finite(scale: float, function: str) -> None:
    refuse("scale", function=function, scale=scale)


@pytest.mark.parametrize("scale", ["1", None, 1j, [1.0], True])
def test_scale_must_be_a_number(scale: Any) -> None:
    refuse("scale", scale=scale)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_shapes(function: str) -> None:
    refuse("mask", function=function, mask=np.ones((2, 3, 4), dtype=bool))
    refuse("mask", function=function, mask=np.ones((3, 3, 5), dtype=bool))
    refuse("mask", function=function, mask=np.ones((1, 2, 3, 5), dtype=bool))
    refuse("lengths", function=function, lengths=np.zeros((3, 2), dtype=np.int64))
    refuse("lengths", function=function, lengths=np.zeros(6, dtype=np.int64))
    refuse("eps", function=function, eps=np.full(6, 0.1))
    refuse("eps", function=function, eps=np.full((2, 3, 1), 0.1))
    refuse("scores", function=function, scores=np.float32(1.0))


def test_lengths_out_of_range_name_the_row() -> None:
    lengths = np.full((2, 3), 5)
    lengths[1, 1] = 6
    refuse("lengths[1, 1]", "6", lengths=lengths)
    lengths[1, 1] = -1
    refuse("lengths[1, 1]", "-1", lengths=lengths)
    refuse("lengths", lengths=np.full((2, 3), 2.0))
    refuse("lengths", lengths=np.full((2, 3), True))


@pytest.mark.parametrize(
    "dtype",
    [np.int8, np.int32, np.int64, np.uint8, np.complex64, np.longdouble, bool, "U1", object],
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_dtypes_that_are_no_scores(dtype: Any, function: str) -> None:
    refuse("scores", "dtype", function=function, scores=np.zeros((2, 3, 5), dtype=dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.complex128, np.longdouble])
def test_dtypes_that_are_no_masks(dtype: Any) -> None:
    refuse("mask", "dtype", mask=np.zeros((2, 3, 5), dtype=dtype))


def test_things_that_are_no_arrays() -> None:
    refuse("scores", scores=None)
    refuse("scores", scores="0.5")
    refuse("scores", scores=[[1.0, 2.0], [1.0]])
    refuse("scores", scores={1: 2})
    refuse("scores", scores=np.ma.masked_array(ROW, mask=ROW == 0))
    refuse("eps", eps="0.1")
    refuse("eps", eps=None)
    refuse("eps", eps=0.1 + 0j)
    refuse("kind", kind="softmax")
    refuse("kind", kind=None)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_on_other_devices(function: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 5), device="meta")
    refuse("scores", "meta", function=function, scores=tensor)
    refuse("scores", "dtype", function=function, scores=torch.zeros((2, 5), dtype=torch.int64))
    refuse("scores", function=function, scores=torch.zeros((2, 5)).to_sparse())


def test_masks_with_bad_entries_name_the_place() -> None:
    mask = np.zeros((2, 3, 5), dtype=np.float32)
    for value in (np.nan, np.inf):
        mask[0, 1, 4] = value
        refuse("mask[0, 1, 4]", mask=mask)


def test_options_that_exclude_each_other() -> None:
    flat, starts = np.zeros(10, dtype=np.float32), np.array([0, 4, 10])
    refuse("scale", "probs", kind="probs", scale=0.5)
    refuse("mask", "probs", kind="probs", mask=np.zeros((2, 3, 5), dtype=np.float32))
    refuse("indptr", scores=flat, indptr=starts, mask=np.ones(10, dtype=bool))
    refuse("indptr", scores=flat, indptr=starts, lengths=np.array([1, 1]))
    refuse("indptr", scores=flat, indptr=starts, causal_offset=1)
    refuse("indptr", function="keep_set", scores=flat, indptr=starts)
    refuse("causal_offset", scores=ROW, causal_offset=0)


@pytest.mark.parametrize(
    "starts", [[1, 4, 10], [0, 4, 9], [0, 4, 11], [0, 7, 4, 10], [0, -1, 10], [], [[0, 10]]]
)
def test_row_starts_that_do_not_fit(starts: Any) -> None:
    refuse("indptr", scores=np.zeros(10, dtype=np.float32), indptr=np.array(starts, dtype=np.int64))


def test_row_starts_of_a_wrong_type() -> None:
    flat = np.zeros(10, dtype=np.float32)
    refuse("indptr", scores=flat, indptr=np.array([0.0, 10.0]))
    refuse("indptr", scores=flat.reshape(2, 5), indptr=np.array([0, 10]))


@pytest.mark.parametrize("name", ["min_keep", "keep_first", "keep_last", "block_size", "max_keep"])
@pytest.mark.parametrize("value", [-1, "3", 2**70, [1], True])
def test_counts_must_be_counts(name: str, value: Any) -> None:
    refuse(name, **{name: value})


def test_values_out_of_range() -> None:
    for value in (0, 0.0, 1.5, -0.5, np.nan):
        refuse("max_keep", max_keep=value)
    refuse("block_size", block_size=0)
    refuse("min_keep", min_keep=1.5)
    refuse("keep_first", "max_keep", keep_first=3, max_keep=2)
    refuse("keep_last", "max_keep", keep_first=1, keep_last=2, max_keep=2)
    refuse("threads", threads=0)
    refuse("threads", threads=-1)
    refuse("threads", threads=1.0)
    refuse("causal_offset", causal_offset=0.5)
    refuse("prove_minimal", prove_minimal="yes")


def test_min_keep_above_max_keep_in_every_form() -> None:
    """An unsatisfiable limit is an error that names the row, in every form of the limit."""
    torch = pytest.importorskip("torch")
    import certk_rs.torch as ct

    scores = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    options: dict[str, Any]
    for options in (
        {"max_keep": 3},
        {"max_keep": 0.15},
        {"max_keep": 0.15, "lengths": np.array([20, 4, 20])},
        {"max_keep": 0.15, "keep_first": 1, "keep_last": 2},
        {"max_keep": 0.15, "scale": -1.0},
        {"max_keep": 0.15, "prove_minimal": True, "mask": np.arange(20) > 2},
        {"max_keep": 6, "block_size": 4},
    ):
        words = ("min_keep", "max_keep")
        refuse(*words, scores=scores, min_keep=5, **options)
        tensors = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        for function in (ct.select, ct.select_mask):
            with pytest.raises(ck.CertkError, match="min_keep"):
                function(torch.from_numpy(scores), 0.1, min_keep=5, **tensors)
    # A row with fewer keys than min_keep is to keep them all; one without keys is to keep none.
    refuse("min_keep is 4", "allows 2 keys of row [1]", scores=scores, min_keep=5,
           max_keep=0.5, lengths=np.array([20, 4, 20]))  # fmt: skip
    starts = np.array([0, 0, 3, 23])
    flat = np.zeros(23, np.float32)
    refuse("row [1]", scores=flat, indptr=starts, min_keep=2, max_keep=0.4)
    kept = ck.select(flat[:0].reshape(2, 0), 0.1, min_keep=2, max_keep=0.1)
    assert (kept.status == ck.Status.EMPTY).all()
    fits = ck.select(scores, 0.999, min_keep=5, max_keep=0.25)
    assert (fits.k == 5).all()
    fits = ck.select(scores, 0.999, min_keep=5, max_keep=8, block_size=4)
    assert (fits.k == 8).all()


def test_kept_indices_out_of_range_or_twice_name_the_row() -> None:
    scores = np.zeros((2, 5), dtype=np.float32)

    def bad(*words: str, keep: Any, scores: Any = scores) -> None:
        for independent in (False, True):
            refuse("keep", *words, function="certify", scores=scores, keep=keep,
                   independent=independent)  # fmt: skip

    bad("5", "[1]", keep=[[0], [1, 5]])
    bad("-2", "[0]", keep=[[0, -2], [1]])
    bad("3", "twice", "[1]", keep=[[0], [3, 1, 3]])
    bad("7", "[0]", keep=np.array([[7, -1], [1, 2]]))
    bad("twice", "[1]", keep=np.array([[0, -1], [2, 2]]))
    bad(keep=[[0]])
    bad(keep=[[0], [1], [2]])
    bad(keep=[0, 1])
    bad(keep=np.zeros((3, 2), dtype=np.int64))
    bad(keep=np.zeros((2, 4), dtype=bool))
    bad(keep=np.zeros((2, 5), dtype=np.float32))
    bad(keep=[[0.5], [1]])
    bad(keep="01")
    bad("9", keep=[9], scores=scores[0])
    bad("Selection", keep=ck.select(np.zeros((2, 4)), 0.1))
    bad("Selection", keep=ck.select(np.zeros((3, 5)), 0.1))


def test_a_negative_index_in_a_list_is_no_padding() -> None:
    """-1 pads arrays; in a list of index arrays it is an error or padding, never the last key."""
    scores = np.array([[0.0, 1.0, 50.0]])
    try:
        cert = ck.certify(scores, [[0, -1]])
    except ck.CertkError as error:
        said = str(error)
    else:
        said = "keep" if cert.k[0] == 1 else "taken as the last key"
    assert "keep" in said


def test_nothing_but_certk_errors_and_they_are_value_errors() -> None:
    assert issubclass(ck.CertkError, ValueError)
    with pytest.raises(ValueError, match="eps"):
        ck.select(ROW, 2.0)
    with pytest.raises(TypeError):
        ck.select(ROW, 0.1, budget=3)  # type: ignore[call-arg]


def test_a_row_selected_after_an_error_is_right() -> None:
    """An error leaves nothing behind in the scratch memory."""
    rows = np.random.default_rng(0).standard_normal((50, 300)).astype(np.float32)
    want = ck.select(rows, 0.1).indices.tobytes()
    bad = rows.copy()
    bad[31, 200] = np.nan
    refuse("scores[31, 200]", scores=bad)
    assert ck.select(rows, 0.1).indices.tobytes() == want
