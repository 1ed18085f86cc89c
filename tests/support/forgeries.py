"""Consistent forgeries of every field of an output, hashes and all.

Each begins with an honest output of `made_outputs`; `words` are what the audit says of it with the
input, and `alone` tells whether it says so without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Body = dict[str, Any]


@dataclass(frozen=True)
class Forgery:
    """How an output of `all_options()[made]` is changed."""

    made: str
    words: str
    alone: bool
    edit: Callable[[Arrays], None] = lambda _: None
    say: Callable[[Body], None] = lambda _: None


def put(name: str, place: Any, value: Any) -> Callable[[Arrays], None]:
    """Another entry of a tensor; `value` may be a function of the one before."""

    def edit(arrays: Arrays) -> None:
        changed = arrays[name].copy()
        changed[place] = value(changed[place]) if callable(value) else value
        arrays[name] = changed

    return edit


def replaced(name: str, new: Callable[[np.ndarray], Any]) -> Callable[[Arrays], None]:
    """Another tensor of the same type."""

    def edit(arrays: Arrays) -> None:
        arrays[name] = np.array(new(arrays[name]), arrays[name].dtype)

    return edit


def option(name: str, value: Any) -> Callable[[Body], None]:
    """Another option."""
    return lambda body: body["options"].update({name: value})


def budget(layer: str, group: int, value: Any, field: str = "eps") -> Callable[[Body], None]:
    """Another budget of one group."""

    def say(body: Body) -> None:
        before = body[field][layer][group]
        body[field][layer][group] = value(before) if callable(value) else value

    return say


def both(*edits: Callable[[Arrays], None]) -> Callable[[Arrays], None]:
    """One change after the other."""

    def edit(arrays: Arrays) -> None:
        for each in edits:
            each(arrays)

    return edit


def keep_another(layer: int) -> Callable[[Arrays], None]:
    """Another position in place of the first kept one of a layer."""

    def edit(arrays: Arrays) -> None:
        kept = arrays[f"layers.{layer}.indices"]
        free = np.setdiff1d(np.arange(30), kept)
        arrays[f"layers.{layer}.indices"] = np.sort([free[0], *kept[1:]]).astype(kept.dtype)

    return edit


def raise_bounds(arrays: Arrays) -> None:
    """As many blocks as the first layer keeps of every head."""
    arrays["layers.0.lower_bound"] = np.diff(arrays["layers.0.block_indptr"])


def drop_kept(place: int) -> Callable[[Arrays], None]:
    """Drop a kept key of the first head of layer 0 with its rows, as a careful forger would."""

    def edit(arrays: Arrays) -> None:
        for name in ("indices", "key", "value"):
            arrays[f"layers.0.{name}"] = np.delete(arrays[f"layers.0.{name}"], place, axis=0)
        arrays["layers.0.indptr"] = arrays["layers.0.indptr"] - [0, 1, 1]

    return edit


def drop_blocks(kept: int, size: int) -> Callable[[Arrays], None]:
    """Drop all but some blocks of the first head of layer 0."""

    def edit(arrays: Arrays) -> None:
        first = int(arrays["layers.0.block_indptr"][1])
        gone = np.arange(kept, first)
        blocks = arrays["layers.0.blocks"][gone]
        start = int(arrays["layers.0.indptr"][1])
        rows = np.flatnonzero(np.isin(arrays["layers.0.indices"][:start] // size, blocks))
        for name, which in (("indices", rows), ("key", rows), ("value", rows), ("blocks", gone)):
            arrays[f"layers.0.{name}"] = np.delete(arrays[f"layers.0.{name}"], which, axis=0)
        arrays["layers.0.indptr"] = arrays["layers.0.indptr"] - np.array([0, 1, 1]) * len(rows)
        shift = np.array([0, 1, 1]) * len(gone)
        arrays["layers.0.block_indptr"] = arrays["layers.0.block_indptr"] - shift
        if "layers.0.lower_bound" in arrays:
            arrays["layers.0.lower_bound"] = np.minimum(arrays["layers.0.lower_bound"], [kept, 99])

    return edit


def to_next(array: np.ndarray) -> np.ndarray:
    """The next smaller numbers."""
    return np.nextafter(array, array.dtype.type(0))


FORGERIES: dict[str, Forgery] = {
    "a block is not listed": Forgery(
        "head full blocks", "not the blocks of 4 that hold", True,
        both(
            replaced("layers.0.blocks", lambda ids: ids[1:]),
            replaced("layers.0.block_indptr", lambda ends: ends - [0, 1, 1]),
        ),
    ),
    "another block is listed": Forgery(
        "layer compact blocks", "not the blocks of 4 that hold", True,
        put("layers.0.blocks", 0, lambda x: x + 1),
    ),
    "part of a block": Forgery("head none blocks", "is kept in part", True, drop_kept(2)),
    "blocks of another size": Forgery(
        "head none blocks", "not the blocks of 2", True, say=option("block_size", 2)
    ),
    "block_indptr falls": Forgery(
        "head full blocks", "block_indptr: does not rise", True,
        put("layers.1.block_indptr", 1, 99),
    ),
    "blocks dropped, none": Forgery(
        "head none nhd", r"tail mass in \[0.0, 0.1\] is refuted", False, drop_blocks(1, 3)
    ),
    "blocks dropped, compact": Forgery(
        "head compact nhd", r"worst_tail_mass.* is refuted", False, drop_blocks(1, 3)
    ),
    "block bound raised": Forgery(
        "head compact nhd", "is not proven by the recorded weights", False, raise_bounds
    ),
    "block bound beyond what is kept": Forgery(
        "head compact blocks", r"is not from 0 to the \d blocks kept", True,
        put("layers.0.lower_bound", 0, 24),
    ),
    "a further block would fit": Forgery(
        "head full capped blocks", "over eps with 12 kept, though max_keep allows 16", True,
        say=option("max_keep", 16),
    ),
    "a cap that is no more, none": Forgery(
        "head none capped", "is refuted", False, say=option("max_keep", None)
    ),
    "a cap that is no more, compact": Forgery(
        "layer compact capped", "without a max_keep to excuse it", True,
        say=option("max_keep", None),
    ),
    "hot keys that are none": Forgery(
        "head none hot", "is refuted", False,
        say=lambda body: body["options"].update(hot=False, size=None),
    ),
    "hot keys that are none, compact": Forgery(
        "layer compact hot", "without a max_keep to excuse it", True,
        say=lambda body: body["options"].update(hot=False, size=None),
    ),
    "more hot keys than said": Forgery(
        "head full hot", "28 keys are kept, its size allows 27", True, say=option("size", 27)
    ),
    "hot keys lose less": Forgery(
        "head full hot", "tail_mass_upper.* is refuted", False,
        both(
            put("layers.0.tail_mass_upper", (0, 0), lambda mass: mass * np.float32(0.9)),
            put("layers.0.tail_mass_lower", (0, 0), 0.0),
        ),
    ),
    "hot keys without a guard": Forgery(
        "head full hot", "options .* cannot have been asked for", True, say=option("guard", "none")
    ),
    "hot keys of any number": Forgery(
        "head full hot", "options .* cannot have been asked for", True, say=option("size", None)
    ),
    "hot keys and a cap": Forgery(
        "head full hot", "options .* cannot have been asked for", True, say=option("max_keep", 7)
    ),
    "hot is a number": Forgery(
        "head full hot", "options .* cannot have been asked for", True, say=option("hot", 1)
    ),
    "a bound of hot keys raised": Forgery(
        "head compact hot", "is not proven by the recorded weights", False,
        put("layers.0.lower_bound", 0, 7),
    ),
    "more held out": Forgery(
        "head none aside", "4 of 6 queries, holdout allows 3", True,
        replaced("layers.1.held_out", lambda held: [*held, 5]),
    ),
    "held out twice": Forgery(
        "head none aside", "held_out: not ascending queries", True,
        replaced("layers.1.held_out", lambda held: [held[0], held[0]]),
    ),
    "held out of no query": Forgery(
        "head none aside", "held_out: not ascending queries from 0 to 5", True,
        put("layers.1.held_out", -1, 6),
    ),
    "less held out than violates, full": Forgery(
        "head full aside", "without a max_keep to excuse it", True,
        replaced("layers.1.held_out", lambda held: held[:0]),
    ),
    "less held out than violates, none": Forgery(
        "head none aside", "is refuted", False,
        replaced("layers.1.held_out", lambda held: held[:0]),
    ),
    "a smaller holdout": Forgery(
        "token none aside", "3 of 6 queries, holdout allows 1", True, say=option("holdout", 0.1)
    ),
    "mass of a held out row": Forgery(
        "head full aside", r"layers.1.tail_mass_upper\[0, 0\]: .* is refuted", False,
        both(*(
            put(f"layers.1.tail_mass_{end}", (0, 0), lambda x: x * 0.99)
            for end in ("upper", "lower")
        )),
    ),
    "fewer violations": Forgery(
        "head compact aside", "held-out queries that lose more than eps", False,
        replaced("layers.1.violations", lambda counts: counts * 0),
    ),
    "more violations": Forgery(
        "head compact aside", "held-out queries that lose more than eps", False,
        replaced("layers.1.violations", lambda counts: counts * 0 + 3),
    ),
    "violations of none": Forgery(
        "head compact aside", "is not from 0 to the 3 queries held out", True,
        put("layers.1.violations", 0, -1),
    ),
    "more violations than queries": Forgery(
        "head compact aside", "is not from 0 to the 3 queries held out", True,
        put("layers.1.violations", 0, 4),
    ),
    "worst mass lowered": Forgery(
        "head compact plain", r"layers.1.worst_tail_mass\[2\]: .* is refuted", False,
        put("layers.1.worst_tail_mass", 2, lambda x: x * np.float32(0.999)),
    ),
    "worst mass raised": Forgery(
        "head compact plain", "is over eps = 0.1 without a max_keep", True,
        put("layers.1.worst_tail_mass", 2, 0.11),
    ),
    "worst mass is none": Forgery(
        "head compact capped", "worst_tail_mass.*: nan is no mass", True,
        put("layers.1.worst_tail_mass", 2, np.nan),
    ),
    "more left out": Forgery(
        "head none covered", "rows, coverage allows", True,
        replaced("layers.0.left_out", lambda left: sorted({*left.tolist(), 1, 2, 3, 4, 5})),
    ),
    "left out and held out": Forgery(
        "head none covered", "is of a query that is held out", True,
        put("layers.0.left_out", 0, 0),
    ),
    "left out of no row": Forgery(
        "head none covered", "left_out: not ascending rows from 0 to 23", True,
        put("layers.0.left_out", -1, 24),
    ),
    "others left out, none": Forgery(
        "layer none covered", "is refuted", False,
        replaced("layers.0.left_out", lambda left: left[:0]),
    ),
    "a larger coverage": Forgery(
        "token compact covered", "rows, coverage allows", True, say=option("coverage", 0.9)
    ),
    "a weight without a promise": Forgery(
        "head compact aside", "nothing is promised for row 6", True,
        both(
            replaced("layers.0.lower_bound_rows", lambda rows: [*rows[:3], 6, *rows[3:]]),
            replaced("layers.0.lower_bound_weights", lambda weights: [*weights, 1]),
        ),
    ),
    "weights of no rows": Forgery(
        "layer full plain", "lower_bound_rows: not ascending rows from 0 to 23", True,
        put("layers.0.lower_bound_rows", -1, 24),
    ),
    "rows of weights fall": Forgery(
        "layer full plain", "lower_bound_rows: not ascending", True,
        replaced("layers.0.lower_bound_rows", lambda rows: rows[::-1]),
    ),
    "another number of weights": Forgery(
        "token full plain", "lower_bound_weights: is F32", True,
        replaced("layers.0.lower_bound_weights", lambda weights: weights[1:]),
    ),
    "a budget of one group, full": Forgery(
        "head full plain", "is over eps = 0.01 without", True, say=budget("1", 1, 0.01)
    ),
    "a budget of one group, none": Forgery(
        "head none plain", r"layer 1, head [23], .* in \[0.0, 0.01\] is refuted", False,
        say=budget("1", 1, 0.01),
    ),
    "a larger budget of one group": Forgery(
        "head compact plain", r"lower_bound\[1\]: layer 1, kv head 1: .* not proven", False,
        say=budget("1", 1, 0.5),
    ),
    "a budget for no group": Forgery(
        "head full plain", "eps is not one budget for each group", True,
        say=lambda body: body["eps"]["1"].append(0.1),
    ),
    "a budget for no layer": Forgery(
        "head full plain", "eps is not one budget for each group", True,
        say=lambda body: body["eps"].update({"2": [0.1, 0.1]}),
    ),
    "a budget of one layer by token": Forgery(
        "token none plain", "eps is not the same in all layers", True, say=budget("1", 0, 0.2)
    ),
    "bounds for a larger budget": Forgery(
        "layer full sized", "is not proven by the recorded weights", False,
        say=lambda body: body.update(bound_eps={"0": [0.3], "1": [0.3]}),
    ),
    "bounds that prove nothing of a size": Forgery(
        "layer full sized", "bound_eps = 0.99 add up to 0 keys, which its size of 44 allows", True,
        both(*(replaced(f"layers.{i}.lower_bound", lambda bounds: bounds * 0) for i in (0, 1))),
        lambda body: body.update(bound_eps={"0": [0.99], "1": [0.99]}),
    ),
    "bounds that prove a little too little of a size": Forgery(
        "token compact sized", "add up to 22 keys, which its size of 22 allows", True,
        both(*(put(f"layers.{i}.lower_bound", 0, 22) for i in (0, 1))),
    ),
    "a size without budgets of bounds": Forgery(
        "head full sized", "has a size, but no bound_eps", True,
        say=lambda body: body.update(bound_eps=None),
    ),
    "a size and several budgets": Forgery(
        "head full sized", "bound_eps is not one number", True,
        say=budget("0", 1, 0.05, "bound_eps"),
    ),
    "budgets of bounds that are none": Forgery(
        "head full sized", "bound_eps is 1.0", True,
        say=lambda body: body.update(bound_eps={"0": [1.0, 1.0], "1": [1.0, 1.0]}),
    ),
    "a smaller size": Forgery(
        "head none sized", "44 keys are kept, its size allows 43", True, say=option("size", 43)
    ),
    "a smaller size by token": Forgery(
        "token full sized", "keys are kept, its size allows 20", True, say=option("size", 20)
    ),
    "a smaller out_tol": Forgery(
        "head none out_tol", "is not proven to keep outputs within out_tol = 0.4", False,
        say=option("out_tol", 0.4),
    ),
    "a larger budget under out_tol": Forgery(
        "layer none out_tol", "is not proven to keep outputs within out_tol = 0.5", False,
        say=budget("1", 0, lambda eps: eps * 1.0001),
    ),
    "another layout": Forgery("head full nhd", "metadata certk: |must be", True,
                              say=option("layout", "hnd")),
    "another layout where all fits": Forgery(
        "head none plain", "metadata certk: |must be", True, say=option("layout", "nhd")
    ),
    "rows of another key, nhd": Forgery(
        "head none nhd", r"layers.1.value\[3\]: is not position \d+ of kv head 0", False,
        put("layers.1.value", (3, 0), lambda x: x + 1),
    ),
    "another level of proof": Forgery(
        "head full plain", "worst_tail_mass: is missing", True, say=option("proof", "compact")
    ),
    "no proof, with tensors of one": Forgery(
        "head full plain", "tail_mass_upper: no output has such a tensor", True,
        say=option("proof", "none"),
    ),
    "wider masses": Forgery(
        "head full plain", r"is F64 \[4, 6\], must be F32", True,
        lambda arrays: arrays.update(
            {"layers.0.tail_mass_upper": arrays["layers.0.tail_mass_upper"].astype("<f8")}
        ),
    ),
    "another set in one layer": Forgery(
        "token none plain", "indices: is not that of layer 0", True,
        keep_another(1),
    ),
    "another bound in one layer": Forgery(
        "token full plain", "lower_bound: is not that of layer 0", True,
        put("layers.1.lower_bound", 0, 1),
    ),
    "a bound for all layers": Forgery(
        "token full plain", "lower_bound.*: all layers: 28 is not proven", False,
        both(*(put(f"layers.{i}.lower_bound", 0, 28) for i in (0, 1))),
    ),
    "sets of layers as one": Forgery(
        "layer none plain", "is not that of layer 0, with which it shares", True,
        say=option("granularity", "token"),
    ),
    "a further part of the input": Forgery(
        "head none plain", "input header: the header of", False,
        say=lambda body: body["input_headers"].append("0" * 64),
    ),
    "no part of the input": Forgery(
        "head none plain", "input_headers is not a list", True,
        say=lambda body: body.update(input_headers=[]),
    ),
    "the format before": Forgery(
        "head none plain", "it is of format 1, which nothing from 0.2.0 on reads", True,
        say=lambda body: body.update(format=1),
    ),
    "a key dropped, none": Forgery(
        "head none capped", "is kept|is refuted|over eps|tail mass", False, drop_kept(0),
    ),
    "a smaller causal offset": Forgery(
        "head none causal", "indices: layer 0, kv head 0: not ascending positions", True,
        say=lambda body: body.update(causal_offset=10),
    ),
    "a scale is as large as can be": Forgery(
        "head none guarded", "guard_radii: kv head 1: a code is farther", False,
        put("layers.1.guard_scales", -1, lambda bits: bits | 0x4000),
    ),
    "a mean is as large as can be": Forgery(
        "layer compact guarded", "guard_radii: kv head 1: a code is farther", False,
        put("layers.0.guard_mean", (1, 2), np.finfo(np.float32).max),
    ),
    "all squares are as large as can be": Forgery(
        "head full guarded", "guard_gram: has an entry that no guard has", True,
        replaced("layers.1.guard_gram", lambda gram: np.full_like(gram, np.finfo(float).max)),
    ),
    "a centre is as far as can be": Forgery(
        "layer full guarded", "guard_ball: kv head 1: a dropped value lies outside of it", False,
        put("layers.0.guard_ball", (1, 0), -np.finfo(float).max),
    ),
    "a guard's codes are of fewer keys": Forgery(
        "head full guarded", "guard_codes: has 64 bytes, which are not those of the keys", True,
        replaced("layers.0.guard_codes", lambda codes: codes[:-64]),
    ),
    "a code is another": Forgery(
        "head full guarded", "guard_radii: kv head 0: a code is farther from its key", False,
        put("layers.0.guard_codes", 9, lambda byte: byte ^ 64),
    ),
    "a byte where no key is": Forgery(
        "layer none guarded", "guard_codes: kv head 1: bytes of no key", False,
        put("layers.1.guard_codes", -1, 3),
    ),
    "a radius is smaller": Forgery(
        "token compact guarded", "guard_radii: kv head 0: a code is farther", False,
        put("layers.1.guard_radii", 2, lambda bits: bits - 2),
    ),
    "a scale is another": Forgery(
        "head none guarded", "guard_radii: kv head 1: a code is farther", False,
        put("layers.1.guard_scales", -1, lambda bits: bits + 1),
    ),
    "a scale is negative": Forgery(
        "head none guarded", "guard_scales: has an entry that no guard has", True,
        put("layers.1.guard_scales", -1, lambda bits: bits | 0x8000),
    ),
    "a scale is infinite": Forgery(
        "head none guarded", "guard_scales: has an entry that no guard has", True,
        put("layers.1.guard_scales", -1, 0x7F80),
    ),
    "a code is left out, and its bytes stay": Forgery(
        "head none guarded", "guard_codes: kv head 1: bytes of no key, or of one without", False,
        put("layers.1.guard_scales", -1, 0),
    ),
    "a mean is another": Forgery(
        "layer compact guarded", "guard_radii: kv head 1: a code is farther", False,
        put("layers.0.guard_mean", (1, 2), lambda x: x + 0.01),
    ),
    "a mean is no number": Forgery(
        "layer compact guarded", "guard_mean: has an entry that no guard has", True,
        put("layers.0.guard_mean", (1, 2), np.nan),
    ),
    "errors of codes are less": Forgery(
        "head full guarded", "guard_gram: kv head 1: it does not bound what all codes leave", False,
        replaced("layers.1.guard_gram", lambda gram: gram * [[1.0], [0.99]]),
    ),
    "errors of codes are less in one direction": Forgery(
        "head full guarded", "guard_gram: kv head 0: it does not bound", False,
        put("layers.1.guard_gram", (0, 0), lambda x: 0.95 * x),
    ),
    "a matrix that is not of squares": Forgery(
        "head full guarded", "guard_gram: kv head 0: it does not bound", False,
        put("layers.1.guard_gram", (0, 1), lambda x: x + 1),
    ),
    "a square is negative": Forgery(
        "head full guarded", "guard_gram: has an entry that no guard has", True,
        put("layers.1.guard_gram", (0, 4), -1e-9),
    ),
    "the largest error is less": Forgery(
        "token full guarded", "guard_bounds: kv head 1: a code's error, a moved key or", False,
        put("layers.1.guard_bounds", (1, 1), lambda x: 0.99 * x),
    ),
    "the longest key is less": Forgery(
        "token full guarded", "guard_bounds: kv head 1: a code's error, a moved key or", False,
        put("layers.1.guard_bounds", (1, 2), lambda x: 0.99 * x),
    ),
    "the largest entry is less": Forgery(
        "token full guarded", "guard_bounds: kv head 1: a code's error, a moved key or", False,
        put("layers.1.guard_bounds", (1, 4), to_next),
    ),
    "keys are turned": Forgery(
        "head full guarded", "guard_radii: kv head 0: a code is farther", False,
        put("layers.1.guard_bounds", (0, 5), 4.0),
    ),
    "keys are turned by what they cannot be": Forgery(
        "head full guarded", "keys of 4 entries are turned by 1 or by 4", True,
        put("layers.1.guard_bounds", (0, 5), 2.0),
    ),
    "half an addition": Forgery(
        "head full guarded", "a count of additions is none", True,
        put("layers.1.guard_bounds", (0, 3), 1.5),
    ),
    "a bound is infinite": Forgery(
        "head full guarded", "guard_bounds: has an entry that no guard has", True,
        put("layers.1.guard_bounds", (0, 0), np.inf),
    ),
    "a ball is smaller": Forgery(
        "layer full guarded", "guard_ball: kv head 0: a dropped value lies outside of it", False,
        put("layers.0.guard_ball", (0, -1), lambda x: x * (1 - 1e-8)),
    ),
    "a ball is elsewhere": Forgery(
        "layer full guarded", "guard_ball: kv head 1: a dropped value lies outside of it", False,
        put("layers.0.guard_ball", (1, 0), lambda x: x + 0.1),
    ),
    "a radius of a ball is negative": Forgery(
        "layer full guarded", "guard_ball: has an entry that no guard has", True,
        put("layers.0.guard_ball", (0, -1), -1.0),
    ),
    "the guard is not spoken of": Forgery(
        "layer full guarded", "no output has such a tensor", True, say=option("guard", "none")
    ),
    "a guard of another kind": Forgery(
        "layer full guarded", "cannot have been asked for", True, say=option("guard", "walls")
    ),
}  # fmt: skip
