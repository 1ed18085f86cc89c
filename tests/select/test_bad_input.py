"""Bad input is a CertkError that names the argument, the place and the remedy, in one line."""

from __future__ import annotations

import array as stdlib_array
import decimal
import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certk_rs as ck

ROWS = np.zeros((2, 3, 5), dtype=np.float32)
ROW = np.zeros(5, dtype=np.float32)
FLAT = np.zeros(10, dtype=np.float32)
FUNCTIONS = ("select", "certify", "keep_set")
LONG_DOUBLE = np.dtype(np.longdouble).itemsize > 8


def call(function: str, scores: Any, **options: Any) -> Any:
    """Call one of the three functions, by default with a valid budget and a valid kept set."""
    if function == "certify":
        keep = np.ones(np.shape(scores) or 1, dtype=bool) if "keep" not in options else None
        return ck.certify(scores, options.pop("keep", keep), **options)
    return getattr(ck, function)(scores, options.pop("eps", 0.1), **options)


def refuse(*words: str, function: str = "select", scores: Any = ROWS, **options: Any) -> None:
    """Assert that the call raises CertkError with all these words in one line."""
    with pytest.raises(ck.CertkError) as caught:
        call(function, scores, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(words[0]), f"{message!r} does not start with {words[0]!r}"
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


# ------------------------------------------------------------------------ things that no score is

NO_SCORES: dict[str, tuple[Any, str]] = {
    "int64": (np.arange(4), "convert it to float16"),
    **{
        name: (np.zeros(4, dtype=name), f"dtype {name}")
        for name in ("int8", "int32", "int64", "uint8", "uint16", "bool", "complex64")
    },
    "object": (np.array([1.0, None]), "object"),
    "str": (np.array(["1.0"]), "dtype"),
    "datetime": (np.array(["2020-01-01"], dtype="datetime64[D]"), "datetime64"),
    "structured": (np.zeros(3, dtype=[("a", "f4")]), "dtype"),
    "float8": (np.ones(4, dtype=ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    "list of bool": ([True, False], "bool"),
    "list of complex": ([1j, 2.0], "complex128"),
    "list of str": (["1.0", "2.0"], "dtype"),
    "list of None": ([1.0, None], "object"),
    "list of huge ints": ([10**400], "object"),
    "ragged list": ([[1.0], [1.0, 2.0]], "indptr"),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), "mask="),
    "scalar": (1.0, "single number"),
    "0-d": (np.float32(1.0), "single number"),
    "0-d array": (np.array(1.0), "single number"),
    "None": (None, "NoneType"),
    "string": ("scores.npy", "str"),
    "bytes": (b"1234", "bytes"),
    "dict": ({"scores": 1}, "dict"),
    "generator": ((x for x in (1.0, 2.0)), "generator"),
    "set": ({1.0, 2.0}, "set"),
    "memoryview": (memoryview(ROW), "is a"),
    "array.array": (stdlib_array.array("d", [1.0]), "is a"),
}
if LONG_DOUBLE:
    NO_SCORES["longdouble"] = np.ones(4, dtype=np.longdouble), np.dtype(np.longdouble).name


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", NO_SCORES)
def test_other_things_than_scores(name: str, function: str) -> None:
    value, word = NO_SCORES[name]
    refuse("scores ", word, function=function, scores=value, **{"keep": [[0]]} if function ==
           "certify" else {})  # fmt: skip


def test_sparse_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    refuse("scores is a scipy", scores=sparse.csr_matrix(ROWS[0]))


# -------------------------------------------------------------------------- values of an argument

COUNTS = (2.0, 1.5, True, np.True_, "2", [2], -1, 2**63, 2**70, np.array([1, 2]))
WRONG: dict[str, tuple[Any, ...]] = {
    "eps": (
        True, "0.1", None, 1j, 0.1 + 0j, {}, [0.1, 0.2], np.array([True]), np.full(6, 0.1),
        np.full((3, 2), 0.1), np.full((2, 3, 1), 0.1), 1.0, 1.5, -1e-300, -0.1, np.nan, np.inf,
        -np.inf,
    ),
    "lengths": (
        5.0, True, "5", [1, 2], np.zeros(6, np.int64), np.zeros((3, 2), np.int64),
        np.full((2, 3), 2.0), np.full((2, 3), True), np.array(2**63, dtype=np.uint64),
    ),
    "mask": (
        "causal", [1, 0, 1, 0, 1], np.ones(4, bool), np.ones((2, 3, 4), bool),
        np.ones((3, 3, 5), bool), np.ones((1, 2, 3, 5), bool),
        *(np.ones(5, t) for t in (np.int64, np.int32, np.uint8, np.complex128)),
    ),
    "scale": (
        True, "1", None, 1j, [1.0], 2**60 + 1, 10**400, decimal.Decimal("0.1"), np.nan, np.inf,
        -np.inf,
    ),
    "kind": ("softmax", "", None, 0, ["logits"]),
    "causal_offset": (0.0, 0.5, True, "0"),
    "indptr": (5, [[0, 60]], [], [0.0, 60.0], "0", [True, False]),
    "threads": (*COUNTS, 0),
    "min_keep": COUNTS,
    "keep_first": COUNTS,
    "keep_last": COUNTS,
    "block_size": (*COUNTS, 0),
    "max_keep": (0, -1, 0.0, -0.5, 1.5, np.nan, np.inf, True, "all", [1], 2**70),
    "prove_minimal": (1, "yes", None),
    "independent": (1, "yes", None),
}  # fmt: skip
if LONG_DOUBLE:
    WRONG["eps"] += (np.longdouble("0.1"),)
    WRONG["mask"] += (np.ones(5, np.longdouble),)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_name_their_argument(name: str, function: str) -> None:
    if name not in inspect.signature(getattr(ck, function)).parameters:
        pytest.skip("has no such argument")
    for value in WRONG[name]:
        if (name, function, value is None) == ("eps", "certify", True):
            continue  # certify may be asked for no budget
        scores = FLAT if name == "indptr" else ROWS
        refuse(f"{name} is" if name in {"scale", "max_keep", "threads"} else name,
               function=function, scores=scores, **{name: value})  # fmt: skip


def at(place: tuple[int, ...], value: Any, fill: Any, dtype: Any = None) -> np.ndarray:
    """Return an array of the batch's, or of the rows', shape with one bad entry."""
    array = np.full((2, 3, 5)[: len(place)], fill, dtype=dtype)
    array[place] = value
    return array


STARTS = [[1, 4, 10], [0, 4, 9], [0, 4, 11], [0, 7, 4, 10], [0, -1, 10], [], [[0, 10]], [0.0, 10]]
RAGGED: dict[str, Any] = {"scores": FLAT, "indptr": np.array([0, 4, 10])}
KEYS_20 = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
CALLS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    # The place in an argument that has one value per row or entry.
    *((("eps[1, 0]",), {"eps": at((1, 0), value, 0.1)}) for value in (1.0, -0.1, np.nan)),
    *((("lengths[1, 1]", str(n)), {"lengths": at((1, 1), n, 5)}) for n in (6, -1)),
    *((("mask[0, 1, 4]",), {"mask": at((0, 1, 4), value, 0.0)}) for value in (np.nan, np.inf)),
    (("mask has dtype int64; pass bool",), {"mask": np.ones(5, dtype=np.int64)}),
    (("mask has shape (4,)", "(2, 3, 5)"), {"mask": np.ones(4, dtype=bool)}),
    # Options that exclude each other.
    (("scale", "probs"), {"kind": "probs", "scale": 0.5}),
    (("mask", "probs"), {"kind": "probs", "mask": ROWS}),
    (("mask cannot be combined with indptr",), {**RAGGED, "mask": np.ones(10, dtype=bool)}),
    (("lengths cannot be combined with indptr",), {**RAGGED, "lengths": np.array([1, 1])}),
    (("causal_offset cannot be combined with indptr",), {**RAGGED, "causal_offset": 1}),
    (("indptr is given",), {**RAGGED, "function": "keep_set"}),
    (("indptr is given, but scores has shape (2, 5)",),
     {"scores": FLAT.reshape(2, 5), "indptr": [0, 10]}),
    *((("indptr",), {"scores": FLAT, "indptr": np.array(starts)}) for starts in STARTS),
    (("scores has shape [5]", "causal_offset needs"), {"scores": ROW, "causal_offset": 0}),
    (("keep_first", "max_keep"), {"keep_first": 3, "max_keep": 2}),
    (("keep_first", "keep_last", "max_keep"), {"keep_first": 1, "keep_last": 2, "max_keep": 2}),
    (("block_size", "max_keep"), {"max_keep": 3, "block_size": 4}),
    # A least and a most that no set meets.
    *((("m", "min_keep", "max_keep"), {"scores": KEYS_20, "min_keep": 5, **more}) for more in (
        {"max_keep": 3}, {"max_keep": 0.15}, {"max_keep": 0.15, "lengths": np.array([20, 4, 20])},
        {"max_keep": 0.15, "keep_first": 1, "keep_last": 2}, {"max_keep": 0.15, "scale": -1.0},
        {"max_keep": 0.15, "prove_minimal": True, "mask": np.arange(20) > 2},
        {"max_keep": 6, "block_size": 4},
    )),
    # A row with fewer keys than min_keep is to keep them all.
    (("min_keep is 4", "allows 2 keys of row [1]"),
     {"scores": KEYS_20, "min_keep": 5, "max_keep": 0.5, "lengths": np.array([20, 4, 20])}),
    (("min_keep", "row [1]"), {"scores": np.zeros(23, np.float32), "indptr": [0, 0, 3, 23],
                               "min_keep": 2, "max_keep": 0.4}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_calls_that_contradict_themselves(number: int) -> None:
    words, options = CALLS[number]
    refuse(*words, **options)


def test_limits_that_can_just_be_met() -> None:
    none = ck.select(KEYS_20[:, :0], 0.1, min_keep=2, max_keep=0.1)
    assert (none.status == ck.Status.EMPTY).all()
    assert (ck.select(KEYS_20, 0.999, min_keep=5, max_keep=0.25).k == 5).all()
    assert (ck.select(KEYS_20, 0.999, min_keep=5, max_keep=8, block_size=4).k == 8).all()
    assert ck.select(ROW, -0.0).k == 5


# ------------------------------------------------------------------------------- entries of scores


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_bad_scores_name_the_place(function: str, dtype: Any) -> None:
    for value, word, options in (
        (np.nan, "NaN", {}), (np.inf, "inf", {}), (np.inf, "inf", {"scale": -1.0}),
        (np.nan, "NaN", {"kind": "logprobs"}),
        *((value, "", {"kind": "probs"}) for value in (np.nan, np.inf, -np.inf, -0.25)),
    ):  # fmt: skip
        bad = at((1, 2, 3), value, 0.0, dtype)
        refuse("scores[1, 2, 3]", word, function=function, scores=bad, **options)


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
    refuse("scores[4]", "NaN", scores=np.where(np.arange(5) == 4, np.nan, 0.0))
    ragged = np.where(np.arange(10) == 7, np.nan, 0.0)
    refuse("scores", "NaN", scores=ragged, indptr=[0, 4, 10])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_weights_whose_sum_overflows_name_the_row(function: str) -> None:
    rows = np.full((2, 3), 0.25)
    rows[1] = 1e308
    refuse("scores[1]", function=function, scores=rows, kind="probs")


def test_a_row_selected_after_an_error_is_right() -> None:
    """An error leaves nothing behind in the scratch memory."""
    rows = np.random.default_rng(0).standard_normal((50, 300)).astype(np.float32)
    want = ck.select(rows, 0.1).indices.tobytes()
    bad = rows.copy()
    bad[31, 200] = np.nan
    refuse("scores[31, 200]", scores=bad)
    assert ck.select(rows, 0.1).indices.tobytes() == want


# ---------------------------------------------------------------------------------------- kept sets

PAIR = np.zeros((2, 5), dtype=np.float32)
KEPT: list[tuple[Any, ...]] = [
    ([[0], [1, 5]], "5", "[1]"),
    ([[0, -2], [1]], "-2", "[0]"),
    ([[0, -1], [1]], "-1"),
    ([[0], [3, 1, 3]], "3", "twice", "[1]"),
    (np.array([[7, -1], [1, 2]]), "7", "[0]"),
    (np.array([[0, -1], [2, 2]]), "twice", "[1]"),
    ([[0]], "lists 1 entries, but the scores have 2 rows"),
    ([[0], [1], [2]], "lists 3 entries"),
    ([], "lists 0 entries"),
    ([0, 1], "keep[0] has shape ()"),
    ([[[0]], [[0]]], "keep[0] has shape (1, 1)"),
    ([[0.5], [1]], "keep[0] has dtype float64"),
    (np.zeros((3, 2), dtype=np.int64), "shape (3, 2); pass indices of shape (2, k)"),
    (np.zeros((2, 4), dtype=bool), "has shape"),
    (np.zeros((2, 5), dtype=np.float32), "has dtype float32; pass integers"),
    (np.ones((2, 5), dtype=np.uint8), "twice"),
    (5,),
    ("01", "is a str"),
    (None, "is a NoneType"),
    (ck.select(np.zeros((2, 4)), 0.1), "is a Selection of shape (2, 4)"),
    (ck.select(np.zeros((3, 5)), 0.1), "is a Selection of shape (3, 5)"),
]


@pytest.mark.parametrize("number", range(len(KEPT)))
def test_kept_sets_that_are_none_of_these_rows(number: int) -> None:
    keep, *words = KEPT[number]
    for independent in (False, True):
        refuse("keep", *words, function="certify", scores=PAIR, keep=keep, independent=independent)


def test_kept_sets_of_other_rows() -> None:
    refuse("keep", "9", function="certify", scores=ROW, keep=[9])
    sel = ck.select(FLAT, 0.1, indptr=[0, 4, 10])
    refuse("keep is a Selection of ragged rows with another indptr", function="certify",
           scores=FLAT, keep=sel, indptr=[0, 5, 10])  # fmt: skip
    refuse("keep is a Selection of shape", function="certify", scores=FLAT[None], keep=sel)


def test_nothing_but_certk_errors_and_they_are_value_errors() -> None:
    with pytest.raises(ValueError, match="eps") as caught:
        ck.select(ROW, 2.0)
    assert type(caught.value) is ck.CertkError
    with pytest.raises(TypeError):
        ck.select(ROW, 0.1, budget=3)  # type: ignore[call-arg]
