"""Arguments of attention's rows, ready for `_native`, and outputs as the caller's kind of array."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import _native
from ..errors import CertkError
from . import coerce

_Shape = tuple[int, ...]
Seen = tuple[
    bool,
    ArrayLike | None,
    ArrayLike | None,
    ArrayLike | None,
    float | None,
    ArrayLike | None,
]
"""causal, lengths, mask, sinks, soft_cap and bias, as `certk_rs.attention` takes them."""


def sight_of(
    batch: _Shape,
    n: int | None,
    seen: Seen,
    of_values: tuple[_native.ValueBall | None, Any],
    threads: int | None,
) -> tuple[Any, ...]:
    """Coerce what rows (q.shape[:-1] = `batch`) see of n keys, beside what is known of values."""
    causal, lengths, mask, sinks, soft_cap, bias = seen
    for name, given in (("mask", mask), ("bias", bias)):
        if given is not None and (not batch or n is None):
            raise CertkError(
                f"{name} goes with q (..., m, d) and k (..., n, d); give both two axes"
            )
    shape = (*batch, n or 0)
    seen_keys = None if mask is None else _mask(mask)
    allowed = None if seen_keys is None else coerce.as_native_mask(seen_keys, shape)[0]
    added = None
    if bias is not None:
        array, dtype = coerce.as_native_floats("bias", bias)
        added = (coerce.broadcast("bias", array, shape), dtype) if n else None
        hidden = coerce.is_negative_infinity(array, dtype)
        if hidden is not None:
            both = ~hidden if seen_keys is None else ~hidden & seen_keys
            allowed = coerce.as_native_mask(both, shape)[0]
    return (
        causal,
        None if lengths is None else coerce.per_row_integers("lengths", lengths, batch),
        allowed,
        None if sinks is None else _sinks(sinks, batch[:-1]),
        soft_cap,
        added,
        *of_values,
        threads,
    )


def like(q: object, out: NDArray[Any], dtype: str) -> Any:
    """Return the output as the kind of array that q is: of torch, of ml_dtypes, or of NumPy."""
    torch = sys.modules.get("torch")
    if dtype == "float16":
        out = out.view(np.float16)
    if torch is not None and isinstance(q, torch.Tensor):
        # A tensor may be written to; the bound is about what was returned.
        out = out.copy()
        if dtype == "bfloat16":
            return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(out)
    if dtype == "bfloat16":
        out = out.view(np.asarray(q).dtype.newbyteorder("="))
    out.setflags(write=False)
    return out


def _sinks(sinks: ArrayLike, shape: _Shape) -> NDArray[np.float64]:
    """Return the sinks' scores, one per query head; whatever floats they are stored as."""
    values = coerce.floats("sinks", sinks)
    try:
        return np.ascontiguousarray(np.broadcast_to(values, shape)).reshape(-1)
    except ValueError:
        raise CertkError(
            f"sinks has shape {values.shape}, which does not broadcast to q.shape[:-2] = {shape}: "
            "pass a number per query head"
        ) from None


def _mask(mask: ArrayLike) -> NDArray[np.bool_]:
    """Return a boolean mask; additive ones of 0 and -inf become one."""
    array, dtype = coerce.borrow("mask", mask)
    if dtype == "bool":
        return array
    if dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise CertkError(
            f"mask has dtype {dtype}; pass bool (True = seen), or an additive one of 0 and -inf"
        )
    bias = coerce.widen(array, dtype)
    lowest = -(2.0 - 2.0**-7) * 2.0**126 if dtype == "bfloat16" else np.finfo(array.dtype).min / 2
    with _native.DefaultFloats():
        hidden = bias <= lowest
        wrong = np.argwhere(~(hidden | (bias == 0.0)))
    if wrong.size:
        place = [int(i) for i in wrong[0]]
        raise CertkError(
            f"mask{place} is {bias[tuple(place)]:g}; pass a boolean mask (True = seen) or one of 0 "
            "and -inf, and as bias what is to be added to scores"
        )
    return ~hidden
