"""Selection in batches of Ray Data and blocks of Dask: what `select` says of the same rows."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ray_host
from certk_rs import CertkError, select
from certk_rs.batches import keep_mask, select_batch, tail_mass_upper
from fresh_process import run_python

ADDED = ["k", "indices", "tail_mass_upper", "tail_mass_lower", "minimal", "status"]
DTYPES = ["int64", "object", "float64", "float64", "bool", "uint8"]


def scores(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    array = (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)
    array.setflags(write=False)
    return array


def ragged(rows: int, dtype: Any = np.float32) -> np.ndarray:
    """Rows of 0 to 40 scores; the first has some."""
    lengths = np.random.default_rng(1).integers(0, 40, rows)
    lengths[:1] = 7
    column = np.empty(rows, object)
    for i, n in enumerate(lengths):
        column[i] = scores(int(n), dtype=dtype, seed=i)
    return column


def check_row(found: dict[str, Any], row: np.ndarray, eps: float = 0.05) -> None:
    """What a batch says of a row is what `select` says of it alone."""
    alone = select(row, eps)
    assert np.array_equal(np.concatenate([alone.indices]), found["indices"])
    for name in ADDED:
        if name != "indices":
            assert np.array_equal(getattr(alone, name), found[name]), name


# ------------------------------------------------------------------------------- one batch


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(9, 30), (4, 2, 3, 17), (3, 1)])
def test_a_batch_has_what_select_finds_in_its_rows(dtype: Any, shape: tuple[int, ...]) -> None:
    batch = {"id": np.arange(shape[0]), "scores": scores(*shape, dtype=dtype)}
    found = select_batch(batch, 0.05)
    assert list(found) == ["id", "scores", *ADDED]
    assert found["id"] is batch["id"]
    assert found["scores"] is batch["scores"]
    assert list(batch) == ["id", "scores"]
    assert [found[name].dtype.name for name in ADDED] == DTYPES
    for i in range(shape[0]):
        check_row({name: found[name][i] for name in ADDED}, batch["scores"][i])


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ragged_rows_are_selected_in_as_they_are(dtype: Any, as_list: bool) -> None:
    column = ragged(25, dtype)
    found = select_batch({"x": list(column) if as_list else column}, 0.05, column="x")
    assert [found[name].dtype.name for name in ADDED] == DTYPES
    for i, row in enumerate(column):
        check_row({name: found[name][i] for name in ADDED}, row)


@pytest.mark.parametrize(
    "column",
    [np.empty((0, 12), np.float16), np.empty((0, 2, 5)), np.empty(0, object), [],
     np.empty((0, 0), np.float32)],
)  # fmt: skip
def test_a_batch_without_rows_has_all_columns(column: Any) -> None:
    found = select_batch({"scores": column}, 0.05)
    assert list(found) == ["scores", *ADDED]
    assert [found[name].dtype.name for name in ADDED] == DTYPES
    assert {len(found[name]) for name in ADDED} == {0}
    inner = np.shape(column)[1:-1]
    assert found["k"].shape == found["tail_mass_upper"].shape == (0, *inner)
    assert list(select_batch({}, 0.05)) == ADDED


def test_budgets_lengths_and_options_come_from_the_batch_or_the_call() -> None:
    x = scores(6, 20)
    batch = {"x": x, "eps": np.linspace(0.01, 0.3, 6), "n": np.arange(6) * 3}
    found = select_batch(
        batch, "eps", column="x", lengths="n", prefix="kept_", keep_last=1, scale=0.5
    )
    alone = select(x, batch["eps"], lengths=batch["n"], keep_last=1, scale=0.5)
    assert np.array_equal(found["kept_k"], alone.k)
    assert np.array_equal(np.concatenate(found["kept_indices"]), alone.indices)
    assert found["kept_status"][0] == 2


def test_what_is_wrong_with_a_batch_is_told_with_its_column_and_row() -> None:
    bad = scores(5, 8).copy()
    bad[3, 6] = np.nan
    rows = ragged(6)
    rows[4] = np.full(9, np.nan, np.float32)
    missing, mixed, deep = ragged(6), ragged(6), ragged(6)
    missing[2], mixed[5], deep[1] = None, np.zeros(3), np.zeros((2, 2), np.float32)
    good = {"scores": scores(2, 8), "k": np.zeros(2)}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({"scores": bad}, {}, r"column 'scores' of the batch: scores\[3, 6\] is NaN"),
        ({"scores": rows}, {}, r"column 'scores' of the batch: scores\[4, 0\] is NaN"),
        ({"scores": missing}, {}, "row 2 is missing"),
        ({"scores": mixed}, {}, "row 5 has dtype float64, row 0 float32"),
        ({"scores": deep}, {}, r"row 1 is of shape \(2, 2\)"),
        ({"scores": np.zeros(4)}, {}, r"shape \(4,\): give scores \(rows, ..., n\)"),
        ({"scores": np.zeros((2, 3), int)}, {}, "dtype int64"),
        ({"other": bad}, {}, "'scores' is not in the batch, which has 'other'"),
        (good, {}, "has a column 'k' already: give prefix"),
        (good, {"prefix": "x", "lengths": "n"}, "'n' is not in the batch"),
        ({"scores": ragged(3)}, {"lengths": "scores"}, "leave lengths out"),
        ({"scores": scores(2, 8)}, {"bogus": 1}, "bogus is no option here"),
        ({"scores": scores(2, 8)}, {"mask": None}, "mask is no option here"),
        (scores(2, 8), {}, 'batch_format="numpy"'),
    ]
    for batch, options, words in cases:
        with pytest.raises(CertkError, match=words):
            select_batch(batch, 0.05, **options)


def test_the_functions_travel_by_their_names_and_load_neither_ray_nor_dask() -> None:
    for function in (select_batch, keep_mask, tail_mass_upper):
        assert len(pickle.dumps(function)) < 100
        assert pickle.loads(pickle.dumps(function)) is function
    done = run_python(
        "import sys, certk_rs.batches\n"
        "print({'ray', 'dask', 'pandas', 'pyarrow', 'torch'} & {*sys.modules})"
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


# ------------------------------------------------------------------------------------ Dask


def test_dask_keeps_what_select_keeps_block_by_block() -> None:
    da = pytest.importorskip("dask.array")
    for dtype in (np.float16, np.float32, np.float64):
        x = scores(10, 4, 50, dtype=dtype)
        blocks = da.from_array(x, chunks=(3, 2, 50))
        alone = select(x, 0.05, max_keep=9)
        # With and without the dtype: without it, Dask tries the function with no entries.
        for told in ({}, {"dtype": bool}):
            mask = blocks.map_blocks(keep_mask, eps=0.05, max_keep=9, **told)
            assert (mask.dtype, mask.shape) == (np.dtype(bool), x.shape)
            assert np.array_equal(mask.compute(scheduler="threads"), alone.to_mask())
        upper = blocks.map_blocks(tail_mass_upper, eps=0.05, max_keep=9, drop_axis=2)
        assert (upper.dtype, upper.shape) == (np.dtype(float), (10, 4))
        assert np.array_equal(upper.compute(), alone.tail_mass_upper)
    one = da.from_array(scores(50), chunks=50).map_blocks(keep_mask, eps=0.05)
    assert np.array_equal(one.compute(), select(scores(50), 0.05).to_mask())
    none = da.from_array(scores(0, 50), chunks=50).map_blocks(keep_mask, eps=0.05)
    assert none.compute().shape == (0, 50)


def test_dask_is_told_of_split_rows_and_of_the_place_of_what_is_wrong() -> None:
    da = pytest.importorskip("dask.array")
    x = scores(10, 4, 50).copy()
    with pytest.raises(CertkError, match=r"in 2 chunks.*rechunk\(\{-1: -1\}\) first"):
        da.from_array(x, chunks=(3, 2, 25)).map_blocks(keep_mask, eps=0.05, dtype=bool).compute()
    x[4, 3, 7] = np.nan
    split = da.from_array(x, chunks=(3, 2, 50)).map_blocks(keep_mask, eps=0.05, dtype=bool)
    with pytest.raises(CertkError, match=r"begins at \(3, 2, 0\): scores\[1, 1, 7\] is NaN"):
        split.compute()


def test_dask_runs_them_in_processes() -> None:
    pytest.importorskip("dask.array")
    code = """
import numpy as np, dask.array as da
from certk_rs import select
from certk_rs.batches import keep_mask
if __name__ == "__main__":
    x = np.random.default_rng(0).standard_normal((8, 30))
    mask = da.from_array(x, chunks=(4, 30)).map_blocks(keep_mask, eps=0.1, dtype=bool)
    found = mask.compute(scheduler="processes", num_workers=2)
    print(np.array_equal(found, select(x, 0.1).to_mask()))
"""
    done = run_python(code)
    assert done.stdout == "True\n", done.stderr


# ------------------------------------------------------------------------------------- Ray


@pytest.fixture(scope="module")
def host() -> Iterator[ray_host.Host]:
    pytest.importorskip("ray.data")
    if sys.platform != "linux":
        pytest.skip("looks processes up in /proc")
    with ray_host.ray_host() as started:
        yield started


def test_ray_data_selects_in_batches_of_any_size(host: ray_host.Host) -> None:
    x = scores(11, 24)
    for blocks, size in [(1, 4), (3, 100), (2, 1)]:
        columns = {"id": np.arange(11), "scores": x}
        rows, types = host.run(ray_host.data_selected, columns, blocks, size, eps=0.05)
        assert len(rows) == 11
        for row in rows:
            assert np.array_equal(row["scores"], x[row["id"]])
            check_row(row, x[row["id"]])
        assert (types["k"], types["minimal"]) == ("int64", "bool"), types


def test_ray_data_has_ragged_rows_as_tensors_of_variable_shape(host: ray_host.Host) -> None:
    x = ragged(13)
    columns = {"id": np.arange(13), "x": x}
    rows, types = host.run(ray_host.data_selected, columns, 2, 5, eps=0.05, column="x")
    assert sorted(int(row["id"]) for row in rows) == list(range(13))
    for row in rows:
        check_row(row, x[row["id"]])
    assert "Tensor" in types["indices"], types


def test_ray_data_may_have_batches_without_rows(host: ray_host.Host) -> None:
    columns = {"scores": scores(6, 9), "wanted": [False, False, False, False, False, True]}
    rows, _ = host.run(ray_host.data_selected, columns, 3, 2, eps=0.05)
    assert len(rows) == 1
    check_row(rows[0], columns["scores"][5])
    rows, _ = host.run(ray_host.data_selected, {**columns, "wanted": [False] * 6}, 3, 2, eps=0.05)
    assert rows == []


def test_ray_data_tells_which_row_of_a_batch_is_wrong(host: ray_host.Host) -> None:
    x = scores(6, 9).copy()
    x[5, 2] = np.nan
    said = host.run(ray_host.data_selected, {"scores": x}, 1, 4, eps=0.05)
    assert "column 'scores' of the batch: scores[1, 2] is NaN" in said


def test_the_page_about_clusters_runs(host: ray_host.Host, tmp_path: Path) -> None:
    # run_page("docs/cluster.md"), where there is a cluster.
    pytest.importorskip("dask.array")
    host.run(ray_host.page_runs, "docs/cluster.md", str(tmp_path))
    local, pruned = (tmp_path / each / "cache.safetensors" for each in ("local", "pruned"))
    assert local.read_bytes() == pruned.read_bytes()
