"""Keys or values in pages, as paged caches hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from ._arrays import coerce
from .errors import CertkError

_Native = tuple[Any, ...]
_LARGEST = 2**32 - 1


@dataclass(frozen=True, eq=False)
class PagedRows:
    """Rows in pages that sequences refer to; k or v of `certk_rs.attention`. Nothing is copied.

    With a table of one sequence they also go where keys (kv_heads, n, d) go: to `KeyIndex.build`,
    `KvIndex.build`, `append`, `check` and `search`, and to `keep_set_of_queries`. Results are those
    of the same rows in one array, bit for bit. Pages, table and lengths must not be written during
    a call.
    """

    blocks: ArrayLike
    """(blocks, kv_heads, block_size, d): float16, bfloat16, float32 or float64. block_size is a
    power of two. The axes but the last may be strided."""
    block_table: ArrayLike
    """(sequences, width): numbers of the blocks of each sequence, in order; or (width,) of one.
    What is behind the last block of a sequence is not read."""
    lengths: ArrayLike
    """(sequences,): the number of rows of each sequence; or one number for the one."""
    layout: Literal["hnd", "nhd"] = "hnd"
    """Order of the axes of a block: "hnd" as above, or "nhd" for (blocks, block_size, kv_heads, d)
    as vLLM's and FlashInfer's caches of GPUs have them."""

    @property
    def is_of_one(self) -> bool:
        """True if they are rows of one sequence, without an axis of sequences."""
        return np.ndim(self.block_table) == 1

    def _parts(self, name: str) -> tuple[_Native, tuple[int, ...]]:
        """Return the rows as `_native` takes them, and the shape of those of the longest sequence.

        Axes are (sequences, kv_heads, n, d), or (kv_heads, n, d) of one.
        """
        array, dtype = coerce.as_native_floats(name, self.blocks)
        table = coerce.integers(f"{name}.block_table", self.block_table)
        lengths = coerce.integers(f"{name}.lengths", self.lengths)
        fits = table.ndim in (1, 2) and lengths.shape == table.shape[:-1]
        if array.ndim != 4 or not fits:
            raise CertkError(
                f"{name} has blocks of shape {array.shape}, a block_table of {table.shape} and "
                f"lengths of {lengths.shape}: pass (blocks, kv_heads, block_size, d), (sequences, "
                "width) and (sequences,), or (width,) and one number"
            )
        if self.layout not in ("hnd", "nhd"):
            raise CertkError(f'{name}.layout is {self.layout!r}; pass "hnd" or "nhd"')
        if self.layout == "nhd":
            array = array.swapaxes(1, 2)
        if lengths.size and int(lengths.min()) < 0:
            raise CertkError(f"{name}.lengths has {int(lengths.min())}; pass counts of rows")
        if table.size and int(table.max()) > _LARGEST:
            raise CertkError(f"{name}.block_table has {int(table.max())}; pass numbers of blocks")
        # What is no number of a block is refused where it is read.
        numbers = np.where(table < 0, _LARGEST, table).astype(np.uint32).reshape(-1)
        counts = lengths.reshape(-1).tolist()
        shape = (*table.shape[:-1], array.shape[1], max(counts, default=0), array.shape[3])
        return (array, dtype, numbers, counts), shape


RowsLike: TypeAlias = ArrayLike | PagedRows
"""Rows in one array, or in pages."""


def native_rows(name: str, rows: RowsLike) -> tuple[_Native, tuple[int, ...]]:
    """Return an array, or pages of one sequence, as `_native` takes it, and the shape of its rows.

    Raises:
        CertkError: Not an array of floats; or pages of several sequences.
    """
    if not isinstance(rows, PagedRows):
        stored = coerce.as_native_floats(name, rows)
        return stored, stored[0].shape
    if not rows.is_of_one:
        raise CertkError(
            f"{name} has a block_table of {np.ndim(rows.block_table)} axes: pass the row of one "
            "sequence, (width,), and its length"
        )
    return rows._parts(name)
