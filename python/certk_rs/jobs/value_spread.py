"""How far apart the values of a kv head are: what a dropped mass can do to an output at most.

The output over the kept keys is a mean of kept values, that over all keys a mean of all values.
They differ by the dropped mass times the difference of two such means, hence by no more than the
mass times the largest distance between two values (arXiv 2512.07647, Proposition 5.3), for
which twice the radius of a ball around all values stands.
"""

from __future__ import annotations

import numpy as np

from ..cache_format import Cache, Layer, widen

# Values at a time.
_PART = 1 << 14


def value_spread(cache: Cache, layer: Layer, first: int, end: int) -> float:
    """The largest diameter of the values of some kv heads, over visible keys, rounded up.

    Args:
        cache: The input, open.
        layer: Whose values.
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
        parts = [slice(at, at + _PART) for at in range(0, visible, _PART)]
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
