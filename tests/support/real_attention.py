"""Attention in long double (80-bit floats), row by row, and the check of all that an answer says.

It shares no code with the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import certk_rs as ck

LD = np.longdouble
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
# Of the reference itself: products of a few hundred terms and sums of a few thousand weights.
CLOSE = LD(1e-13)


@dataclass
class Real:
    """Exact attention row by row: axes (..., m), keys behind them."""

    weights: np.ndarray
    """Shares of the whole softmax, that of the sink included."""
    out: np.ndarray
    log_mass: np.ndarray
    """Of everything that a row sees, and its sink."""
    seen: np.ndarray


def rows_seen(shape: tuple[int, ...], n: int, sight: dict[str, Any]) -> np.ndarray:
    """Return the keys that each row sees, (*shape, n)."""
    m, at = shape[-1], np.arange(n)
    seen = np.ones((*shape, n), bool)
    if sight.get("causal"):
        seen &= at <= np.arange(m)[:, None] + n - m
    if sight.get("lengths") is not None:
        seen &= at < np.broadcast_to(sight["lengths"], shape)[..., None]
    if sight.get("mask") is not None:
        seen &= sight["mask"]
    if sight.get("bias") is not None:
        seen &= sight["bias"] > -np.inf
    return seen


def real_attention(
    q: Any, k: Any, v: Any, sight: dict[str, Any], scale: float | None = None, sinks: Any = None
) -> Real:
    q, k, v = (np.asarray(x).astype(np.float64).astype(LD) for x in (q, k, v))
    if q.ndim > 2:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    seen = rows_seen(q.shape[:-1], k.shape[-2], sight)
    # What no row sees may hold anything.
    used = seen.any(axis=tuple(range(seen.ndim - 1)))[:, None]
    k, v = np.where(used, k, 0), np.where(used, v, 0)
    factor = LD(float(q.shape[-1]) ** -0.5 if scale is None else scale)
    scores = q @ np.swapaxes(k, -1, -2) * factor
    if sight.get("soft_cap") is not None:
        cap = LD(sight["soft_cap"])
        scores = cap * np.tanh(scores / cap)
    if sight.get("bias") is not None:
        scores = scores + sight["bias"].astype(np.float64).astype(LD)
    scores = np.where(seen, scores, -np.inf)
    sink = np.full(q.shape[:-1], -np.inf, LD)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, LD)[..., None], q.shape[:-1])
    top = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=-1) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        log_mass = np.log(total) + top
    weights = weights / np.where(total == 0, 1, total)[..., None]
    return Real(weights, weights @ v, log_mass, seen)


def check(found: ck.AttentionResult, real: Real, eps: Any) -> None:
    """Everything that is said of a row; which keys were kept is not, but how many.

    The same holds of weights from codes: what has no weight is a part of their distance.
    """
    out = np.asarray(found.out).astype(np.float64).astype(LD)
    away = np.sqrt(np.square(out - real.out).sum(axis=-1))
    size = np.sqrt(np.square(real.out).sum(axis=-1))
    assert (away <= found.error_bound.astype(LD) + CLOSE * size).all()
    assert (found.tail_mass_upper <= eps).all()
    count = real.seen.sum(axis=-1)
    assert ((found.k >= 0) & (found.k <= count)).all()
    coded = found.rung == ck.Rung.CODED
    assert (coded | (found.k <= found.scored)).all()
    assert (found.scored <= count).all()
    assert (found.k[count > 0] > 0).all()
    assert not out[count == 0].any()
    assert not found.error_bound[count == 0].any()
    # No k keys weigh more than the k that weigh most.
    best = np.cumsum(-np.sort(-real.weights, axis=-1), axis=-1)
    best = np.concatenate([np.zeros((*count.shape, 1), LD), best], axis=-1)
    best, whole = (np.take_along_axis(best, x[..., None], -1)[..., 0] for x in (found.k, count))
    assert (whole - best <= found.tail_mass_upper.astype(LD) + CLOSE).all()
    # What was kept weighs all but the tail, and no more than the best with the sink.
    sink = np.where(count > 0, 1 - whole, 1)
    with np.errstate(divide="ignore"):
        most = real.log_mass + np.log(best + sink)
        least = real.log_mass + np.log1p(-found.tail_mass_upper.astype(LD))
    close = CLOSE * (1 + np.abs(np.where(np.isfinite(most), most, 0)))
    empty = ~np.isfinite(real.log_mass)
    assert (empty | (found.log_mass_lower.astype(LD) <= most + close)).all()
    assert (empty | (found.log_mass_upper.astype(LD) >= least - close)).all()
    assert (found.log_mass_upper[empty] == -np.inf).all()
