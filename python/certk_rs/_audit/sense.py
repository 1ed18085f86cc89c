"""Whether what an output says of its layers makes sense, whatever the input was.

Whatever does not hold is told to `note(where, what)`; nothing raises. The sizes of the input are
only claimed: nothing may be made in proportion to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..cache_format import Certificate, Layer
from .claims import Claims, Floats, Integers, Note
from .guards import nonsense

_LARGEST = 2**63 - 1


def check_layer(claims: Claims, certificate: Certificate, note: Note) -> bool:
    """Check what must hold of one layer; tell whether it does."""
    complaints = 0

    def wrong(where: str, what: str) -> None:
        nonlocal complaints
        complaints += 1
        note(claims.stem + where, what)

    # What is left out and held out first: the rest asks for it.
    _check_aside(claims, certificate, wrong)
    if claims.guard is not None:
        found = nonsense(claims.guard, claims.layer.d)
        if found is not None:
            wrong(*found)
    if not complaints:
        _check_masses(claims, certificate, wrong)
        _check_weights(claims, wrong)
        for group, _, _ in claims.groups():
            _check_group(claims, group, certificate, wrong)
    return not complaints


def visible_keys(layers: Sequence[Layer], certificate: Certificate) -> dict[int, int]:
    """Of every layer how many keys are candidates; by token those that any layer's query sees."""
    offset = certificate.causal_offset
    seen = {layer.index: layer.visible(offset) for layer in layers}
    if certificate.options.granularity != "token":
        return seen
    return dict.fromkeys(seen, max(seen.values()))


def most_kept(certificate: Certificate, visible: int) -> int:
    """How many keys `max_keep` allows."""
    limit = certificate.options.max_keep
    if isinstance(limit, float):
        limit = max(1, math.floor(limit * visible))
    return visible if limit is None else min(limit, visible)


def may_be_over(certificate: Certificate) -> bool:
    """Whether rows may lose more than their budgets: where a limit on keys comes first."""
    options = certificate.options
    return options.max_keep is not None or options.hot


def is_at_the_cap(kept: int, certificate: Certificate, visible: int) -> bool:
    """Whether a further block (of one key, if there are no blocks) would be more than `max_keep`.

    Only such sets may lose more than their budget. Hot ones are: how many keys each has is for the
    whole file to say.
    """
    if certificate.options.hot:
        return True
    most = most_kept(certificate, visible)
    return most < visible and kept + certificate.options.block_size > most


def forced_positions(certificate: Certificate, visible: int) -> tuple[range, range]:
    """The visible positions that `keep_first` and those that `keep_last` forces."""
    options = certificate.options
    first, last = min(options.keep_first, visible), min(options.keep_last, visible)
    return range(first), range(visible - last, visible)


def inside(positions: Integers, forced: range) -> NDArray[np.bool_]:
    """Which positions are among the forced ones."""
    return (positions >= forced.start) & (positions < forced.stop)


def _check_aside(claims: Claims, certificate: Certificate, wrong: Note) -> None:
    """Queries that are set aside, and rows that coverage leaves out: where, and how many."""
    options, layer = certificate.options, claims.layer
    held, left, m = claims.held_out, claims.left_out, layer.m
    if not _ascending(held, m):
        wrong("held_out", f"not ascending queries from 0 to {m - 1}")
        return
    most = min(math.ceil(Fraction(repr(options.holdout)) * m), m - 1)
    if len(held) > most:
        wrong("held_out", f"{len(held)} of {m} queries, holdout allows {most}")
    if not _ascending(left, layer.heads * m):
        wrong("left_out", f"not ascending rows from 0 to {layer.heads * m - 1}")
        return
    both = left[_among(left % m, held)]
    if len(both):
        wrong("left_out", f"row {both[0]} is of a query that is held out")


def check_coverage(group: Iterable[tuple[Claims, slice]], certificate: Certificate) -> str | None:
    """What is wrong with how many rows of a group (query heads of layers) are left out."""
    rows = left = 0
    for claims, heads in group:
        m = claims.layer.m
        rows += (heads.stop - heads.start) * (m - len(claims.held_out))
        ends = (min(heads.start * m, _LARGEST), min(heads.stop * m, _LARGEST))
        low, high = np.searchsorted(claims.left_out, ends)
        left += int(high - low)
    most = math.floor((1 - Fraction(repr(certificate.options.coverage))) * rows)
    return f"{left} of {rows} rows, coverage allows {most}" if left > most else None


def _check_masses(claims: Claims, certificate: Certificate, wrong: Note) -> None:
    capped = may_be_over(certificate)
    if claims.upper is not None and claims.lower is not None:
        upper, lower, eps = claims.upper, claims.lower, claims.eps_of_rows()
        fine = (lower >= 0) & (lower <= upper) & (upper <= 1)
        fine &= _storable(lower, certificate) & _storable(upper, certificate)
        for head, query in np.argwhere(~fine):
            interval = f"[{lower[head, query]}, {upper[head, query]}]"
            wrong(f"tail_mass_upper[{head}, {query}]", f"{interval} is no interval of masses")
        every = slice(0, claims.layer.heads)
        over = np.zeros_like(fine) if capped else fine & (upper > eps) & promised(claims, every)
        for head, query in np.argwhere(over):
            mass, budget = float(upper[head, query]), float(eps[head, 0])
            what = f"{mass!r} is over eps = {budget!r} without a max_keep to excuse it"
            wrong(f"tail_mass_upper[{head}, {query}]", what)
    if claims.worst is not None:
        for head, worst in enumerate(claims.worst.tolist()):
            budget = float(claims.eps[head * len(claims.eps) // claims.layer.heads])
            if not 0 <= worst <= 1 or not _storable(claims.worst[head], certificate):
                wrong(f"worst_tail_mass[{head}]", f"{worst!r} is no mass")
            elif worst > budget and not capped:
                what = f"{worst!r} is over eps = {budget!r} without a max_keep to excuse it"
                wrong(f"worst_tail_mass[{head}]", what)
    if claims.violations is not None:
        most = len(claims.held_out)
        for head in np.flatnonzero((claims.violations < 0) | (claims.violations > most)):
            what = f"{claims.violations[head]} is not from 0 to the {most} queries held out"
            wrong(f"violations[{head}]", what)


def _storable(masses: Floats, certificate: Certificate) -> NDArray[np.bool_]:
    """Which masses are 0 or not below the least that is recorded."""
    least = 2.0**-126 if certificate.mass_dtype == "F32" else 2.0**-1000
    return np.asarray((masses == 0) | (masses >= least))


def promised(claims: Claims, heads: slice) -> NDArray[np.bool_]:
    """For which rows of some heads the promise is made; where the file has a mass for each."""
    parts = [
        claims.is_promised(head, slice(0, claims.layer.m))
        for head in range(heads.start, heads.stop)
    ]
    return np.array(parts)


def _check_weights(claims: Claims, wrong: Note) -> None:
    rows, weights, m = claims.rows, claims.weights, claims.layer.m
    if not _ascending(rows, claims.layer.heads * m):
        wrong("lower_bound_rows", f"not ascending rows from 0 to {claims.layer.heads * m - 1}")
        return
    for place in np.flatnonzero(_among(rows % m, claims.held_out) | _among(rows, claims.left_out)):
        wrong(f"lower_bound_rows[{place}]", f"nothing is promised for row {rows[place]}")
    # As bits: a subnormal weight is one also where the processor takes it for 0.
    for place in np.flatnonzero(~((weights.view(np.int64) > 0) & np.isfinite(weights))):
        wrong(f"lower_bound_weights[{place}]", "is not a finite weight > 0")


def _check_group(claims: Claims, group: int, certificate: Certificate, wrong: Note) -> None:
    """One set: its positions, forced ones, blocks, how many there are, and its lower bound."""
    kept, visible, name = claims.indices[group], claims.visible, claims.name_of(group)
    if not _ascending(kept, visible):
        wrong("indices", f"{name}: not ascending positions from 0 to {visible - 1}")
        return
    absent = _first_absent(kept, certificate, visible)
    if absent is not None:
        wrong("indices", f"{name}: position {absent} must be kept and is not")
    most = most_kept(certificate, visible)
    if len(kept) > most:
        wrong("indices", f"{name}: {len(kept)} kept, max_keep allows {most}")
    capped = may_be_over(certificate)
    at_the_cap = is_at_the_cap(len(kept), certificate, visible)
    if capped and not at_the_cap and _is_over(claims, group):
        what = f"{name}: over eps with {len(kept)} kept, though max_keep allows {most}"
        wrong("indices", what)
    size, units, unit = certificate.options.block_size, len(kept), "kept"
    if size > 1:
        _check_blocks(claims, group, size, wrong)
        units, unit = len(claims.blocks[group]), "blocks kept"
    if certificate.options.proof == "none":
        return
    bound = int(claims.lower_bound[group])
    # Sets within other budgets than those of the promise may need more keys than this one has.
    if claims.bound_eps is not None and claims.bound_eps[group] < claims.eps[group]:
        units, unit = -(-visible // size), "there are"
    if not 0 <= bound <= units:
        wrong("lower_bound", f"{name}: {bound} is not from 0 to the {units} {unit}")


def _is_over(claims: Claims, group: int) -> bool:
    """Whether a group says that one of its rows loses more than its budget."""
    heads = claims.heads_of(group)
    if claims.upper is not None:
        over = (claims.upper[heads] > claims.eps[group]) & promised(claims, heads)
        return bool(over.any())
    if claims.worst is not None:
        return bool((claims.worst[heads] > claims.eps[group]).any())
    return False


def _check_blocks(claims: Claims, group: int, size: int, wrong: Note) -> None:
    """Kept are all visible positions of the blocks that are listed, and no others."""
    kept, blocks, name = claims.indices[group], claims.blocks[group], claims.name_of(group)
    if not np.array_equal(np.unique(kept // size), blocks):
        wrong("blocks", f"{name}: not the blocks of {size} that hold the kept positions, ascending")
        return
    counts = np.bincount(np.searchsorted(blocks, kept // size), minlength=len(blocks))
    short = np.flatnonzero(counts != np.minimum(size, claims.visible - blocks * size))
    if len(short):
        wrong("indices", f"{name}: block {blocks[short[0]]} is kept in part")


def _first_absent(kept: Integers, certificate: Certificate, visible: int) -> int | None:
    """The first position that is forced and not among the ascending `kept`, if there is one."""
    for forced in forced_positions(certificate, visible):
        here = kept[inside(kept, forced)]
        gaps = np.flatnonzero(here != forced.start + np.arange(len(here)))
        run = int(gaps[0]) if len(gaps) else len(here)
        if run < len(forced):
            return forced.start + run
    return None


def _ascending(numbers: Integers, end: int) -> bool:
    """Whether numbers rise within 0 .. end - 1."""
    # Compared, not subtracted: differences may wrap.
    return not len(numbers) or (
        int(numbers[0]) >= 0 and int(numbers[-1]) < end and bool((numbers[1:] > numbers[:-1]).all())
    )


def _among(numbers: Integers, ascending: Integers) -> NDArray[np.bool_]:
    """Which of the numbers are in an ascending list."""
    if not len(ascending):
        return np.zeros(len(numbers), bool)
    place = np.minimum(np.searchsorted(ascending, numbers), len(ascending) - 1)
    return np.asarray(ascending[place] == numbers)
