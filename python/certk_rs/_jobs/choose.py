"""Choose the kept sets of some layers, or of some heads of one, and prove what they lose.

For every group (a kv head, a layer, or all layers together by token) one kept set is chosen for all
its rows, a row being one query of one query head of the group.

Why a recorded certificate holds, and why an audit that shares no code with this always confirms it.
Let u = 2^-53, s* = scale * q.k the real score of the stored vectors, R = |scale| |q| max_i |k_i| of
a row, and ln(odds) = ln(tail mass / kept mass). If every score moves by at most x, ln(odds) moves
by at most 2 x, and there are such scores for which it does.

1. F16, BF16 and F32 widen to float64 exactly, and products of two of them neither overflow nor
   underflow there. So for any order of summation, with FMA or without, a computed dot product is
   off by at most gamma_d |q||k|, gamma_d = d u / (1 - d u) <= d u (1 + 2^-20) as d <= 2^20. The
   scale is left to the selector, which counts its own roundings. Hence the exact scale * (computed
   dot) is within r = d u (1 + 2^-20) R of s*. The largest |k_i| is over the keys that a query of
   the layer sees, or more.
2. An auditor's exact ln(odds) of its own computed scores are within 2 r' of the real ones, with r'
   <= (d + 8) u (1 + 2^-20) R; its exp and sums add an error below 2^-31.9 (`_audit.recompute`, n <=
   2^32). What it reports has all of this once as error and once more as its own widening, so it
   never reports more than the real ln(odds) + 4 r' + 2^-30.9, nor more than ours + 2 r + 4 r' +
   2^-30.9.
3. The selector is told the radius (3 d + 16) u (1 + 2^-19) R + 2^-31 (R rounded up), which is more
   than r + 2 r' + 2^-31.9. Its upper ends, on which CERTIFIED and over budget are decided, hold for
   all scores within that radius: for s* (soundness) and for all that an audit can report
   (confirmation). Likewise its lower ends and its lower bounds.
4. The 2^-31 costs a relative 1e-9 of the budget. What is recorded is rounded outward
   (`_files.masses`), and budgets are rounded down to the numbers that can be recorded, so that a
   recorded upper end is within eps if the selector's is.

The promise covers the queries in the file that are not left out. With a causal
offset, `keep_first` and `keep_last` count the positions that at least one query of the layer sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from .._files.cache import Cache
from .._files.layers import Layer
from .._files.masses import lower_ends, storable_budget, storable_weights, upper_ends
from .._files.transposed import ROW_MAJOR
from ..errors import CertkError
from ..hot_keys import Edge
from .held_out import held_out_queries
from .sets import Answer, Demands, LayerRecord, Probe, fewest_keys, joined
from .solve import Block, Limits, Solution, demanded, leave_out, solve, value_spread

# Budgets that follow from values: what F32 can tell from 1, and from 0 with room to spare.
_LARGEST, _SMALLEST = 1 - 2.0**-24, 2.0**-90


@dataclass(frozen=True)
class Ask:
    """A question about groups, besides the queries and keys of the input.

    The budget of layer i is eps[i], or where `out_tol` is given, what keeps the error of the
    output within it. `bound_eps` is the budget that lower bounds refer to where it is not
    `eps`. With `probes`, only the sizes at these budgets are asked for; with `demands`, only
    how often keys are needed. With `hot`, the keys that are needed so often are the set: an
    edge for each (layer, first kv head) of a group. A share `holdout` of the queries is set
    aside: the sets are made for the others, and tried on these. `masses` tells whether the tail
    mass of every row is wanted, or only the worst one; `bounds`, whether lower bounds are;
    `dtype` is that of the masses in the whole file.
    """

    granularity: str
    limits: Limits
    eps: tuple[tuple[int, float], ...] = ()
    out_tol: float | None = None
    bound_eps: float | None = None
    coverage: float = 1.0
    holdout: float = 0.0
    masses: bool = True
    bounds: bool = True
    probes: tuple[float, ...] = ()
    demands: bool = False
    hot: tuple[tuple[tuple[int, int], Edge], ...] = ()
    dtype: str = "F32"


@dataclass(frozen=True, eq=False)
class _Member:
    """The part of one layer in a group: its kv heads from `first` to `end`."""

    layer: Layer
    first: int
    end: int
    block: Block
    held_out: NDArray[np.int64]

    @property
    def heads(self) -> int:
        return int(self.block.query.shape[0])


def choose_layers(
    cache: Cache,
    layers: Sequence[Layer],
    heads: tuple[int, int] | None,
    ask: Ask,
    threads: int | None,
) -> tuple[Answer, ...]:
    """Answer for some layers, an entry per layer.

    Args:
        cache: The input, open.
        layers: By token, all layers of the input, which have the same number of keys; else any.
        heads: The kv heads of these layers to choose for, by head only; None for all.
        ask: The question.
        threads: The most threads, None for all; the result does not depend on it.

    Raises:
        CertkError: Scores are too large, or layers do not fit together.
    """
    if ask.granularity == "token":
        return _together(cache, layers, ask, threads)
    return tuple(_by_layer(cache, layer, heads, ask, threads) for layer in layers)


def _by_layer(
    cache: Cache, layer: Layer, heads: tuple[int, int] | None, ask: Ask, threads: int | None
) -> Answer:
    first, end = heads or (0, layer.kv_heads)
    step = 1 if ask.granularity == "head" else layer.kv_heads
    parts: list[Answer] = []
    # Heads that lie between each other are read at once: each alone would take reading all.
    stored, buffer = None, None
    if layer.layout == ROW_MAJOR:
        stored = cache.read(layer, "query"), cache.read(layer, "key")
    else:
        buffer = cache.room(layer, "key", step)
    for start in range(first, end, step):
        member = _member(cache, layer, start, min(start + step, end), ask, stored, buffer)
        parts += _group(cache, [member], ask, threads)
    if ask.probes:
        return joined([part for part in parts if isinstance(part, Probe)])
    if ask.demands:
        return joined([part for part in parts if isinstance(part, Demands)])
    return joined([part for part in parts if isinstance(part, LayerRecord)])


def _together(
    cache: Cache, layers: Sequence[Layer], ask: Ask, threads: int | None
) -> tuple[Answer, ...]:
    if len({layer.visible(cache.causal_offset) for layer in layers}) > 1 or (
        len({layer.n for layer in layers}) > 1
    ):
        raise CertkError(
            f"{cache.path}: its layers differ in their keys, so that one set of tokens does not "
            "fit all: take granularity layer or head"
        )
    members = [_member(cache, layer, 0, layer.kv_heads, ask) for layer in layers]
    return tuple(_group(cache, members, ask, threads))


def _member(
    cache: Cache,
    layer: Layer,
    first: int,
    end: int,
    ask: Ask,
    stored: tuple[NDArray[Any], NDArray[Any]] | None = None,
    buffer: NDArray[np.uint8] | None = None,
) -> _Member:
    size = layer.heads // layer.kv_heads
    heads, kv_heads = slice(first * size, end * size), slice(first, end)
    if stored is None:
        keys = cache.read(layer, "key", kv_heads, buffer=buffer)
        stored = cache.read(layer, "query", heads), keys
    else:
        stored = stored[0][heads], stored[1][kv_heads]
    block = Block(
        stored[0],
        layer.dtypes["query"],
        stored[1],
        layer.dtypes["key"],
        cache.scales[layer.index],
    )
    offset = cache.causal_offset
    blind = 0 if offset is None else min(max(-offset, 0), layer.m)
    held_out = held_out_queries(layer.m, ask.holdout, blind, offset is not None)
    return _Member(layer, first, end, block, held_out)


def _group(cache: Cache, members: list[_Member], ask: Ask, threads: int | None) -> list[Answer]:
    """Choose for one group, and hand each layer in it its part."""
    counted = np.concatenate([_counted(member) for member in members])
    blocks = [member.block for member in members]

    def find(eps: float | NDArray[np.float64], rows: NDArray[np.bool_], limits: Limits) -> Solution:
        every = None if rows.all() else rows
        try:
            return solve(blocks, eps, every, cache.causal_offset, limits, threads)
        except CertkError as error:
            where = ", ".join(str(member.layer.index) for member in members)
            raise CertkError(f"{cache.path}: layer {where}: {error}") from None

    if ask.probes:
        found = [find(storable_budget(eps, ask.dtype), counted, ask.limits) for eps in ask.probes]
        kept = np.array([[len(one.indices) for one in found]])
        visible = members[0].layer.visible(cache.causal_offset)
        fewest = [fewest_keys(one.lower_bound, ask.limits.block_size, visible) for one in found]
        bounds = np.array([fewest])
        return [Probe(member.layer, member.first, kept, bounds) for member in members]
    eps = _budget(cache, members, ask)
    limit = storable_budget(eps, ask.dtype)
    rows = counted
    if ask.demands or ask.hot:
        shares = _demanded(cache, members, ask, limit, threads)
        if not ask.hot:
            return [Demands(member.layer, member.first, shares[None]) for member in members]
        given = np.zeros(members[0].layer.n, np.bool_)
        edge = dict(ask.hot)[members[0].layer.index, members[0].first]
        given[: len(shares)] = edge.stays(shares)
        solution = solve(blocks, limit, counted, cache.causal_offset, Limits(), threads, given)
        # Also where all are within their budgets: this set was not made to be small.
        solution = replace(solution, over=True)
    else:
        solution = find(limit, rows, ask.limits)
    left_out = np.empty(0, np.int64)
    if ask.coverage < 1:
        fixed = np.concatenate([_fixed(member, cache.causal_offset) for member in members])
        solution, rows = leave_out(find, limit, counted, fixed, ask.coverage, ask.limits, solution)
        left_out = np.flatnonzero(counted & ~rows)
    proof = solution
    if ask.bounds and (ask.bound_eps is not None or solution.over):
        free = replace(ask.limits, max_keep=None)
        least: float | NDArray[np.float64]
        if ask.bound_eps is not None:
            least = storable_budget(ask.bound_eps, ask.dtype)
            demanding = rows
        else:
            least = _limits(members, ask, solution, rows, limit)
            # A row that may lose everything asks for nothing, and proves nothing.
            demanding = rows & (least < 1)
            least = np.minimum(least, np.nextafter(1.0, 0.0))
        proof = find(least, demanding, free)
    return _parts(members, ask, eps, solution, rows, left_out, proof)


def _demanded(
    cache: Cache, members: list[_Member], ask: Ask, eps: float, threads: int | None
) -> NDArray[np.float64]:
    [member] = members
    layer, offset = member.layer, cache.causal_offset
    counted = np.setdiff1d(np.arange(layer.m), member.held_out)
    if offset is not None:
        counted = counted[counted + offset >= 0]
    visible = layer.visible(offset)
    return demanded(member.block, counted, visible, offset, ask.limits, eps, threads)


def _counted(member: _Member) -> NDArray[np.bool_]:
    counted = np.ones((member.heads, member.layer.m), np.bool_)
    counted[:, member.held_out] = False
    return counted.reshape(-1)


def _fixed(member: _Member, causal_offset: int | None) -> NDArray[np.bool_]:
    """Return the rows that coverage may not leave out: they tell what is visible at all."""
    fixed = np.zeros((member.heads, member.layer.m), np.bool_)
    fixed[:, -1] = causal_offset is not None
    return fixed.reshape(-1)


def _budget(cache: Cache, members: list[_Member], ask: Ask) -> float:
    """Return the budget of a group."""
    if ask.out_tol is None:
        of_layer = dict(ask.eps)
        return min(of_layer[member.layer.index] for member in members)
    [member] = members
    spread = value_spread(cache, member.layer, member.first, member.end)
    eps = min(ask.out_tol / spread * (1 - 2.0**-50), _LARGEST) if spread else _LARGEST
    return eps if eps >= _SMALLEST else 0.0


def _limits(
    members: list[_Member],
    ask: Ask,
    solution: Solution,
    rows: NDArray[np.bool_],
    floor: float,
) -> NDArray[np.float64]:
    """Return the recorded losses of rows over budget: the budgets of the lower bound."""
    upper = np.maximum(upper_ends(solution.upper, ask.dtype).astype(np.float64), floor)
    if not ask.masses:
        start = 0
        for member in members:
            stop = start + member.block.rows
            part = np.where(rows[start:stop], upper[start:stop], floor)
            by_head = part.reshape(member.heads, -1)
            upper[start:stop] = np.broadcast_to(by_head.max(axis=1)[:, None], by_head.shape).ravel()
            start = stop
    return upper


def _parts(
    members: list[_Member],
    ask: Ask,
    eps: float,
    solution: Solution,
    promised: NDArray[np.bool_],
    left_out: NDArray[np.int64],
    proof: Solution,
) -> list[Answer]:
    """Return the record of each layer of a group; `proof` has the lower bound and its weights."""
    parts: list[Answer] = []
    start = 0
    limit = storable_budget(eps, ask.dtype)
    # For the whole group: only the ratios of its weights count, and those must stay.
    storable = storable_weights(proof.weights if ask.bounds else np.zeros_like(proof.weights))
    with _native.DefaultFloats():
        for member in members:
            part = slice(start, start + member.block.rows)
            shape = (member.heads, member.layer.m)
            upper = upper_ends(solution.upper[part], ask.dtype).reshape(shape)
            lower = lower_ends(solution.lower[part], ask.dtype).reshape(shape)
            counts = promised[part].reshape(shape)
            size = member.layer.heads // member.layer.kv_heads
            shift = member.first * size * member.layer.m
            weights = storable[part]
            (heavy,) = np.nonzero(weights)
            out = left_out[(left_out >= part.start) & (left_out < part.stop)]
            violations = np.count_nonzero((upper[:, member.held_out] > limit).any(axis=0))
            parts.append(
                LayerRecord(
                    layer=member.layer,
                    first_head=member.first,
                    sizes=np.array([len(solution.indices)]),
                    indices=solution.indices,
                    eps=np.array([eps]),
                    upper=upper if ask.masses else None,
                    lower=lower if ask.masses else None,
                    worst=np.where(counts, upper, upper.dtype.type(0)).max(axis=1),
                    over=np.count_nonzero(counts & (upper > limit), axis=1),
                    violations=np.array([[violations, violations]]),
                    lower_bounds=np.array([proof.lower_bound], np.int64),
                    weight_rows=heavy + shift,
                    weights=weights[heavy].astype(np.float32),
                    held_out=member.held_out,
                    left_out=out - part.start + shift,
                )
            )
            start = part.stop
    return parts
