"""Checks of an output's statements against each other, which need no input.

A check yields findings, (where, what), and raises nothing. The sizes of the input are only claimed:
no memory is taken in proportion to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from .._files.certificate import Certificate
from .._files.layers import Layer
from . import codes, guards
from .claims import Claims, Floats, Integers, Note, among

Found = Iterator[tuple[str, str]]
Check = Callable[[Claims, Certificate], Found]

CERTIFICATE = "metadata certk"
_LARGEST = 2**63 - 1


# ------------------------------------------------------------------------------------ rules of sets


def visible_keys(layers: Sequence[Layer], certificate: Certificate) -> dict[int, int]:
    """Return the number of candidates in every layer; by token, those of the longest layer."""
    offset = certificate.causal_offset
    seen = {layer.index: layer.visible(offset) for layer in layers}
    if certificate.options.granularity != "token":
        return seen
    return dict.fromkeys(seen, max(seen.values()))


def most_kept(certificate: Certificate, visible: int) -> int:
    """Return the most keys that `max_keep` allows."""
    limit = certificate.options.max_keep
    if isinstance(limit, float):
        limit = max(1, math.floor(limit * visible))
    return visible if limit is None else min(limit, visible)


def may_be_over(certificate: Certificate) -> bool:
    """Return True if a limit on keys lets rows lose more than their budgets."""
    options = certificate.options
    return options.max_keep is not None or options.hot


def is_at_the_cap(kept: int, certificate: Certificate, visible: int) -> bool:
    """Return True if one more block (of one key without blocks) would exceed `max_keep`.

    Only such sets may lose more than their budget. Hot sets always may: their limit is one for the
    whole file.
    """
    if certificate.options.hot:
        return True
    most = most_kept(certificate, visible)
    return most < visible and kept + certificate.options.block_size > most


def forced_positions(certificate: Certificate, visible: int) -> tuple[range, range]:
    """Return the visible positions that `keep_first` and `keep_last` force."""
    options = certificate.options
    first, last = min(options.keep_first, visible), min(options.keep_last, visible)
    return range(first), range(visible - last, visible)


def inside(positions: Integers, forced: range) -> NDArray[np.bool_]:
    """Return which positions are among the forced ones."""
    return (positions >= forced.start) & (positions < forced.stop)


def promised(claims: Claims, heads: slice) -> NDArray[np.bool_]:
    """Return which rows of some heads have a promise; only for files with a mass for each row."""
    every = np.arange(heads.start, heads.stop)[:, None]
    return claims.is_promised(every, np.arange(claims.layer.m))


# -------------------------------------------------------------------------------------- whole files


def budgets_complaint(certificate: Certificate, layers: Sequence[Layer]) -> str | None:
    """Return why the budgets are not one for each group, or cannot be asked for; else None."""
    options = certificate.options
    token, sized = options.granularity == "token", options.size is not None
    groups = {
        layer.index: layer.kv_heads if options.granularity == "head" else 1 for layer in layers
    }
    checks: list[tuple[bool, str]] = []
    for name, budgets in (("eps", certificate.eps), ("bound_eps", certificate.bound_eps)):
        if budgets is None:
            continue
        every = [budget for each in budgets.values() for budget in each]
        wrong = next((budget for budget in every if not 0 <= budget < 1), None)
        differ = len(set(every)) > 1
        checks += [
            (
                {index: len(each) for index, each in budgets.items()} != groups,
                f"its {name} is not one budget for each group of each layer",
            ),
            (wrong is not None, f"its {name} is {wrong!r}"),
            (token and differ, f"its {name} is not the same in all layers, which share one set"),
            (
                name == "bound_eps" and sized and differ,
                "its bound_eps is not one number, as a size for all groups needs",
            ),
        ]
    checks += [
        (
            sized and certificate.bound_eps is None and options.proof != "none" and not options.hot,
            "it has a size, but no bound_eps that its lower bounds refer to",
        ),
        (
            token and len({layer.n for layer in layers}) > 1,
            "its layers have different numbers of keys, but share one set by token",
        ),
        (set(certificate.scales) != groups.keys(), "its scales are not one for each layer"),
    ]
    return next((what for wrong, what in checks if wrong), None)


def check_whole(layers: Sequence[Claims], certificate: Certificate, note: Note) -> list[Claims]:
    """Check the statements of all layers together; return the layers to be recomputed.

    By token these are all layers or none.
    """
    token = certificate.options.granularity == "token"
    if not layers:
        return []
    for where, group in _groups(layers, token=token):
        if (problem := _coverage(group, certificate)) is not None:
            note(where, problem)
    for where, what in _size(layers[:1] if token else layers, certificate):
        note(where, what)
    if not token:
        return list(layers)
    first, fine = layers[0], True
    for claims in layers[1:]:
        for name in ("indices", "lower_bound"):
            if not np.array_equal(getattr(first, name), getattr(claims, name)):
                what = f"is not that of layer {first.layer.index}, with which it shares one set"
                note(claims.stem + name, what)
                fine = False
    heaviest = max(claims.heaviest for claims in layers)
    return [replace(claims, heaviest=heaviest) for claims in layers] if fine else []


def _groups(
    layers: Sequence[Claims], *, token: bool
) -> Iterator[tuple[str, list[tuple[Claims, slice]]]]:
    """Yield of every group its place in the file, and its query heads."""
    if token:
        yield CERTIFICATE, [(claims, claims.heads_of(0)) for claims in layers]
        return
    for claims in layers:
        if len(claims.left_out):
            for _, _, heads in claims.groups():
                yield claims.stem + "left_out", [(claims, heads)]


def _coverage(group: Iterable[tuple[Claims, slice]], certificate: Certificate) -> str | None:
    rows = left = 0
    for claims, heads in group:
        m = claims.layer.m
        rows += (heads.stop - heads.start) * (m - len(claims.held_out))
        ends = (min(heads.start * m, _LARGEST), min(heads.stop * m, _LARGEST))
        low, high = np.searchsorted(claims.left_out, ends)
        left += int(high - low)
    most = math.floor((1 - Fraction(repr(certificate.options.coverage))) * rows)
    return f"{left} of {rows} rows, coverage allows {most}" if left > most else None


def _size(layers: Sequence[Claims], certificate: Certificate) -> Found:
    """Check kept keys and lower bounds against the size of the file.

    By token `layers` is one layer, which has the set of all.
    """
    options, budgets = certificate.options, certificate.bound_eps
    if options.size is None:
        return
    kept = sum(claims.kept for claims in layers)
    if kept > options.size:
        yield CERTIFICATE, f"{kept} keys are kept, its size allows {options.size}"
    alike = options.granularity == "token" or len(layers) == len(certificate.scales)
    if budgets is None or options.hot or options.proof == "none" or not alike:
        return
    w = next(iter(budgets.values()))[0]
    needed = sum(claims.needed(options.block_size) for claims in layers)
    # Bounds of no more keys than the size has prove nothing of its best loss.
    if w > 0 and needed <= options.size:
        yield (
            CERTIFICATE,
            f"its lower bounds for bound_eps = {w!r} add up to {needed} keys, which its size of "
            f"{options.size} allows: they do not prove that less is lost by none",
        )


# --------------------------------------------------------------------------------------- one layer


def check_layer(claims: Claims, certificate: Certificate, note: Note) -> bool:
    """Check the statements of one layer; return True if they make sense."""
    for stage in _STAGES:
        found = 0
        for check in stage:
            for where, what in check(claims, certificate):
                note(claims.stem + where, what)
                found += 1
        if found:
            return False
    return True


def _held_out(claims: Claims, certificate: Certificate) -> Found:
    m = claims.layer.m
    if not _ascending(claims.held_out, m):
        yield "held_out", f"not ascending queries from 0 to {m - 1}"
        return
    most = min(math.ceil(Fraction(repr(certificate.options.holdout)) * m), max(0, m - 1))
    if len(claims.held_out) > most:
        yield "held_out", f"{len(claims.held_out)} of {m} queries, holdout allows {most}"
    rows, left = claims.layer.heads * m, claims.left_out
    if not _ascending(left, rows):
        yield "left_out", f"not ascending rows from 0 to {rows - 1}"
        return
    both = left[among(left % m, claims.held_out)]
    if len(both):
        yield "left_out", f"row {both[0]} is of a query that is held out"


def _rest(claims: Claims, _: Certificate) -> Found:
    d, wrong = claims.layer.d, None
    if claims.guard is not None:
        wrong = guards.nonsense(claims.guard, d)
    if claims.codes is not None:
        wrong = codes.nonsense(claims.codes, d)
    if wrong is not None:
        yield wrong


def _intervals(claims: Claims, certificate: Certificate) -> Found:
    upper, lower = claims.upper, claims.lower
    if upper is None or lower is None:
        return
    eps = claims.eps_of_rows()
    fine = (lower >= 0) & (lower <= upper) & (upper <= 1)
    fine &= _storable(lower, certificate) & _storable(upper, certificate)
    for head, query in np.argwhere(~fine):
        interval = f"[{lower[head, query]}, {upper[head, query]}]"
        yield f"tail_mass_upper[{head}, {query}]", f"{interval} is no interval of masses"
    if may_be_over(certificate):
        return
    for head, query in np.argwhere(fine & (upper > eps) & promised(claims, slice(0, len(upper)))):
        what = _over(float(upper[head, query]), float(eps[head, 0]))
        yield f"tail_mass_upper[{head}, {query}]", what


def _worst(claims: Claims, certificate: Certificate) -> Found:
    if claims.worst is None:
        return
    for head, worst in enumerate(claims.worst.tolist()):
        budget = float(claims.eps[head * len(claims.eps) // claims.layer.heads])
        if not 0 <= worst <= 1 or not _storable(claims.worst[head], certificate):
            yield f"worst_tail_mass[{head}]", f"{worst!r} is no mass"
        elif worst > budget and not may_be_over(certificate):
            yield f"worst_tail_mass[{head}]", _over(worst, budget)


def _over(mass: float, budget: float) -> str:
    return f"{mass!r} is over eps = {budget!r} without a max_keep to excuse it"


def _violations(claims: Claims, _: Certificate) -> Found:
    said, most = claims.violations, len(claims.held_out)
    if said is not None:
        for head in np.flatnonzero((said < 0) | (said > most)):
            what = f"{said[head]} is not from 0 to the {most} queries held out"
            yield f"violations[{head}]", what


def _storable(masses: Floats, certificate: Certificate) -> NDArray[np.bool_]:
    """Return which masses are 0, or not below the least that is recorded."""
    least = 2.0**-126 if certificate.mass_dtype == "F32" else 2.0**-1000
    return np.asarray((masses == 0) | (masses >= least))


def _weights(claims: Claims, _: Certificate) -> Found:
    rows, weights, m = claims.rows, claims.weights, claims.layer.m
    if not _ascending(rows, claims.layer.heads * m):
        yield "lower_bound_rows", f"not ascending rows from 0 to {claims.layer.heads * m - 1}"
        return
    for place in np.flatnonzero(among(rows % m, claims.held_out) | among(rows, claims.left_out)):
        yield f"lower_bound_rows[{place}]", f"nothing is promised for row {rows[place]}"
    # As bits: a subnormal weight is positive also where the processor takes it for 0.
    for place in np.flatnonzero(~((weights.view(np.int64) > 0) & np.isfinite(weights))):
        yield f"lower_bound_weights[{place}]", "is not a finite weight > 0"


def _sets(claims: Claims, certificate: Certificate) -> Found:
    for group, _, _ in claims.groups():
        yield from _set(claims, group, certificate)


def _set(claims: Claims, group: int, certificate: Certificate) -> Found:
    """Check one set: positions, forced ones, blocks, number of keys, lower bound."""
    options, kept, visible = certificate.options, claims.indices[group], claims.visible
    name = claims.name_of(group)
    if not _ascending(kept, visible):
        yield "indices", f"{name}: not ascending positions from 0 to {visible - 1}"
        return
    absent = _first_absent(kept, certificate, visible)
    if absent is not None:
        yield "indices", f"{name}: position {absent} must be kept and is not"
    most = most_kept(certificate, visible)
    if len(kept) > most:
        yield "indices", f"{name}: {len(kept)} kept, max_keep allows {most}"
    excused = is_at_the_cap(len(kept), certificate, visible)
    if may_be_over(certificate) and not excused and _is_over(claims, group):
        what = f"{name}: over eps with {len(kept)} kept, though max_keep allows {most}"
        yield "indices", what
    units, unit = len(kept), "kept"
    if options.block_size > 1:
        yield from _blocks(claims, group, options.block_size)
        units, unit = len(claims.blocks[group]), "blocks kept"
    if options.proof == "none":
        return
    bound = int(claims.lower_bound[group])
    # Sets within smaller budgets than those of the promise may need more keys than this one has.
    if claims.bound_eps is not None and claims.bound_eps[group] < claims.eps[group]:
        units, unit = -(-visible // options.block_size), "there are"
    if not 0 <= bound <= units:
        yield "lower_bound", f"{name}: {bound} is not from 0 to the {units} {unit}"


def _is_over(claims: Claims, group: int) -> bool:
    """Return True if a row of a group is said to lose more than its budget."""
    heads = claims.heads_of(group)
    if claims.upper is not None:
        over = (claims.upper[heads] > claims.eps[group]) & promised(claims, heads)
        return bool(over.any())
    if claims.worst is not None:
        return bool((claims.worst[heads] > claims.eps[group]).any())
    return False


def _blocks(claims: Claims, group: int, size: int) -> Found:
    """Check that the kept positions are all visible ones of the listed blocks."""
    kept, blocks, name = claims.indices[group], claims.blocks[group], claims.name_of(group)
    if not np.array_equal(np.unique(kept // size), blocks):
        what = f"{name}: not the blocks of {size} that hold the kept positions, ascending"
        yield "blocks", what
        return
    counts = np.bincount(np.searchsorted(blocks, kept // size), minlength=len(blocks))
    short = np.flatnonzero(counts != np.minimum(size, claims.visible - blocks * size))
    if len(short):
        yield "indices", f"{name}: block {blocks[short[0]]} is kept in part"


def _first_absent(kept: Integers, certificate: Certificate, visible: int) -> int | None:
    """Return the first forced position that is not among the ascending `kept`."""
    for forced in forced_positions(certificate, visible):
        here = kept[inside(kept, forced)]
        gaps = np.flatnonzero(here != forced.start + np.arange(len(here)))
        run = int(gaps[0]) if len(gaps) else len(here)
        if run < len(forced):
            return forced.start + run
    return None


def _ascending(numbers: Integers, end: int) -> bool:
    """Return True if numbers rise within 0 .. end - 1."""
    # Compared, not subtracted: differences may wrap.
    return not len(numbers) or (
        int(numbers[0]) >= 0 and int(numbers[-1]) < end and bool((numbers[1:] > numbers[:-1]).all())
    )


# The checks of a layer; a stage is reached only if nothing was found before it.
_STAGES: tuple[tuple[Check, ...], ...] = (
    (_held_out, _rest),
    (_intervals, _worst, _violations, _weights, _sets),
)
