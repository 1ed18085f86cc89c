"""Every accepted form of an argument gives the bits of its plain form, and arrays are not copied.

Forms are dtypes, layouts and libraries of arrays, numbers of all kinds, and ways to list kept keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import certk_rs as ck
from cases import Case
from certk_rs import _native
from certk_rs._arrays import coerce
from checks import certificate_faults

RNG = np.random.default_rng(20)
SHAPE = (3, 4, 33)
SCORES = (3 * RNG.standard_normal(SHAPE)).astype(np.float32)
FLAT, INDPTR = SCORES.reshape(-1)[:60], [0, 10, 10, 60]
EPS = 0.05
FIELDS = ("k", "indptr", "indices", "tail_mass_upper", "tail_mass_lower", "minimal", "status")


def same(a: Any, b: Any) -> None:
    """Assert that two results hold the same bits."""
    assert a.shape == b.shape
    for field in FIELDS if isinstance(a, ck.Selection) else ("k", *FIELDS[3:6], "holds"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)


def test_rows_between_items_are_refused_by_the_extension() -> None:
    """Python copies such rows before; Rust would read them at the wrong places."""
    table = np.ones(3, dtype=[("row", np.float32, (4,)), ("other", np.int16)])
    given = (table["row"], "float32"), "logits", 1.0, None, None, None, None
    with pytest.raises(ck.CertkError, match="has strides"):
        _native.visible_rows(given, 12, None)
    assert ck.select(table["row"], 0.0).k.tolist() == [4, 4, 4]


def lent(scores: Any) -> NDArray[Any]:
    """Return the array that the extension reads."""
    return coerce.as_native_floats("scores", scores)[0]


# ------------------------------------------------------------------------------ dtypes and layouts

DTYPES = ("float16", "float32", "float64", "bfloat16")
TORCH = {name: getattr(torch, name) for name in DTYPES}


def unaligned(x: NDArray[Any]) -> NDArray[Any]:
    """Return a copy that begins one byte after an aligned address."""
    raw = np.zeros(x.nbytes + 1, dtype=np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def odd_strides(x: NDArray[Any]) -> NDArray[Any]:
    """Return rows of a structured array, whose stride is no multiple of the item size."""
    record = np.zeros(x.shape[:-1], dtype=[("row", x.dtype, x.shape[-1:]), ("tag", np.uint8)])
    record["row"] = x
    return record["row"]


class Offers:
    """An object that offers an array."""

    def __init__(self, array: NDArray[Any]) -> None:
        """Keep the array."""
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the array."""
        return self.array


LAYOUTS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "fortran": np.asfortranarray,
    "reversed rows": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "reversed keys": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "every second key": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "every second row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "swapped axes": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "keys first": lambda x: np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0),
    "padded rows": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 7)))[..., : x.shape[-1]],
    "unaligned": unaligned,
    "odd strides": odd_strides,
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "little endian": lambda x: x.astype(x.dtype.newbyteorder("<")),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "subclass": lambda x: x.view(np.recarray),
}


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_matter(layout: str, dtype: str) -> None:
    scores = SCORES.astype(dtype)
    laid_out = LAYOUTS[layout](scores)
    np.testing.assert_array_equal(laid_out, scores)
    before = laid_out.tobytes()
    same(ck.select(laid_out, EPS), ck.select(scores, EPS))
    assert laid_out.tobytes() == before, "the input was written to"
    native = lent(laid_out)
    assert native.flags.aligned
    assert native.dtype.isnative
    assert native.strides[-1] == native.itemsize
    assert all(stride >= 0 and stride % native.itemsize == 0 for stride in native.strides)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_widen_exactly_and_torch_gives_what_numpy_gives(dtype: str) -> None:
    tensor = torch.from_numpy(SCORES).to(TORCH[dtype])
    stored = SCORES.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    want = ck.select(stored, EPS)
    forms = {
        "tensor": tensor,
        "keys first": tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "gradients": tensor.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(tensor.clone()),
        # A view that is negated only when it is read.
        "lazy sign": torch._neg_view(-tensor),
    }
    for form in forms.values():
        same(ck.select(form, EPS), want)
    if dtype in ("float16", "bfloat16"):
        same(ck.select(stored.astype(np.float32), EPS), want)
    same(ck.select(tensor[0].expand(3, -1, -1), EPS), ck.select(stored[[0, 0, 0]], EPS))
    kept = torch.from_numpy(want.to_mask())
    assert np.array_equal(ck.certify(tensor, kept).k, want.k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_arrays_are_read_in_place(dtype: str) -> None:
    scores = SCORES.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for view in (
        scores, scores[::2, 1:], scores[:, :, 3:17], scores.transpose(1, 0, 2),
        np.broadcast_to(scores[0], SHAPE),
    ):  # fmt: skip
        assert np.shares_memory(lent(view), view)
    tensor = torch.from_numpy(SCORES).to(TORCH[dtype])
    for part in (tensor, tensor[1:, ::2], tensor.transpose(0, 1), tensor[:1].expand(3, -1, -1)):
        assert lent(part).ctypes.data == part.data_ptr()


def test_lists_and_objects_that_offer_an_array() -> None:
    wide, nested = SCORES.astype(np.float64), SCORES.tolist()
    for given, plain in (
        (nested, wide),
        (tuple(nested), wide),
        ([3, 1, 2], np.array([3.0, 1.0, 2.0])),
        ([np.float32(0.1), 1], np.array([np.float32(0.1), 1.0])),
        (Offers(SCORES), SCORES),
    ):
        same(ck.select(given, EPS), ck.select(plain, EPS))
    assert ck.select([], EPS).shape == (0,)


POSITIVE = SCORES > 0


@pytest.mark.parametrize(
    "scores",
    [
        SCORES[:1][::-1],
        SCORES[:, :, :1][..., ::-1],
        SCORES[:, :0],
        SCORES[..., :0],
        SCORES[:0][::-1],
        np.broadcast_to(np.float32(1.0), (2, 1)),
        np.broadcast_to(np.float32(1.0), (2, 5)),
        np.zeros(0, dtype=np.float16),
    ],
    ids=lambda x: f"{x.shape}-{x.strides}",
)
def test_axes_of_length_one_and_none(scores: NDArray[Any]) -> None:
    # NumPy lets such axes carry any stride, also where it calls the array contiguous.
    assert lent(scores).shape == scores.shape
    plain = np.array(scores, order="C")
    same(ck.select(scores, EPS), ck.select(plain, EPS))
    same(ck.select(plain, EPS, mask=scores), ck.select(plain, EPS, mask=plain))


@pytest.mark.parametrize(
    "flags",
    [POSITIVE[:1][::-1], POSITIVE[:, :, :1][..., ::-1], POSITIVE[:0][::-1], POSITIVE[..., :0]],
    ids=lambda x: f"{x.shape}-{x.strides}",
)
def test_flags_with_axes_of_length_one_and_none(flags: NDArray[np.bool_]) -> None:
    scores, plain = np.zeros(flags.shape), np.array(flags, order="C")
    same(ck.select(scores, EPS, mask=flags), ck.select(scores, EPS, mask=plain))
    for keep in (flags, plain):
        kept = ck.certify(scores, keep, mask=flags).k
        np.testing.assert_array_equal(kept, plain.sum(axis=-1), strict=True)


# --------------------------------------------------------------------------- options, in all forms

FULL = RNG.random(SHAPE) < 0.7
LENGTHS = RNG.integers(1, 33, SHAPE[:-1])
BATCH = np.full(SHAPE[:-1], 0.25)
SQUARE = SCORES[0, :, :4]
# Options in their plain form, other forms of one of them, and the scores.
FORMS: list[tuple[dict[str, Any], str, list[Any], Any]] = [
    ({"mask": FULL}, "mask", [torch.from_numpy(FULL), FULL.tolist(), np.asfortranarray(FULL)],
     SCORES),
    *(({"mask": np.broadcast_to(part, SHAPE).copy()}, "mask", [part], SCORES) for part in (
        FULL[0, 0], FULL[:1], FULL[:, :1], FULL[..., :1], FULL[0, :, :1], np.array(True))),
    ({"eps": 0.25}, "eps",
     [np.float16(0.25), np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25),
      BATCH, np.asfortranarray(BATCH), BATCH.tolist(), torch.from_numpy(BATCH).bfloat16()], SCORES),
    ({"eps": 0.0}, "eps", [0], SCORES),
    ({"lengths": LENGTHS}, "lengths",
     [*(LENGTHS.astype(t) for t in (np.int8, np.uint8, np.int32, np.uint64, ">i4")),
      LENGTHS.tolist(), torch.from_numpy(LENGTHS).int()], SCORES),
    ({"lengths": np.full(SHAPE[:-1], 5)}, "lengths", [5, np.int16(5)], SCORES),
    *(({name: 2}, name, [np.int8(2), np.uint64(2)], SCORES)
      for name in ("min_keep", "keep_first", "keep_last", "block_size", "threads")),
    ({"eps": 0.0, "max_keep": 8}, "max_keep", [np.int64(8), 0.25, np.float32(0.25)], SCORES[0]),
    ({"eps": 0.0}, "max_keep", [1.0], SCORES[0]),
    ({"scale": 0.5}, "scale", [np.float32(0.5), np.float64(0.5)], SCORES),
    ({"scale": 2.0}, "scale", [2], SCORES),
    ({"prove_minimal": True}, "prove_minimal", [np.True_], SCORES),
    ({"causal_offset": 0}, "causal_offset", [np.int32(0)], SQUARE),
    ({"indptr": INDPTR}, "indptr",
     [np.array(INDPTR, np.int32), np.array(INDPTR, np.uint64), torch.tensor(INDPTR)], FLAT),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_options_may_be_given_in_every_form(number: int) -> None:
    options, name, others, scores = FORMS[number]
    options = {"eps": EPS, **options}
    want = ck.select(scores, **options)
    for other in others:
        same(ck.select(scores, **{**options, name: other}), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_additive_masks_of_every_dtype(dtype: Any) -> None:
    bias = np.where(RNG.random(SHAPE[-1]) < 0.7, 0.5, -np.inf).astype(np.float32)
    wide = ck.select(SCORES, EPS, mask=bias.astype(np.float64))
    same(ck.select(SCORES, EPS, mask=torch.from_numpy(bias).to(TORCH[dtype])), wide)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    same(ck.select(SCORES, EPS, mask=bias.astype(kind)), wide)
    hides = ck.select(SCORES, EPS, mask=np.where(FULL, 0.0, -np.inf))
    np.testing.assert_array_equal(hides.indices, ck.select(SCORES, EPS, mask=FULL).indices)


def test_a_budget_per_row_is_copied() -> None:
    rows = np.linspace(0.01, 0.5, 12).reshape(SHAPE[:-1])
    mixed = ck.select(SCORES, rows)
    np.testing.assert_array_equal(mixed.eps, rows)
    assert not np.shares_memory(mixed.eps, rows)
    for i in np.ndindex(rows.shape):
        np.testing.assert_array_equal(mixed.row(i), ck.select(SCORES[i], rows[i]).row(0))
    turned = np.asfortranarray(rows)
    same(ck.select(SCORES, turned), mixed)
    assert ck.keep_set(SCORES, turned).k == ck.keep_set(SCORES, rows).k


def test_options_mean_what_they_say() -> None:
    five = ck.select(SCORES, EPS, lengths=5)
    np.testing.assert_array_equal(five.indices, ck.select(SCORES[..., :5], EPS).indices)
    assert ck.select(SCORES[0], 0.0, max_keep=1).k.max() == 1
    assert ck.keep_set(SCORES[0], 0.5, max_keep=0.25).k <= 8
    assert ck.select(SQUARE, EPS, causal_offset=-1).status[0] == ck.Status.EMPTY
    assert ck.select(FLAT, EPS, indptr=INDPTR).shape == (3, None)


# -------------------------------------------------------------------------------------- kept sets

ROWS = SCORES.reshape(12, 33)
KEEP = RNG.random(ROWS.shape) < 0.4
KEEP[3] = False


@pytest.mark.parametrize("independent", [False, True])
def test_every_form_of_a_kept_set_gives_the_same_bits(independent: bool) -> None:
    def judge(keep: Any, scores: Any = ROWS, **more: Any) -> ck.Certificate:
        return ck.certify(scores, keep, eps=0.2, independent=independent, **more)

    want = judge(KEEP)
    assert certificate_faults(Case(ROWS, np.full(12, 0.2), name="certify"), KEEP, want) == []
    assert want.tail_mass_upper[3] == want.tail_mass_lower[3] == 1.0
    lists = [RNG.permutation(np.flatnonzero(row)) for row in KEEP]
    padded = np.full((12, 31), -1)
    for i, kept in enumerate(lists):
        padded[i, np.sort(RNG.choice(31, len(kept), replace=False))] = kept
    forms = {
        "mask tensor": torch.from_numpy(KEEP),
        "mask lists": KEEP.tolist(),
        "strided mask": np.repeat(KEEP, 2, axis=1)[:, ::2],
        "padded int64": padded,
        "padded int16": padded.astype(np.int16),
        "padded reversed": padded[..., ::-1],
        "padded tensor": torch.from_numpy(padded),
        "list of arrays": lists,
        "list of lists": [kept.tolist() for kept in lists],
        "tuple of tensors": tuple(torch.from_numpy(kept) for kept in lists),
    }
    for keep in forms.values():
        same(judge(keep), want)
    batch = judge(KEEP.reshape(SHAPE), SCORES)
    assert batch.k.shape == SHAPE[:-1]
    np.testing.assert_array_equal(batch.tail_mass_upper.reshape(-1), want.tail_mass_upper)
    chosen = ck.select(ROWS, 0.2)
    for keep in (chosen, chosen.to_padded(), [chosen.row(i) for i in range(12)]):
        same(judge(keep), judge(chosen.to_mask()))
    same(judge(KEEP[0]), judge(np.tile(KEEP[0], (12, 1))))
    ragged = ck.select(FLAT, EPS, indptr=INDPTR)
    for keep in (ragged, [ragged.row(i) for i in range(3)], ragged.to_padded()):
        same(judge(keep, FLAT, indptr=INDPTR), judge(ragged.to_mask(), FLAT, indptr=INDPTR))


def test_one_row_takes_a_flat_list() -> None:
    row = SCORES[0, 0]
    want = ck.certify(row, [[4, 2]])
    for keep in (
        [4, 2], (2, 4), np.array([2, 4, -1]), np.array([2, 4], np.uint8), [np.int8(4), 2],
        [np.array([2, 4])], torch.tensor([4, 2]),
    ):  # fmt: skip
        same(ck.certify(row, keep), want)
        assert ck.certify(row[None], keep).tail_mass_upper == want.tail_mass_upper
    for keep in ([], [[]], np.zeros(33, dtype=bool), np.array([-1, -1]), np.zeros(0, dtype=int)):
        none = ck.certify(row, keep, eps=0.2)
        assert none.tail_mass_upper == none.tail_mass_lower == 1.0
        assert none.k.shape == ()
        assert not none.holds


# --------------------------------------------------------------------------------- torch, refused
