"""The audit of one layer: whether its tensors make sense, and whether they are true of the input.

Whatever does not hold is told to `note(where, what)`; nothing raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache_format import Certificate, Form, Layer, SafetensorsFile, output_tensors, widen
from .recompute import Floats, Keys, Proof, Rows, recompute

Note = Callable[[str, str], None]

_BLOCK = 1 << 21  # scores at a time: 16 MiB, and a few temporaries of that size


@dataclass(frozen=True)
class Sets:
    """One layer of an output, as read: `indices` one array per group, the rest as in the file."""

    layer: Layer
    stem: str
    by_head: bool
    indices: list[NDArray[np.int64]]
    upper: Floats
    lower: Floats
    lower_bound: NDArray[np.int64]
    weights: Floats

    @property
    def kept(self) -> int:
        """How many keys are kept, in all groups together."""
        return sum(map(len, self.indices))

    @property
    def total(self) -> int:
        """Of how many keys."""
        return self.layer.n * len(self.indices)

    def heads(self, kv_heads: range) -> slice:
        """The query heads of some kv heads."""
        size = self.layer.heads // self.layer.kv_heads
        return slice(kv_heads.start * size, kv_heads.stop * size)

    def groups(self) -> Iterator[tuple[int, str, range]]:
        """Number, name and kv heads of every group."""
        name, kv_heads = f"layer {self.layer.index}", self.layer.kv_heads
        if not self.by_head:
            yield 0, name, range(kv_heads)
            return
        for head in range(kv_heads):
            yield head, f"{name}, kv head {head}", range(head, head + 1)


def tensors_of(file: SafetensorsFile, layer: Layer, certificate: Certificate) -> dict[str, Form]:
    """What tensors this layer must have, given how many indices it has."""
    indices = file.header.entries.get(f"layers.{layer.index}.indices")
    total = 0 if indices is None else math.prod(indices.shape)
    return output_tensors(layer, certificate.options.granularity, [total])


def read_sets(
    file: SafetensorsFile, layer: Layer, certificate: Certificate, note: Note
) -> Sets | None:
    """The tensors of one layer, None (noted) if they do not fit together."""
    stem, by_head = f"layers.{layer.index}.", certificate.options.granularity == "head"
    entries, fine = file.header.entries, True
    for name, (dtype, shape) in tensors_of(file, layer, certificate).items():
        found = entries.get(name)
        if found is None:
            note(name, "is missing")
        elif (found.dtype, found.shape) != (dtype, shape):
            note(name, f"is {found.dtype} {list(found.shape)}, must be {dtype} {list(shape)}")
        fine = fine and found is not None and (found.dtype, found.shape) == (dtype, shape)
    if not fine:
        return None
    indices = file.read(stem + "indices").astype(np.int64)
    # In Python's integers, whose differences do not wrap.
    indptr = file.read(stem + "indptr").tolist() if by_head else [0, len(indices)]
    ends = indptr[0] == 0 and indptr[-1] == len(indices)
    if not ends or any(start > stop for start, stop in pairwise(indptr)):
        note(stem + "indptr", f"does not rise from 0 to the {len(indices)} kept positions")
        return None
    return Sets(
        layer,
        stem,
        by_head,
        [indices[start:stop] for start, stop in pairwise(indptr)],
        file.read(stem + "tail_mass_upper"),
        file.read(stem + "tail_mass_lower"),
        file.read(stem + "lower_bound"),
        file.read(stem + "lower_bound_weights"),
    )


def check_sense(sets: Sets, certificate: Certificate, note: Note) -> bool:
    """Check what must hold whatever the input was; tell whether it does.

    The sizes of the input are only claimed here: nothing may be made in proportion to them.
    """
    stem, eps, limit = sets.stem, certificate.eps, certificate.options.max_keep
    found = 0

    def wrong(where: str, what: str) -> None:
        nonlocal found
        found += 1
        note(where, what)

    visible = sets.layer.visible(certificate.causal_offset)
    most, over = _most(certificate, visible), sets.upper > eps
    for group, name, kv_heads in sets.groups():
        kept, bound = sets.indices[group], int(sets.lower_bound[group])
        # Compared, not subtracted: differences may wrap.
        if len(kept) and (kept[0] < 0 or kept[-1] >= visible or (kept[1:] <= kept[:-1]).any()):
            wrong(stem + "indices", f"{name}: not ascending positions from 0 to {visible - 1}")
            continue
        absent = _first_absent(kept, certificate, visible)
        if absent is not None:
            wrong(stem + "indices", f"{name}: position {absent} must be kept and is not")
        if len(kept) > most:
            wrong(stem + "indices", f"{name}: {len(kept)} kept, max_keep allows {most}")
        if len(kept) < most and limit is not None and over[sets.heads(kv_heads)].any():
            what = f"{name}: over eps with {len(kept)} kept, though max_keep allows {most}"
            wrong(stem + "indices", what)
        if not 0 <= bound <= len(kept):
            wrong(stem + "lower_bound", f"{name}: {bound} is not from 0 to the {len(kept)} kept")
    fine = (sets.lower >= 0) & (sets.lower <= sets.upper) & (sets.upper <= 1)
    for head, query in np.argwhere(~fine):
        interval = f"[{sets.lower[head, query]}, {sets.upper[head, query]}]"
        wrong(f"{stem}tail_mass_upper[{head}, {query}]", f"{interval} is no interval of masses")
    if limit is None:
        for head, query in np.argwhere(fine & over):
            mass = float(sets.upper[head, query])
            where = f"{stem}tail_mass_upper[{head}, {query}]"
            wrong(where, f"{mass!r} is over eps = {eps!r} without a max_keep to excuse it")
    for head, query in np.argwhere(~(np.isfinite(sets.weights) & (sets.weights >= 0))):
        wrong(f"{stem}lower_bound_weights[{head}, {query}]", "is not a finite weight >= 0")
    return not found


def check_truth(
    sets: Sets, given: SafetensorsFile, file: SafetensorsFile, certificate: Certificate, note: Note
) -> tuple[int, int]:
    """Hold a layer against its input; the numbers of tail masses and lower bounds confirmed."""
    for role in ("key", "value"):
        _check_copies(sets, role, given, file, note)
    layer = sets.layer
    queries = given.read(layer.names["query"]).reshape(layer.heads, layer.m, layer.d)
    keys = given.read(layer.names["key"]).reshape(layer.kv_heads, layer.n, layer.d)
    rows = bounds = 0
    for group, name, kv_heads in sets.groups():
        confirmed, proof = _recompute_group(sets, group, kv_heads, queries, keys, certificate, note)
        rows += confirmed
        bound = int(sets.lower_bound[group])
        if proof.holds_for(bound):
            bounds += 1
        else:
            what = f"{name}: {bound} is not proven by the recorded weights"
            note(f"{sets.stem}lower_bound[{group}]", what)
    return rows, bounds


def _check_copies(
    sets: Sets, role: str, given: SafetensorsFile, file: SafetensorsFile, note: Note
) -> None:
    """Kept rows are those of the input, bit for bit (as integers: NaN and -0 have no say)."""
    raw = given.read(sets.layer.names[role])
    bits = f"<u{raw.itemsize}"
    rows = raw.view(bits).reshape(raw.shape[-3:])
    pruned = file.read(sets.stem + role).view(bits)
    start = 0
    for head, kept in enumerate(sets.indices if sets.by_head else sets.indices * len(rows)):
        copies = pruned[start : start + len(kept)] if sets.by_head else pruned[head]
        for row in np.flatnonzero((copies != rows[head][kept]).any(axis=1))[:3]:
            place = f"{start + row}" if sets.by_head else f"{head}, {row}"
            what = f"is not position {kept[row]} of kv head {head} of the input"
            note(f"{sets.stem}{role}[{place}]", what)
        start += len(kept)


def _recompute_group(
    sets: Sets,
    group: int,
    kv_heads: range,
    queries: NDArray[Any],
    keys: NDArray[Any],
    certificate: Certificate,
    note: Note,
) -> tuple[int, Proof]:
    """Recompute the rows of one group, some queries of one head at a time."""
    layer, scale = sets.layer, certificate.scales[sets.layer.index]
    visible, size = layer.visible(certificate.causal_offset), layer.heads // layer.kv_heads
    kept = sets.indices[group]
    dropped = np.setdiff1d(np.arange(visible), kept, assume_unique=True)
    order = np.concatenate([kept, dropped])
    proof = Proof(np.logical_or.reduce([_inside(order, r) for r in _forced(certificate, visible)]))
    heads = sets.heads(kv_heads)
    largest = float(sets.weights[heads].max()) or 1.0
    step = max(1, _BLOCK // max(visible, 1))
    confirmed = 0
    for head in range(heads.start, heads.stop):
        if head % size == 0:
            vectors = widen(keys[head // size], layer.dtypes["key"])
            two_sides = Keys(vectors[kept], kept), Keys(vectors[dropped], dropped)
        for start in range(0, layer.m, step):
            part = slice(start, min(start + step, layer.m))
            place = (head, part)
            q = widen(queries[place], layer.dtypes["query"])
            seen = _seen(part, visible, certificate.causal_offset)
            rows = recompute(q, *two_sides, scale, seen)
            confirmed += _compare(sets, head, part, rows, note)
            # A row over budget, as max_keep allows, is bound by what the certificate says it loses.
            limits = np.maximum(certificate.eps, sets.upper[place])
            proof.add(rows, sets.weights[place] / largest, limits, seen)
    return confirmed, proof


def _compare(sets: Sets, head: int, part: slice, rows: Rows, note: Note) -> int:
    """Hold the recorded masses of some rows against the recomputed ones; how many are confirmed."""
    upper, lower = sets.upper[head, part], sets.lower[head, part]
    confirmed = rows.lose_at_most(upper) & rows.lose_at_least(lower)
    refuted = rows.refute(lower, upper)
    for row in np.flatnonzero(~confirmed):
        query = part.start + int(row)
        said = f"[{float(lower[row])!r}, {float(upper[row])!r}]"
        mine = f"[{float(rows.tail_low[row])!r}, {float(rows.tail_high[row])!r}]"
        verdict = f"refuted: it is in {mine}" if refuted[row] else f"not confirmed, only {mine} is"
        note(
            f"{sets.stem}tail_mass_upper[{head}, {query}]",
            f"layer {sets.layer.index}, head {head}, query {query}: "
            f"tail mass in {said} is {verdict}",
        )
    return int(confirmed.sum())


def _most(certificate: Certificate, visible: int) -> int:
    """How many keys `max_keep` allows."""
    limit = certificate.options.max_keep
    if isinstance(limit, float):
        limit = max(1, math.floor(limit * visible))
    return visible if limit is None else min(limit, visible)


def _forced(certificate: Certificate, visible: int) -> tuple[range, range]:
    """The visible positions that `keep_first` and those that `keep_last` forces."""
    options = certificate.options
    first, last = min(options.keep_first, visible), min(options.keep_last, visible)
    return range(first), range(visible - last, visible)


def _inside(positions: NDArray[np.int64], forced: range) -> NDArray[np.bool_]:
    return (positions >= forced.start) & (positions < forced.stop)


def _first_absent(kept: NDArray[np.int64], certificate: Certificate, visible: int) -> int | None:
    """The first position that is forced and not among the ascending `kept`, if there is one."""
    for forced in _forced(certificate, visible):
        here = kept[_inside(kept, forced)]
        gaps = np.flatnonzero(here != forced.start + np.arange(len(here)))
        run = int(gaps[0]) if len(gaps) else len(here)
        if run < len(forced):
            return forced.start + run
    return None


def _seen(part: slice, visible: int, causal_offset: int | None) -> NDArray[np.int64]:
    """How many of the visible keys each query sees."""
    if causal_offset is None:
        return np.full(part.stop - part.start, visible)
    # In Python's integers: an offset may be near the ends of int64.
    queries = range(part.start, part.stop)
    return np.array([min(max(i + causal_offset + 1, 0), visible) for i in queries])
