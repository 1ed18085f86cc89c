"""Exact keys and values of some positions, end to end, beside the codes of all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._arrays import coerce
from ._ragged import starts_of
from .errors import CertkError


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Exact keys and values of some positions of each kv head, without padding.

    With them `KvIndex.attention` scores keys exactly that are too heavy for their codes.
    """

    keys: ArrayLike
    """(rows, d): those of the first kv head, then of the next; batch axes in C order."""
    values: ArrayLike
    """(rows, d_v)."""
    positions: Sequence[NDArray[Any]]
    """Of each kv head the positions of its rows among all keys, ascending."""
    tail: tuple[ArrayLike, ArrayLike] | None = None
    """Keys (..., kv_heads, m, d) and values (..., kv_heads, m, d_v) of the last m positions, which
    are not among `positions`."""

    def __post_init__(self) -> None:
        pair: object = self.tail
        if pair is not None and not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise CertkError("tail is no pair: pass the keys and the values of the last positions")
        if not isinstance(self.positions, Sequence | np.ndarray):
            raise CertkError(
                f"positions is a {type(self.positions).__name__}; pass an array for each kv head"
            )
        for head, each in enumerate(self.positions):
            try:
                array = np.asarray(each)
            except ValueError:
                raise CertkError(f"positions[{head}] is no array of integers") from None
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise CertkError(
                    f"positions[{head}] has shape {array.shape} and dtype {array.dtype}: pass "
                    "integers of shape (rows of the head,)"
                )
            if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**32:
                raise CertkError(f"positions[{head}] holds numbers that are no positions")

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of the positions."""
        stored = [self.keys, self.values, *(self.tail or ())]
        rows = sum(int(coerce.borrow("kept", part)[0].nbytes) for part in stored)
        return rows + 4 * sum(len(each) for each in self.positions)

    def with_tail(self, tail: tuple[ArrayLike, ArrayLike]) -> KeptRows:
        """Return the same rows with those of the last positions, without looking at all again."""
        made = copy.copy(self)
        object.__setattr__(made, "tail", tail)
        made.__dict__["_parts"] = (*self._parts[:-1], _native_tail(tail))
        return made

    @cached_property
    def _parts(self) -> tuple[Any, ...]:
        """The rows as `_native` takes them: a cache of codes asks at every step."""
        flat = [np.asarray(each).astype(np.uint32) for each in self.positions]
        starts = starts_of([len(each) for each in flat])
        return (
            coerce.as_native_floats("kept.keys", self.keys),
            coerce.as_native_floats("kept.values", self.values),
            np.concatenate([*flat, np.empty(0, np.uint32)]),
            starts.tolist(),
            None if self.tail is None else _native_tail(self.tail),
        )


def _native_tail(tail: tuple[ArrayLike, ArrayLike]) -> tuple[Any, ...]:
    return tuple(coerce.as_native_floats("kept.tail", part) for part in tail)
