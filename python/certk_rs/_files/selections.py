"""Saved selections: an npz file with the fields of a `Selection`, checked when it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CertkError, one_line
from .atomic import NewFile

Arrays = dict[str, NDArray[Any]]

_DTYPES = {
    "shape": ("int64",),
    "eps": ("float64",),
    "k": ("int64",),
    "indptr": ("int64",),
    "indices": ("int32", "int64"),
    "tail_mass_upper": ("float64",),
    "tail_mass_lower": ("float64",),
    "minimal": ("bool",),
    "status": ("uint8",),
}
# Further fields of the result of a search, a number per row each.
_SEARCHED: dict[str, tuple[str, ...]] = {"scored": ("int64",), "rung": ("uint8",)}
# As the file has them: `results.Status`.
_CERTIFIED, _EMPTY = 0, 2
_MOST = 2**63 - 1


def write_selection(
    path: str | os.PathLike[str], fields: Mapping[str, Any], *, replace: bool
) -> None:
    """Write the fields of a selection; those that are None are left out."""
    shape = np.array([-1 if axis is None else axis for axis in fields["shape"]], np.int64)
    arrays = {name: value for name, value in fields.items() if value is not None} | {"shape": shape}
    with NewFile(Path(path), replace=replace) as file:
        with file.stream() as stream:
            np.savez(stream, **arrays)
        file.commit()


def read_selection(path: str | os.PathLike[str], *, searched: bool) -> dict[str, Any]:
    """Read the fields of what `write_selection` wrote, with those of a search or without.

    Raises:
        CertkError: The file is not one, or its fields contradict each other.
        OSError: The file cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
        if searched:
            return _checked(stored, _SEARCHED)
        return _checked({name: stored[name] for name in stored if name not in _SEARCHED}, {})
    except OSError:
        raise
    except Exception as error:  # zipfile and NumPy raise many kinds
        name, problem = os.fspath(path), one_line(error)
        raise CertkError(f"{name} is not a saved Selection ({problem})") from None


def _checked(stored: Arrays, more: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Turn the arrays of a file into fields; ValueError where they contradict each other.

    `more` has the dtypes of fields per row beyond those of a Selection.
    """
    known = {**_DTYPES, **more}
    _need(stored.keys() - {"score_indptr"} == known.keys(), "it has other fields")
    for name, dtypes in (*known.items(), ("score_indptr", ("int64",))):
        array = stored.get(name)
        _need(array is None or str(array.dtype) in dtypes, f"{name} has another dtype")
    _need(stored["shape"].ndim == 1 and stored["shape"].size > 0, "shape has no axis")
    *axes, n = stored["shape"].tolist()
    batch, rows = tuple(axes), prod(axes)
    k, indptr, indices, eps = (stored[name] for name in ("k", "indptr", "indices", "eps"))
    lower, upper, status = (stored[f] for f in ("tail_mass_lower", "tail_mass_upper", "status"))
    for array in (k, lower, upper, status, stored["minimal"], *(stored[name] for name in more)):
        _need(array.shape == batch, "a field per row has not the batch shape")
    _need(eps.shape in ((), batch), "eps has not the batch shape")
    starts = stored.get("score_indptr")
    if starts is None:
        _need(0 <= n <= _MOST // max(rows, 1), "shape is negative or too large")
        starts = np.arange(rows + 1, dtype=np.int64) * n
    else:
        _need(len(batch) == 1 and n == -1, "shape is not that of ragged rows")
        _need(
            starts.shape == (rows + 1,) and starts[0] == 0, "score_indptr has not rows + 1 entries"
        )
    # Where nothing is negative no difference wraps; and counts that wrap would end in a crash.
    _need((starts >= 0).all() and (indptr >= 0).all(), "a row begins before the first")
    sizes = np.diff(starts)
    _need((sizes >= 0).all() and (k >= 0).all(), "a row has a negative length")
    _need(indptr.shape == (rows + 1,) and indptr[0] == 0, "indptr has not rows + 1 entries from 0")
    _need(np.array_equal(np.diff(indptr), k.reshape(-1)), "indptr and k differ")
    _need(indices.shape == (indptr[-1],), "indptr and indices differ")
    inside = (indices >= 0) & (indices < np.repeat(sizes, k.reshape(-1)))
    _need(inside.all(), "an index is out of range")
    flat = np.repeat(starts[:-1], k.reshape(-1)) + indices
    _need((np.diff(flat) > 0).all(), "the indices of a row are not ascending")
    _need(((lower >= 0) & (lower <= upper) & (upper <= 1)).all(), "a tail mass is out of order")
    certified = status == _CERTIFIED
    _need((status <= _EMPTY).all() and (upper <= eps)[certified].all(), "a status does not hold")
    shape = (*batch, None if "score_indptr" in stored else n)
    return {**stored, "shape": shape}


def _need(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
