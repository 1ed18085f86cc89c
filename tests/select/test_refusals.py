"""Bad input is a CertkError that begins with the argument, names the place and a remedy: one line.

Tables hold for every function that `calls` lists and that has the argument.
"""

from __future__ import annotations

import array as stdlib_array
import decimal
import random
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import certk_rs as ck
import certk_rs.torch as ct
from calls import calls

CALLS = calls()
ROW_FUNCTIONS = ("select", "certify", "certify independent", "keep_set")
ROWS = np.zeros((2, 3, 5), dtype=np.float32)
ROW = np.zeros(5, dtype=np.float32)
FLAT = np.zeros(10, dtype=np.float32)
KEYS_20 = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
NAN, INF = np.nan, np.inf
# After the fact: the values that are allowed.
REMEDY = re.compile(r"[;:,] \w|pass |must |than ")


def refuse(name: str, *words: str, **changes: Any) -> None:
    """Assert that the changed call raises CertkError: one line, with all words, the first ahead."""
    function, arguments = CALLS[name]
    if name.startswith("certify") and "scores" in changes and "keep" not in changes:
        changes["keep"] = np.ones(np.shape(changes["scores"]) or 1, dtype=bool)
    with pytest.raises(ck.CertkError) as caught:
        function(**{**arguments, **changes})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(words[0]), f"{message!r} does not start with {words[0]!r}"
    assert REMEDY.search(message), f"no remedy in {message!r}"
    for word in words:
        assert word in message, f"{word!r} not in {message!r}"


def taking(argument: str) -> list[str]:
    """Return the calls that have this argument."""
    return [name for name, (_, arguments) in CALLS.items() if argument in arguments]


def at(place: tuple[int, ...], value: Any, fill: Any = 0.0, dtype: Any = None) -> np.ndarray:
    """Return an array of the batch's, or of the rows', shape with one bad entry."""
    array = np.full((2, 3, 5)[: len(place)], fill, dtype=dtype)
    array[place] = value
    return array


# ------------------------------------------------------------------------ things that no score is


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on another device; no accelerator is needed."""

    @property
    def device(self) -> torch.device:
        """Return a device of which there is none."""
        return torch.device("cuda:1")


ELSEWHERE = torch.ones(4).as_subclass(Elsewhere)
NO_SCORES: list[tuple[Any, str]] = [
    (np.arange(4), "convert it to float16"),
    *((np.zeros(4, dtype=t), f"dtype {t}")
      for t in ("int8", "int32", "int64", "uint8", "uint16", "bool", "complex64")),
    (np.array([1.0, None]), "object"), (np.array(["1.0"]), "dtype"),
    (np.array(["2020-01-01"], dtype="datetime64[D]"), "datetime64"),
    (np.zeros(3, dtype=[("a", "f4")]), "dtype"),
    (np.ones(4, dtype=ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    ([True, False], "bool"), ([1j, 2.0], "complex128"), (["1.0", "2.0"], "dtype"),
    ([1.0, None], "object"), ([10**400], "object"), ([[1.0], [1.0, 2.0]], "indptr"),
    (np.ma.masked_array([1.0, 2.0], [True, False]), "mask="),
    (1.0, "single number"), (np.float32(1.0), "single number"), (np.array(1.0), "single number"),
    ("scores.npy", "str"), (b"1234", "bytes"), ({"scores": 1}, "dict"), ({1.0, 2.0}, "set"),
    ((x for x in (1.0, 2.0)), "generator"), (memoryview(ROW), "is a"),
    (stdlib_array.array("d", [1.0]), "is a"),
    (torch.arange(4), "dtype int64"), (torch.ones(4, dtype=torch.bool), "bool"),
    (torch.ones(4, dtype=torch.complex64), "complex64"),
    (torch.ones(4).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    (torch.eye(4).to_sparse(), "to_dense()"), (torch.ones(4, device="meta"), "holds no data"),
    (torch.tensor(1.0), "single number"), (ELSEWHERE, "on device cuda:1; pass scores.cpu"),
]  # fmt: skip
if np.dtype(np.longdouble).itemsize > 8:
    NO_SCORES.append((np.ones(4, dtype=np.longdouble), np.dtype(np.longdouble).name))


@pytest.mark.parametrize("name", taking("scores"))
def test_other_things_than_scores(name: str) -> None:
    for value, word in NO_SCORES:
        refuse(name, "scores ", word, scores=value, **{"keep": [[0]]} if "cert" in name else {})
    if name != "tail_mass":  # which may be given a function in place of scores
        refuse(name, "scores ", "NoneType", scores=None)


def test_sparse_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    refuse("select", "scores is a scipy", scores=sparse.csr_matrix(ROWS[0]))


# -------------------------------------------------------------------------- values of an argument

COUNTS = (2.0, 1.5, True, np.True_, "2", [2], -1, 2**63, 2**70, np.array([1, 2]))
# Wrong values, by how the message begins: first of all with the argument.
WRONG: dict[str, tuple[Any, ...]] = {
    "eps": (True, "0.1", 1j, 0.1 + 0j, {}, np.array([True]), 1.0, 1.5, -1e-300, NAN, -INF),
    "eps is 1": (1.0,), "eps is NaN": (NAN,), "eps is inf": (INF,), "eps is -0.1": (-0.1,),
    "lengths": (5.0, True, "5", [1, 2, 3, 4], np.full((1, 2, 3), 2.0), np.full((2, 3), True),
                np.array(2**63, dtype=np.uint64), -1, 10**6),
    "lengths has dtype": (3.0, [3.5]),
    "mask": ("causal", [1, 0, 1], np.ones(4, bool), np.ones((3, 4, 40), bool), np.ones(600, int),
             np.ones(40, np.uint8), np.ones(40, np.complex128), np.ones((1, 2, 3, 40), bool)),
    "scale": (True, [True], 2**60 + 1, 10**400, decimal.Decimal("0.1")),
    "scale is": ("1", 1j, [1.0], NAN, INF, -INF),
    "kind": ("softmax", "", None, 0, ["logits"]),
    "causal_offset": (0.0, 0.5, True, "0"),
    "causal is 1; pass True or False": (1,), "causal is None": (None,),
    "threads is": (*COUNTS, 0),
    "min_keep": COUNTS, "keep_first": COUNTS, "keep_last": COUNTS, "block_size": (*COUNTS, 0),
    "max_keep is": (0, -1, 0.0, -0.5, 1.5, NAN, INF, True, "all", [1], 2**70),
    "prove_minimal": (1, "yes", None), "independent": (1, "yes", None),
    "index is a str; pass a certk_rs.KeyIndex": ("no",),
    "ball is a ndarray; pass a certk_rs.ValueBall": (np.ones(3),),
    "delta is": (0.0, 1.0, NAN, -0.1), "seed is": (-1, 0.5),
    "draws": (0, 2.5, True, 2**40), "method": ("clt", 3), "family": ("rows", None),
    "rule is": ("best", None),
    "k": (-1, 1.0, "2"), "n_cuts is": (-1, "a", 1.5),
    "cuts[1] is 1": ([1, 1],), "cuts[1] is 1: cuts must increase": ([3, 1],),
    "cuts[0] is 0": ([0, 1],), "cuts[0] is -1": ([-1],), "cuts[1] is 40": ([1, 40],),
    "cuts[1] is 2: k = 2 is a cut already": ([1, 2],), "cuts has shape (1, 1)": ([[1]],),
    "cuts has dtype float64": ([1.5],),
    "sizes[0, 1] is -1": ([1, -1],),
    "upper[0, 1] is NaN": ([[1.0, NAN]],), "upper holds 9007": (np.array([[0, 2**53 + 1]]),),
    "lower[0, 0] is 2": ([[2.0, -1.0]],), "lower[0, 0] is NaN": ([[NAN, 0.0]],),
    "lower": (np.int64([[-(2**53) - 1, 0]]),),
    "tail_mass[1] is 1.5": ([0.5, 1.5],), "tail_mass[1, 0] is NaN": ([[0.5], [NAN]],),
    "tail_mass is -": (-1e-9,), "tail_mass is a str": ("a",), "tail_mass has dtype bool": (True,),
    "tail_mass has dtype": (np.zeros(2, [("a", "f4")]), np.zeros(2, np.longdouble)),
    "kl[1] is -1": ([0.0, -1.0],), "kl[0, 0] is NaN": ([[NAN]],),
    "sigma is": (NAN, INF, -1.0, "x"), "sigma": (True, [1.0, -1.0]),
    "fraction is 1.5; pass a share": (1.5,), "level is": (0.0, 1.0, NAN),
    "alpha is": (0.0, NAN), "C is": (0.0, 1.0, "x"), "R is": (-1.0, INF), "B is": (-1.0, NAN),
    "w_q has shape": (np.ones(2),), "w_k has shape": (np.eye(3),),
    "w_q[0, 1] is NaN": ([[1.0, NAN]],),
    "out_tol is": (-1.0, NAN, INF), "out_tol": ("a", [0.1, 0.2, 0.3, 0.4]),
    "upper_bounds": ([1.0] * 3, np.full((3, 40), INF), np.full((3, 40), NAN)),
    "upper_bounds[0, 4] is -90, but the score there is": (np.full((3, 40), -90.0),),
}  # fmt: skip


@pytest.mark.parametrize("start", WRONG)
def test_wrong_values_name_their_argument(start: str) -> None:
    name = re.match(r"\w+", start)[0]  # type: ignore[index]
    seen = 0
    for function in taking(name):
        if (name, "attention" in function) == ("mask", False) and function not in ROW_FUNCTIONS:
            continue  # rows of other shapes
        more = {"eps": None} if name == "out_tol" and "attention" in function else {}
        for value in WRONG[start]:
            refuse(function, start, **more, **{name: value})
            seen += 1
    assert seen


# --------------------------------------------------------- places, and options that contradict

RAGGED: dict[str, Any] = {"scores": FLAT, "indptr": np.array([0, 4, 10])}
STARTS = ([1, 4, 10], [0, 4, 9], [0, 4, 11], [0, 7, 4, 10], [0, -1, 10], [], [[0, 10]], [0.0, 10],
          5, "0", [True, False])  # fmt: skip
LEAST = {"scores": KEYS_20, "min_keep": 5}
ATTEND = {"q": np.ones((2, 4, 3, 8)), "k": np.ones((2, 2, 10, 8)), "v": np.ones((2, 2, 10, 5))}
UPPER = {"upper_bounds": np.full((3, 40), 99.0)}
Refused = tuple[str, tuple[str, ...], dict[str, Any]]
REFUSED: list[Refused] = [
    # The place in an argument that has one value per row or entry.
    *(("select", (start,), {"scores": ROWS, **change}) for start, change in (
        ("eps[1, 0]", {"eps": at((1, 0), 1.0, 0.1)}), ("eps[1, 0]", {"eps": at((1, 0), NAN, 0.1)}),
        ("eps[1, 0] is -0.1", {"eps": at((1, 0), -0.1, 0.1)}),
        ("eps has shape (3, 2)", {"eps": np.full((3, 2), 0.1)}),
        ("lengths[1, 1] is 6", {"lengths": at((1, 1), 6, 5, int)}),
        ("lengths[1, 1] is -1", {"lengths": at((1, 1), -1, 5, int)}),
        ("mask[0, 1, 4]", {"mask": at((0, 1, 4), NAN)}),
        ("mask[0, 1, 4]", {"mask": at((0, 1, 4), INF)}),
        ("mask has dtype int64; pass bool", {"mask": np.ones(5, dtype=np.int64)}),
        ("mask has shape (4,)", {"mask": np.ones(4, dtype=bool)}),
        ("scale is", {"scale": torch.tensor(1.0)}),
        ("mask is a tensor on device cuda:1; pass mask.cpu", {"mask": ELSEWHERE}),
        # Options that exclude each other.
        ("scale", {"kind": "probs", "scale": 0.5}), ("mask", {"kind": "probs", "mask": ROWS}),
        ("scores has shape [5]: causal_offset needs", {"scores": ROW, "causal_offset": 0}),
        ("keep_first and keep_last force", {"keep_first": 3, "max_keep": 2}),
        ("keep_first and keep_last force", {"keep_first": 1, "keep_last": 2, "max_keep": 2}),
        ("block_size", {"max_keep": 3, "block_size": 4}),
        ("indptr is given, but scores has shape (2, 5)", {"scores": FLAT.reshape(2, 5), "indptr": [0, 10]}),
    )),
    *(("select", ("indptr",), {"scores": FLAT, "indptr": starts}) for starts in STARTS),
    *(("select", (f"{name} cannot be combined with indptr",), {**RAGGED, name: value})
      for name, value in (("mask", FLAT > 0), ("lengths", [1, 1]), ("causal_offset", 1))),
    ("keep_set", ("indptr is given",), RAGGED),
    # A least and a most that no set meets.
    *(("select", ("m", "min_keep", "max_keep"), {**LEAST, **change}) for change in (
        {"max_keep": 3}, {"max_keep": 0.15}, {"max_keep": 0.15, "lengths": np.array([20, 4, 20])},
        {"max_keep": 0.15, "keep_first": 1, "keep_last": 2}, {"max_keep": 0.15, "scale": -1.0},
        {"max_keep": 0.15, "prove_minimal": True, "mask": np.arange(20) > 2},
        {"max_keep": 6, "block_size": 4},
    )),
    # A row with fewer keys than min_keep is to keep them all.
    ("select", ("min_keep is 4", "allows 2 keys of row [1]"),
     {**LEAST, "max_keep": 0.5, "lengths": np.array([20, 4, 20])}),
    ("select", ("min_keep is 2", "row [1]"), {"scores": np.zeros(23, np.float32), "min_keep": 2,
                                              "indptr": [0, 0, 3, 23], "max_keep": 0.4}),
    # Counts and budgets of a row.
    *((name, ("k is 41 for row [0], which has n = 40",), {"k": 41})
      for name in ("score_gap", "single_gap", "multi_gap", "best_cuts")),
    *(("single_gap", (start,), {"k": k}) for start, k in (
        ("k is -1 for row [1]", [1, -1, 1]), ("k has shape (2,)", [1, 2]),
        ("k has dtype float64", 1.0))),
    ("multi_gap", ("k is 3 for row [1], which has n = 2",),
     {"scores": [[0.0] * 3, [0.0, -INF, 0.0]], "k": 3}),
    ("multi_gap", ("cuts[0] is 2",), {"scores": [[0.0] * 3, [0.0, -INF, 0.0]], "k": 1,
                                      "cuts": [2]}),
    ("multi_gap", ("n_cuts is 524288",), {"scores": np.zeros(1 << 20), "n_cuts": 1 << 19}),
    *(("required_gap", (start,), change) for start, change in (
        ("k is 11", {"k": 11}), ("k is -1 for row [1]", {"k": [1, -1]}),
        ("n[1] is -5", {"n": [5, -5], "k": 0}), ("eps[1] is 1", {"eps": [0.1, 1.0]}),
        ("n has dtype float64", {"n": 5.5}), ("shapes do not broadcast: n (2,), k (3,)", {"n": [5, 5], "k": [1] * 3}))),
    *(("smallest_k multi_gap", (start,), {"eps": eps})
      for start, eps in (("eps[1] is -0.1", [0.1, -0.1, 0.1]), ("eps has shape (2,)", [0.1] * 2))),
    ("threshold", ("eps[0, 1] is 1",), {"sigma": [[1.0], [2.0]], "eps": [0.5, 1.0]}),
    ("keep_fraction", ("eps has shape",), {"sigma": [1.0, 2.0], "eps": [0.1] * 3}),
    ("keep_fraction", ("sigma[1] is NaN",), {"sigma": [1.0, NAN]}),
    *(("plan", (f"n is {n}", "pass an integer"), {"n": n}) for n in (0, 2**60, 10.5, True)),
    ("plan", ("eps is 0",), {"eps": 0.0}), ("effective", ("eps is 0",), {"eps": 0.0}),
    # Laws of windows.
    *(("windows.fit", (start,), {"n": n, "k": k}) for start, n, k in (
        ("k has 2 entries but 3", [1, 2, 3], [1, 2]), ("n is 2 values", [1, 2], [1, 2]),
        ("n is 3 values, 1 of them distinct", [5, 5, 5], [1, 2, 3]),
        ("n[1] is 0", [1, 0, 3], [1, 2, 3]), ("k[2] is 0", [1, 2, 3], [1, 2, 0]),
        ("k[1] is NaN", [1, 2, 3], [1, NAN, 2]), ("n has shape", [[1, 2, 3]], [1, 2, 3]))),
    ("size", ("n[1] is -2; pass a number of keys of at least 1",), {"n": [3, -2]}),
    ("size", ("n is 0",), {"n": 0}), ("size", ("n has dtype float64",), {"n": 2.5}),
    ("predict", ("n is 0",), {"n": 0}),
    # Draws and values.
    ("tail_mass", ("draws is 39, but the tail of row [0] has only 38",), {"draws": 39}),
    ("tail_mass", ("eps cannot be combined",), {"eps": 0.1, "method": "hoeffding"}),
    ("tail_mass", ("upper_bounds cannot",), {**UPPER, "kind": "probs",
                                             "scores": np.ones((3, 40))}),
    ("tail_mass", ("upper_bounds cannot",), {**UPPER, "mask": np.zeros(40)}),
    ("tail_mass", ("scores",), {"scores": None}),
    ("clt_interval", ("values",), {"values": [0.5]}),
    ("clt_interval", ("values",), {"values": [[0.5, 0.5]]}),
    ("output_error", ("values has shape [3, 4, 5]", "grouped heads"),
     {"scores": np.zeros((2, 3, 4)), "values": np.zeros((3, 4, 5)), "keep": np.ones(4, bool)}),
    ("output_error", ("values has shape [5, 5]", "the 8 keys"), {"values": np.zeros((5, 5))}),
    *(("output_error", (start,), {"values": values}) for start, values in (
        ("values has shape [8]", np.zeros(8)), ("values is a single number", 1.0),
        ("values has dtype int64", np.zeros((8, 5), np.int64)))),
    ("select_output", ("out_tol[1] is -1",), {"out_tol": [1.0, -1.0, 1.0]}),
    # Vectors.
    *((name, (start,), change) for name, start, change in (
        ("keep_set_of_queries", "queries has shape", {"keys": np.zeros((5, 3), np.float32)}),
        ("keep_set_of_queries", "queries has shape (4,)", {"queries": np.zeros(4, np.float32)}),
        ("keep_set_of_queries", "keys has shape [5, 8]: float64 cannot", {"keys": np.zeros((5, 8))}),
        ("keep_set_of_queries", "queries has shape [3, 8]: queries in float64", {"queries": np.zeros((3, 8))}),
        ("keep_set_of_queries", "keep_first", {"max_keep": 1, "keep_first": 3}))),
    *(("attention", (start, *words), {**ATTEND, **change}) for start, *words, change in (
        ("q has shape [2, 4, 3, 7]: keys have 8 entries", {"q": np.ones((2, 4, 3, 7))}),
        ("q has shape", "multiple", {"q": np.ones((2, 3, 3, 8))}),
        ("q has shape", "axes", {"q": np.ones((4, 3, 8))}),
        ("q has shape", "axis of vectors", {"q": np.ones(8)}),
        ("q is a single number", {"q": 1.0}), ("q is a str", {"q": "text"}),
        ("q has dtype int64", {"q": np.ones((2, 4, 3, 8), dtype=int)}),
        ("q has shape", {"k": np.ones((2, 0, 10, 8))}),
        ("k has shape", "at least one entry", {"k": np.ones((2, 2, 10, 0))}),
        ("v has shape", "a value for each key", {"k": np.ones((2, 2, 11, 8))}),
        ("v has shape", "a value for each key", {"v": np.ones((2, 1, 10, 5))}),
        ("v has shape", "at least one entry", {"v": np.ones((2, 2, 10, 0))}),
        ("out[0, 0, 0, 0] is inf", "wider",
         {"v": np.full((2, 2, 10, 5), 1e5), "q": np.ones((2, 4, 3, 8), np.float16)}),
        ("a score of k[0, 0, 0] is inf", {"scale": 1e308, "q": np.full((2, 4, 3, 8), 1e5)}),
        ("eps[1, 3, 2] is 2", {"eps": np.pad([[[2.0]]], ((1, 0), (3, 0), (2, 0)))}),
        ("eps and out_tol: neither given", {"eps": None}),
        ("eps and out_tol: both given", {"out_tol": 0.1}),
        ("lengths is 11; it must lie between 0 and n = 10", {"lengths": 11}),
        ("lengths[0, 0, 0] is 12", {"lengths": np.full((2, 4, 3), 12)}),
        ("mask[0] is 1; pass a boolean mask", {"mask": np.ones(10)}),
        ("mask[9] is nan", {"mask": [0.0] * 9 + [NAN]}),
        ("mask[9] is inf", {"mask": [0.0] * 9 + [INF]}),
        ("sinks[0, 1] is NaN", "negative infinity for none", {"sinks": [0.0, NAN, 0.0, 0.0]}),
        ("sinks[0", "is inf", {"sinks": INF}),
        ("sinks has shape (3,), ", "number per query head", {"sinks": [0.0] * 3}),
        ("sinks has dtype", {"sinks": ["a", "b"]}), ("sinks has dtype", {"sinks": [True, False]}),
    )),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_calls_that_contradict_themselves(number: int) -> None:
    name, words, changes = REFUSED[number]
    refuse(name, *words, **changes)


# Calls of which the index needs no keys.
INDEXED = ("attention indexed", "search", "search top_k")


@pytest.mark.parametrize("argument", ["scores", "q", "k", "v", "queries", "keys", "values"])
def test_what_is_not_finite_is_named_with_its_place(argument: str) -> None:
    for name in taking(argument):
        array = CALLS[name][1][argument]
        if not isinstance(array, np.ndarray) or name in {"build", "check", "ValueBall"}:
            continue
        if argument in {"k", "keys"} and name in INDEXED:
            continue
        for bad in (NAN, INF) if argument == "scores" else (NAN, INF, -INF):
            broken, place = array.copy(), tuple(size // 2 for size in array.shape)
            broken[place] = bad
            start = f"{argument}[{', '.join(map(str, place))}] is"
            refuse(name, start, **{"eps": 0.0} if argument == "v" else {}, **{argument: broken})


@pytest.mark.parametrize("name", ROW_FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_bad_scores_name_the_place(name: str, dtype: Any) -> None:
    for value, word, options in (
        (NAN, "NaN", {}), (INF, "inf", {}), (INF, "inf", {"scale": -1.0}),
        (NAN, "NaN", {"kind": "logprobs"}),
        *((value, "", {"kind": "probs"}) for value in (NAN, INF, -INF, -0.25)),
    ):  # fmt: skip
        refuse(name, "scores[1, 2, 3]", word, scores=at((1, 2, 3), value, 0.0, dtype), **options)
    # Weights whose sum overflows name the row.
    refuse(name, "scores[1]", scores=[[0.25] * 3, [1e308] * 3], kind="probs")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_nan_of_either_sign_is_no_mask(dtype: Any) -> None:
    for value in (NAN, -NAN):
        mask = at((1, 2), -INF, 0.0, dtype)
        mask[0, 1] = value
        assert np.signbit(mask[0, 1]) == np.signbit(value)
        refuse("select", "mask[0, 1] is NaN", scores=np.zeros((2, 3)), mask=mask)


@pytest.mark.parametrize("name", ROW_FUNCTIONS)
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 255, 257, 1025, 4097, 70001])
def test_a_bad_score_is_found_wherever_it_is(name: str, n: int) -> None:
    rng = np.random.default_rng(n)
    rows = rng.standard_normal((3, n)).astype(np.float32)
    for place in {0, n // 2, n - 1, int(rng.integers(n))}:
        for value, word in ((NAN, "NaN"), (INF, "inf")):
            bad = rows.copy()
            bad[2, place] = value
            refuse(name, f"scores[2, {place}]", word, scores=bad)


def test_the_first_bad_score_is_named_for_any_number_of_threads() -> None:
    rows = np.zeros((3000, 400), dtype=np.float32)
    want = ck.select(rows, 0.1).indices.tobytes()
    bad = rows.copy()
    bad[2957:, 123:] = NAN
    for threads in (1, 2, 8):
        refuse("select", "scores[2957, 123]", "NaN", scores=bad, threads=threads)
        refuse("keep_set", "scores[2957, 123]", "NaN", scores=bad, threads=threads)
    # An error leaves nothing behind in the scratch memory.
    assert ck.select(rows, 0.1).indices.tobytes() == want
    refuse("select", "scores[4]", "NaN", scores=np.where(np.arange(5) == 4, NAN, 0.0))
    ragged = np.where(np.arange(10) == 7, NAN, 0.0)
    refuse("select", "scores", "NaN", scores=ragged, indptr=[0, 4, 10])


# ---------------------------------------------------------------------------------------- kept sets

PAIR = np.zeros((2, 5), dtype=np.float32)
OF_RAGGED = ck.select(FLAT, 0.1, indptr=[0, 4, 10])
KEPT: list[tuple[Any, ...]] = [
    ([[0], [1, 5]], "5", "[1]"), ([[0, -2], [1]], "-2", "[0]"), ([[0, -1], [1]], "-1"),
    ([[0], [3, 1, 3]], "3", "twice", "[1]"), (np.array([[7, -1], [1, 2]]), "7", "[0]"),
    (np.array([[0, -1], [2, 2]]), "twice", "[1]"),
    ([[0]], "lists 1 entries, but the scores have 2 rows"), ([[0], [1], [2]], "lists 3 entries"),
    ([], "lists 0 entries"), ([0, 1], "keep[0] has shape ()"),
    ([[[0]], [[0]]], "keep[0] has shape (1, 1)"), ([[0.5], [1]], "keep[0] has dtype float64"),
    (np.zeros((3, 2), dtype=np.int64), "shape (3, 2); pass indices of shape (2, k)"),
    (np.zeros((2, 4), dtype=bool), "has shape"),
    (np.zeros((2, 5), dtype=np.float32), "has dtype float32; pass integers"),
    (np.ones((2, 5), dtype=np.uint8), "twice"), (5,), ("01", "is a str"), (None, "is a NoneType"),
    (ck.select(np.zeros((2, 4)), 0.1), "is a Selection of shape (2, 4)"),
    (ck.select(np.zeros((3, 5)), 0.1), "is a Selection of shape (3, 5)"),
    (OF_RAGGED, "is a Selection of shape"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["certify", "certify independent", "tail_mass", "output_error"])
def test_kept_sets_that_are_none_of_these_rows(name: str) -> None:
    more = {"output_error": {"values": np.zeros((5, 3))}, "tail_mass": {"draws": 1}}.get(name, {})
    for keep, *words in KEPT:
        refuse(name, "keep", *words, scores=PAIR, keep=keep, **more)
    if "certify" in name:
        refuse(name, "keep", "9", scores=ROW, keep=[9])
        refuse(name, "keep is a Selection of ragged rows with another indptr", scores=FLAT,
               keep=OF_RAGGED, indptr=[0, 5, 10])  # fmt: skip


def test_torch_operators_and_misspelt_options() -> None:
    for function in (ct.select, ct.select_mask):
        with pytest.raises(ck.CertkError, match="min_keep"):
            function(torch.zeros(2, 20), 0.1, min_keep=5, max_keep=0.1)
    with pytest.raises(ValueError, match="eps") as caught:
        ck.select(ROW, 2.0)
    assert type(caught.value) is ck.CertkError
    with pytest.raises(TypeError):
        ck.select(ROW, 0.1, budget=3)  # type: ignore[call-arg]


# ------------------------------------------------------------------------------- odd arguments

# ruff: noqa: E501
K, Q = CALLS["attention"][1]["k"], CALLS["attention"][1]["q"]
S = CALLS["select"][1]["scores"]
POOL: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400,
    0.0, -0.0, 1.0, 0.5, 0.25, 1e-320, 1e-300, 1e-153, 4e-153, 2e-18, 1e-30, 0.999, np.nextafter(1.0, 0.0), 1e308,
    -1e308, NAN, INF, -INF, 1j, "", "mass", "gap", "top_k", "cells", "both",
    "probs", "logits", "logprobs", "\udcff", b"", [], [[]], [0], [0, 1], [2, 1], [-1], (), {}, {1: 2}, object(),
    len, np.float32(0.5), np.int8(3), np.uint64(2**64 - 1), np.bool_(True), np.array(0.5), np.array([]),
    np.zeros((0, 5)), np.zeros((5, 0)), np.zeros((3, 40)), np.zeros((3, 40), np.int64), np.ones((3, 40), bool),
    np.full((3, 40), -np.inf), np.full((3, 40), np.inf), np.full((3, 40), np.nan), np.full((3, 40), 3e38, np.float32),
    np.full((3, 40), 1e308), np.full((3, 40), -1e308), np.full((3, 40), 5e-324), S[::-1, ::-2], S.T,
    S.astype(np.float16), S.astype(">f4"), S.astype(np.complex64), S.astype(object),
    np.broadcast_to(np.float32(1), (3, 40)), np.array(["a", "b"]), np.zeros(3, dtype=[("a", "f4")]),
    np.array([0, 2**40]), np.array([[2**62, -5]]), np.zeros((2, 600, 8)), np.zeros((2, 600, 8), np.float32),
    np.full((2, 600, 8), 3e38, np.float32), np.full((2, 600, 8), 1e-45, np.float32), K[:, ::-1], K[:, :, ::2],
    K.astype(np.float16), K.astype(np.float64) * 1e300, K[:1], Q * 1e30, Q * 0,
    np.broadcast_to(K[:, :1], K.shape), np.datetime64("now"), ck.KeyIndex.build(K), ck.ValueBall(K), slice(None),
]  # fmt: skip


@pytest.mark.parametrize(
    "part", [*range(3), *(pytest.param(part, marks=pytest.mark.heavy) for part in range(3, 8))]
)
def test_no_panic_is_raised(part: int) -> None:
    """A panic is a BaseException of PyO3, and would end a program that catches errors.

    Valid calls are changed in one to three places by values of the pool, 10 000 times in all.
    """
    choose = random.Random(part)
    names = list(CALLS)
    for turn in range(1250):
        name = names[(turn * 8 + part) % len(names)]
        function, arguments = CALLS[name]
        changed = dict(arguments)
        for key in choose.sample(sorted(changed), min(len(changed), choose.choice([1, 1, 2, 3]))):
            changed[key] = choose.choice(POOL)
        try:
            function(**changed)
        except Exception:  # anything that a caller can catch
            pass
        except BaseException as error:
            pytest.fail(f"{name}({changed!r}) raised {type(error)}: {error}")
