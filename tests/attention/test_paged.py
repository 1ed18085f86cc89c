"""Keys and values in pages give the bits of the same rows in one array."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import certk_rs as ck
from certk_rs import CertkError
from certk_rs.key_index import IndexArrays

SEQUENCES = 3


def in_pages(
    rows: NDArray[Any], size: int, layout: Any, seed: int, lengths: list[int] | None = None
) -> ck.PagedRows:
    """Cut rows (sequences, heads, n, d) into pages, shuffled among others that hold NaN."""
    sequences, heads, n, d = rows.shape
    width = -(-n // size)
    numbers = np.random.default_rng(seed).permutation(sequences * width + 3)
    table = numbers[: sequences * width].reshape(sequences, width)
    blocks = np.full((len(numbers), heads, size, d), np.nan, rows.dtype)
    for sequence in range(sequences):
        for at, number in enumerate(table[sequence]):
            part = rows[sequence, :, at * size : (at + 1) * size]
            blocks[number, :, : part.shape[1]] = part
    if layout == "nhd":
        blocks = np.ascontiguousarray(blocks.swapaxes(1, 2))
    return ck.PagedRows(blocks, table, lengths or [n] * sequences, layout)


def of_one(pages: ck.PagedRows, sequence: int) -> ck.PagedRows:
    table, lengths = np.asarray(pages.block_table), np.asarray(pages.lengths)
    return ck.PagedRows(pages.blocks, table[sequence], lengths[sequence], pages.layout)


def same(one: ck.AttentionResult, other: ck.AttentionResult, at: Any = None) -> None:
    for name in ("out", "tail_mass_upper", "k", "scored", "error_bound", "log_mass_upper"):
        wanted, found = np.asarray(getattr(one, name)), np.asarray(getattr(other, name))
        found = found if at is None else found[at]
        if name == "error_bound" and at is not None:  # sums are taken to be of the longest
            assert (found >= wanted).all()
            assert np.allclose(found, wanted, rtol=1e-6, atol=1e-12)
        else:
            assert found.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize(
    ("heads", "queries", "n", "m", "d", "size"),
    [(2, 4, 100, 1, 64, 16), (1, 1, 37, 5, 24, 8), (2, 4, 700, 40, 64, 32), (2, 8, 3000, 1, 64, 1)],
)
def test_attention_has_the_same_bits(
    dtype: Any, heads: int, queries: int, n: int, m: int, d: int, size: int
) -> None:
    rng = np.random.default_rng(n)
    k, v = rng.standard_normal((2, SEQUENCES, heads, n, d)).astype(dtype)
    q = (4 * rng.standard_normal((SEQUENCES, queries, m, d))).astype(dtype)
    keys, values = in_pages(k, size, "hnd", 1), in_pages(v, size, "nhd", 2)
    for eps in (0.0, 0.05):
        for causal in (False, True):
            whole = ck.attention(q, k, v, eps, causal=causal)
            same(whole, ck.attention(q, keys, values, eps, causal=causal))
            one = ck.attention(q[1], of_one(keys, 1), of_one(values, 1), eps, causal=causal)
            same(one, ck.attention(q[1], k[1], v[1], eps, causal=causal))


def test_an_index_of_pages_is_that_of_the_rows() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 2, 3000, 64), dtype=np.float32)
    q = 4 * rng.standard_normal((4, 2, 64), dtype=np.float32)
    keys, values = (of_one(in_pages(x, 32, "nhd", 3), 0) for x in (k, v))
    index, other = ck.KvIndex.build(k[0], v[0]), ck.KvIndex.build(keys, values)
    same(
        ck.attention(q, k[0], v[0], 0.02, index=index),
        ck.attention(q, keys, values, 0.02, index=other),
    )
    other.check(keys, values=values)
    found = other.search(q, 0.02, keys=keys)
    assert np.array_equal(found.indices, index.search(q, 0.02).indices)
    other.append(keys, values)
    assert len(other) == 6000
    with pytest.raises(CertkError, match="keep_keys=False"):
        index.append(keys, values)
    assert len(index) == 3000
    sets = [ck.keep_set_of_queries(q[:2], each, 0.05).indices for each in (k[0], keys)]
    assert np.array_equal(*sets)


def test_sequences_of_different_lengths_are_each_as_if_alone() -> None:
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, SEQUENCES, 2, 100, 64), dtype=np.float32)
    q = rng.standard_normal((SEQUENCES, 4, 1, 64), dtype=np.float32)
    lengths = [100, 1, 50]
    keys, values = (in_pages(x, 16, "hnd", 4, lengths) for x in (k, v))
    # Numbers behind the last page are not read.
    for pages in (keys, values):
        np.asarray(pages.block_table)[1, 1:] = -1
    found = ck.attention(q, keys, values, 0.01)
    for at, n in enumerate(lengths):
        same(ck.attention(q[at], k[at, :, :n], v[at, :, :n], 0.01), found, at)


def test_pages_that_are_none() -> None:
    k = np.ones((2, 2, 100, 8), np.float32)
    q = np.ones((2, 2, 1, 8), np.float32)
    good = in_pages(k, 16, "hnd", 0)
    table = np.asarray(good.block_table)

    def refused(words: str, other: object = None, **changed: Any) -> None:
        parts = {"blocks": good.blocks, "block_table": table, "lengths": [100, 100]}
        pages = ck.PagedRows(**{**parts, **changed})
        with pytest.raises(CertkError, match=words):
            ck.attention(q, pages, pages if other is None else other, 0.01)  # type: ignore[arg-type]

    refused("pass integers", block_table=table.astype(float))
    refused("its table only 7 pages", lengths=[100, 113])
    refused("pass \\(blocks", lengths=[100])
    refused("lengths has -1", lengths=[-1, 100])
    refused("page 0 of sequence 0 is number", block_table=table + 500)
    refused(
        "page 2 of sequence 0 is number -1", block_table=np.where(table == table[0, 2], -1, table)
    )
    refused("pass numbers of blocks", block_table=table + 2**40)
    refused("a page has 10 rows", blocks=np.asarray(good.blocks)[:, :, :10])
    refused("layout is 'dnh'", layout="dnh")
    refused("pass two of a kind", other=k)
    refused("k and v have other starts", other=in_pages(k, 16, "hnd", 0, [100, 99]))
    index = ck.KvIndex.build(k[0], k[0])
    with pytest.raises(CertkError, match="one sequence"):
        ck.attention(q, good, good, 0.01, index=index)
    arrays = IndexArrays(index.arrays())
    with pytest.raises(CertkError, match="IndexArrays"):
        ck.attention(q[0], of_one(good, 0), of_one(good, 0), 0.01, index=arrays)
    with pytest.raises(CertkError, match="row of one"):
        ck.KeyIndex.build(good)
