"""A valid call of every function over rows, vectors and numbers, for tests that all must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import certk_rs as ck
from certk_rs import bounds, gaussian, montecarlo, output, windows

Call = tuple[Callable[..., Any], dict[str, Any]]
ROW_OPTIONS: dict[str, Any] = {
    "kind": "logits", "scale": 1.0, "mask": None, "lengths": None, "indptr": None,
    "causal_offset": None, "threads": 1,
}  # fmt: skip
SIGHT: dict[str, Any] = {"scale": None, "lengths": None, "mask": None, "threads": 1}


def built(keys: Any, more: Any, rotate: Any) -> Any:
    """Return the arrays of an index that was appended to."""
    index = ck.KeyIndex.build(keys, rotate=rotate)
    index.append(more)
    return index.nbytes, *index.arrays()


def radii(values: Any, more: Any) -> np.ndarray:
    """Return the radii of a ball that was appended to."""
    ball = ck.ValueBall(values)
    ball.append(more)
    return ball.radius


def attended(**arguments: Any) -> Any:
    """Return an answer of attention with its bound, which is computed when it is read."""
    found = ck.attention(**arguments)
    return found, found.error_bound


def calls(rows: int = 3, n: int = 40, keys: int = 600) -> dict[str, Call]:
    """Return functions with valid arguments, by name.

    Args:
        rows: Rows of `scores`.
        n: Scores of a row; eight in the calls that read values.
        keys: Keys of each of two heads.
    """
    rng = np.random.default_rng(5)
    scores = rng.normal(0, 3, (rows, n)).astype(np.float32)
    k = rng.normal(0, 1, (2, keys, 8)).astype(np.float32)
    q = rng.normal(0, 2, (2, 3, 8)).astype(np.float32)
    keep = np.arange(2 * rows).reshape(rows, 2) % 8
    index = ck.KeyIndex.build(k)
    over = {"scores": scores, "eps": 0.1, **ROW_OPTIONS}
    fixed = {"max_keep": None, "keep_first": 0, "keep_last": 0}
    ranked = {"scores": scores, "k": 2, "threads": 1}
    attention = {"q": q, "k": k, "v": k, "eps": 0.1, "out_tol": None, "sinks": None, "ball": None}
    search = {"q": q, "keys": k, "max_scored": None, "causal": False, **SIGHT}
    drawn = {"delta": 0.1, "draws": 16, "seed": 1, "method": "betting", "eps": None,
             "family": "row"}  # fmt: skip
    judged = {**over, "keep": keep}
    valued = {"scores": scores[:, :8], "values": k[0, :8], "threads": 1}
    return {
        "select": (ck.select, {**over, **fixed, "min_keep": 1, "block_size": 1,
                               "prove_minimal": True}),
        "certify": (ck.certify, {**judged, "independent": False}),
        "certify independent": (ck.certify, {**judged, "independent": True}),
        "keep_set": (ck.keep_set, {**over, **fixed}),
        "keep_set_of_queries": (ck.keep_set_of_queries, {
            "queries": q[0], "keys": k[0], "eps": 0.1, "scale": None, "causal_offset": None,
            **fixed, "block_size": 1, "threads": 1}),
        "attention indexed": (attended, {**attention, "index": index, "causal": False, **SIGHT}),
        "attention": (attended, {**attention, "index": None, "causal": True, **SIGHT}),
        "build": (built, {"keys": k, "more": k[:, :7], "rotate": None}),
        "ValueBall": (radii, {"values": k, "more": k[:, :7]}),
        "search": (index.search, {**search, "eps": 0.1, "rule": "mass", "k": None}),
        "search top_k": (index.search, {**search, "eps": None, "rule": "top_k", "k": 3}),
        "log_mass": (index.log_mass, {"q": q, **SIGHT}),
        "recall": (index.recall, {"q": q, "beside": (np.zeros((2, 3)), np.ones((2, 3))),
                                  "eps": 0.1, **SIGHT}),
        "check": (index.check, {"keys": k, "threads": 1}),
        "kl_from_tail_mass": (bounds.kl_from_tail_mass, {"tail_mass": 0.5}),
        "tail_mass_from_kl": (bounds.tail_mass_from_kl, {"kl": 0.5}),
        "pinsker": (bounds.pinsker, {"kl": 0.5}),
        "bretagnolle_huber": (bounds.bretagnolle_huber, {"kl": 0.5}),
        "required_gap": (bounds.required_gap, {"n": 10, "k": 2, "eps": 0.1}),
        "score_gap": (bounds.score_gap, ranked),
        "single_gap": (bounds.single_gap, ranked),
        "multi_gap": (bounds.multi_gap, {**ranked, "cuts": None, "n_cuts": 3}),
        "best_cuts": (bounds.best_cuts, {**ranked, "n_cuts": 3}),
        "blockwise": (bounds.blockwise, {"sizes": [4, 4], "upper": [[1.0, 0.0]],
                                         "lower": [[0.5, -1.0]], "kept": [[True, False]],
                                         "threads": 1}),
        "smallest_k": (bounds.smallest_k, {"scores": scores, "eps": 0.1, "rule": "exact",
                                           "n_cuts": 3, "threads": 1}),
        "smallest_k multi_gap": (bounds.smallest_k, {"scores": scores, "eps": 0.1,
                                                     "rule": "multi_gap", "n_cuts": 3,
                                                     "threads": 1}),
        "keep_fraction": (gaussian.keep_fraction, {"sigma": 2.0, "eps": 0.1}),
        "threshold": (gaussian.threshold, {"sigma": 2.0, "eps": 0.1}),
        "gaussian.tail_mass": (gaussian.tail_mass, {"sigma": 2.0, "fraction": 0.1}),
        "gaussian.fit": (gaussian.fit, over),
        "plan": (gaussian.plan, {"n": 100, "sigma": 2.0, "eps": 0.1, "seed": 0, "threads": 1}),
        "windows.fit": (windows.fit, {"n": [10, 20, 30], "k": [3, 4, 5], "level": 0.95}),
        "effective": (windows.effective, over),
        "participation": (windows.participation, {"scores": scores, **ROW_OPTIONS}),
        "scale_r": (windows.scale_r, {"B": 1.0, "w_q": np.eye(4), "w_k": np.eye(4)}),
        "predict": (windows.predict, {"n": 10, "R": 1.0, "delta": 0.1, "eps": 0.1}),
        "WindowPolicy": (windows.WindowPolicy, {"alpha": 1.0, "C": 0.5}),
        "size": (windows.WindowPolicy(1.0, 0.5).size, {"n": 10}),
        "tail_mass": (montecarlo.tail_mass, {"scores": scores, "keep": keep, "upper_bounds": None,
                                             **drawn, **ROW_OPTIONS}),
        "clt_interval": (montecarlo.clt_interval, {"values": [0.1, 0.2], "delta": 0.1,
                                                   "population": None}),
        "output_error": (output.output_error, {**valued, "keep": keep}),
        "select_output": (output.select_output, {**valued, "out_tol": 0.1}),
    }  # fmt: skip
