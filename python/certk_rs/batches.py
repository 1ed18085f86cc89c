"""Selection as Ray Data and Dask run it: functions of one batch or block, found by their names.

`select_batch` is what `ray.data.Dataset.map_batches` takes, `keep_mask` and `tail_mass_upper` are
what `dask.array.map_blocks` takes. They depend on nothing but their arguments, write to none of
them, and neither Ray nor Dask is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._ragged import starts_of
from .errors import CertkError
from .results import Selection
from .selection import select

_ADDED = ("k", "indices", "tail_mass_upper", "tail_mass_lower", "minimal", "status")
# What a batch has in columns of its own, and what is said otherwise here.
_NOT_OPTIONS = {"scores", "eps", "mask", "lengths", "indptr", "threads"}
_OPTIONS = tuple(name for name in inspect.signature(select).parameters if name not in _NOT_OPTIONS)


def select_batch(
    batch: Mapping[str, Any],
    eps: float | str,
    *,
    column: str = "scores",
    lengths: str | None = None,
    prefix: str = "",
    threads: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Select in each row of a batch; the batch with the kept sets and their certificates.

    As `Dataset.map_batches(select_batch, fn_kwargs={"eps": 0.01})` in Ray Data, whose batches are
    dictionaries of arrays (`batch_format="numpy"`, the default). The answer for a row does not
    depend on the batch it is in.

    Args:
        batch: Columns by name, each with as many entries as the batch has rows.
        eps: The budget, 0 <= eps < 1, or the name of a column with one for each row.
        column: The scores: an array (rows, ..., n), or ragged, which is an array of objects (or a
            list) with one array (n,) for each row; float16, float32 or float64.
        lengths: Name of a column with the valid prefix of each row; not with ragged scores.
        prefix: Before the names of the columns that are added.
        threads: See `select`; workers are usually given one processor each.
        **options: Of `select`: kind, scale, causal_offset, min_keep, max_keep and so on.

    Returns:
        A new dictionary with the columns of `batch`, which are the same arrays, and
        `k` (int64), `tail_mass_upper` and `tail_mass_lower` (float64), `minimal` (bool) and
        `status` (uint8, see `Status`), each (rows, ...), and `indices`: for each row the kept
        positions, ascending, as an array of its own (int32, or int64 where n >= 2^31); where a row
        of the batch has several rows of scores, one behind the other, `k` positions each. A batch
        without rows gets the same columns, with as many.

    Raises:
        CertkError: Bad input; the message names column and row of the batch, counted from 0.
    """
    columns = _columns(batch, column, prefix)
    _check_options(options)
    if not columns:
        columns = {column: np.empty((0, 0), np.float32)}
        batch = {}
    given = columns[column]
    budget = _column(columns, eps) if isinstance(eps, str) else eps
    try:
        ragged = _ragged_rows(given)
        if ragged is None:
            if np.ndim(given) < 2:
                raise CertkError(f"it has shape {np.shape(given)}: give scores (rows, ..., n)")
            valid = None if lengths is None else _column(columns, lengths)
            found = select(given, budget, lengths=valid, threads=threads, **options)
        elif lengths is not None:
            raise CertkError("ragged rows have the lengths they have: leave lengths out")
        else:
            flat, starts = ragged
            found = select(flat, budget, indptr=starts, threads=threads, **options)
    except CertkError as error:
        raise CertkError(f"column {column!r} of the batch: {error}") from None
    return {**batch, **{prefix + name: value for name, value in _added(found).items()}}


def keep_mask(
    block: ArrayLike,
    eps: float,
    *,
    threads: int = 1,
    block_info: Mapping[Any, Any] | None = None,
    **options: Any,
) -> NDArray[np.bool_]:
    """The kept keys of a block of scores, as an array of its shape that is True where they are.

    As `scores.map_blocks(keep_mask, eps=0.01, dtype=bool)` for a Dask array. The last axis is that
    of the keys, and it must be one chunk: what a row keeps depends on all of it. `map_blocks` tells
    how the array is split, and then a split axis is an error; from elsewhere it cannot be seen.

    Args:
        block: Scores (..., n), as in `select`.
        eps: The budget of every row, 0 <= eps < 1.
        threads: See `select`; Dask runs several blocks at a time.
        block_info: Filled in by Dask.
        **options: Of `select`: kind, scale, min_keep, max_keep and so on.

    Raises:
        CertkError: Bad input; the message names the place in the block, and which block.
    """
    return _select_block(block, eps, threads, block_info, options).to_mask()


def tail_mass_upper(
    block: ArrayLike,
    eps: float,
    *,
    threads: int = 1,
    block_info: Mapping[Any, Any] | None = None,
    **options: Any,
) -> NDArray[np.float64]:
    """What each row of a block loses at most with `keep_mask`, (...).

    As `scores.map_blocks(tail_mass_upper, eps=0.01, drop_axis=scores.ndim - 1, dtype=float)`.
    Arguments and errors are those of `keep_mask`.
    """
    return _select_block(block, eps, threads, block_info, options).tail_mass_upper


# ------------------------------------------------------------------------------------- batches


def _columns(batch: object, column: str, prefix: str) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise CertkError(
            f"a batch is a {kind}: give a dictionary of arrays, which map_batches makes with "
            'batch_format="numpy"'
        )
    if batch and column not in batch:
        raise CertkError(
            f"column {column!r} is not in the batch, which has {', '.join(map(repr, batch))}: "
            "name the scores with column"
        )
    taken = [prefix + name for name in _ADDED if prefix + name in batch]
    if taken:
        raise CertkError(
            f"the batch has a column {taken[0]!r} already: give prefix, which goes before the "
            "names of what is added"
        )
    return batch


def _column(columns: Mapping[str, Any], name: str) -> Any:
    """A column; a `CertkError` if there is none of that name."""
    if name not in columns:
        raise CertkError(
            f"column {name!r} is not in the batch, which has {', '.join(map(repr, columns))}"
        )
    return columns[name]


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise CertkError(f"{name} is no option here: give some of {', '.join(_OPTIONS)}")


def _ragged_rows(given: Any) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
    """Rows of different lengths, flat and where each begins; None where it is one array."""
    if isinstance(given, np.ndarray) and given.dtype != np.dtype(object):
        return None
    if not isinstance(given, (np.ndarray, Sequence)) or isinstance(given, (str, bytes)):
        return None  # a tensor, or what select refuses
    rows: list[NDArray[Any]] = []
    for i, row in enumerate(given):
        array = np.asarray(row)
        if row is None or array.ndim != 1 or array.dtype == np.dtype(object):
            what = "missing" if row is None else f"of shape {array.shape}"
            raise CertkError(f"row {i} is {what}: ragged rows are arrays (n,) of numbers")
        if array.dtype != (rows[0] if rows else array).dtype and array.size:
            raise CertkError(
                f"row {i} has dtype {array.dtype}, row 0 {rows[0].dtype}: give all of them one"
            )
        rows.append(array if not rows or array.size else array.astype(rows[0].dtype))
    flat = np.concatenate(rows) if rows else np.empty(0, np.float32)
    return flat, starts_of([len(row) for row in rows])


def _added(found: Selection) -> dict[str, Any]:
    """The columns of a selection; those of fixed width are (rows, ...)."""
    rows = found.k.shape[0] if found.k.ndim else 1
    # Where each row of the batch ends: it may have several rows of scores.
    each = found.k.reshape(rows, -1).sum(axis=1) if rows else np.zeros(0, np.int64)
    ends = np.cumsum(each)
    indices = np.empty(rows, object)
    for i in range(rows):
        indices[i] = found.indices[ends[i] - each[i] : ends[i]]
    return {name: indices if name == "indices" else getattr(found, name) for name in _ADDED}


# -------------------------------------------------------------------------------------- blocks


def _select_block(
    block: ArrayLike,
    eps: float,
    threads: int,
    block_info: Mapping[Any, Any] | None,
    options: Mapping[str, Any],
) -> Selection:
    """What is selected in a block, also in one without entries, by which Dask learns the dtype."""
    _check_options(options)
    where = _place(block_info)
    try:
        return select(block, eps, threads=threads, **options)
    except CertkError as error:
        raise CertkError(f"{where}{error}") from None


def _place(block_info: Mapping[Any, Any] | None) -> str:
    """Which block this is, for a message; a `CertkError` where rows are split."""
    told = (block_info or {}).get(0)
    if not told:
        return ""
    chunks = told["num-chunks"]
    if chunks[-1] > 1:
        raise CertkError(
            f"the last axis, that of the keys, is in {chunks[-1]} chunks, and what a row keeps "
            "depends on all of it: rechunk({-1: -1}) first"
        )
    begins = tuple(start for start, _ in told["array-location"])
    return f"block {tuple(told['chunk-location'])}, which begins at {begins}: "
