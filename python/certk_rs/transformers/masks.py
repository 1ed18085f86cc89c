"""The keys that each query sees, read from a model's mask: runs of keys wherever possible.

Models hand over None (everything, or causal), a boolean mask, or an additive one of 0 and very
negative numbers; other numbers are a bias of scores. Nearly all such masks show each row one run of
keys: a prefix (causal, padding on the right), or a run that begins later (padding on the left,
sliding windows). Attention over a run need not read a mask, and is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CertkError

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Visibility:
    """The keys, of n, that rows (batch, heads, m) see; leading axes of length 1 stand for all.

    Row r sees the keys `starts[r] <= i < ends[r]` (none if these are equal), unless `mask` is
    given, of the same leading axes and (m, n): then it sees those that are True, and `starts` and
    `ends` enclose them.
    """

    shape: Shape
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    mask: NDArray[np.bool_] | None

    @property
    def counts(self) -> NDArray[np.int64]:
        """Counts of the keys that each row sees, (batch, heads, m)."""
        own = self.ends - self.starts if self.mask is None else np.count_nonzero(self.mask, axis=-1)
        return np.broadcast_to(own, self.shape[:3])

    def arguments(self) -> dict[str, Any]:
        """Return the options of `certk_rs.attention` that say this, the fastest there are."""
        _, _, m, n = self.shape
        if self.mask is not None:
            return {"mask": np.broadcast_to(self.mask, self.shape)}
        if not self.starts.any():
            if (self.ends == n).all():
                return {}
            if (self.ends == _causal_ends(m, n)).all():
                return {"causal": True}
            return {"lengths": np.broadcast_to(self.ends, self.shape[:3])}
        return {"mask": np.broadcast_to(self.full_mask(), self.shape)}

    def full_mask(self) -> NDArray[np.bool_]:
        """Return the same as a mask, of leading axes 1 where all are alike."""
        if self.mask is not None:
            return self.mask
        keys = np.arange(self.shape[3])
        return (keys >= self.starts[..., None]) & (keys < self.ends[..., None])

    def only_from(self, starts: NDArray[np.int64]) -> Visibility:
        """Return the same without the keys before `starts` (heads,), the first that a head has."""
        first = starts[None, :, None]
        if self.mask is not None:
            keys = np.arange(self.shape[3])
            return _of_mask(self.mask & (keys >= first[..., None]), self.shape)
        return Visibility(
            self.shape, np.minimum(np.maximum(self.starts, first), self.ends), self.ends, None
        )

    def behind(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> Visibility:
        """Return the same of keys that each head (heads,) has from its slot on, and no others.

        `counts` (batch, kv_heads) are theirs; places then count from a head's own first key.
        """
        batch, heads, m, _ = self.shape
        shape = (batch, heads, m, int(counts.max()))
        first = slots[None, :, None]
        ends = np.broadcast_to(np.maximum(self.ends - first, 0), shape[:3])
        if self.mask is None and (self.starts <= first).all():
            return Visibility(shape, np.zeros_like(ends), ends, None)
        whole = np.broadcast_to(self.full_mask(), self.shape)
        mask = np.zeros(shape, np.bool_)
        for head, slot in enumerate(slots):
            seen = whole[:, head, :, slot:]
            mask[:, head, :, : seen.shape[-1]] = seen
        return Visibility(shape, np.zeros_like(ends), ends, mask)

    def without(self, gone: NDArray[np.bool_]) -> Visibility:
        """Return the same without the keys that are True in `gone` (batch, heads, n)."""
        if not gone.any():
            return self
        return _of_mask(self.full_mask() & ~gone[:, :, None], self.shape)


def apart(
    mask: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a mask of 0 and -inf, or of booleans, and all that is added to scores that are seen.

    A bias of zeros is none.
    """
    if bias is not None:
        bias = bias.detach() if bool(bias.any()) else None
    if not isinstance(mask, torch.Tensor) or not mask.dtype.is_floating_point:
        return mask, bias
    hides = mask <= torch.finfo(mask.dtype).min / 2
    if bool((hides | (mask == 0)).all()):
        return mask, bias
    added = mask.detach().masked_fill(hides, 0.0)
    # In a narrower type the sum would be another one.
    return ~hides, added if bias is None else added.double() + bias.double()


def visibility_of(mask: torch.Tensor | None, causal: bool, shape: Shape) -> Visibility:
    """Read a mask for scores of `shape` (batch, heads, m, n).

    Without one, `causal` with m > 1 means that query i sees the keys up to i, counted from the
    first (as in transformers, where m < n then says that the keys behind are not yet written).

    Raises:
        CertkError: A mask of another shape, or an additive one that is a bias.
    """
    _, _, m, n = shape
    if mask is None:
        ends = np.minimum(np.arange(1, m + 1), n) if causal and m > 1 else np.full(m, n)
        ends = ends.astype(np.int64).reshape(1, 1, m)
        return Visibility(shape, np.zeros_like(ends), ends, None)
    if not isinstance(mask, torch.Tensor):
        raise CertkError(
            f"attention_mask is a {type(mask).__name__}; certk takes a boolean mask (True = seen) "
            "or an additive one of 0 and -inf, of shape (batch, heads or 1, m, n)"
        )
    if mask.ndim != 4 or any(a not in (1, b) for a, b in zip(mask.shape, shape, strict=True)):
        raise CertkError(
            f"attention_mask has shape {tuple(mask.shape)}, which does not broadcast to the "
            f"scores' shape {shape} (batch, heads, m, n)"
        )
    return _of_mask(_visible(mask), shape)


def _visible(mask: torch.Tensor) -> NDArray[np.bool_]:
    mask = mask.detach()
    if mask.device.type != "cpu":
        raise CertkError(f"attention_mask is on device {mask.device}; move the model to the CPU")
    if mask.dtype is torch.bool:
        return mask.numpy()
    if not mask.dtype.is_floating_point:
        raise CertkError(
            f"attention_mask has dtype {mask.dtype}; certk takes bool (True = seen) or an additive "
            "mask of 0 and -inf"
        )
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((hidden | (mask == 0)).all()):
        place = [int(i) for i in (~(hidden | (mask == 0))).nonzero()[0]]
        raise CertkError(
            f"attention_mask{place} is {float(mask[tuple(place)]):g}: certk takes no attention "
            "bias (ALiBi, relative positions): use this model with another attn_implementation"
        )
    return (~hidden).numpy()


def _of_mask(mask: NDArray[np.bool_], shape: Shape) -> Visibility:
    """Read a mask as runs if every row is one."""
    _, _, m, n = shape
    mask = np.broadcast_to(mask, (*mask.shape[:2], m, n))
    counts = np.count_nonzero(mask, axis=-1)
    if n == 0:
        none = counts.astype(np.int64)
        return Visibility(shape, none, none, None)
    # Of a row without keys both are 0.
    starts = mask.argmax(axis=-1).astype(np.int64)
    last = n - mask[..., ::-1].argmax(axis=-1).astype(np.int64)
    ends = np.where(counts > 0, last, 0)
    runs = bool((ends - starts == counts).all())
    return Visibility(shape, starts, ends, None if runs else mask)


def _causal_ends(m: int, n: int) -> NDArray[np.int64]:
    return np.maximum(np.arange(m, dtype=np.int64) + (n - m + 1), 0)
