"""Outputs of prune, changed at random and sealed anew, hashes and all: from a seed, the same again.

What is changed are numbers and shapes of tensors, the sets as a careful forger would change them,
the certificate, and the input together with what the output says of it. Some changes make a claim
weaker, so that it stays true; most make it false or nonsense.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from certk_rs._files.certificate import Options
from cli_fixtures import Arrays, Body, Job, forge, forge_input, opened
from made_outputs import Made

Kind = Callable[["Mutation"], str | None]

SHAPE = {"m": 5, "kv_heads": 2, "heads": 4, "n": 26, "d": 4, "spread": 1.5}
CAUSAL = {"metadata": {"causal_offset": "19"}}
# What prune is asked for: the cache, and the options.
PRUNED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"dtype": "F32"} | CAUSAL, {"keep_first": 2, "keep_last": 1}),
    "compact, capped": ({"dtype": "BF16"}, {"proof": "compact", "max_keep": 9, "eps": 0.02}),
    "none": ({"metadata": {"scale": "0.25"}}, {"proof": "none"}),
    "layer, blocks": ({"dtype": "F32"}, {"granularity": "layer", "block_size": 3}),
    "head, blocks, compact": (CAUSAL, {"block_size": 4, "proof": "compact", "keep_last": 3}),
    "token, compact": ({"dtype": "BF16"}, {"granularity": "token", "proof": "compact"}),
    "token, full, nhd": ({"turned": True}, {"granularity": "token", "layout": "nhd"}),
    "none, nhd, coverage": ({"turned": True}, {"proof": "none", "layout": "nhd", "coverage": 0.8}),
    "coverage": ({}, {"coverage": 0.7}),
    "layer, coverage, compact": (
        CAUSAL,
        {"granularity": "layer", "coverage": 0.8, "proof": "compact"},
    ),
    "size": ({}, {"size": 0.5, "eps": None}),
    "size, compact, blocks": ({}, {"size": 0.6, "eps": None, "proof": "compact", "block_size": 2}),
    "size, token": ({"dtype": "BF16"}, {"size": 12, "eps": None, "granularity": "token"}),
    "size, none": ({"dtype": "F32"}, {"size": 0.4, "eps": None, "proof": "none"}),
    "out_tol": ({"dtype": "F32"}, {"out_tol": 2.0, "eps": None}),
    "tiny": ({"spread": 30.0}, {"eps": 1e-60}),
    "guard": ({"dtype": "F32", "d": 16, "n": 40}, {"guard": "codes"}),
    "guard, layer, none": (
        CAUSAL | {"d": 8},
        {"guard": "codes", "granularity": "layer", "proof": "none"},
    ),
    "guard, compact, causal": (
        CAUSAL | {"dtype": "BF16", "d": 6, "spread": 2.5},
        {"guard": "codes", "proof": "compact"},
    ),
    "guard, token": ({"d": 16}, {"guard": "codes", "granularity": "token"}),
    "hot": ({"n": 30}, {"hot": 0.3, "guard": "codes", "eps": 0.05}),
    "hot, none, layer": (
        {"dtype": "BF16", "n": 30},
        {"hot": 20, "guard": "codes", "eps": 0.05, "proof": "none", "granularity": "layer"},
    ),
    "all of one layer": ({"layers": 1, "kv_heads": 1, "heads": 1}, {"eps": 0.0}),
}
# Parts of the format that prune seldom writes.
MADE = {
    "held out": Made(Options(holdout=0.4)),
    "held out, compact": Made(Options(holdout=0.4, proof="compact"), offset=17),
    "held out, token, none": Made(Options("token", holdout=0.4, proof="none"), dtype="BF16"),
    "held out and left out": Made(
        Options("layer", coverage=0.8, holdout=0.1, block_size=2, proof="compact")
    ),
}
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
}


def sound(folder: Path) -> dict[str, tuple[bytes, bytes]]:
    """Of every kind an input and its output, as bytes."""
    found = {}
    for name, (cache, options) in PRUNED.items():
        cache, options = SHAPE | cache, {"eps": 0.1} | options
        if cache.pop("turned", False):
            # (rows, heads, d): what are heads here are rows to whoever reads it.
            cache |= {"kv_heads": cache["n"], "n": 2, "heads": cache["m"], "m": 4}
        found[name] = Job(folder / name, cache=cache, **options).files
    return found | {name: made.write(folder / name).files for name, made in MADE.items()}


@dataclass
class Mutation:
    """One output that is being changed, and the numbers that say how."""

    job: Job
    rng: random.Random

    def edit(self, change: Callable[[Arrays], str | None]) -> str | None:
        """Change the tensors."""
        said: list[str | None] = []
        forge(self.job.output, lambda arrays: said.append(change(arrays)))
        return said[0]

    def say(self, change: Callable[[Body], None]) -> None:
        """Change the certificate."""
        forge(self.job.output, say=change)

    def body(self) -> Body:
        """Read the certificate."""
        found: Body = {}
        forge(self.job.output, say=found.update)
        return found


def mutated(files: tuple[bytes, bytes], folder: Path, seed: int) -> tuple[Job, str]:
    """An output, changed once or a few times; with what was done, None where nothing could be."""
    rng = random.Random(seed)
    job = Job.of(folder, *files)
    done: list[str] = []
    wanted = rng.choice([1, 1, 1, 1, 2, 3])
    mutation = Mutation(job, rng)
    while len(done) < wanted:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            said = kind(mutation)
        except (KeyError, IndexError, ValueError, TypeError):
            # A change before this one has left too little to change.
            assert done, f"{kind.__name__} of {seed}"
            said = None
        if said is not None:
            done.append(f"{kind.__name__}: {said}")
    return job, "; ".join(done)


# ------------------------------------------------------------------------------------------ tensors


def one_number(mutation: Mutation) -> str | None:
    """Another number at one place of a tensor."""
    rng = mutation.rng

    def change(arrays: Arrays) -> str | None:
        name = _some_tensor(rng, arrays)
        if name is None:
            return None
        array = arrays[name].copy()
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
        arrays[name] = array
        return f"{name}[{place}] {before} -> {flat[place]}"

    return mutation.edit(change)


def whole_tensor(mutation: Mutation) -> str | None:
    """All entries of a tensor in another order, or multiplied, or all the same."""
    rng = mutation.rng

    def change(arrays: Arrays) -> str | None:
        name = _some_tensor(rng, arrays)
        if name is None:
            return None
        array, how = arrays[name], rng.choice(["roll", "reverse", "same", "times", "sort"])
        if how == "roll":
            array = np.roll(array, 1, axis=0)
        elif how == "reverse":
            array = array[::-1].copy()
        elif how == "same":
            array = np.full_like(array, array.reshape(-1)[0])
        elif how == "sort":
            array = np.sort(array, axis=-1)
        else:
            with np.errstate(all="ignore"):
                array = (array * rng.choice(FACTORS)).astype(array.dtype)
        arrays[name] = array
        return f"{name} {how}"

    return mutation.edit(change)


def another_form(mutation: Mutation) -> str | None:
    """A tensor more or less, of another length, shape or type, or that of another layer."""
    rng = mutation.rng

    def change(arrays: Arrays) -> str | None:
        name = rng.choice(sorted(arrays))
        how = rng.choice(["less", "more", "shorter", "longer", "shape", "type", "other"])
        array = arrays[name]
        if how == "less":
            del arrays[name]
        elif how == "more":
            arrays[name + rng.choice(["s", ".0", "_2"])] = array
        elif how == "shorter":
            arrays[name] = array[:-1].copy()
        elif how == "longer":
            arrays[name] = np.concatenate([array, array[-1:]])
        elif how == "shape":
            arrays[name] = array.reshape(1, -1) if rng.random() < 0.5 else array.reshape(-1)
        elif how == "type":
            with np.errstate(all="ignore"):
                arrays[name] = array.astype(rng.choice(["<f4", "<f8", "<i4", "<i8", "<f2"]))
        else:
            _, layer, rest = name.split(".", 2)
            twin = f"layers.{1 - int(layer)}.{rest}"
            if twin not in arrays:
                return None
            arrays[name] = arrays[twin]
        return f"{name} {how}"

    return mutation.edit(change)


def weaker(mutation: Mutation) -> str | None:
    """A claim made weaker, as far as its own limits allow: it may stay true."""
    rng, body = mutation.rng, mutation.body()

    def change(arrays: Arrays) -> str | None:
        names = [name for name in sorted(arrays) if name.split(".", 2)[2] in WEAKER]
        if not names:
            return None
        name = rng.choice(names)
        layer, role = name.split(".", 2)[1:]
        low, high = WEAKER[role]
        array = arrays[name].copy()
        if role == "guard_radii":
            array += array.dtype.type(rng.choice([1, 2, 9]))
        elif role == "guard_ball":
            array[:, -1] *= rng.choice([1.0, 1.001, 2.0])
        elif role == "guard_bounds":
            array[:, rng.choice([0, 1, 2, 4])] *= rng.uniform(low, high)
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

    return mutation.edit(change)


def other_keys(mutation: Mutation) -> str | None:
    """Another set, with the rows of the input and all that goes with it."""
    rng, body = mutation.rng, mutation.body()
    _, given = opened(mutation.job.source)
    options = body["options"]
    if options["block_size"] > 1 or options["guard"] != "none":
        return None

    def change(arrays: Arrays) -> str | None:
        layers = sorted({name.split(".")[1] for name in arrays})
        which = layers if options["granularity"] == "token" else [rng.choice(layers)]
        stem = f"layers.{which[0]}."
        by_head, every = options["granularity"] == "head", arrays[stem + "indices"].astype(np.int64)
        ends = arrays[stem + "indptr"] if by_head else np.array([0, len(every)])
        sets = [every[a:b] for a, b in pairwise(ends)]
        if not sets:
            return None
        group = rng.randrange(len(sets))
        keys = _heads_first(given[f"layers.{which[0]}.key"], options)
        free = np.setdiff1d(np.arange(keys.shape[1]), sets[group])
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
                some = (
                    np.concatenate([rows[h][kept] for h, kept in enumerate(sets)])
                    if by_head
                    else rows[:, sets[0]]
                )
                arrays[stem + role] = np.ascontiguousarray(some)
            # What is lost is another number now: anything from nothing to all, or what it was.
            if how != "add" or rng.random() < 0.5:
                for name, value in (("tail_mass_lower", 0), ("tail_mass_upper", 1)):
                    if stem + name in arrays and (how == "add" or options["max_keep"]):
                        lost = arrays[stem + name].copy()
                        lost[:] = value if name.endswith("lower") or options["max_keep"] else lost
                        arrays[stem + name] = lost
        return f"{how} in group {group} of layer {which}"

    return mutation.edit(change)


def _some_tensor(rng: random.Random, arrays: Arrays) -> str | None:
    """A tensor with entries; the small ones, which say what is promised, more often."""
    names = [name for name in sorted(arrays) if arrays[name].size]
    rows = [name for name in names if name.endswith(("key", "value"))]
    if rng.random() < 0.8:
        names = [name for name in names if name not in rows]
    return rng.choice(names) if names else None


def _heads_first(array: np.ndarray, options: Body) -> np.ndarray:
    array = array.reshape(array.shape[-3:])
    return array if options["layout"] == "hnd" else array.swapaxes(0, 1)


# -------------------------------------------------------------------------------------- certificate


def an_option(mutation: Mutation) -> str | None:
    """Another value of an option."""
    name = mutation.rng.choice(sorted(VALUES))
    value = mutation.rng.choice(VALUES[name])
    if mutation.body()["options"][name] == value:
        return None
    mutation.say(lambda body: body["options"].update({name: value}))
    return f"{name} = {value!r}"


def a_budget(mutation: Mutation) -> str | None:
    """Another budget of one group, or of all, of the promise or of the bounds."""
    rng, body = mutation.rng, mutation.body()
    field = rng.choice(["eps", "eps", "bound_eps"])
    if body[field] is None:
        if rng.random() < 0.7:
            return None
        budgets = {layer: [rng.choice([0.0, 0.05, 0.9])] * len(groups)
                   for layer, groups in body["eps"].items()}  # fmt: skip
    else:
        budgets = {layer: list(groups) for layer, groups in body[field].items()}
        new = rng.choice([None, 0.0, 0.05, 0.1, 0.2, 0.5, 0.99, 1.0, -0.1, 1, 1e-300])
        factor = rng.choice([1 - 1e-6, 1 + 1e-6, 0.9, 1.1, 1.5, 3.0])
        alone = None if rng.random() < 0.4 else (rng.choice(sorted(budgets)), 0)
        for layer, groups in budgets.items():
            for group, before in enumerate(groups):
                if alone in (None, (layer, group)):
                    groups[group] = before * factor if new is None else new
    mutation.say(lambda body: body.update({field: budgets}))
    return f"{field} = {budgets}"


def what_it_says(mutation: Mutation) -> str | None:
    """Any other field of the certificate."""
    rng = mutation.rng
    changes: dict[str, Callable[[Body], Any]] = {
        "library": lambda body: body.update(library=rng.choice(["", "9", 3, None])),
        "format": lambda body: body.update(format=rng.choice([1, 3, 2.0, "2", True])),
        "a scale": lambda body: body["scales"].update(
            {"0": rng.choice([0.25, 0.5, 1.0, -0.5, 1, 0.5000000000000001])}
        ),
        "no scale": lambda body: body["scales"].popitem(),
        "causal_offset": lambda body: body.update(
            causal_offset=rng.choice([None, 18, 19, 20, 21, 0, -1, 1 << 63, 19.0])
        ),
        "a header": lambda body: body.update(
            input_headers=rng.choice([[], body["input_headers"] * 2, ["0" * 64], ["0"]])
        ),
        "an input's shape": lambda body: _some(rng, body["inputs"])["shape"].reverse(),
        "an input's hash": lambda body: _some(rng, body["inputs"]).update(sha256="0" * 64),
        "an input's type": lambda body: _some(rng, body["inputs"]).update(dtype="F32"),
        "an input less": lambda body: body["inputs"].popitem(),
        "an output's hash": lambda body: _some(rng, body["outputs"]).update(sha256="1" * 64),
        "an output's shape": lambda body: _some(rng, body["outputs"])["shape"].append(1),
        "an output less": lambda body: body["outputs"].popitem(),
        "a field more": lambda body: body.update(note="x"),
        "a field less": lambda body: body.pop(rng.choice(sorted(body))),
        "an option more": lambda body: body["options"].update(min_keep=1),
        "an option less": lambda body: body["options"].pop(rng.choice(sorted(body["options"]))),
        "a layer's number": lambda body: body["eps"].update({"00": body["eps"].pop("0")}),
        "a layer more": lambda body: body["eps"].update({"7": body["eps"]["0"]}),
        "no bounds": lambda body: body.update(bound_eps=None),
    }
    name = rng.choice(sorted(changes))
    mutation.say(changes[name])
    return name


def _some(rng: random.Random, facts: Body) -> Body:
    found: Body = facts[rng.choice(sorted(facts))]
    return found


# -------------------------------------------------------------------------------------------- input


def a_number_of_the_input(mutation: Mutation) -> str | None:
    """Another number in the input, which the output says it was made of."""
    rng, said = mutation.rng, []

    def change(arrays: Arrays) -> None:
        name = rng.choice(sorted(arrays))
        array = arrays[name].copy()
        flat = array.reshape(-1)
        place = rng.randrange(flat.size)
        if array.dtype.kind == "f":
            most = np.finfo(array.dtype).max
            flat[place] = rng.choice([np.nan, np.inf, -np.inf, most, 0.0, -0.0, -flat[place]])
        else:  # BF16: NaN, infinities, the largest, zero, another sign
            bits = int(flat[place])
            flat[place] = rng.choice([0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0, bits ^ 0x8000, bits ^ 1])
        arrays[name] = array
        said.append(f"{name}[{place}] = {flat[place]}")

    forge_input(mutation.job.source, mutation.job.output, change)
    return said[0]


def metadata_of_the_input(mutation: Mutation) -> str | None:
    """Another scale or causal offset in the input, that the output does not know of."""
    rng = mutation.rng
    name, value = rng.choice(
        [
            *(
                ("scale", text)
                for text in ("0.5", "1/sqrt(4)", "1/sqrt(9)", "2.5e-1", "x", "1e999")
            ),
            *(("causal_offset", text) for text in ("19", "+19", "25", "0", "-3", "x", "1.0")),
            ("title", "x"),
        ]
    )
    forge_input(
        mutation.job.source,
        mutation.job.output,
        lambda _: None,
        lambda metadata: metadata.update({name: value}),
    )
    return f"{name} = {value}"


def tensors_of_the_input(mutation: Mutation) -> str | None:
    """A tensor of the input more, less, or under another name."""
    rng, said = mutation.rng, []

    def change(arrays: Arrays) -> None:
        name = rng.choice(sorted(arrays))
        how = rng.choice(["more", "less", "renamed", "exchanged"])
        if how == "exchanged":
            other = name.replace("key", "value") if "key" in name else name.replace("value", "key")
            arrays[name], arrays[other] = arrays[other], arrays[name]
        else:
            array = arrays.pop(name) if how != "more" else arrays[name]
            if how != "less":
                arrays[name.replace("layers.", rng.choice(["layer.", "mask.", "layers.1"]))] = array
        said.append(f"{name} {how}")

    forge_input(mutation.job.source, mutation.job.output, change)
    return said[0]


KINDS: dict[Kind, float] = {
    one_number: 8,
    whole_tensor: 2,
    another_form: 2,
    weaker: 5,
    other_keys: 3,
    an_option: 4,
    a_budget: 4,
    what_it_says: 2,
    a_number_of_the_input: 2,
    metadata_of_the_input: 1,
    tensors_of_the_input: 1,
}
