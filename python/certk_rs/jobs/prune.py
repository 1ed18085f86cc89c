"""One prune task: a cache in, a smaller cache with its certificate out.

For every group (a kv head, or the whole layer) one keep-set is chosen for all its rows, a row being
one query of one query head of the group; then the kept rows are copied byte for byte. Two passes
over the layers, so that memory holds about one layer: the first chooses all the sets, after which
the size of the output is known, the second copies.

Why a recorded certificate holds, and why an audit that shares no code with this always confirms it.
Let u = 2^-53, s* = scale * q.k the real score of the stored vectors, R = |scale| |q| max_i |k_i| of
a row, and ln(odds) = ln(tail mass / kept mass). If every score moves by at most x, ln(odds) moves
by at most 2 x, and there are such scores for which it does.

1. F16, BF16 and F32 widen to float64 exactly, and products of two of them neither overflow nor
   underflow there. So for any order of summation, with FMA or without, a computed dot product is
   off by at most gamma_d |q||k|, gamma_d = d u / (1 - d u) <= d u (1 + 2^-20) as d <= 2^20. The
   scale is left to `keep_set`, which counts its own roundings. Hence the exact scale * (computed
   dot) is within r = d u (1 + 2^-20) R of s*. The largest |k_i| is over the keys that a query of
   the layer sees, or more.
2. An auditor's exact ln(odds) of its own computed scores are within 2 r' of the real ones, with r'
   <= (d + 8) u (1 + 2^-20) R; its exp and sums add an error below 2^-31.9 (`_audit.recompute`, n <=
   2^32). What it reports has all of this once as error and once more as its own widening, so it
   never reports more than the real ln(odds) + 4 r' + 2^-30.9, nor more than ours + 2 r + 4 r' +
   2^-30.9.
3. `keep_set` is told the radius (3 d + 16) u (1 + 2^-19) R + 2^-31 (R rounded up), which is more
   than r + 2 r' + 2^-31.9. Its upper ends, on which CERTIFIED and over budget are decided, hold for
   all scores within that radius: for s* (soundness) and for all that an audit can report
   (confirmation). Likewise its lower ends and its lower bounds.
4. The 2^-31 costs a relative 1e-9 of the budget. Masses below 2^-1000 are recorded as 2^-1000
   (upper end) and 0 (lower end): float64 loses precision not far below. Budgets start at 1e-300.

The promise covers the queries in the file. With a causal offset, `keep_first` and `keep_last` count
the positions that at least one query of the layer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__, _native, keepset
from ..cache_format import Cache, Certificate, Form, Layer, Options, OutputFile, output_tensors
from ..errors import CertkError
from .plan import Plan, Task

_U = 2.0**-53
_SLACK = 2.0**-31
_TINY = 2.0**-1000
_MOST_RADIUS = 100.0


@dataclass(frozen=True)
class LayerSets:
    """The keep-sets of one layer, one per group, and what is proven of them.

    Masses and weights have shape (heads, m); `lower_bounds` one entry per group. `visible` keys are
    the candidates of every group: those that at least one query sees.
    """

    layer: Layer
    visible: int
    indices: tuple[NDArray[np.int64], ...]
    upper: NDArray[np.float64]
    lower: NDArray[np.float64]
    lower_bounds: NDArray[np.int64]
    weights: NDArray[np.float64]


def prune(
    task: Task, plan: Plan, step: Callable[[], None], threads: int | None = None
) -> list[LayerSets]:
    """Write the output of one task; on any failure nothing is left of it.

    Args:
        task: What to prune; the input must not have changed since it was checked.
        plan: The job that it belongs to. `plan.out` must exist.
        step: Called twice for each layer: when its sets are chosen, and when they are written.
        threads: Passed on to the selector; the result does not depend on it.
    """
    with Cache(task.source, plan.names) as cache:
        cache.file.check_unchanged(task.identity)
        chosen = []
        for layer in cache.layers:
            chosen.append(_choose(cache, layer, plan.eps, plan.options, threads))
            step()
        tensors: dict[str, Form] = {}
        for sets in chosen:
            kept = [len(indices) for indices in sets.indices]
            tensors |= output_tensors(sets.layer, plan.options.granularity, kept)
        certificate = Certificate(
            library=__version__,
            eps=float(plan.eps),
            options=plan.options,
            names=cache.names.pattern,
            causal_offset=cache.causal_offset,
            scales=cache.scales,
            input_header_sha256=cache.file.header_sha256(),
            inputs=task.facts,
            outputs={},
        )
        with OutputFile(task.target, tensors, certificate) as output:
            for sets in chosen:
                _copy(cache, sets, plan.options.granularity, output)
                step()
            cache.file.check_unchanged(task.identity)
            output.commit()
    return chosen


def _choose(
    cache: Cache, layer: Layer, eps: float, options: Options, threads: int | None
) -> LayerSets:
    """The keep-sets of one layer: one per kv head, or one for all its rows."""
    query, key = cache.read(layer, "query"), cache.read(layer, "key")
    scale, offset = cache.scales[layer.index], cache.causal_offset
    upper = np.empty((layer.heads, layer.m))
    lower, weights = np.empty_like(upper), np.empty_like(upper)
    indices, bounds = [], []
    groups = list(_groups(layer, options.granularity))
    # One array for all groups, since fresh memory costs the system about as long as filling it. It
    # begins with zeros: what a query does not see is not written.
    scores = np.zeros((layer.heads // len(groups), layer.m, layer.n))
    for heads, kv_heads in groups:
        radius = score(layer, query[heads], key[kv_heads], scores, offset, threads)
        with np.errstate(over="ignore"), _native.DefaultFloats():
            radius = abs(scale) * radius + _SLACK
        _check_radius(cache, layer, radius)
        found = keepset.keep_set_of_inexact(
            scores,
            eps,
            radius=radius,
            scale=scale,
            causal_offset=offset,
            max_keep=options.max_keep,
            keep_first=options.keep_first,
            keep_last=options.keep_last,
            threads=threads,
        )
        indices.append(found.indices)
        bounds.append(found.lower_bound)
        raw_upper, raw_lower = found.tail_mass_upper, found.tail_mass_lower
        # A host that flushes subnormal numbers would take one for a loss of nothing.
        with _native.DefaultFloats():
            upper[heads] = np.where(raw_upper > 0, np.maximum(raw_upper, _TINY), 0.0)
            lower[heads] = np.where(raw_lower >= _TINY, raw_lower, 0.0)
        weights[heads] = found.weights
    return LayerSets(
        layer,
        layer.visible(offset),
        tuple(indices),
        upper,
        lower,
        np.array(bounds, np.int64),
        weights,
    )


def _groups(layer: Layer, granularity: str) -> Iterator[tuple[slice, slice]]:
    """The query heads whose rows share a set, and their kv heads."""
    together = layer.kv_heads if granularity == "layer" else 1
    size = layer.heads // layer.kv_heads
    for first in range(0, layer.kv_heads, together):
        end = first + together
        yield slice(first * size, end * size), slice(first, end)


def score(
    layer: Layer,
    query: NDArray[Any],
    key: NDArray[Any],
    scores: NDArray[np.float64],
    causal_offset: int | None,
    threads: int | None,
) -> NDArray[np.float64]:
    """Fill in dot products in float64, read from where keys are stored.

    All of them: a keep-set with a proven lower bound needs every weight of every row, so bounds on
    scores save nothing here, and float32 would widen the recorded intervals 2^29-fold.

    Args:
        layer: Whose heads these are.
        query: Some query heads as stored, (heads, m, d).
        key: Their kv heads as stored, (kv_heads, n, d).
        scores: What is filled in, (heads, m, n). Places of keys that a query does not see may stay
            as they are. The bits depend neither on `threads` nor on the instruction set.
        causal_offset: Query i sees the keys <= i + offset; None: all.
        threads: How many threads, None for all.

    Returns:
        What `keep_set` is told of each row at scale 1, without the slack: (heads, m).
    """
    reach = _native.products(
        _as_native(query, layer.dtypes["query"]),
        _as_native(key, layer.dtypes["key"]),
        causal_offset,
        scores,
        threads,
    )
    roundings = (3 * layer.d + 16) * _U * (1 + 2.0**-19)
    radius: NDArray[np.float64] = reach.reshape(scores.shape[:2]) * (roundings * (1 + 2.0**-40))
    return radius


def _as_native(stored: NDArray[Any], dtype: str) -> tuple[NDArray[Any], str]:
    """A stored tensor and its dtype, as `_native` takes them."""
    bits = stored.view(np.uint16) if stored.itemsize == 2 else stored
    return bits, {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]


def _check_radius(cache: Cache, layer: Layer, radius: NDArray[np.float64]) -> None:
    """Beyond this (scores of 1e16) nothing can be certified, and arithmetic begins to overflow."""
    if not radius.max() <= _MOST_RADIUS:
        raise CertkError(
            f"{cache.path}: layer {layer.index}: its scores are so large (scale "
            f"{cache.scales[layer.index]!r}) that rounding in float64 may change them by more than "
            f"{_MOST_RADIUS:g}: check the vectors and the scale in the metadata"
        )


def _copy(cache: Cache, sets: LayerSets, granularity: str, output: OutputFile) -> None:
    """Write all tensors of one layer."""
    layer, stem = sets.layer, f"layers.{sets.layer.index}."
    output.write(stem + "tail_mass_upper", sets.upper)
    output.write(stem + "tail_mass_lower", sets.lower)
    output.write(stem + "lower_bound", sets.lower_bounds)
    output.write(stem + "lower_bound_weights", sets.weights)
    output.write(stem + "indices", np.concatenate(sets.indices))
    if granularity == "head":
        sizes = [len(indices) for indices in sets.indices]
        output.write(stem + "indptr", np.cumsum([0, *sizes]))
    for role in ("key", "value"):
        rows = cache.read(layer, role)
        if granularity == "head":
            picked = [rows[h][indices] for h, indices in enumerate(sets.indices)]
            output.write(stem + role, np.concatenate(picked))
        else:
            output.write(stem + role, rows[:, sets.indices[0]])
