"""Changes of an output at random, sealed anew, hashes and all: from a seed, the same again.

Numbers and shapes of tensors change, sets as a careful forger would change them, the certificate,
and the input together with what the output says of it. Some changes make a claim weaker, so that it
stays true; most make it false or nonsense.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from cli_fixtures import Arrays, Body, Job, forge, forge_input, opened

# Of every option some values, of which most cannot be of this output.
VALUES: dict[str, list[Any]] = {
    "granularity": ["head", "layer", "token", "rows"],
    "layout": ["hnd", "nhd", "dnh"],
    "max_keep": [None, 1, 5, 9, 10, 26, 0.3, 0.5, 1.0, 0, 1.5, True],
    "keep_first": [0, 1, 2, 3, 26, 1 << 70, -1, 1.0],
    "keep_last": [0, 1, 2, 3, 26, 1 << 70, -1, True],
    "block_size": [1, 2, 3, 4, 26, 0, 1 << 32],
    "coverage": [1.0, 0.99, 0.9, 0.8, 0.7, 0.5, 0.0, 1, 5e-324],
    "holdout": [0.0, 0.1, 0.3, 0.4, 0.9, 1.0, 0, -0.0],
    "proof": ["full", "compact", "none", "half"],
    "out_tol": [None, 0.0, 0.5, 1.9, 2.0, 100.0, 1e308, 2],
    "size": [None, 0, 12, 40, 60, 104, 1 << 40, 1.0],
    "hot": [True, False, 1],
    "guard": ["none", "codes", "walls"],
    "key_bits": [8, 12, 16, 10, None, 8.0],
    "value_bits": [8, 4, 16, None, True],
    "names": [
        *("layers.{i}.{key|value|query}", "layers.{i}.{value|key|query}", "x"),
        *("layers.{i}.{key|value|queries}", "layer.{i}.{key|value|query}"),
    ],
}
FACTORS = [0.0, 0.5, 0.9, 0.99, 1 - 1e-6, 1 + 1e-6, 1.01, 1.1, 2.0, -1.0, 1e30, 1e-30]
WEAKER = {
    "tail_mass_upper": (1.0, 1.3),
    "tail_mass_lower": (0.0, 1.0),
    "worst_tail_mass": (1.0, 1.3),
    "lower_bound": (0.0, 1.0),
    "lower_bound_weights": (0.25, 8.0),
    "guard_radii": (1.0, 1.0),
    "guard_ball": (1.0, 1.0),
    "guard_bounds": (1.0, 3.0),
    "guard_gram": (1.0, 1.1),
    **dict.fromkeys(("key_radii", "value_radii"), (1.0, 1.0)),
    **dict.fromkeys(("key_bounds", "value_bounds", "key_low_bounds"), (1.0, 3.0)),
    "value_spread_bounds": (1.0, 3.0),
    **dict.fromkeys(("key_gram", "value_gram", "key_low_gram", "value_spread"), (1.0, 1.001)),
}
# Of bounds, the places of those that are true of whatever less is true of.
PLACES = {
    **{"guard_bounds": [0, 1, 2, 4], "value_bounds": [0, 1, 2, 4], "key_bounds": [0, 1, 2, 4, 6]},
    **{"key_low_bounds": [0, 1], "value_spread_bounds": [0]},
}


def change_at_random(job: Job, seed: int) -> str:
    """Change an output once or a few times; return what was done."""
    rng, done = random.Random(seed), list[str]()
    wanted = rng.choice([1, 1, 1, 1, 2, 3])
    while len(done) < wanted:
        [kind] = rng.choices(list(KINDS), list(KINDS.values()))
        try:
            said = _changed(job, kind, rng)
        except (KeyError, IndexError, ValueError, TypeError):
            # A change before this one has left too little to change.
            assert done, f"{kind.__name__} of {seed}"
            said = None
        if said is not None:
            done.append(f"{kind.__name__}: {said}")
    return "; ".join(done)


def _changed(job: Job, kind: Callable[..., str | None], rng: random.Random) -> str | None:
    """Make one change; return what it was, or None where nothing could be changed."""
    said: list[str | None] = []
    if kind in TENSORS:
        body, given = json.loads(opened(job.output)[0]["certk"]), opened(job.source)[1]
        forge(job.output, lambda arrays: said.append(kind(rng, arrays, body, given)))
    elif kind in CERTIFICATE:
        forge(job.output, say=lambda body: said.append(kind(rng, body)))
    else:
        held: list[Arrays] = []
        change = lambda metadata: said.append(kind(rng, held[0], metadata))  # noqa: E731
        forge_input(job.source, job.output, held.append, change)
    return said[0]


# ------------------------------------------------------------------------------------------ tensors


def one_number(rng: random.Random, arrays: Arrays, *_: Any) -> str | None:
    """Another number at one place of a tensor."""
    if (name := _some_tensor(rng, arrays)) is None:
        return None
    array = arrays[name]
    flat = array.reshape(-1)
    place = rng.randrange(flat.size)
    before = flat[place]
    if rng.random() < 0.3:
        bits = flat.view(f"u{array.itemsize}")
        bits[place] ^= bits.dtype.type(1 << rng.randrange(8 * array.itemsize))
    elif rng.random() < 0.3:
        flat[place] = flat[rng.randrange(flat.size)]
    elif array.dtype.kind == "f":
        with np.errstate(all="ignore"):
            flat[place] = rng.choice(
                [
                    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 5e-324, -before),
                    *(np.nextafter(before, before.dtype.type(to)) for to in (-np.inf, np.inf)),
                    *(before * before.dtype.type(factor) for factor in FACTORS),
                ]
            )
    else:
        most = np.iinfo(array.dtype)
        other = rng.choice([0, 1, -1, int(before) + 1, int(before) - 1, most.max, most.min])
        flat[place] = min(max(other, most.min), most.max)
    return f"{name}[{place}] {before} -> {flat[place]}"


def whole_tensor(rng: random.Random, arrays: Arrays, *_: Any) -> str | None:
    """All entries of a tensor in another order, or multiplied, or all the same."""
    if (name := _some_tensor(rng, arrays)) is None:
        return None
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "roll": lambda array: np.roll(array, 1, axis=0),
        "reverse": lambda array: array[::-1].copy(),
        "same": lambda array: np.full_like(array, array.reshape(-1)[0]),
        "sort": lambda array: np.sort(array, axis=-1),
        "times": lambda array: (array * rng.choice(FACTORS)).astype(array.dtype),
    }
    how = rng.choice(sorted(ways))
    with np.errstate(all="ignore"):
        arrays[name] = ways[how](arrays[name])
    return f"{name} {how}"


def another_form(rng: random.Random, arrays: Arrays, *_: Any) -> str | None:
    """A tensor more or less, of another length, shape or type, or that of another layer."""
    name = rng.choice(sorted(arrays))
    array, (_, layer, rest) = arrays[name], name.split(".", 2)
    ways: dict[str, Callable[[], Any]] = {
        "less": lambda: None,
        "more": lambda: arrays.update({name + rng.choice(["s", ".0", "_2"]): array}) or array,
        "shorter": lambda: array[:-1].copy(),
        "longer": lambda: np.concatenate([array, array[-1:]]),
        "flat": lambda: array.reshape(rng.choice([(1, -1), (-1,)])),
        "type": lambda: array.astype(rng.choice(["<f4", "<f8", "<i4", "<i8", "<f2"])),
        "other": lambda: arrays[f"layers.{1 - int(layer)}.{rest}"],
    }
    how = rng.choice(sorted(ways))
    if how == "other" and f"layers.{1 - int(layer)}.{rest}" not in arrays:
        return None
    with np.errstate(all="ignore"):
        arrays[name] = ways[how]()
    if arrays[name] is None:
        del arrays[name]
    return f"{name} {how}"


def weaker(rng: random.Random, arrays: Arrays, body: Body, _: Arrays) -> str | None:
    """A claim made weaker, as far as its own limits allow: it may stay true."""
    names = [name for name in sorted(arrays) if name.split(".", 2)[2] in WEAKER]
    if not names:
        return None
    name = rng.choice(names)
    layer, role = name.split(".", 2)[1:]
    low, high = WEAKER[role]
    array = arrays[name].copy()
    if role.endswith("_radii"):
        array += array.dtype.type(rng.choice([1, 2, 9]))
    elif role == "guard_ball":
        array[:, -1] *= rng.choice([1.0, 1.001, 2.0])
    elif role in PLACES:
        array[:, rng.choice(PLACES[role])] *= rng.uniform(low, high)
    elif role == "lower_bound":
        array = np.maximum(array - rng.choice([0, 1, 2]), 0)
    else:
        array = (array * array.dtype.type(rng.uniform(low, high))).astype(array.dtype)
    if role in ("tail_mass_upper", "worst_tail_mass"):
        eps = np.array(body["eps"][layer], array.dtype)
        most = np.maximum(np.repeat(eps, len(array) // len(eps)), array.dtype.type(0))
        most = most.reshape(-1, *[1] * (array.ndim - 1))
        array = np.where(arrays[name] > most, np.minimum(array, 1), np.minimum(array, most))
        array = np.maximum(array, arrays[name]).astype(array.dtype)
    arrays[name] = array
    return name


def other_keys(rng: random.Random, arrays: Arrays, body: Body, given: Arrays) -> str | None:
    """Another set, with the rows of the input and all that goes with it."""
    options = body["options"]
    if options["block_size"] > 1 or options.get("guard", "none") != "none":
        return None
    layers = sorted({name.split(".")[1] for name in arrays})
    which = layers if options["granularity"] == "token" else [rng.choice(layers)]
    stem = f"layers.{which[0]}."
    by_head, every = options["granularity"] == "head", arrays[stem + "indices"].astype(np.int64)
    ends = arrays[stem + "indptr"] if by_head else np.array([0, len(every)])
    sets = [every[a:b] for a, b in pairwise(ends)]
    if not sets:
        return None
    group = rng.randrange(len(sets))
    free = np.setdiff1d(np.arange(_heads_first(given[stem + "key"], options).shape[1]), sets[group])
    how = rng.choice(["add", "add", "drop", "move"])
    if how != "add" and len(sets[group]):
        sets[group] = np.delete(sets[group], rng.randrange(len(sets[group])))
    if how != "drop" and len(free):
        sets[group] = np.sort([*sets[group], free[rng.randrange(len(free))]])
    for layer in which:
        stem = f"layers.{layer}."
        arrays[stem + "indices"] = np.concatenate(sets).astype(arrays[stem + "indices"].dtype)
        if by_head:
            arrays[stem + "indptr"] = np.cumsum([0, *map(len, sets)]).astype("<i8")
        for role in ("key", "value"):
            rows = _heads_first(given[stem + role], options)
            by_set = [rows[h][kept] for h, kept in enumerate(sets)] if by_head else []
            some = np.concatenate(by_set) if by_head else rows[:, sets[0]]
            arrays[stem + role] = np.ascontiguousarray(some)
        # Another number is lost now: anything from nothing to all, or as much as before.
        if how != "add" or rng.random() < 0.5:
            for name, value in (("tail_mass_lower", 0), ("tail_mass_upper", 1)):
                if stem + name in arrays and (how == "add" or options["max_keep"]):
                    lost = arrays[stem + name].copy()
                    lost[:] = value if name.endswith("lower") or options["max_keep"] else lost
                    arrays[stem + name] = lost
    return f"{how} in group {group} of layer {which}"


def _some_tensor(rng: random.Random, arrays: Arrays) -> str | None:
    """A tensor with entries; the small ones, which say what is promised, more often."""
    names = [name for name in sorted(arrays) if arrays[name].size]
    if rng.random() < 0.8:
        names = [name for name in names if not name.endswith(("key", "value"))]
    return rng.choice(names) if names else None


def _heads_first(array: np.ndarray, options: Body) -> np.ndarray:
    array = array.reshape(array.shape[-3:])
    return array if options["layout"] == "hnd" else array.swapaxes(0, 1)


# -------------------------------------------------------------------------------------- certificate


def an_option(rng: random.Random, body: Body) -> str | None:
    """Another value of an option."""
    name = rng.choice(sorted(VALUES.keys() & body["options"].keys()))
    value = rng.choice(VALUES[name])
    if body["options"][name] == value:
        return None
    body["options"][name] = value
    return f"{name} = {value!r}"


def a_budget(rng: random.Random, body: Body) -> str | None:
    """Another budget of one layer, or of all, of the promise or of the bounds."""
    field = rng.choice(["eps", "eps", "bound_eps"])
    if body[field] is None:
        body[field] = body["eps"]
    new = rng.choice([None, 0.0, 0.05, 0.1, 0.2, 0.5, 0.99, 1.0, -0.1, 1, 1e-300])
    factor = rng.choice([1 - 1e-6, 1 + 1e-6, 0.9, 1.1, 1.5, 3.0])
    alone = rng.choice([*sorted(body[field]), *[None] * len(body[field])])
    for layer, groups in body[field].items():
        if alone in (None, layer):
            body[field][layer] = [old * factor if new is None else new for old in groups]
    return f"{field} = {body[field]}"


def a_leaf(rng: random.Random, body: Body) -> str | None:
    """Another value at any place of the certificate, or none, or one more beside it."""
    at: Any = body
    while True:
        key = rng.choice(sorted(at)) if isinstance(at, dict) else rng.randrange(len(at))
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.1:
            break
        at = at[key]
    how = rng.choice(["other", "other", "less", "more"])
    if how == "less":
        del at[key]
    elif how == "more" and isinstance(at, dict):
        at["00"] = at[key]
    else:
        at[key] = rng.choice([None, "", "0" * 64, True, -1, 0, 1, 2, 0.25, 0.5000000000000001, []])
    return f"{how} at {key}"


# -------------------------------------------------------------------------------------------- input


def a_number_of_the_input(rng: random.Random, arrays: Arrays, _: dict[str, str]) -> str:
    """Another number in the input, which the output says it was made of."""
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    flat = array.reshape(-1)
    place = rng.randrange(flat.size)
    if array.dtype.kind == "f":
        most = np.finfo(array.dtype).max
        flat[place] = rng.choice([np.nan, np.inf, -np.inf, most, 0.0, -0.0, -flat[place]])
    else:  # BF16: NaN, infinities, the largest, zero, another sign
        bits = int(flat[place])
        flat[place] = rng.choice([0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0, bits ^ 0x8000, bits ^ 1])
    return f"{name}[{place}] = {flat[place]}"


def metadata_of_the_input(rng: random.Random, _: Arrays, metadata: dict[str, str]) -> str:
    """Another scale or causal offset in the input, that the output does not know of."""
    values = {
        "scale": ["0.5", "1/sqrt(4)", "1/sqrt(9)", "2.5e-1", "x", "1e999"],
        "causal_offset": ["19", "+19", "25", "0", "-3", "x", "1.0"],
        "title": ["x"],
    }
    name = rng.choice(sorted(values))
    metadata[name] = rng.choice(values[name])
    return f"{name} = {metadata[name]}"


def tensors_of_the_input(rng: random.Random, arrays: Arrays, _: dict[str, str]) -> str:
    """A tensor of the input more, less, or under another name."""
    name = rng.choice(sorted(arrays))
    how = rng.choice(["more", "less", "renamed", "exchanged"])
    if how == "exchanged":
        other = name.replace("key", "value") if "key" in name else name.replace("value", "key")
        arrays[name], arrays[other] = arrays[other], arrays[name]
    else:
        array = arrays.pop(name) if how != "more" else arrays[name]
        if how != "less":
            arrays[name.replace("layers.", rng.choice(["layer.", "mask.", "layers.1"]))] = array
    return f"{name} {how}"


# Each kind of change, and how often it is made.
TENSORS = {one_number: 8, whole_tensor: 2, another_form: 2, weaker: 7, other_keys: 3}
CERTIFICATE = {an_option: 4, a_budget: 3, a_leaf: 3}
INPUT = {a_number_of_the_input: 2, metadata_of_the_input: 1, tensors_of_the_input: 1}
KINDS: dict[Callable[..., str | None], int] = {**TENSORS, **CERTIFICATE, **INPUT}
