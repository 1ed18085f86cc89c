"""Results are frozen, survive pickle and files, read well, and their views of the set agree.

Arrays of a result stay in Rust until somebody asks for them; see `results._OnDemand`.
"""

from __future__ import annotations

import copy
import dataclasses
import html
import inspect
import io
import itertools
import pickle
import pydoc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from same_bytes import bits

RNG = np.random.default_rng(5)
SCORES = (3 * RNG.standard_normal((2, 3, 40))).astype(np.float32)
SCORES[1, 2] = -np.inf
FLAT = SCORES.reshape(-1)[:100]
INDPTR = [0, 30, 30, 100]
EPS = 0.05
EACH = np.linspace(0.01, 0.3, 6).reshape(2, 3)
KEEP = SCORES > 2
Q = RNG.standard_normal((2, 3, 8)).astype(np.float32)
KEYS = RNG.standard_normal((1, 50, 8)).astype(np.float32)
Make = Callable[[], Any]


def dense() -> ck.Selection:
    return ck.select(SCORES, EPS)


def built() -> ck.Selection:
    """Return one that the constructor made, not select."""
    return ck.Selection(**values(dense()))


def ragged() -> ck.Selection:
    return ck.select(FLAT, EPS, indptr=INDPTR)


def one_row() -> ck.Selection:
    return ck.select(SCORES[0, 0], EPS)


def no_rows() -> ck.Selection:
    return ck.select(SCORES[:0], EPS)


def per_row_eps() -> ck.Selection:
    return ck.select(SCORES, EACH, max_keep=4)


DENSE = [dense, one_row, no_rows, lambda: ck.select(SCORES[..., :0], EPS), per_row_eps, built]
SELECTIONS = [*DENSE, ragged]
ON_DEMAND: list[Make] = [
    *SELECTIONS,
    # So many rows that select released the interpreter.
    lambda: ck.select(np.tile(SCORES, (30, 1, 1)), EPS),
    lambda: ck.certify(SCORES, dense(), eps=EPS),
    lambda: ck.certify(SCORES, KEEP, eps=EACH),
    lambda: ck.certify(SCORES, dense()),
    lambda: ck.certify(FLAT, ragged(), eps=EPS, indptr=INDPTR),
    lambda: ck.certify(SCORES[0, 0], KEEP[0, 0], eps=EPS),
]
RESULTS: list[Make] = [
    *ON_DEMAND, lambda: ck.keep_set(SCORES[0], EPS), lambda: ck.keep_set(SCORES[0, 0], EPS),
]  # fmt: skip
ALL: list[Make] = [
    *RESULTS,
    lambda: ck.KeyIndex.build(KEYS).search(Q, EPS),
    lambda: ck.attention(Q, KEYS, KEYS, EPS),
    lambda: ck.KeyIndex.build(KEYS).recall(Q, (3.0, 3.0), EPS),
]


def values(result: Any) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    for name, value in values(a).items():
        assert type(getattr(b, name)) is type(value)
    assert bits(a) == bits(b)


# -------------------------------------------------------------------------- what all results share


@pytest.mark.parametrize("make", RESULTS)
def test_results_are_frozen(make: Make) -> None:
    result = make()
    for name, value in values(result).items():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(result, name, value)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(result, name)
        if isinstance(value, np.ndarray):
            assert not value.flags.writeable, name
        # Read-only for good; `eps` and `score_indptr` are copies of what the caller gave.
        if isinstance(value, np.ndarray) and make in ON_DEMAND and make is not built:
            if name in ("eps", "score_indptr"):
                continue
            with pytest.raises(ValueError, match="WRITEABLE"):
                value.setflags(write=True)
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = result.no_such_field


@pytest.mark.parametrize("make", RESULTS)
def test_results_survive_pickle_and_copies_before_anybody_looked(make: Make) -> None:
    want = make()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(make(), protocol))
        same(again, want)
        for value in values(again).values():
            assert not isinstance(value, np.ndarray) or not value.flags.writeable
    for again in (copy.copy(make()), copy.deepcopy(make()), dataclasses.replace(make())):
        same(again, want)
    assert dataclasses.asdict(make()).keys() == values(want).keys()
    same(pickle.loads(pickle.dumps(want)), want)


@pytest.mark.parametrize("make", RESULTS)
def test_results_read_at_a_glance_and_are_equal_to_themselves_alone(make: Make) -> None:
    result, other = make(), make()
    assert repr(result).startswith(f"{type(result).__name__}(shape={result.shape}, ")
    assert repr(result).endswith(")")
    assert "\n" not in repr(result)
    assert len(repr(result)) < 200
    # Comparing arrays gives arrays, so == on results is identity, and they can be dictionary keys.
    assert result == result
    assert result != other
    assert len({result, other}) == 2


# ---------------------------------------------------------------------------- arrays on demand


@pytest.mark.parametrize("make", ON_DEMAND)
def test_a_field_is_one_object_in_any_order_and_for_any_thread(make: Make) -> None:
    want = make()
    names = list(values(want))
    result = make()
    first = {name: getattr(result, name) for name in reversed(names)}
    same(result, want)
    assert all(getattr(result, name) is value for name, value in first.items())
    for _ in range(10):
        result, barrier = make(), threading.Barrier(4)
        got: list[dict[str, Any]] = []

        def ask(result: Any = result, barrier: Any = barrier, got: Any = got) -> None:
            barrier.wait()
            got.append(values(result))

        workers = [threading.Thread(target=ask) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(got) == 4
        for name, value in values(result).items():
            assert all(other[name] is value for other in got)


def test_an_untouched_selection_can_be_saved_shown_and_certified(tmp_path: Path) -> None:
    want = dense()
    _ = values(want)
    dense().save(tmp_path / "keep.npz")
    same(ck.Selection.load(tmp_path / "keep.npz"), want)
    assert repr(dense()) == repr(want)
    assert dense().summary() == want.summary()
    np.testing.assert_array_equal(dense().row((1, 1)), want.row(4), strict=True)
    np.testing.assert_array_equal(dense().to_mask(), want.to_mask(), strict=True)
    same(ck.certify(SCORES, dense(), eps=EPS), ck.certify(SCORES, want, eps=EPS))


def test_what_the_caller_overwrites_does_not_show() -> None:
    scores, eps, starts, keep = SCORES.copy(), EACH.copy(), np.array(INDPTR), KEEP.copy()
    calls: list[Make] = [
        lambda: ck.select(scores, eps),
        lambda: ck.select(scores[0, 0], EPS),
        lambda: ck.select(scores.reshape(-1)[:100], EPS, indptr=starts),
        lambda: ck.certify(scores, keep, eps=eps),
    ]
    want = [call() for call in calls]
    _ = [values(result) for result in want]
    results = [call() for call in calls]
    scores[...] = np.nan
    eps[...] = np.nan
    starts[...] = 0
    keep[...] = False
    for result, seen in zip(results, want, strict=True):
        same(result, seen)


def test_results_still_look_like_dataclasses() -> None:
    assert [field.name for field in dataclasses.fields(ck.Selection)][:3] == ["shape", "eps", "k"]
    parameters = inspect.signature(ck.Certificate).parameters
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    assert required == ["shape", "k", "tail_mass_upper", "tail_mass_lower"]
    for kind in (ck.Selection, ck.Certificate):
        assert "Proven upper end" in inspect.getsource(kind)
        assert kind.__name__ in pydoc.render_doc(kind)
        with pytest.raises(AttributeError):
            _ = kind.k
        with pytest.raises(AttributeError):
            _ = object.__new__(kind).k


# ----------------------------------------------------------------------------------- pictures


def test_what_the_pictures_say() -> None:
    selection = dense()
    kept = 100 * selection.indices.size // SCORES.size
    assert f"eps=0.05, kept {kept}" in repr(selection)
    assert f"(k 0..{selection.k.max()})" in repr(selection)
    assert "5 certified, 1 empty" in repr(selection)
    assert "minimal 100 %" in repr(selection)
    assert "eps=0.01..0.3" in repr(per_row_eps())
    assert "over budget" in repr(per_row_eps())
    assert "no rows" in repr(no_rows())
    keep = ck.keep_set(SCORES[0], EPS)
    assert "listed only" in repr(keep)
    assert "The promise covers the listed queries only" in keep.summary()
    certificate = ck.certify(SCORES, selection, eps=EPS)
    assert "holds 100 % at eps=0.05" in repr(certificate)
    assert "holds" not in repr(ck.certify(SCORES, selection))


def test_shown_bounds_are_bounds() -> None:
    # Six digits are shown; rounded to nearest, a shown upper end could be below the truth.
    for upper in (0.123456400001, 0.00999994999, 1e-80 * 1.23456789, 0.9999999, 1.0, 0.0):
        arrays = [np.array(x) for x in (upper, 0.0)]
        certificate = ck.Certificate((4,), np.array(1), *arrays)
        shown = float(repr(certificate).split("tail mass <= ")[1].rstrip(")"))
        assert upper <= shown <= upper * (1 + 1e-5)
    almost = np.ones(100_000, dtype=bool)
    almost[0] = False
    certificate = ck.Certificate(
        (100_000, 4),
        np.ones(100_000, dtype=np.int64),
        np.zeros(100_000),
        np.zeros(100_000),
        np.array(0.1),
        almost,
        almost,
    )
    assert "holds 99.99 %" in repr(certificate)


# ------------------------------------------------------------------------------ views of the set


@pytest.mark.parametrize("make", DENSE)
def test_rows_mask_and_padding_agree(make: Make) -> None:
    selection = make()
    batch = selection.shape[:-1]
    mask, padded = selection.to_mask(), selection.to_padded()
    assert mask.shape == selection.shape
    assert padded.shape == (*batch, selection.k.max(initial=0))
    assert padded.dtype == selection.indices.dtype == np.int32
    for name in ("k", "tail_mass_upper", "tail_mass_lower", "minimal", "status"):
        assert getattr(selection, name).shape == batch
    assert selection.indptr.shape == (selection.k.size + 1,)
    for flat, i in enumerate(np.ndindex(*batch)):
        row = selection.row(i)
        np.testing.assert_array_equal(row, selection.row(flat))
        np.testing.assert_array_equal(row, np.flatnonzero(mask[i]))
        np.testing.assert_array_equal(row, padded[i][: selection.k[i]])
        assert (padded[i][selection.k[i] :] == -1).all()
        assert not row.flags.writeable


def test_new_arrays_may_be_written() -> None:
    assert dense().to_mask().flags.writeable
    assert dense().to_padded().flags.writeable
    padded = dense().to_padded()
    np.testing.assert_array_equal(dense().to_padded(fill=99), np.where(padded < 0, 99, padded))


def test_ragged_rows() -> None:
    selection = ragged()
    mask = selection.to_mask()
    assert selection.shape == (3, None)
    assert mask.shape == (100,)
    for i, (start, end) in enumerate(itertools.pairwise(INDPTR)):
        np.testing.assert_array_equal(selection.row(i), np.flatnonzero(mask[start:end]))
    assert selection.status.tolist() == [0, 2, 0]
    assert selection.to_padded().shape == (3, selection.k.max())


def test_one_row_behaves_like_numbers() -> None:
    selection = one_row()
    assert selection.k.shape == ()
    assert list(range(selection.k)) == list(range(int(selection.k)))
    assert selection.row(0).size == selection.k == selection.row(()).size == selection.row(-1).size
    assert selection.status == ck.Status.CERTIFIED
    assert bool(selection.minimal)
    assert float(selection.tail_mass_upper) <= EPS


def test_rows_count_from_the_end_too() -> None:
    selection = dense()
    np.testing.assert_array_equal(selection.row(-2), selection.row((1, 1)))
    np.testing.assert_array_equal(selection.row((-2, np.int64(-1))), selection.row((0, 2)))
    for wrong in (6, -7, (2, 0), (0, 3), (0,), (0, 0, 0), (), 0.0, "0", None, (0, 1.0)):
        with pytest.raises(ck.CertkError, match=r"i is .* no such row"):
            selection.row(wrong)
    with pytest.raises(ck.CertkError):
        no_rows().row(0)


def test_kl_is_the_outward_rounded_logarithm() -> None:
    flint = pytest.importorskip("flint")
    uppers = np.array([0.0, 5e-324, 1e-300, 1e-17, 1e-3, 0.25, 0.5, 1 - 2**-53, 1.0])
    rows = {name: value for name, value in values(dense()).items() if "tail" not in name}
    kl = ck.Selection(tail_mass_upper=uppers, tail_mass_lower=uppers, **rows).kl_upper
    assert kl[0] == 0.0
    assert kl[-1] == np.inf
    with flint.ctx.workprec(2400):  # 1 - 2**-1074 needs every bit of it
        for upper, bound in zip(uppers[1:-1].tolist(), kl[1:-1].tolist(), strict=True):
            exact = -(1 - flint.arb(upper)).log()
            assert exact < flint.arb(bound)
            assert flint.arb(bound) < exact * (1 + flint.arb(2) ** -46) + flint.arb(2) ** -1073
    np.testing.assert_array_equal(dense().kl_upper.shape, dense().k.shape)


def test_keep_set_fields() -> None:
    keep = ck.keep_set(SCORES[0], EPS)
    assert keep.shape == (3, 40)
    assert keep.k == keep.indices.size == keep.lower_bound + keep.optimality_gap
    assert isinstance(keep.lower_bound, int)
    assert keep.optimality_gap >= 0
    assert isinstance(keep.status, ck.Status)
    assert (np.diff(keep.indices) > 0).all()
    assert keep.weights.shape == keep.tail_mass_upper.shape == keep.tail_mass_lower.shape == (3,)
    np.testing.assert_array_equal(np.flatnonzero(keep.to_mask()), keep.indices)


# ---------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("make", SELECTIONS)
def test_save_and_load(make: Make, tmp_path: Path) -> None:
    selection = make()
    for name in ("keep.npz", "no suffix"):
        selection.save(tmp_path / name)
        same(ck.Selection.load(str(tmp_path / name)), selection)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["keep.npz", "no suffix"]
    # What anybody else writes so is read, too.
    write(tmp_path / "a", stored(selection))
    same(ck.Selection.load(tmp_path / "a"), selection)
    with np.load(tmp_path / "keep.npz", allow_pickle=False) as file:
        assert set(values(selection)) - {"score_indptr"} <= set(file.files)


def test_save_replaces_whole_files_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keep.npz"
    one_row().save(path)
    dense().save(path)
    same(ck.Selection.load(path), dense())
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        one_row().save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["keep.npz"]


def test_save_into_nowhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dense().save(tmp_path / "no such folder" / "keep.npz")
    with pytest.raises(ck.CertkError, match="is no regular file: give the name of a new file"):
        dense().save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        ck.Selection.load(tmp_path / "keep.npz")


def test_save_respects_the_umask(tmp_path: Path) -> None:
    dense().save(tmp_path / "keep.npz")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "keep.npz").stat().st_mode == (tmp_path / "plain").stat().st_mode


def stored(selection: ck.Selection) -> dict[str, Any]:
    buffer = dict(values(selection))
    buffer["shape"] = np.array([-1 if axis is None else axis for axis in selection.shape])
    return {name: np.array(value) for name, value in buffer.items() if value is not None}


def write(path: Path, arrays: dict[str, Any]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a field missing": lambda a: a.pop("status"),
    "a field more": lambda a: a.update(extra=np.zeros(1)),
    "another dtype": lambda a: a.update(k=a["k"].astype(np.float64)),
    "a pickled object": lambda a: a.update(k=np.array([object()])),
    "another byte order": lambda a: a.update(k=a["k"].astype(">i8")),
    "another shape": lambda a: a.update(shape=np.array([3, 2, 40])),
    "shape without axes": lambda a: a.update(shape=np.zeros(0, dtype=np.int64)),
    "negative shape": lambda a: a.update(shape=np.array([2, 3, -5])),
    "scalar shape": lambda a: a.update(shape=np.array(6)),
    "eps of another shape": lambda a: a.update(eps=np.full(6, 0.05)),
    "k against indptr": lambda a: a["k"].__setitem__((0, 0), 1),
    "indptr not from zero": lambda a: a["indptr"].__iadd__(1),
    "indices cut": lambda a: a.update(indices=a["indices"][:-1]),
    "index out of range": lambda a: a["indices"].__setitem__(a["k"][0, 0] - 1, 40),
    "negative index": lambda a: a["indices"].__setitem__(0, -1),
    "index twice": lambda a: a["indices"].__setitem__(1, a["indices"][0]),
    "mass above one": lambda a: a["tail_mass_upper"].__setitem__((0, 0), 1.5),
    "mass NaN": lambda a: a["tail_mass_upper"].__setitem__((0, 0), np.nan),
    "masses swapped": lambda a: a["tail_mass_lower"].__setitem__((0, 0), 1.0),
    "unknown status": lambda a: a["status"].__setitem__((0, 0), 3),
    "status that does not hold": lambda a: a["eps"].__setitem__((), 0.0),
    "ragged starts of another length": lambda a: a.update(score_indptr=np.array([0, 40])),
}


# Differences of int64 may all be positive where the numbers fall: repeating so often is a crash.
MOST = 2**63 - 1
WRAPPED: list[tuple[bool, dict[str, list[int]]]] = [
    (False, {"k": [MOST, MOST, 3], "indptr": [0, MOST, -2, 1], "indices": [0]}),
    (False, {"k": [1, 0, 0], "indptr": [0, 1, 1, 1], "indices": [0], "shape": [3, 2**62]}),
    (False, {"shape": [3, -(2**63)]}),
    (True, {"score_indptr": [0, MOST, -2, 12]}),
]


def test_load_refuses_what_contradicts_itself(tmp_path: Path) -> None:
    forged = [stored(dense()) for _ in CHANGES]
    for arrays, change in zip(forged, CHANGES.values(), strict=True):
        change(arrays)
    rows = np.zeros((3, 4), np.float32)
    for in_one, changes in WRAPPED:
        found = (
            ck.select(rows.reshape(-1), 0.5, indptr=[0, 4, 8, 12])
            if in_one
            else ck.select(rows, 0.5)
        )
        arrays = stored(found)
        forged.append(
            arrays | {name: np.array(new, arrays[name].dtype) for name, new in changes.items()}
        )
    for arrays in forged:
        write(tmp_path / "keep.npz", arrays)
        with pytest.raises(ck.CertkError, match=r"keep\.npz is not a saved Selection") as caught:
            ck.Selection.load(tmp_path / "keep.npz")
        assert "\n" not in str(caught.value)


def test_load_refuses_foreign_files(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    whole = tmp_path / "whole"
    dense().save(whole)
    foreign = {
        "empty": b"",
        "text": b"not a zip file",
        "npy": buffer.getvalue(),
        "pickle": pickle.dumps({"k": 1}),
        "cut": whole.read_bytes()[:-40],
        "zip": b"PK\x05\x06" + bytes(18),
    }
    for name, content in foreign.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ck.CertkError, match=f"{name} is not a saved Selection"):
            ck.Selection.load(path)


def test_errors_survive_pickle() -> None:
    with pytest.raises(ck.CertkError) as caught:
        ck.select([0.0, np.nan], EPS)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ck.CertkError
    assert isinstance(again, ValueError)
    assert str(again) == str(caught.value)


# ------------------------------------------------------------------------ the names that all have


@pytest.mark.parametrize("make", ALL)
def test_every_result_has_a_summary_and_shows_it_in_notebooks(make: Make) -> None:
    result = make()
    summary = result.summary()
    assert summary.startswith(type(result).__name__)
    assert len(summary.splitlines()) > 2
    shown = result._repr_html_()
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == summary
    assert len(shown) < 5_000
    assert not re.search(r"src=|href=|url\(|<script", shown)


@pytest.mark.parametrize("make", ALL)
def test_every_result_becomes_a_frame_of_its_rows(make: Make) -> None:
    pd = pytest.importorskip("pandas")
    result = make()
    frame = result.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    upper = result.tail_mass_upper
    assert len(frame) == upper.size
    # Read by the multi-index, rows are where they are in the batch.
    assert frame.index.names == (
        ["row"] if upper.ndim < 2 else [f"axis_{i}" for i in range(upper.ndim)]
    )
    for name in frame.columns:
        field = {"weight": "weights"}.get(name, name)
        values = np.broadcast_to(getattr(result, field), upper.shape)
        kind = {"status": ck.Status, "rung": ck.Rung}.get(name)
        for place, row in zip(np.ndindex(upper.shape), frame[name], strict=True):
            assert row == (values[place] if kind is None else kind(values[place]).name.lower())
    per_row = {
        field.name
        for field in dataclasses.fields(result)
        if isinstance(getattr(result, field.name), np.ndarray)
        and getattr(result, field.name).shape == upper.shape
        and field.name not in ("indices", "out")
    }
    if upper.ndim:
        assert {"weights" if n == "weight" else n for n in frame.columns} >= per_row - {"indptr"}
    # A frame is the caller's own.
    frame.loc[:, "tail_mass_upper"] = 2.0
    assert (result.tail_mass_upper <= 1).all()


@pytest.mark.parametrize("make", ALL)
def test_pandas_that_is_not_there_is_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("pandas.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ck.CertkError, match=r"pip install 'pandas"):
        make().to_pandas()


def test_a_summary_does_not_compute_the_bound_on_the_error() -> None:
    result = ck.attention(Q, KEYS, KEYS, EPS)
    assert "error" not in result.summary()
    assert "error_bound" not in vars(result)
    bound = result.error_bound.max()
    [line] = [line for line in result.summary().splitlines() if "error" in line]
    assert float(line.split()[-1]) >= bound


def test_blocks_are_those_that_hold_a_kept_key() -> None:
    rng = np.random.default_rng(0)
    scores = 4 * rng.standard_normal((2, 5, 200))
    mask = np.ones(scores.shape, np.bool_)
    mask[0, 3] = False  # a row that keeps nothing, and one that keeps the last key alone
    mask[1, 4, :-1] = False
    found = ck.select(scores, 0.01, mask=mask)
    for size in (1, 7, 16, 500):
        indptr, numbers = found.to_blocks(size)
        for row in range(10):
            expected = sorted({int(i) // size for i in found.row(row)})
            assert numbers[indptr[row] : indptr[row + 1]].tolist() == expected
        assert indptr[-1] == len(numbers)
    none = ck.select(np.zeros((0, 8)), 0.1).to_blocks(4)
    assert none[0].tolist() == [0]
    assert not len(none[1])
    with pytest.raises(ck.CertkError, match="block_size is 0"):
        found.to_blocks(0)
