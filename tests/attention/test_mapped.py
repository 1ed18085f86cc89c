"""Attention over arrays in mapped files: what is read, and that nothing else is another."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certk_rs as ck
from page_cache import PAGE, drop, held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are counted as Linux does")
HEADS, N, DIM = 2, 16_384, 64
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def stored(
    tmp_path: Path, dtype: Any, together: bool
) -> tuple[list[Path], Any, Any, Callable[[], tuple[Any, Any]]]:
    """Files of keys and values, apart or side by side; both in memory; and how they are mapped."""
    rng = np.random.default_rng(5)
    keys, values = rng.standard_normal((2, HEADS, N, DIM), dtype=np.float32).astype(dtype)
    if together:
        path = tmp_path / "pairs"
        np.concatenate([keys, values], -1).tofile(path)

        def pairs() -> tuple[Any, Any]:
            mapped = np.memmap(path, dtype, "r", shape=(HEADS, N, 2 * DIM))
            return mapped[..., :DIM], mapped[..., DIM:]

        return [path], keys, values, pairs
    paths = [tmp_path / name for name in ("keys", "values")]
    for path, array in zip(paths, (keys, values), strict=True):
        array.tofile(path)

    def both() -> tuple[Any, Any]:
        keys, values = (np.memmap(path, dtype, "r", shape=(HEADS, N, DIM)) for path in paths)
        return keys, values

    return paths, keys, values, both


@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("queries", [1, 3])
def test_few_rows_are_read_of_mapped_arrays(
    tmp_path: Path, dtype: str, together: bool, queries: int
) -> None:
    paths, keys, values, mapping = stored(tmp_path, DTYPES[dtype], together)
    rng = np.random.default_rng(6)
    q = 10 * rng.standard_normal((HEADS, queries, DIM), dtype=np.float32)
    index, ball = ck.KeyIndex.build(keys, keep_keys=False), ck.ValueBall(values)
    wanted = ck.attention(q, keys, values, 0.01, index=index, ball=ball)
    for path in paths:
        drop(path)
    keys, values = mapping()
    waited = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    found = ck.attention(q, keys, values, 0.01, index=index, ball=ball, threads=1)
    waited = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - waited
    assert (found.out == wanted.out).all()
    assert (found.error_bound == wanted.error_bound).all()
    assert (found.tail_mass_upper == wanted.tail_mass_upper).all()
    rows = int(found.scored.sum()) + int((index.arrays()[3] != -1).sum())
    pages = sum(int(held(path).sum()) for path in paths)
    every = sum(-(-path.stat().st_size // PAGE) for path in paths)
    # A row is on one page of keys and one of values, or on one of both.
    assert pages <= rows * len(paths)
    assert pages < every / 2
    # Asked for before, pages come without a fault that waits for each.
    assert waited <= 2 + pages // 50, (waited, pages)


def test_without_an_index_everything_is_read(tmp_path: Path) -> None:
    paths, _, _, mapping = stored(tmp_path, np.float32, False)
    q = np.ones((HEADS, 1, DIM), np.float32)
    for path in paths:
        drop(path)
    ck.attention(q, *mapping(), 0.01)
    assert held(paths[0]).all()


def test_rows_of_a_map_that_ends_within_a_page(tmp_path: Path) -> None:
    """Also where the file is smaller than a page, and the map begins anywhere."""
    for n, offset in ((5, 4), (300, 4), (1001, 8192)):
        rng = np.random.default_rng(n)
        data = rng.standard_normal((n, 12), dtype=np.float32)
        path = tmp_path / f"{n}"
        path.write_bytes(bytes(offset) + data.tobytes())
        mapped = np.memmap(path, np.float32, "r", offset=offset, shape=(n, 12))
        index = ck.KeyIndex.build(data)
        q = 4 * rng.standard_normal((3, 12), dtype=np.float32)
        found = ck.attention(q, mapped, mapped, 0.05, index=index)
        assert (found.out == ck.attention(q, data, data, 0.05, index=index).out).all()
