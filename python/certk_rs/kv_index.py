"""An index of keys and of the values beside them, one byte an entry each.

The Gram certificate over codes of values is ours: docs/search.md.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.attended import like, sight_of
from .errors import CertkError
from .kept_rows import KeptRows
from .key_index import KeyIndex, key_bits, written
from .paged_rows import RowsLike, native_rows
from .results import AttentionResult

if TYPE_CHECKING:
    from typing_extensions import Self

_Stored = tuple[Any, ...]


class KvIndex(KeyIndex):
    """A `KeyIndex` that has codes of the values as well; see docs/search.md.

    Made by `build` or `load`. Values take d_v + 4 bytes each, or d_v / 2 + 4 in four bits (d_v
    rounded up to a multiple of 16), and two d_v x d_v matrices per head. Values are not kept.
    """

    def __init__(
        self, index: _native.KeyIndex, kept: NDArray[Any] | None, values: _native.ValueIndex
    ) -> None:
        """Take over native indexes and the keys to be kept; users call `build` or `load`."""
        super().__init__(index, kept)
        self._values = values

    def __reduce__(self) -> tuple[Any, ...]:
        """Codes are copied, also by `copy.copy`: an index and its copy grow apart."""
        with self._appending:
            return _restored, (written(self._index), self._kept, self._file_of_values())

    @classmethod
    def build(  # type: ignore[override]
        cls,
        keys: RowsLike,
        values: RowsLike,
        *,
        bits: int = 8,
        rotate: bool | None = None,
        keep_keys: bool = True,
        value_bits: int = 8,
        threads: int | None = None,
    ) -> Self:
        """Encode keys and values, in parallel.

        Args:
            keys: As in `KeyIndex.build`.
            values: (n, d_v) or (..., kv_heads, n, d_v), the axes before the last as those of
                `keys`; float32, float16 or bfloat16, all finite.
            bits: As in `KeyIndex.build`, of keys.
            rotate: As in `KeyIndex.build`, of keys. Values are not turned.
            keep_keys: As in `KeyIndex.build`.
            value_bits: 8, or 4 for half the bytes of values. In 4 bits outputs lose sixteen times
                as much, which averages of many thousand values even out; `error_bound` has it.
            threads: Number of threads; None for all available.

        Raises:
            CertkError: Bad input; names the place. Keys and values of different axes; names both
                shapes.
        """
        stored, beside = _pair(keys, values)
        if value_bits not in (4, 8):
            raise CertkError(f"value_bits is {value_bits!r}: pass 8 or 4")
        index = _native.KeyIndex.build(stored, key_bits(bits), rotate, threads)
        native_values = _native.ValueIndex.build(beside, int(value_bits), threads)
        kept = stored[0] if keep_keys and len(stored) == 2 else None
        return cls(index, kept, native_values)

    @property
    def value_bits(self) -> int:
        """Bits of a code of an entry of a value: 8 or 4."""
        return self._values.bits

    @property
    def nbytes(self) -> int:
        """Bytes of the codes of keys and of values, and of what is known of them."""
        return super().nbytes + self._values.bytes

    def __repr__(self) -> str:
        kept = "kept" if self._kept is not None else "not kept"
        entries = self._values.shape[-1]
        return (
            f"KvIndex(shape={self.shape}, {self.dtype} keys {kept}, {self._values.dtype} values of "
            f"{entries} entries in {self.value_bits} bits, {self.nbytes} bytes)"
        )

    def append(  # type: ignore[override]
        self,
        keys: RowsLike,
        values: RowsLike,
        *,
        threads: int | None = None,
    ) -> None:
        """Append keys (..., m, d) and the values (..., m, d_v) beside them, as `KeyIndex.append`.

        On an error the index is as it was, in both parts.

        Raises:
            CertkError: Bad input; names the place.
        """
        stored, beside = _pair(keys, values)
        append = self._values.append_beside
        self._grow(stored, lambda: append(beside, self._index, stored, threads))

    def attention(
        self,
        q: ArrayLike,
        eps: ArrayLike,
        *,
        kept: KeptRows | None = None,
        scale: float | None = None,
        causal: bool = False,
        lengths: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
        soft_cap: float | None = None,
        bias: ArrayLike | None = None,
        threads: int | None = None,
    ) -> AttentionResult:
        """Attend from the codes, with exact rows of some positions or of none.

        Weights of heavy keys come from the low plane if `bits` is 12 or 16, and from exact rows as
        far as `eps` asks for it. `tail_mass_upper` is the proven total variation distance from
        real attention over the keys and values that the index was built of, and `error_bound` that
        of each output. They hold also where codes prove less than `eps` asks for: then
        `tail_mass_upper` is above it.

        Args:
            q: Queries, as in `certk_rs.attention`.
            eps: Total variation distance to aim at, 0 <= eps < 1: a number, or one per row.
            kept: Exact rows. Keys without a code (`bare`) must be among them.
            scale: As in `certk_rs.attention`, like all that follows.
            causal: Query i of m sees keys up to i + n - m.
            lengths: How many keys a row sees, from the first.
            mask: Boolean (True = seen), broadcasts to q.shape[:-1] + (n,).
            sinks: Scores that join the softmax without a value, one per query head.
            soft_cap: Soft cap of scores. The low plane of a code then says nothing.
            bias: Numbers to add to scores, broadcast to q.shape[:-1] + (n,).
            threads: Number of threads; None for all available.

        Returns:
            An `AttentionResult`, each row of `Rung.CODED`.

        Raises:
            CertkError: Bad input; names the argument. Also a key without a code or an exact row.
        """
        stored = queries, dtype = coerce.as_native_floats("q", q)
        batch = queries.shape[:-1]
        if kept is None:
            kept = self._no_rows()
        elif not isinstance(kept, KeptRows):
            raise CertkError(f"kept is a {type(kept).__name__}; pass a certk_rs.KeptRows")
        seen = (causal, lengths, mask, sinks, soft_cap, bias)
        found = _native.attention_from_codes(
            stored,
            self._index,
            self._values,
            kept._parts,
            coerce.per_row_floats("eps", eps, batch),
            scale,
            sight_of(batch, len(self), seen, (None, None), threads),
        )
        out = like(q, found.out.reshape(*batch, self._values.shape[-1]), dtype)
        return AttentionResult._of(found, out=out)

    def crop(self, n: int) -> None:
        """Keep the first n keys and values of every head, without being given any.

        `check` then refuses all keys: it is not known which these are.

        Raises:
            CertkError: There are fewer.
        """
        if isinstance(n, bool) or not 0 <= n <= len(self):
            raise CertkError(f"n is {n!r}; pass a whole number from 0 to {len(self)}")
        with self._appending:
            self._index.crop(n)
            self._values.crop(n)

    def take(self, entries: Sequence[int]) -> KvIndex:
        """Return an index of some entries of the first axis, in any order and as often as wanted.

        Codes are shared, not copied; both indexes then grow apart. Kept keys do not go with them.

        Raises:
            CertkError: An entry that is not there.
        """
        chosen = [int(each) for each in entries]
        if any(not 0 <= each < (self.shape[:-2] or (0,))[0] for each in chosen):
            raise CertkError(f"entries are {chosen}; the first axis of {self.shape} has no such")
        with self._appending:
            return KvIndex(self._index.take(chosen), None, self._values.take(chosen))

    def _no_rows(self) -> KeptRows:
        """Return rows of no position."""
        (*axes, _, d), d_v = self.shape, self._values.shape[-1]
        nothing = [np.empty((0, each), np.float32) for each in (d, d_v)]
        return KeptRows(nothing[0], nothing[1], [np.empty(0, np.int64)] * prod(axes))

    def check(
        self,
        keys: RowsLike | None = None,
        values: RowsLike | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        """Compare keys and values, all of them, with those that the index was built of.

        As `KeyIndex.check`. `keys` may be None for the kept ones; values are not kept.

        Raises:
            CertkError: They are not those; names the head. Or there are none to check.
        """
        if values is None:
            raise CertkError("values are needed: the index does not keep them; pass them to check")
        super().check(keys, threads=threads)
        self._values.check(_as_native_values(values), threads)

    @classmethod
    def load(cls, path: str | os.PathLike[str], keys: RowsLike | None = None) -> Self:
        """Read what `save` wrote: the file of the keys, followed by that of the values.

        Args:
            path: The file.
            keys: The keys that it was built of, to be kept; all of them are compared.

        Raises:
            CertkError: The file is cut off, damaged or no index of keys and values; or the keys
                are others.
            OSError: The file cannot be read.
        """
        return super().load(path, keys)

    def _file_of_values(self) -> NDArray[np.uint8]:
        """Return the codes of the values as the bytes of a file."""
        return written(self._values)

    def _write(self, stream: BinaryIO) -> None:
        with self._appending:  # keys and values of one moment
            self._index.write_to(stream)
            self._values.write_to(stream)

    @classmethod
    def _read(cls, stream: BinaryIO) -> Self:
        index = _native.KeyIndex.read_from(stream)
        return cls._of(index, None, _native.ValueIndex.read_from(stream))

    @classmethod
    def _of(
        cls, index: _native.KeyIndex, kept: NDArray[Any] | None, values: _native.ValueIndex
    ) -> Self:
        """Make an index of parts that may not be of one."""
        if index.shape[:-1] != values.shape[:-1]:
            raise CertkError(
                f"its keys have shape {index.shape} and its values {values.shape}: they are not of "
                "one index; build it again"
            )
        return cls(index, kept, values)


def _restored(
    file: NDArray[np.uint8], kept: NDArray[Any] | None, values: NDArray[np.uint8]
) -> KvIndex:
    """Make an index from what `KvIndex.__reduce__` gives."""
    index = _native.KeyIndex.read_from(io.BytesIO(file.data))
    return KvIndex._of(index, kept, _values_of_file(values))


def _values_of_file(values: NDArray[np.uint8]) -> _native.ValueIndex:
    return _native.ValueIndex.read_from(io.BytesIO(values.data))


def _as_native_values(values: RowsLike) -> _Stored:
    return native_rows("values", values)[0]


def _pair(keys: RowsLike, values: RowsLike) -> tuple[_Stored, _Stored]:
    """Return keys and the values beside them, as `_native` takes them."""
    (stored, shape), (beside, others) = native_rows("keys", keys), native_rows("values", values)
    if shape[:-1] != others[:-1]:
        raise CertkError(
            f"values have shape {others}, keys {shape}: pass a value for each key, so that all "
            "axes but the last agree"
        )
    return stored, beside
