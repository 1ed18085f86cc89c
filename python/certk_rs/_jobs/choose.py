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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from .._files.cache import Cache
from .._files.certificate import Options
from .._files.layers import Layer
from .._files.masses import lower_ends, mass_dtype, storable_budget, storable_weights, upper_ends
from .._files.safetensors import NAMES
from .._files.transposed import ROW_MAJOR
from .._files.values import widen
from ..errors import CertkError
from ..hot_keys import Demand, Edge, Rows
from ..results import Status
from .held_out import held_out_queries
from .sets import Answer, Demands, LayerRecord, Probe, fewest_keys, joined

# The radius of a row is so many roundings beyond 3 d, and this slack (see above).
ROUNDINGS = 16
SLACK = 2.0**-31
# Each round leaves out a part of what may be left out, since others bind once the first are gone.
_ROUNDS = 6
# Scores that are held at a time where demands are counted, and values where they are compared.
_SCORES = 1 << 22
_VALUES = 1 << 14
# Budgets that follow from values: what F32 can tell from 1, and from 0 with room to spare.
_LARGEST, _SMALLEST = 1 - 2.0**-24, 2.0**-90


@dataclass(frozen=True)
class Ask:
    """A question about groups, besides the queries and keys of the input.

    The budget of layer i is eps[i], or with `options.out_tol`, one that keeps the error of the
    output within it. `bound_eps` is the budget of the lower bounds where it is not `eps`. With
    `probes`, only the sizes at these budgets are asked for; with `demands`, only how often keys are
    needed. With `hot`, the keys that are needed so often are the set: an edge for each (layer,
    first kv head) of a group. A share `holdout` of the queries is set aside: the sets are made for
    the others, and tried on these. Such sets are not written, and nothing is proven of them.
    """

    options: Options
    eps: tuple[tuple[int, float], ...] = ()
    effort: str = "default"
    bound_eps: float | None = None
    holdout: float = 0.0
    probes: tuple[float, ...] = ()
    demands: bool = False
    hot: tuple[tuple[tuple[int, int], Edge], ...] = ()

    @property
    def masses(self) -> bool:
        """True if the tail mass of every row is wanted, and not only the worst one."""
        return self.options.proof == "full" and not self.holdout

    @property
    def bounds(self) -> bool:
        """True if lower bounds are wanted."""
        return self.options.proof != "none" and not self.holdout

    @property
    def dtype(self) -> str:
        """The dtype of the masses in the whole file."""
        bound = () if self.bound_eps is None else (self.bound_eps,)
        return mass_dtype({0: (*dict(self.eps).values(), *self.probes, *bound)})


@dataclass(frozen=True, eq=False)
class Block:
    """Query heads (heads, m, d) and the kv heads (kv_heads, n, d) they share, as stored."""

    query: NDArray[Any]
    query_dtype: str
    key: NDArray[Any]
    key_dtype: str
    scale: float

    @property
    def rows(self) -> int:
        """The number of rows: one per query head and query."""
        return int(self.query.shape[0] * self.query.shape[1])


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
    token = ask.options.granularity == "token"
    keys = {(layer.n, layer.visible(cache.causal_offset)) for layer in layers}
    if token and len(keys) > 1:
        raise CertkError(
            f"{cache.path}: its layers differ in their keys, so that one set of tokens does not "
            "fit all: take granularity layer or head"
        )
    if not any(layer.m for layer in layers):
        return tuple(_forced(layer, heads, ask.options) for layer in layers)
    if not token:
        return tuple(_by_layer(cache, layer, heads, ask, threads) for layer in layers)
    members = [_member(cache, layer, 0, layer.kv_heads, ask) for layer in layers]
    return tuple(_group(cache, members, ask, threads))


def _forced(layer: Layer, heads: tuple[int, int] | None, options: Options) -> LayerRecord:
    """Return the sets of a layer without queries: forced positions, of which nothing is proven."""
    first, end = heads or (0, layer.kv_heads)
    groups = end - first if options.granularity == "head" else 1
    kept = np.arange(layer.n)
    kept = kept[(kept < options.keep_first) | (kept >= layer.n - options.keep_last)]
    none = np.empty(0, np.int64)
    return LayerRecord(
        layer=layer,
        first_head=first,
        sizes=np.full(groups, len(kept)),
        eps=np.zeros(groups),
        lower_bounds=None,
        violations=None,
        upper=None,
        lower=None,
        worst=None,
        over=None,
        weight_rows=none,
        weights=np.empty(0, np.float32),
        left_out=none,
        held_out=none,
        indices=np.tile(kept, groups),
    )


def _by_layer(
    cache: Cache, layer: Layer, heads: tuple[int, int] | None, ask: Ask, threads: int | None
) -> Answer:
    first, end = heads or (0, layer.kv_heads)
    step = 1 if ask.options.granularity == "head" else layer.kv_heads
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
    return joined(parts)


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
        query = cache.read(layer, "query", heads)
    else:
        query, keys = stored[0][heads], stored[1][kv_heads]
    dtypes, scale = layer.dtypes, cache.scales[layer.index]
    block = Block(query, dtypes["query"], keys, dtypes["key"], scale)
    offset = cache.causal_offset
    blind = 0 if offset is None else min(max(-offset, 0), layer.m)
    held_out = held_out_queries(layer.m, ask.holdout, blind, offset is not None)
    return _Member(layer, first, end, block, held_out)


def _group(cache: Cache, members: list[_Member], ask: Ask, threads: int | None) -> list[Answer]:
    """Choose for one group, and hand each layer in it its part."""
    counted = np.concatenate([_counted(member) for member in members])
    blocks = [member.block for member in members]

    offset, options = cache.causal_offset, ask.options
    layer, dtype = members[0].layer, ask.dtype

    def find(
        eps: float | NDArray[np.float64], rows: NDArray[np.bool_], options: Options = options
    ) -> Solution:
        every = None if rows.all() else rows
        try:
            return solve(blocks, eps, every, offset, options, ask.effort, threads)
        except CertkError as error:
            where = ", ".join(str(member.layer.index) for member in members)
            raise CertkError(f"{cache.path}: layer {where}: {error}") from None

    if ask.probes:
        found = [find(storable_budget(eps, dtype), counted) for eps in ask.probes]
        kept = np.array([[len(one.indices) for one in found]])
        visible, size = layer.visible(offset), options.block_size
        bounds = np.array([[fewest_keys(one.lower_bound, size, visible) for one in found]])
        return [Probe(member.layer, member.first, kept, bounds) for member in members]
    eps = _budget(cache, members, ask)
    limit = storable_budget(eps, dtype)
    rows, left_out = counted, np.empty(0, np.int64)
    if ask.demands or ask.hot:
        shares = demanded(members[0], offset, options, limit, threads)
        if not ask.hot:
            return [Demands(layer, members[0].first, shares[None])]
        given = np.zeros(layer.n, np.bool_)
        given[: len(shares)] = dict(ask.hot)[layer.index, members[0].first].stays(shares)
        solution = solve(blocks, limit, counted, offset, Options(), ask.effort, threads, given)
        # Also where all are within their budgets: this set was not made to be small.
        solution = replace(solution, over=True)
    else:
        solution = find(limit, rows)
    if options.coverage < 1:
        fixed = np.concatenate([_fixed(member, offset) for member in members])
        solution, rows = leave_out(find, limit, counted, fixed, options.coverage, solution)
        left_out = np.flatnonzero(counted & ~rows)
    proof = solution
    if ask.bounds and (ask.bound_eps is not None or solution.over):
        least: float | NDArray[np.float64]
        if ask.bound_eps is not None:
            least, demanding = storable_budget(ask.bound_eps, dtype), rows
        else:
            least = _losses(members, ask, solution, rows, limit)
            # A row that may lose everything asks for nothing, and proves nothing.
            demanding = rows & (least < 1)
            least = np.minimum(least, np.nextafter(1.0, 0.0))
        proof = find(least, demanding, replace(options, max_keep=None))
    return _parts(members, ask, eps, solution, rows, left_out, proof)


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
    if ask.options.out_tol is None:
        of_layer = dict(ask.eps)
        return min(of_layer[member.layer.index] for member in members)
    [member] = members
    spread = value_spread(cache, member.layer, member.first, member.end)
    eps = min(ask.options.out_tol / spread * (1 - 2.0**-50), _LARGEST) if spread else _LARGEST
    return eps if eps >= _SMALLEST else 0.0


def _losses(
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


@dataclass(frozen=True, eq=False)
class Solution:
    """A kept set: `upper`, `lower` and `weights` have an entry per row, blocks in their order.

    `lower_bound` counts keys, or blocks where `block_size` is above 1.
    """

    indices: NDArray[np.int64]
    over: bool
    upper: NDArray[np.float64]
    lower: NDArray[np.float64]
    lower_bound: int
    weights: NDArray[np.float64]


def solve(
    blocks: list[Block],
    eps: float | NDArray[np.float64],
    counted: NDArray[np.bool_] | None,
    causal_offset: int | None,
    options: Options,
    effort: str,
    threads: int | None,
    given: NDArray[np.bool_] | None = None,
) -> Solution:
    """Return the kept set of all rows of some blocks, which share the positions of their keys.

    Args:
        blocks: In the order of the rows.
        eps: Budget, one for all or one per row.
        counted: The rows (rows,) that the set must serve; the others are only certified.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        options: Constraints of the set.
        effort: How far the search goes; see `certk_rs.keep_set`.
        threads: The most threads, None for all.
        given: The keys (n,) that are kept, where that is decided already; the set is then only
            certified, and has no constraints.
    """
    found = _native.keep_set_of_queries(
        [
            (
                as_native(block.query, block.query_dtype),
                as_native(block.key, block.key_dtype),
                block.scale,
            )
            for block in blocks
        ],
        eps,
        counted,
        given,
        SLACK,
        ROUNDINGS,
        causal_offset,
        options.max_keep,
        options.keep_first,
        options.keep_last,
        options.block_size,
        effort,
        threads,
    )
    return Solution(
        found.indices,
        found.status == Status.OVER_BUDGET,
        found.tail_mass_upper.reshape(-1),
        found.tail_mass_lower.reshape(-1),
        # Blocks: of so many keys, so many at least.
        -(-found.lower_bound // options.block_size),
        found.weights.reshape(-1),
    )


def as_native(stored: NDArray[Any], dtype: str) -> tuple[NDArray[Any], str]:
    """Return a stored tensor and the name of its dtype, as `_native` takes them."""
    return stored.view(np.uint16) if stored.itemsize == 2 else stored, NAMES[dtype]


def leave_out(
    find: Callable[[float, NDArray[np.bool_]], Solution],
    eps: float,
    counted: NDArray[np.bool_],
    fixed: NDArray[np.bool_],
    coverage: float,
    solution: Solution,
) -> tuple[Solution, NDArray[np.bool_]]:
    """Return a set that serves at least a share `coverage` of the counted rows, and those rows.

    The rows that weigh most in the proof of the lower bound cost most: some of them are left out,
    the set is sought again, and so on. In the end every row that the set happens to serve counts as
    served. Which rows to leave out is a heuristic; what is proven is proven for the rows served.

    Args:
        find: Finds a set for some rows.
        eps: The budget.
        counted: The rows in question, (rows,).
        fixed: Rows that stay in any case, (rows,).
        coverage: Share of them that must be served, in (0, 1).
        solution: The set that serves them all.
    """
    rows = counted.copy()
    most = math.floor((1 - coverage) * np.count_nonzero(counted))
    for round_ in range(_ROUNDS):
        out = np.count_nonzero(counted & ~rows)
        take = math.ceil((most - out) / (_ROUNDS - round_))
        binding = np.flatnonzero(rows & ~fixed & (solution.weights > 0))
        if take <= 0 or not len(binding):
            break
        heaviest = np.argsort(-solution.weights[binding], kind="stable")[:take]
        rows[binding[heaviest]] = False
        solution = find(eps, rows)
    served = counted & (solution.upper <= eps)
    if np.array_equal(served, rows) or not (served | ~rows).all():
        return solution, rows
    # For these rows the same set does, and more rows may prove a better bound.
    again = find(eps, served)
    return (again, served) if len(again.indices) <= len(solution.indices) else (solution, rows)


def demanded(
    member: _Member,
    causal_offset: int | None,
    options: Options,
    eps: float,
    threads: int | None,
) -> NDArray[np.float64]:
    """Return the demand (visible,) for the keys that a query sees (see `Demand`).

    It is infinite for keys that stay: the forced ones, and of every group the key that is needed
    most. It is the same on any machine and for any number of threads, since products and selections
    are.

    Args:
        member: The one layer of the group.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        options: The forced positions.
        eps: Tail mass that a query may lose, 0 < eps < 1.
        threads: The most threads, None for all.
    """
    block, visible = member.block, member.layer.visible(causal_offset)
    queries = np.setdiff1d(np.arange(member.layer.m), member.held_out)
    if causal_offset is not None:
        queries = queries[queries + causal_offset >= 0]
    n, heads = block.key.shape[1], block.query.shape[0]
    demand = Demand(visible, eps, threads)
    keys = as_native(block.key, block.key_dtype)
    step = max(1, _SCORES // max(1, heads * n))
    for start in range(0, len(queries), step):
        some = queries[start : start + step]
        lengths = np.full(len(some), visible, np.int64)
        if causal_offset is not None:
            lengths = np.clip(some + causal_offset + 1, 0, visible)
        scores = np.empty((heads, len(some), n))
        asked = np.ascontiguousarray(block.query[:, some])
        _native.products(as_native(asked, block.query_dtype), keys, None, scores, threads)
        scores *= block.scale
        demand.add(Rows(each[:, :visible], lengths) for each in scores)
    shares = demand.shares()
    if visible:
        shares[shares.argmax()] = np.inf
        shares[: options.keep_first] = np.inf
        shares[max(0, visible - options.keep_last) :] = np.inf
    return shares


def value_spread(cache: Cache, layer: Layer, first: int, end: int) -> float:
    """Return the largest diameter of the values of some kv heads, over visible keys, rounded up.

    The output over the kept keys is a mean of kept values, that over all keys a mean of all values.
    They differ by the dropped mass times the difference of two such means, hence by no more than
    the mass times the largest distance between two values (arXiv 2512.07647, Proposition 5.3), for
    which twice the radius of a ball around all values stands.

    Args:
        cache: The input, open.
        layer: The layer of the values.
        first: The first kv head.
        end: The one after the last.

    Returns:
        Twice the radius of the ball around the mean that holds all values of a kv head, for the
        head where it is largest; in the unit of the values.
    """
    visible = layer.visible(cache.causal_offset)
    widest = 0.0
    for head in range(first, end):
        stored = cache.read(layer, "value", slice(head, head + 1))[0][:visible]
        parts = [slice(at, at + _VALUES) for at in range(0, visible, _VALUES)]
        if not parts:
            continue
        dtype = layer.dtypes["value"]
        centre = sum(widen(stored[part], dtype).sum(axis=0) for part in parts) / visible
        for part in parts:
            off = widen(stored[part], dtype) - centre
            # The squares of d <= 2^20 differences, each off by two roundings of numbers that were
            # rounded once: far below 2^-30 of the whole, since the centre may be any point.
            longest = float(np.sqrt(np.einsum("ij,ij->i", off, off).max()))
            widest = max(widest, longest)
    return 2 * widest * (1 + 2.0**-30)
