"""Consistent forgeries of every field of an output, hashes and all, with the findings they need.

`alone` is found without the input. `by_input` is found with the input, and without it the output
holds. Each begins with an honest output of `made_outputs`: a name of `MADE` or of `PRUNED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cli_fixtures import Arrays, Body, as_float64, cache_tensors

EDGE = 1 << 63
BOTH = (0, 1)


@dataclass(frozen=True)
class Say:
    """A change of the certificate."""

    change: Callable[[Body], Any]


Edit = Callable[[Arrays], Any]
Change = Edit | Say


@dataclass(frozen=True)
class Forgery:
    """An honest output by its name, and its changes; certificates change last."""

    made: str
    words: str
    alone: bool
    changes: tuple[Change, ...]

    def edit(self, arrays: Arrays) -> None:
        """Change the tensors."""
        for change in self.changes:
            if not isinstance(change, Say):
                change(arrays)

    def say(self, body: Body) -> None:
        """Change the certificate."""
        for change in self.changes:
            if isinstance(change, Say):
                change.change(body)


def alone(made: str, words: str, *changes: Change) -> Forgery:
    """A forgery that is found without the input."""
    return Forgery(made, words, True, changes)


def by_input(made: str, words: str, *changes: Change) -> Forgery:
    """A forgery that only the input refutes."""
    return Forgery(made, words, False, changes)


def new(name: str, value: Callable[[np.ndarray], Any]) -> Edit:
    """Another tensor of the same type; names go without "layers."."""

    def edit(arrays: Arrays) -> None:
        before = arrays[f"layers.{name}"]
        arrays[f"layers.{name}"] = np.array(value(before), before.dtype)

    return edit


def made_of(name: str, value: Callable[[Arrays], Any]) -> Edit:
    """Another tensor of the same type, made of those that are there."""
    return lambda arrays: new(name, lambda _: value(arrays))(arrays)


def put(name: str, place: Any, value: Any) -> Edit:
    """Another entry of a tensor; `value` may be a function of the entry before."""

    def edit(arrays: Arrays) -> None:
        held = arrays[f"layers.{name}"]
        held[place] = value(held[place]) if callable(value) else value

    return edit


def option(name: str, value: Any) -> Say:
    """Another option."""
    return Say(lambda body: body["options"].update({name: value}))


def options(**values: Any) -> Say:
    """Other options."""
    return Say(lambda body: body["options"].update(values))


def field(**values: Any) -> Say:
    """Other fields of the certificate."""
    return Say(lambda body: body.update(values))


def budget(layer: str, group: int, value: Any, field: str = "eps") -> Say:
    """Another budget of one group."""

    def say(body: Body) -> None:
        before = body[field][layer][group]
        body[field][layer][group] = value(before) if callable(value) else value

    return Say(say)


def eps(value: Any) -> Say:
    """One budget for all groups."""

    def say(body: Body) -> None:
        body["eps"] = {index: [value] * len(groups) for index, groups in body["eps"].items()}

    return Say(say)


def output_said(**values: Any) -> Say:
    """Other facts about the kept keys of layer 0."""
    return Say(lambda body: body["outputs"]["layers.0.key"].update(values))


def drop(head: int, which: Callable[[np.ndarray], Any]) -> Edit:
    """Drop kept keys of a head of layer 0 with their rows and blocks, as a careful forger would.

    `which` finds their places among the kept positions of the head.
    """

    def edit(arrays: Arrays) -> None:
        held = {name.removeprefix("layers.0."): name for name in arrays if "layers.0" in name}
        ends = arrays[held["indptr"]]
        gone = ends[head] + np.asarray(which(arrays[held["indices"]][ends[head] : ends[head + 1]]))
        for name in ("indices", "key", "value"):
            arrays[held[name]] = np.delete(arrays[held[name]], gone, axis=0)
        arrays[held["indptr"]] = ends = ends - (np.arange(len(ends)) > head) * len(gone)
        if "lower_bound" in held:
            bounds = arrays[held["lower_bound"]]
            bounds[head] = min(bounds[head], ends[head + 1] - ends[head])

    return edit


def drop_kept(place: int, head: int = 0) -> Edit:
    """Drop the kept key at one place of a head."""
    return drop(head, lambda _: [place])


def drop_blocks(kept: int, size: int) -> Edit:
    """Drop all but some blocks of the first head of layer 0."""

    def edit(arrays: Arrays) -> None:
        left = arrays["layers.0.blocks"][:kept]
        drop(0, lambda keys: np.flatnonzero(~np.isin(keys // size, left)))(arrays)
        ends = arrays["layers.0.block_indptr"]
        arrays["layers.0.blocks"] = np.delete(arrays["layers.0.blocks"], range(kept, ends[1]))
        arrays["layers.0.block_indptr"] = ends - np.array([0, 1, 1]) * (ends[1] - kept)
        if "layers.0.lower_bound" in arrays:
            arrays["layers.0.lower_bound"] = np.minimum(arrays["layers.0.lower_bound"], [kept, 99])

    return edit


def drop_all(arrays: Arrays) -> None:
    """Drop all keys, and say so."""
    for i in BOTH:
        for name in ("indices", "key", "value"):
            arrays[f"layers.{i}.{name}"] = arrays[f"layers.{i}.{name}"][:0]
        for name in ("lower_bound", "lower_bound_weights", "indptr"):
            arrays[f"layers.{i}.{name}"] = np.zeros_like(arrays[f"layers.{i}.{name}"])
        for end in ("upper", "lower"):
            name = f"layers.{i}.tail_mass_{end}"
            arrays[name] = np.ones_like(arrays[name])


def no_proof(arrays: Arrays, layer: int = 0) -> None:
    """No rows with weights."""
    for name in ("lower_bound_rows", "lower_bound_weights"):
        arrays[f"layers.{layer}.{name}"] = arrays[f"layers.{layer}.{name}"][:0]


def keep_only(kept: list[int]) -> Edit:
    """Keep these positions in every head of the cache "small"; claim nothing else."""

    def edit(arrays: Arrays) -> None:
        cache = {name: as_float64(stored) for name, stored in cache_tensors(m=5).items()}
        for i in BOTH:
            arrays[f"layers.{i}.indices"] = np.array(kept * 2, np.int32)
            arrays[f"layers.{i}.indptr"] = np.array([0, len(kept), 2 * len(kept)])
            for role in ("key", "value"):
                rows = cache[f"layers.{i}.{role}"].reshape(2, -1, 4)[:, kept].astype("<f2")
                arrays[f"layers.{i}.{role}"] = rows.reshape(-1, 4)
            for name, value in (("tail_mass_upper", 1.0), ("tail_mass_lower", 0.0)):
                name = f"layers.{i}.{name}"
                arrays[name] = np.full_like(arrays[name], value)
            arrays[f"layers.{i}.lower_bound"] = np.zeros(2, np.int64)
            no_proof(arrays, i)

    return edit


def one_key_to_two_heads(arrays: Arrays) -> None:
    """Cut as slices are, [0, 2^63 - 1, -2, 1] is one key, none, and the one again."""
    cache = cache_tensors(m=5, layers=1, kv_heads=3, heads=3)
    arrays["layers.0.indices"] = np.array([17], np.int32)
    arrays["layers.0.indptr"] = np.array([0, EDGE - 1, -2, 1])
    for role in ("key", "value"):
        rows = as_float64(cache[f"layers.0.{role}"])[0, :1, 17]
        arrays[f"layers.0.{role}"] = rows.astype("<f2")
    arrays["layers.0.tail_mass_upper"] = np.ones((3, 5), "<f4")
    arrays["layers.0.tail_mass_lower"] = np.zeros((3, 5), "<f4")
    arrays["layers.0.lower_bound"] = np.zeros(3, np.int64)
    no_proof(arrays)


def starts(*ends: int | None) -> Edit:
    """Other starts of the heads of layer 1; None is the number of kept keys."""

    def edit(arrays: Arrays) -> None:
        total = len(arrays["layers.1.indices"])
        arrays["layers.1.indptr"] = np.array([total if end is None else end for end in ends])

    return edit


def first_twice(*, longer: bool) -> Edit:
    """The first key of kv head 1 twice: its row makes another's place, or room of its own."""

    def edit(arrays: Arrays) -> None:
        place = int(arrays["layers.0.indptr"][1])
        for name in ("indices", "key", "value"):
            rows = arrays[f"layers.0.{name}"]
            if longer:
                rows = np.insert(rows, place, rows[place], axis=0)
            else:
                rows[place + 1] = rows[place]
            arrays[f"layers.0.{name}"] = rows
        if longer:
            arrays["layers.0.indptr"] = arrays["layers.0.indptr"] + np.array([0, 0, 1, 1])

    return edit


def wide(kept: list[int]) -> Edit:
    """Positions of 64 bits in one set of layer 0, with rows of zeros."""

    def edit(arrays: Arrays) -> None:
        arrays["layers.0.indices"] = np.array(kept, np.int64)
        for role in ("key", "value"):
            arrays[f"layers.0.{role}"] = np.zeros((2, len(kept), 4), "<f2")
        arrays["layers.0.lower_bound"] = np.zeros(1, np.int64)

    return edit


def claim(axis: int, size: int, *roles: str) -> Say:
    """Say that tensors of the input were of another size."""

    def say(body: Body) -> None:
        for name, facts in body["inputs"].items():
            if name.endswith(roles):
                facts["shape"][axis] = size

    return Say(say)


def claim_keys(n: int) -> Say:
    """Say that the input had n keys."""
    return claim(2, n, "key", "value")


class Shaped:
    """An empty tensor of a shape that NumPy refuses."""

    nbytes = 0

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype, self.itemsize, self.shape = dtype, dtype.itemsize, shape

    def tobytes(self) -> bytes:
        return b""


def empty(name: str, shape: tuple[int, ...]) -> Edit:
    """A tensor of another shape without entries."""

    def edit(arrays: Arrays) -> None:
        kind: Any = arrays[f"layers.{name}"].dtype
        try:
            arrays[f"layers.{name}"] = np.zeros(shape, kind)
        except ValueError:  # NumPy cannot say it, the file can
            arrays[f"layers.{name}"] = Shaped(kind, shape)  # type: ignore[assignment]

    return edit


def widened(arrays: Arrays) -> None:
    """Indices in I64, as where there are more than 2^31 keys."""
    for i in BOTH:
        retyped(f"{i}.indices", "<i8")(arrays)


def scale_masses(layer: int, place: Any, upper: float, lower: float = 1.0) -> Edit:
    """Multiply the ends of a recorded mass; the lower one stays at most the upper one."""

    def edit(arrays: Arrays) -> None:
        names = [f"layers.{layer}.tail_mass_{end}" for end in ("upper", "lower")]
        for name, factor in zip(names, (upper, lower), strict=True):
            arrays[name][place] *= np.float32(factor)
        arrays[names[1]] = np.minimum(*(arrays[name] for name in names))

    return edit


def another_index(arrays: Arrays) -> None:
    """Keep another key of the first head than was kept, under the old rows."""
    first = arrays["layers.0.indices"][: arrays["layers.0.indptr"][1]]
    first[0] = min(set(range(24)) - set(first.tolist()))
    first.sort()


def first_row_of_another_head(arrays: Arrays) -> None:
    """The first key of kv head 1 in place of that of kv head 2."""
    _, first, second, _ = arrays["layers.0.indptr"]
    arrays["layers.0.key"][second] = arrays["layers.0.key"][first]


def retyped(name: str, kind: str) -> Edit:
    """The same numbers in another type."""

    def edit(arrays: Arrays) -> None:
        arrays[f"layers.{name}"] = arrays[f"layers.{name}"].astype(kind)

    return edit


FORGERIES: dict[str, Forgery] = {
    "a block is not listed": alone("head full blocks", "not the blocks of 4 that hold",
        new("0.blocks", lambda ids: ids[1:]), new("0.block_indptr", lambda ends: ends - [0, 1, 1])),
    "another block is listed": alone("layer compact blocks", "not the blocks of 4 that hold",
        put("0.blocks", 0, lambda x: x + 1)),
    "part of a block": alone("head none blocks", "is kept in part", drop_kept(2)),
    "blocks of another size": alone("head none blocks", "not the blocks of 2",
        option("block_size", 2)),
    "block_indptr falls": alone("head full blocks", "block_indptr: does not rise",
        put("1.block_indptr", 1, 99)),
    "blocks dropped, none": by_input("head none nhd", r"tail mass in \[0.0, 0.1\] is refuted",
        drop_blocks(1, 3)),
    "blocks dropped, compact": by_input("head compact nhd", r"worst_tail_mass.* is refuted",
        drop_blocks(1, 3)),
    "block bound raised": by_input("head compact nhd", "is not proven by the recorded weights",
        made_of("0.lower_bound", lambda arrays: np.diff(arrays["layers.0.block_indptr"]))),
    "block bound beyond what is kept": alone("head compact blocks",
        r"is not from 0 to the \d blocks kept", put("0.lower_bound", 0, 24)),
    "a further block would fit": alone("head full capped blocks",
        "over eps with 12 kept, though max_keep allows 16", option("max_keep", 16)),
    "a cap that is no more, none": by_input("head none capped", "is refuted",
        option("max_keep", None)),
    "a cap that is no more, compact": alone("layer compact capped",
        "without a max_keep to excuse it", option("max_keep", None)),
    "hot keys that are none": by_input("head none hot", "is refuted",
        Say(lambda body: body["options"].update(hot=False, size=None))),
    "hot keys that are none, compact": alone("layer compact hot", "without a max_keep to excuse it",
        Say(lambda body: body["options"].update(hot=False, size=None))),
    "more hot keys than said": alone("head full hot", "28 keys are kept, its size allows 27",
        option("size", 27)),
    "hot keys lose less": by_input("head full hot", "tail_mass_upper.* is refuted",
        put("0.tail_mass_upper", (0, 0), lambda mass: mass * np.float32(0.9)),
        put("0.tail_mass_lower", (0, 0), 0.0)),
    "hot keys without a guard": alone("head full hot", "options .* cannot have been asked for",
        option("guard", "none")),
    "hot keys of any number": alone("head full hot", "options .* cannot have been asked for",
        option("size", None)),
    "hot keys and a cap": alone("head full hot", "options .* cannot have been asked for",
        option("max_keep", 7)),
    "hot is a number": alone("head full hot", "options .* cannot have been asked for",
        option("hot", 1)),
    "a bound of hot keys raised": by_input("head compact hot",
        "is not proven by the recorded weights", put("0.lower_bound", 0, 7)),
    "more held out": alone("head none aside", "4 of 6 queries, holdout allows 3",
        new("1.held_out", lambda held: [*held, 5])),
    "held out twice": alone("head none aside", "held_out: not ascending queries",
        new("1.held_out", lambda held: [held[0], held[0]])),
    "held out of no query": alone("head none aside", "held_out: not ascending queries from 0 to 5",
        put("1.held_out", -1, 6)),
    "less held out than violates, full": alone("head full aside", "without a max_keep to excuse it",
        new("1.held_out", lambda held: held[:0])),
    "less held out than violates, none": by_input("head none aside", "is refuted",
        new("1.held_out", lambda held: held[:0])),
    "a smaller holdout": alone("token none aside", "3 of 6 queries, holdout allows 1",
        option("holdout", 0.1)),
    "mass of a held out row": by_input("head full aside",
        r"layers.1.tail_mass_upper\[0, 0\]: .* is refuted",
        *(put(f"1.tail_mass_{end}", (0, 0), lambda x: x * 0.99) for end in ("upper", "lower"))),
    "fewer violations": by_input("head compact aside", "held-out queries that lose more than eps",
        new("1.violations", lambda counts: counts * 0)),
    "more violations": by_input("head compact aside", "held-out queries that lose more than eps",
        new("1.violations", lambda counts: counts * 0 + 3)),
    "violations of none": alone("head compact aside", "is not from 0 to the 3 queries held out",
        put("1.violations", 0, -1)),
    "more violations than queries": alone("head compact aside",
        "is not from 0 to the 3 queries held out", put("1.violations", 0, 4)),
    "worst mass lowered": by_input("head compact plain",
        r"layers.1.worst_tail_mass\[2\]: .* is refuted",
        put("1.worst_tail_mass", 2, lambda x: x * np.float32(0.999))),
    "worst mass raised": alone("head compact plain", "is over eps = 0.1 without a max_keep",
        put("1.worst_tail_mass", 2, 0.11)),
    "worst mass is none": alone("head compact capped", "worst_tail_mass.*: nan is no mass",
        put("1.worst_tail_mass", 2, np.nan)),
    "more left out": alone("head none covered", "rows, coverage allows",
        new("0.left_out", lambda left: sorted({*left.tolist(), 1, 2, 3, 4, 5}))),
    "half a row more than coverage allows": alone("head none covered",
        "2 of 10 rows, coverage allows 1", option("coverage", 0.85)),
    "left out and held out": alone("head none covered", "is of a query that is held out",
        put("0.left_out", 0, 0)),
    "left out of no row": alone("head none covered", "left_out: not ascending rows from 0 to 23",
        put("0.left_out", -1, 24)),
    "others left out, none": by_input("layer none covered", "is refuted",
        new("0.left_out", lambda left: left[:0])),
    "a larger coverage": alone("token compact covered", "rows, coverage allows",
        option("coverage", 0.9)),
    "a weight without a promise": alone("head compact aside", "nothing is promised for row 6",
        new("0.lower_bound_rows", lambda rows: [*rows[:3], 6, *rows[3:]]),
        new("0.lower_bound_weights", lambda weights: [*weights, 1])),
    "weights of no rows": alone("layer full plain",
        "lower_bound_rows: not ascending rows from 0 to 23", put("0.lower_bound_rows", -1, 24)),
    "rows of weights fall": alone("layer full plain", "lower_bound_rows: not ascending",
        new("0.lower_bound_rows", lambda rows: rows[::-1])),
    "another number of weights": alone("token full plain", "lower_bound_weights: is F32",
        new("0.lower_bound_weights", lambda weights: weights[1:])),
    "a budget of one group, full": alone("head full plain", "is over eps = 0.01 without",
        budget("1", 1, 0.01)),
    "a budget of one group, none": by_input("head none plain",
        r"layer 1, head [23], .* in \[0.0, 0.01\] is refuted", budget("1", 1, 0.01)),
    "a larger budget of one group": by_input("head compact plain",
        r"lower_bound\[1\]: layer 1, kv head 1: .* not proven", budget("1", 1, 0.5)),
    "a budget for no group": alone("head full plain", "eps is not one budget for each group",
        Say(lambda body: body["eps"]["1"].append(0.1))),
    "a budget for no layer": alone("head full plain", "eps is not one budget for each group",
        Say(lambda body: body["eps"].update({"2": [0.1, 0.1]}))),
    "a budget of one layer by token": alone("token none plain", "eps is not the same in all layers",
        budget("1", 0, 0.2)),
    "bounds for a larger budget": by_input("layer full sized",
        "is not proven by the recorded weights",
        Say(lambda body: body.update(bound_eps={"0": [0.3], "1": [0.3]}))),
    "bounds that prove nothing of a size": alone("layer full sized",
        "bound_eps = 0.99 add up to 0 keys, which its size of 44 allows",
        *(new(f"{i}.lower_bound", lambda bounds: bounds * 0) for i in (0, 1)),
        Say(lambda body: body.update(bound_eps={"0": [0.99], "1": [0.99]}))),
    "bounds that prove a little too little of a size": alone("token compact sized",
        "add up to 22 keys, which its size of 22 allows",
        *(put(f"{i}.lower_bound", 0, 22) for i in (0, 1))),
    "a size without budgets of bounds": alone("head full sized", "has a size, but no bound_eps",
        Say(lambda body: body.update(bound_eps=None))),
    "a size and several budgets": alone("head full sized", "bound_eps is not one number",
        budget("0", 1, 0.05, "bound_eps")),
    "budgets of bounds that are none": alone("head full sized", "bound_eps is 1.0",
        Say(lambda body: body.update(bound_eps={"0": [1.0, 1.0], "1": [1.0, 1.0]}))),
    "a smaller size": alone("head none sized", "44 keys are kept, its size allows 43",
        option("size", 43)),
    "a smaller size by token": alone("token full sized", "keys are kept, its size allows 20",
        option("size", 20)),
    "a smaller out_tol": by_input("head none out_tol",
        "is not proven to keep outputs within out_tol = 0.4", option("out_tol", 0.4)),
    "a larger budget under out_tol": by_input("layer none out_tol",
        "is not proven to keep outputs within out_tol = 0.5",
        budget("1", 0, lambda eps: eps * 1.0001)),
    "another layout": alone("head full nhd", "metadata certk: |must be", option("layout", "hnd")),
    "another layout where all fits": alone("head none plain", "metadata certk: |must be",
        option("layout", "nhd")),
    "rows of another key, nhd": by_input("head none nhd",
        r"layers.1.value\[3\]: is not position \d+ of kv head 0",
        put("1.value", (3, 0), lambda x: x + 1)),
    "another level of proof": alone("head full plain", "worst_tail_mass: is missing",
        option("proof", "compact")),
    "no proof, with tensors of one": alone("head full plain",
        "tail_mass_upper: no output has such a tensor", option("proof", "none")),
    "wider masses": alone("head full plain", r"is F64 \[4, 6\], must be F32",
        retyped("0.tail_mass_upper", "<f8")),
    "another set in one layer": alone("token none plain", "indices: is not that of layer 0",
        new("1.indices", lambda kept: sorted({*kept[1:], min({*range(30)} - {*kept})}))),
    "another bound in one layer": alone("token full plain", "lower_bound: is not that of layer 0",
        put("1.lower_bound", 0, 1)),
    "a bound for all layers": by_input("token full plain",
        "lower_bound.*: all layers: 28 is not proven",
        *(put(f"{i}.lower_bound", 0, 28) for i in (0, 1))),
    "sets of layers as one": alone("layer none plain",
        "is not that of layer 0, with which it shares", option("granularity", "token")),
    "a further part of the input": by_input("head none plain", "input header: the header of",
        Say(lambda body: body["input_headers"].append("0" * 64))),
    "no part of the input": alone("head none plain", "input_headers is not a list",
        Say(lambda body: body.update(input_headers=[]))),
    "the format before": alone("head none plain",
        "it is of format 1, which nothing from 0.2.0 on reads",
        Say(lambda body: body.update(format=1))),
    "a key dropped, none": by_input("head none capped", "is kept|is refuted|over eps|tail mass",
        drop_kept(0)),
    "a smaller causal offset": alone("head none causal",
        "indices: layer 0, kv head 0: not ascending positions",
        Say(lambda body: body.update(causal_offset=10))),
    "a radius is smaller": by_input("token compact guarded",
        "guard_radii: kv head 0: a code is farther",
        put("1.guard_radii", 2, lambda bits: bits - 2)),
    "a scale is negative": alone("head none guarded",
        "guard_scales: has an entry that no such tensor has",
        put("1.guard_scales", -1, lambda bits: bits | 0x8000)),
    "keys are turned by what they cannot be": alone("head full guarded",
        "keys of 4 entries are turned by 1 or by 4", put("1.guard_bounds", (0, 5), 2.0)),
    "half an addition": alone("head full guarded", "a count of additions is none",
        put("1.guard_bounds", (0, 3), 1.5)),
    "a ball is smaller": by_input("layer full guarded",
        "guard_ball: kv head 0: a dropped value lies outside of it",
        put("0.guard_ball", (0, -1), lambda x: x * (1 - 1e-8))),
    "the guard is not spoken of": alone("layer full guarded", "no output has such a tensor",
        option("guard", "none")),
    "a guard of another kind": alone("layer full guarded", "cannot have been asked for",
        option("guard", "walls")),
    "codes of other bits": alone("head none coded", "key_low: no output has such a tensor",
        option("key_bits", 8)),
    "codes of bits that are none": alone("head none coded", "cannot have been asked for",
        option("value_bits", 5)),
    "a value without a code": alone("layer none coded",
        "value_scales: has an entry that no such tensor has", put("1.value_scales", (0, 3), 0)),
    "fewer keys without a code": alone("head none coded",
        "key_bare: has 1 rows, but 2 keys have no code",
        *(new(f"0.{role}_bare", lambda rows: rows[:1]) for role in ("key", "value"))),
    "another row of a key without a code": by_input("head compact coded",
        "key_bare: kv head 1: a row of a key without a code is not", put("0.key_bare", (1, 2), 0)),
    "a number beyond the low plane": by_input("layer full coded",
        "key_low: kv head 1: a number is not from -127 to 127", put("1.key_low", (1, 3, 2), 0)),
    "both planes leave out less": by_input("layer full coded",
        "key_low_gram: kv head 1: it does not bound",
        put("1.key_low_gram", 1, lambda squares: squares * 0.9)),
    "codes of values stand for less": by_input("token none coded",
        "value_spread: kv head 0: it does not bound",
        put("0.value_spread", 0, lambda squares: squares * 0.9)),
    "an upper end too small to be recorded": alone("head full plain", "is no interval of masses",
        put("1.tail_mass_upper", (0, 0), 2.0**-130), put("1.tail_mass_lower", (0, 0), 0.0)),
    "a worst mass too small to be recorded": alone("head compact plain", "is no mass",
        put("1.worst_tail_mass", 2, 2.0**-130)),
    # What prune writes, changed one by one.
    "one key to two heads": alone("three heads",
        "^layers.0.indptr: does not rise from 0 to the 1 kept positions$", one_key_to_two_heads,
        option("max_keep", 1)),
    "keys of a head to its neighbour": alone("threes",
        "^layers.0.indices: layer 0, kv head 2: not ascending",
        new("0.indptr", lambda ends: ends[[0, 1, 1, 3]])),
    "a head without keys": by_input("threes",
        r"layer 0, head 2, query 0: tail mass in .* is refuted: it is in \[1.0, 1.0\]",
        drop(1, lambda keys: np.arange(len(keys)))),
    "all heads without keys": alone("at cap",
        "kv head 0: over eps with 0 kept, though max_keep allows 5", drop_all),
    "an index twice": alone("threes", "^layers.0.indices: layer 0, kv head 1: not ascending pos",
        first_twice(longer=False)),
    "a key twice": alone("threes", "^layers.0.indices: layer 0, kv head 1: not ascending pos",
        first_twice(longer=True)),
    "an output less": alone("threes", "^layers.0.key: the file has it, the",
        Say(lambda body: body["outputs"].pop("layers.0.key"))),
    "an output more": alone("threes", "^x: the certificate lists it, the file has no such tensor",
        Say(lambda body: body["outputs"].update(x=body["outputs"]["layers.0.key"]))),
    "an output of another shape": alone("threes",
        r"^layers.0.key: is F16 .*, the certificate says F16 \[\d+, 4, 1\]",
        Say(lambda body: body["outputs"]["layers.0.key"]["shape"].append(1))),
    "an output of another type": alone("threes",
        r"^layers.0.key: is F16 .*, the certificate says BF16 \[\d+, 4\]",
        output_said(dtype="BF16")),
    "an output of other bytes": alone("threes", "^layers.0.key: its bytes were changed",
        output_said(sha256="0" * 64)),
    "an output of sizes that nobody can print": alone("threes",
        "is not a dtype, a shape and a SHA-256", output_said(shape=["@9" + "0" * 4000] * 2)),
    "a library that is no text": alone("threes", "^metadata certk: its text is not in the canon",
        field(library="@ 1")),
    "a bound that the budget alone would prove": by_input("at cap",
        "is not proven by the recorded weights",
        *(new(f"{i}.tail_mass_upper", lambda lost: np.where(lost > 0.01, 0.999, lost))
          for i in BOTH)),
    "rows of one head given to another": by_input("threes",
        r"^layers.0.key\[\d+\]: is not position \d+ of kv head 2 of the input$",
        first_row_of_another_head),
    "a key dropped": by_input("eights",
        r"layer 0, head [23], query \d: tail mass in .* is refuted", drop_kept(0, head=1)),
    "upper end halved": by_input("eights",
        "layer 1, head 2, query 1: tail mass in .* is refuted: it is in",
        scale_masses(1, (2, 1), 0.5)),
    "upper end a little less": by_input("eights",
        "layer 1, head 2, query 1: tail mass in .* is refuted: it is in",
        scale_masses(1, (2, 1), 0.999)),
    "both ends raised": by_input("eights", "layer 0, head 2, query 1: tail mass in .* is refuted",
        scale_masses(0, (2, 1), 1.002, 1.001)),
    "another row": by_input("eights",
        r"layers.1.value\[3\]: is not position \d+ of kv head 0 of the input",
        put("1.value", (3, 0), lambda x: x + 1)),
    "another index": by_input("eights", r"layers.0.key\[\d+\]: is not position \d+ of kv head 0",
        another_index),
    "bounds raised": by_input("eights", r"lower_bound\[\d\]: layer \d, kv head \d: \d+ is not pro",
        *(made_of(f"{i}.lower_bound", lambda arrays, i=i: np.diff(arrays[f"layers.{i}.indptr"]))
          for i in BOTH)),
    "no proof": by_input("eights", r"layers.1.lower_bound\[0\].* is not proven by the recorded we",
        lambda arrays: no_proof(arrays, 1)),
    "indices exchanged": alone("eights", "layers.0.indices: layer 0, kv head 0: not ascending",
        new("0.indices", lambda kept: [kept[1], kept[0], *kept[2:]])),
    "a negative index": alone("eights", "layers.0.indices: layer 0, kv head 0: not ascend",
        put("0.indices", 0, -1)),
    "an index beyond the last": alone("eights", "layers.1.indices: layer 1, kv head 1: not ascen",
        put("1.indices", -1, 24)),
    "a start beyond the last": alone("eights", "layers.0.indptr: does not rise",
        put("0.indptr", 1, 1000)),
    "a first start of 1": alone("eights", "layers.0.indptr: does not rise", put("0.indptr", 0, 1)),
    "an upper end over budget": alone("eights", r"upper\[1, 2\]: 0.2\d* is over eps",
        put("0.tail_mass_upper", (1, 2), 0.2)),
    "an upper end that is none": alone("eights", r"upper\[1, 2\]: .* no interval",
        put("0.tail_mass_upper", (1, 2), np.nan)),
    "a negative lower end": alone("eights", r"upper\[1, 2\]: .* no interval",
        put("0.tail_mass_lower", (1, 2), -0.5)),
    "a lower end above the upper one": alone("eights", r"upper\[1, 2\]: .* no interval",
        put("0.tail_mass_lower", (1, 2), 0.5)),
    "a negative bound": alone("eights", "layers.0.lower_bound: layer 0, kv head 1: -1",
        put("0.lower_bound", 1, -1)),
    "a bound beyond all keys": alone("eights", "layers.0.lower_bound: layer 0, kv head 1: 25",
        put("0.lower_bound", 1, 25)),
    "no bound": alone("eights", "layers.1.lower_bound: is missing",
        lambda arrays: arrays.pop("layers.1.lower_bound")),
    "keys of another length": alone("eights",
        r"layers.0.key: is F16 \[\d+, 3\], must be F16 \[\d+, 4\]",
        new("0.key", lambda rows: rows[:, :3])),
    "a tiny budget": alone("eights", "is over eps = 1e-09", eps(1e-9)),
    "a cap of one key": alone("eights", "kept, max_keep allows 1", option("max_keep", 1)),
    "another granularity": alone("eights", "its eps is not one budget for each group",
        option("granularity", "layer")),
    "names of nothing": alone("eights", "cannot be of a prune job",
        option("names", "l.{i}.{key|value|query}")),
    "no inputs": alone("eights", "cannot be of a prune job", field(inputs={})),
    "a later causal offset": by_input("eights", "scale or causal_offset is not that of",
        field(causal_offset=30)),
    "a larger budget": by_input("eights", "is not proven by the recorded weights", eps(0.5)),
    "another header of the input": by_input("eights", "input header: the header of",
        field(input_headers=["0" * 64])),
    "another forced key": alone("forced", "must be kept and is not", drop_kept(0, head=1),
        option("keep_first", 2)),
}  # fmt: skip

# Forgeries of what prune writes, over lists of values.
MANY_KEYS = (50_000_000, (1 << 31) - 1, (1 << 32) - 1)
TYPES = {
    **{"key": "<f2", "value": "<f2", "indices": "<i4", "indptr": "<i8", "lower_bound": "<i8"},
    **{"lower_bound_rows": "<i8", "lower_bound_weights": "<f4", "tail_mass_upper": "<f4"},
    "tail_mass_lower": "<f4",
}
FALLS = r"^layers.1.indptr: does not rise from 0 to the \d+ kept positions$"
NO_SET = "^layers.0.indices: layer 0: not ascending positions"
NO_BUDGET = "^metadata certk: (cannot be read: |its eps is nan)"
NO_NUMBER = ("@NaN", "@1e999", "@-1e999", "nan", "inf", None, [], "@1e400", "@1" + "0" * 400)
# Of a set of positions 0, 1, 4, 9 and 23 in every head.
BROKEN_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "position 2 must be kept and is not": [
        *({"keep_first": 3}, {"keep_first": 1 << 70}, {"keep_last": 24}, {"keep_last": 1 << 70}),
    ],
    "position 22 must be kept and is not": [{"keep_last": 2}],
    "5 kept, max_keep allows 4": [{"max_keep": 4}, {"max_keep": 4.9 / 24}],
    "5 kept, max_keep allows 1": [{"max_keep": 1e-9}],
    "cannot be read: options": [
        *({"max_keep": 0}, {"max_keep": 1.5}, {"max_keep": 0.0}, {"max_keep": True}),
        *({"keep_first": -1}, {"keep_last": 1.0}, {"granularity": "rows"}),
    ],
    "cannot be read: a field is missing or of the wrong kind": [{"min_keep": 1}],
}
FORGERIES |= {
    f"starts {ends}": alone("threes", FALLS, starts(*ends))
    for ends in (
        *((0, EDGE - 1, -2, None), (0, -EDGE, EDGE - 1, None), (0, -1, 0, None), (0, 5, 4, None)),
        *((0, None, None, EDGE - 1), (0, 0, 0, -1), (-1, 0, 0, None), (1, 1, 1, None)),
        (-EDGE, 0, 0, None),
    )
} | {
    f"one key under max_keep {most}": alone(
        "small", r"kv head 1: over eps with 1 kept, though max_keep allows \d+$", keep_only([17]),
        option("max_keep", most),
    )
    for most in (2, 24, 0.1, 1.0, 1 << 70)
} | {
    f"one row over budget {row}": alone(
        "small", rf"^layers.1.indices: .* kv head {row[0] // 2}: over eps with \d+",
        put("1.tail_mass_upper", row, 0.11), option("max_keep", 23),
    )
    for row in ((0, 0), (3, 4))
} | {
    f"a mass of {mass}": alone(
        "at cap", r"^layers.1.tail_mass_upper\[2, 3\]: .* is no interval of masses$",
        put("1.tail_mass_upper", (2, 3), mass),
    )
    for mass in (1 + 2.0**-23, 1.5, np.inf)
} | {
    f"wide positions {kept}": alone("one set", NO_SET, wide(kept), claim_keys((1 << 32) - 1))
    for kept in ([0, EDGE - 1, -EDGE, -1, 5], [0, 1, 1 << 32], [-EDGE, 5], [EDGE - 1], [-1])
} | {
    f"{what} of {value}"[:60]: alone("threes", NO_BUDGET, say(value))
    for value in NO_NUMBER
    for what, say in (("eps", lambda value: field(eps=value)), ("budgets", eps))
} | {
    f"budgets {value}": alone("threes", "^metadata certk: its eps is ", eps(value))
    for value in (1.0, 1.5, -1e-300, -1.0, 1e308)
} | {
    f"options {given}": alone(
        "small", words, keep_only([0, 1, 4, 9, 23]), option("max_keep", 5), options(**given)
    )
    for words, every in BROKEN_OPTIONS.items()
    for given in every
} | {
    f"scale {scale}": by_input(
        "threes", "scale or causal_offset is not that of",
        Say(lambda body, scale=scale: body["scales"].update({"1": scale})),
    )
    for scale in (0.5 + 2**-53, -0.5, 0.0, 1e308, 5e-324)
} | {
    f"scales {scales}": alone(
        "threes", "its scales are not one for each layer", field(scales=scales)
    )
    for scales in ({}, {"0": 0.5}, {"0": 0.5, "1": 0.5, "2": 0.5}, {"0": 0.5, "7": 0.5})
} | {
    f"a weight of {value}": alone(
        "threes", r"^layers.1.lower_bound_weights\[3\]: is not a finite weight > 0$",
        put("1.lower_bound_weights", 3, value),
    )
    for value in (np.nan, np.inf, -np.inf, -(2.0**-149), -1.0, 0.0)
} | {
    f"the last {role}": by_input(
        "by layer", rf"^layers.1.{role}\[1, \d+\]: is not position 23 of kv head 1 of the input$",
        put(f"1.{role}", (1, -1, -1), lambda x: x + 1),
    )
    for role in ("key", "value")
} | {
    f"bits {bits} of zero": by_input(
        "zeros", r"^layers.0.value\[2\]: is not position", put(
            "0.value", (2, 1), lambda x, bits=bits: (x.view("<u2") ^ np.uint16(bits)).view("<f2")
        ),
    )
    for bits in (0x8000, 0x0001)
} | {
    f"{forced} of {n} keys are forced": alone(
        "small", "must be kept and is not", widened if n >= 1 << 31 else retyped("0.key", "<f2"),
        claim_keys(n), options(keep_first=forced, keep_last=forced),
    )
    for n in MANY_KEYS
    for forced in (2, n)
} | {
    f"{n} keys"[:60]: alone(
        "small", f"cannot be {'read: what it says' if n >= EDGE else 'of a prune job: inputs'}",
        widened, claim_keys(n),
    )
    for n in (1 << 32, 1 << 62, EDGE - 1, EDGE, 1 << 64, 10**400)
} | {
    f"{roles} of {size} on axis {axis}": alone("small", ".", claim(axis, size, *roles))
    for roles in (("key", "value"), ("query",), ("key", "value", "query"))
    for axis in range(4)
    for size in (0, 1 << 31, 1 << 62)
} | {
    # A size that no file can have is told before what it is of.
    f"{name} of shape {shape}": alone(
        "threes", r"^layers.0.\w+: is .*, must be|^file: tensor 'layers.0.\w+': shape .* has more",
        empty(f"0.{name}", shape),
    )
    for name in ("indices", "indptr", "key", "tail_mass_upper", "lower_bound")
    for shape in ((0,), (0, 4), (4, 0), (0, 0, 0), (0, 1 << 40), (1 << 62, 0), ())
} | {
    f"{name} as {kind}": alone(
        "threes", rf"^layers.0.{name}: is \w+ \[.*\], must be", retyped(f"0.{name}", kind)
    )
    for name, right in TYPES.items()
    for kind in ("?", "u1", "<u2", "<f4", "<i4", "<u8", "<c8")
    if kind != right
} | {
    f"a causal offset of {offset}": by_input(
        "threes", "scale or causal_offset is not that of", field(causal_offset=offset)
    )
    for offset in (18, 20, 1 << 62, 1 << 63, None)
} | {
    f"a causal offset of {offset}": alone("threes", words, field(causal_offset=offset))
    for words, offsets in {
        "not ascending positions from 0 to": (-1, -5, -100, -(1 << 64)), ".": (0,)
    }.items()
    for offset in offsets
}  # fmt: skip
