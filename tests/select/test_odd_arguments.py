"""Odd arguments: whatever a call is given, it answers or raises what `except Exception` catches.

A panic of the extension would be a BaseException of PyO3, and end a program that catches errors.
Calls that are valid are changed in one or two places, by values from a pool, some 10 000 times.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import bounds, gaussian, montecarlo, output, windows

RNG = np.random.default_rng(5)
ROWS = RNG.normal(0, 3, (3, 40)).astype(np.float32)
KEYS = RNG.normal(0, 1, (2, 600, 8)).astype(np.float32)
QUERIES = RNG.normal(0, 2, (2, 3, 8)).astype(np.float32)
INDEX = ck.KeyIndex.build(KEYS)
FLAT = ROWS[:, :8].copy()
KEEP = np.array([[0, 1], [2, 3], [4, 5]])
ROW_OPTIONS: dict[str, Any] = {
    "kind": "logits",
    "scale": 1.0,
    "mask": None,
    "lengths": None,
    "indptr": None,
    "causal_offset": None,
    "threads": 1,
}
SIGHT: dict[str, Any] = {"scale": None, "lengths": None, "mask": None, "threads": 1}


def built(keys: Any, more: Any, rotate: Any) -> int:
    """Build an index and append to it; its size."""
    index = ck.KeyIndex.build(keys, rotate=rotate)
    index.append(more)
    return index.nbytes


def radii(values: Any, more: Any) -> np.ndarray:
    """Build a ball and append to it; its radii."""
    ball = ck.ValueBall(values)
    ball.append(more)
    return ball.radius


# ruff: noqa: E501
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (ck.select, {"scores": ROWS, "eps": 0.1, **ROW_OPTIONS, "min_keep": 1, "max_keep": None,
                 "keep_first": 0, "keep_last": 0, "block_size": 1, "prove_minimal": True}),
    (ck.certify, {"scores": ROWS, "keep": KEEP, "eps": 0.1, **ROW_OPTIONS, "independent": False}),
    (ck.certify, {"scores": ROWS, "keep": KEEP, "eps": 0.1, **ROW_OPTIONS, "independent": True}),
    (ck.keep_set, {"scores": ROWS, "eps": 0.1, **ROW_OPTIONS, "max_keep": None, "keep_first": 0,
                   "keep_last": 0}),
    (ck.keep_set_of_queries, {"queries": QUERIES[0], "keys": KEYS[0], "eps": 0.1, "scale": None,
                              "causal_offset": None, "max_keep": None, "keep_first": 0,
                              "keep_last": 0, "block_size": 1, "threads": 1}),
    (ck.attention, {"q": QUERIES, "k": KEYS, "v": KEYS, "eps": 0.1, "index": INDEX, **SIGHT,
                    "causal": False, "out_tol": None, "sinks": None, "ball": None}),
    (ck.attention, {"q": QUERIES, "k": KEYS, "v": KEYS, "eps": 0.1, "index": None, **SIGHT,
                    "causal": True, "out_tol": None, "sinks": None, "ball": None}),
    (built, {"keys": KEYS, "more": KEYS[:, :7], "rotate": None}),
    (radii, {"values": KEYS, "more": KEYS[:, :7]}),
    (INDEX.search, {"q": QUERIES, "eps": 0.1, "keys": KEYS, "rule": "mass", "k": None,
                    "over": "codes", "max_scored": None, "causal": False, **SIGHT}),
    (INDEX.search, {"q": QUERIES, "eps": None, "keys": KEYS, "rule": "top_k", "k": 3,
                    "over": "codes", "max_scored": None, "causal": False, **SIGHT}),
    (INDEX.log_mass, {"q": QUERIES, **SIGHT}),
    (INDEX.recall, {"q": QUERIES, "beside": (np.zeros((2, 3)), np.ones((2, 3))), "eps": 0.1, **SIGHT}),
    (INDEX.montecarlo, {"q": QUERIES, "keep": np.zeros((2, 3, 1), np.int64), "delta": 0.1, "seed": 1,
                        "draws": 16, "method": "betting", "eps": None, "family": "row",
                        "keys": KEYS, "scale": None, "threads": 1}),
    (INDEX.check, {"keys": KEYS, "threads": 1}),
    (bounds.kl_from_tail_mass, {"tail_mass": 0.5}),
    (bounds.tail_mass_from_kl, {"kl": 0.5}),
    (bounds.pinsker, {"kl": 0.5}),
    (bounds.bretagnolle_huber, {"kl": 0.5}),
    (bounds.required_gap, {"n": 10, "k": 2, "eps": 0.1}),
    (bounds.score_gap, {"scores": ROWS, "k": 2, "threads": 1}),
    (bounds.single_gap, {"scores": ROWS, "k": 2, "threads": 1}),
    (bounds.multi_gap, {"scores": ROWS, "k": 2, "cuts": None, "n_cuts": 3, "threads": 1}),
    (bounds.best_cuts, {"scores": ROWS, "k": 2, "n_cuts": 3, "threads": 1}),
    (bounds.blockwise, {"sizes": [4, 4], "upper": [[1.0, 0.0]], "lower": [[0.5, -1.0]],
                        "kept": [[True, False]], "threads": 1}),
    (bounds.smallest_k, {"scores": ROWS, "eps": 0.1, "rule": "exact", "n_cuts": 3, "threads": 1}),
    (gaussian.keep_fraction, {"sigma": 2.0, "eps": 0.1}),
    (gaussian.threshold, {"sigma": 2.0, "eps": 0.1}),
    (gaussian.tail_mass, {"sigma": 2.0, "fraction": 0.1}),
    (gaussian.fit, {"scores": ROWS, "eps": 0.1, **ROW_OPTIONS}),
    (gaussian.plan, {"n": 100, "sigma": 2.0, "eps": 0.1, "seed": 0, "threads": 1}),
    (windows.fit, {"n": [10, 20, 30], "k": [3, 4, 5], "level": 0.95}),
    (windows.effective, {"scores": ROWS, "eps": 0.1, **ROW_OPTIONS}),
    (windows.participation, {"scores": ROWS, **ROW_OPTIONS}),
    (windows.scale_r, {"B": 1.0, "w_q": np.eye(4), "w_k": np.eye(4)}),
    (windows.predict, {"n": 10, "R": 1.0, "delta": 0.1, "eps": 0.1}),
    (montecarlo.tail_mass, {"scores": ROWS, "keep": KEEP, "delta": 0.1, "draws": 16, "seed": 1,
                            "method": "betting", "upper_bounds": None, "score": None, "eps": None,
                            "family": "row", **ROW_OPTIONS}),
    (montecarlo.clt_interval, {"values": [0.1, 0.2], "delta": 0.1, "population": None}),
    (output.output_error, {"scores": FLAT, "values": KEYS[0, :8], "keep": KEEP}),
    (output.select_output, {"scores": FLAT, "values": KEYS[0, :8], "out_tol": 0.1}),
]  # fmt: skip

POOL: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400,
    0.0, -0.0, 1.0, 0.5, 0.25, 1e-320, 1e-300, 1e-153, 4e-153, 2e-18, 1e-30, 0.999, np.nextafter(1.0, 0.0), 1e308,
    -1e308, float("nan"), float("inf"), -float("inf"), 1j, "", "mass", "gap", "top_k", "cells", "both",
    "probs", "logits", "logprobs", "\udcff", b"", [], [[]], [0], [0, 1], [2, 1], [-1], (), {}, {1: 2}, object(),
    len, np.float32(0.5), np.int8(3), np.uint64(2**64 - 1), np.bool_(True), np.array(0.5), np.array([]),
    np.zeros((0, 5)), np.zeros((5, 0)), np.zeros((3, 40)), np.zeros((3, 40), np.int64), np.ones((3, 40), bool),
    np.full((3, 40), -np.inf), np.full((3, 40), np.inf), np.full((3, 40), np.nan), np.full((3, 40), 3e38, np.float32),
    np.full((3, 40), 1e308), np.full((3, 40), -1e308), np.full((3, 40), 5e-324), ROWS[::-1, ::-2], ROWS.T,
    ROWS.astype(np.float16), ROWS.astype(">f4"), ROWS.astype(np.complex64), ROWS.astype(object),
    np.broadcast_to(np.float32(1), (3, 40)), np.array(["a", "b"]), np.zeros(3, dtype=[("a", "f4")]),
    np.array([0, 2**40]), np.array([[2**62, -5]]), np.zeros((2, 600, 8)), np.zeros((2, 600, 8), np.float32),
    np.full((2, 600, 8), 3e38, np.float32), np.full((2, 600, 8), 1e-45, np.float32), KEYS[:, ::-1], KEYS[:, :, ::2],
    KEYS.astype(np.float16), KEYS.astype(np.float64) * 1e300, KEYS[:1], QUERIES * 1e30, QUERIES * 0,
    np.broadcast_to(KEYS[:, :1], KEYS.shape), np.datetime64("now"), INDEX, ck.ValueBall(KEYS), slice(None),
]  # fmt: skip


@pytest.mark.parametrize("part", range(8))
def test_no_panic_is_raised(part: int) -> None:
    choose = random.Random(part)
    for turn in range(1250):
        function, arguments = CALLS[(turn * 8 + part) % len(CALLS)]
        changed = dict(arguments)
        for name in choose.sample(sorted(changed), min(len(changed), choose.choice([1, 1, 2, 3]))):
            changed[name] = choose.choice(POOL)
        try:
            function(**changed)
        except Exception:  # anything that a caller can catch
            pass
        except BaseException as error:
            pytest.fail(f"{function.__name__}({changed!r}) raised {type(error)}: {error}")
