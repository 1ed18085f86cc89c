"""One keep-set per kv head: the keys that all queries of its group need together."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _native
from .._arrays import coerce
from ..errors import CertkError
from ..keepset import keep_set_of_inexact

_U = 2.0**-53


def select_per_head(
    place: str,
    query: torch.Tensor,
    keys: torch.Tensor,
    eps: float,
    *,
    scale: float | None,
    causal: bool,
    keep_first: int,
    keep_last: int,
    threads: int | None,
    max_keep: int | None = None,
) -> tuple[list[NDArray[np.int64]], NDArray[np.float64]]:
    """Choose a set for each kv head such that no query given loses more than eps in any head.

    Args:
        place: Where these tensors are, for messages ("layer 3").
        query: (heads, m, d), after rotary positions.
        keys: (kv_heads, n, d); query head h looks at kv head h // (heads / kv_heads).
        eps: Budget of dropped mass, 0 <= eps < 1.
        scale: What products are multiplied by; None for the float64 nearest d^-1/2.
        causal: Whether query i sees the keys up to i + n - m only.
        keep_first: Positions at the start that are always kept.
        keep_last: Positions at the end that are always kept.
        threads: Number of threads; None for all available.
        max_keep: The most keys of a set, which then loses as little as it can in the worst query.

    Returns:
        The kept positions of each kv head, ascending, and what each query loses at most, (heads,
        m), by the real scores of the stored vectors.

    Raises:
        CertkError: Bad input; the message names `place`.
    """
    heads, m, d = query.shape
    kv_heads, n = keys.shape[:2]
    group = heads // kv_heads
    factor = _native.nearest_rsqrt(d) if scale is None else float(scale)
    if d > 1 << 20:
        raise CertkError(f"{place}: vectors longer than {1 << 20}")
    if torch.float64 in (query.dtype, keys.dtype):
        raise CertkError(
            f"{place} is in float64, whose products round in ways that are not bounded here; "
            "convert it to float32"
        )
    offset = n - m if causal else None
    kept, upper = [], np.empty((heads, m))
    # One array for all groups; what a query does not see is not written.
    scores = np.zeros((group, m, n))
    for g in range(kv_heads):
        queries, key = query[g * group : (g + 1) * group].detach(), keys[g : g + 1].detach()
        if not (torch.isfinite(key).all() and torch.isfinite(queries).all()):
            raise CertkError(f"{place}, kv head {g}: a NaN or infinite query or key")
        reach = _native.products(
            coerce.as_native_floats("queries", queries),
            coerce.as_native_floats("keys", key),
            offset,
            scores,
            threads,
        ).reshape(group, m)
        # Products of two float32 are exact in float64, so a sum of d of them is off by at most
        # gamma_d |q||k|; the scale's own rounding is counted by the selection.
        radius = abs(factor) * reach * ((d + 3) * _U * (1 + 2.0**-10)) + 2.0**-1000
        found = keep_set_of_inexact(
            scores,
            eps,
            radius=radius,
            scale=factor,
            causal_offset=offset,
            max_keep=max_keep,
            keep_first=keep_first,
            keep_last=keep_last,
            threads=threads,
        )
        kept.append(np.array(found.indices, dtype=np.int64))
        upper[g * group : (g + 1) * group] = found.tail_mass_upper
    return kept, upper


def pad_with_latest(indices: NDArray[np.int64], most: int, n: int) -> NDArray[np.int64]:
    """Return the kept positions and the latest others of n, `most` in all, ascending."""
    others = np.setdiff1d(np.arange(n), indices)
    return np.sort(np.concatenate([indices, others[len(others) - (most - len(indices)) :]]))
