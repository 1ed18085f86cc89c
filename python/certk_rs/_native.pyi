"""The Rust extension. Its arguments are coerced by `_arrays`; values and shapes are judged in Rust.

Arrays have a contiguous last axis and non-negative strides that are multiples of the item size.
float16 and bfloat16 are lent as uint16 views beside the dtype's name. `rows` is the product of the
batch shape; arrays per row are 1-D, of length `rows`, or 1 where one value serves all rows.
Every function raises `certk_rs.CertkError` for bad input and lets KeyboardInterrupt pass.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["__version__", "certify", "keep_set", "select", "set_simd_level", "simd_level"]

__version__: str

def select(
    scores: NDArray[Any],
    dtype: str,
    eps: NDArray[np.float64],
    kind: str,
    scale: float,
    mask: NDArray[Any] | None,
    mask_dtype: str | None,
    lengths: NDArray[np.int64] | None,
    indptr: NDArray[np.int64] | None,
    causal_offset: int | None,
    min_keep: int,
    max_keep: int | None,
    max_keep_fraction: float | None,
    keep_first: int,
    keep_last: int,
    block_size: int,
    prove_minimal: bool,
    threads: int | None,
) -> tuple[
    NDArray[np.int64],  # k (rows,)
    NDArray[np.int64],  # indptr (rows + 1,)
    NDArray[np.int32] | NDArray[np.int64],  # indices (total,)
    NDArray[np.float64],  # tail mass, upper end (rows,)
    NDArray[np.float64],  # tail mass, lower end (rows,)
    NDArray[np.bool_],  # minimal (rows,)
    NDArray[np.uint8],  # status (rows,)
]: ...
def certify(
    scores: NDArray[Any],
    dtype: str,
    eps: NDArray[np.float64] | None,
    kind: str,
    scale: float,
    mask: NDArray[Any] | None,
    mask_dtype: str | None,
    lengths: NDArray[np.int64] | None,
    indptr: NDArray[np.int64] | None,
    causal_offset: int | None,
    keep_mask: NDArray[np.bool_] | None,
    keep_indptr: NDArray[np.int64] | None,
    keep_indices: NDArray[np.int64] | None,
    independent: bool,
    threads: int | None,
) -> tuple[
    NDArray[np.int64],  # k (rows,)
    NDArray[np.float64],  # tail mass, upper end (rows,)
    NDArray[np.float64],  # tail mass, lower end (rows,)
    NDArray[np.bool_] | None,  # holds (rows,), None without eps
    NDArray[np.bool_] | None,  # minimal (rows,), None without eps
]: ...
def keep_set(
    scores: NDArray[Any],
    dtype: str,
    eps: NDArray[np.float64],
    kind: str,
    scale: float,
    mask: NDArray[Any] | None,
    mask_dtype: str | None,
    lengths: NDArray[np.int64] | None,
    indptr: NDArray[np.int64] | None,
    causal_offset: int | None,
    radius: NDArray[np.float64] | None,
    max_keep: int | None,
    max_keep_fraction: float | None,
    keep_first: int,
    keep_last: int,
    threads: int | None,
) -> tuple[
    NDArray[np.int64],  # indices (k,), ascending
    int,  # status
    NDArray[np.float64],  # tail mass, upper end (rows,)
    NDArray[np.float64],  # tail mass, lower end (rows,)
    int,  # lower bound
    NDArray[np.float64],  # weights (rows,) of the mixture that proves the lower bound
]: ...
def simd_level() -> str:
    """Name of the instruction-set level in use: portable, avx2, avx512 or neon."""

def set_simd_level(level: str | None) -> None:
    """Force a level; None returns to `CERTK_LEVEL` or detection."""
