"""Every array of real numbers is read, in place or copied, and nothing else.

Each accepted form must give the bits that a plain C-ordered array of the same values gives.
"""

from __future__ import annotations

import array as stdlib_array
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import certk_rs as ck
from certk_rs._arrays import coerce

RNG = np.random.default_rng(20)
SHAPE = (3, 4, 33)
SCORES = (3 * RNG.standard_normal(SHAPE)).astype(np.float32)
EPS = 0.05

FIELDS = ("k", "indptr", "indices", "tail_mass_upper", "tail_mass_lower", "minimal", "status")


def same(a: ck.Selection, b: ck.Selection) -> None:
    assert a.shape == b.shape
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), strict=True)


def lent(scores: Any) -> NDArray[Any]:
    return coerce.as_native_floats("scores", scores)[0]


def shares(scores: Any) -> bool:
    return np.shares_memory(lent(scores), np.asarray(scores))


# ------------------------------------------------------------------------------ floating dtypes

DTYPES = ("float16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_gives_what_numpy_gives(dtype: str) -> None:
    scores = SCORES.astype(dtype)
    same(ck.select(torch.from_numpy(scores), EPS), ck.select(scores, EPS))


def test_bfloat16_of_torch_and_ml_dtypes_is_that_of_float32() -> None:
    tensor = torch.from_numpy(SCORES).to(torch.bfloat16)
    wide = ck.select(tensor.float().numpy(), EPS)
    same(ck.select(tensor, EPS), wide)
    same(ck.select(SCORES.astype(ml_dtypes.bfloat16), EPS), wide)


def test_float16_is_that_of_float32() -> None:
    half = SCORES.astype(np.float16)
    same(ck.select(half, EPS), ck.select(half.astype(np.float32), EPS))


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16])
def test_contiguous_arrays_are_read_in_place(dtype: Any) -> None:
    scores = SCORES.astype(dtype)
    assert shares(scores)
    assert shares(scores[::2, 1:])
    assert shares(scores[:, :, 3:17])
    assert shares(scores.transpose(1, 0, 2))
    assert shares(np.broadcast_to(scores[0], SHAPE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.bfloat16])
def test_contiguous_tensors_are_read_in_place(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(SCORES).to(dtype)
    for view in (tensor, tensor[1:, ::2], tensor.transpose(0, 1), tensor[:1].expand(3, -1, -1)):
        assert lent(view).ctypes.data == view.data_ptr()


# -------------------------------------------------------------------------------------- layouts

LAYOUTS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "fortran": np.asfortranarray,
    "reversed rows": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "reversed keys": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "every second key": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "every second row": lambda x: np.repeat(x, 2, axis=0)[::2],
    "swapped axes": lambda x: np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
    "keys first": lambda x: np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0),
    "padded rows": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 7)))[..., : x.shape[-1]],
    "unaligned": lambda x: unaligned(x),
    "odd strides": lambda x: odd_strides(x),
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "little endian": lambda x: x.astype(x.dtype.newbyteorder("<")),
    "read-only": lambda x: read_only(x),
    "subclass": lambda x: x.view(np.recarray),
}


def unaligned(x: NDArray[Any]) -> NDArray[Any]:
    raw = np.zeros(x.nbytes + 1, dtype=np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def odd_strides(x: NDArray[Any]) -> NDArray[Any]:
    """Rows of a structured array, whose stride is no multiple of the item size."""
    record = np.zeros(x.shape[:-1], dtype=[("row", x.dtype, x.shape[-1:]), ("tag", np.uint8)])
    record["row"] = x
    return record["row"]


def read_only(x: NDArray[Any]) -> NDArray[Any]:
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_matter(layout: str, dtype: str) -> None:
    scores = SCORES.astype(dtype)
    laid_out = LAYOUTS[layout](scores)
    np.testing.assert_array_equal(laid_out, scores)
    before = laid_out.copy()
    same(ck.select(laid_out, EPS), ck.select(scores, EPS))
    np.testing.assert_array_equal(laid_out, before)
    native = lent(laid_out)
    assert native.flags.aligned
    assert native.dtype.isnative
    assert native.strides[-1] == native.itemsize
    assert all(stride >= 0 and stride % native.itemsize == 0 for stride in native.strides)


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


POSITIVE = SCORES > 0


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


def test_transposed_and_expanded_tensors() -> None:
    tensor = torch.from_numpy(SCORES)
    keys_first = tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    same(ck.select(keys_first, EPS), ck.select(SCORES, EPS))
    same(ck.select(tensor[0].expand(3, -1, -1), EPS), ck.select(SCORES[[0, 0, 0]], EPS))
    bfloat16 = keys_first.to(torch.bfloat16)
    same(ck.select(bfloat16, EPS), ck.select(bfloat16.float(), EPS))


def test_tensors_with_gradients_and_lazy_signs() -> None:
    tensor = torch.from_numpy(SCORES).requires_grad_()
    same(ck.select(tensor, EPS), ck.select(SCORES, EPS))
    same(ck.select(torch.nn.Parameter(tensor.detach()), EPS), ck.select(SCORES, EPS))
    negated = torch.complex(tensor.detach(), tensor.detach()).conj().imag
    assert negated.is_neg()
    same(ck.select(negated, EPS), ck.select(-SCORES, EPS))


def test_lists_become_float64() -> None:
    nested = SCORES.tolist()
    same(ck.select(nested, EPS), ck.select(SCORES.astype(np.float64), EPS))
    same(ck.select(tuple(nested), EPS), ck.select(nested, EPS))
    same(ck.select([3, 1, 2], EPS), ck.select(np.array([3.0, 1.0, 2.0]), EPS))
    same(ck.select([np.float32(0.1), 1], EPS), ck.select(np.array([np.float32(0.1), 1.0]), EPS))
    assert ck.select([], EPS).shape == (0,)


def test_objects_that_offer_an_array_are_read() -> None:
    class Offers:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
            return SCORES

    same(ck.select(Offers(), EPS), ck.select(SCORES, EPS))


# ------------------------------------------------------------------------------ what is refused

REFUSED: dict[str, tuple[Any, str]] = {
    "int64": (np.arange(4), r"scores has dtype int64.*convert it to float16"),
    "int8": (np.arange(4, dtype=np.int8), "int8"),
    "uint16": (np.arange(4, dtype=np.uint16), "uint16"),
    "bool": (np.array([True, False]), "bool"),
    "complex64": (np.ones(4, dtype=np.complex64), "complex64"),
    "object": (np.array([1.0, None]), "object"),
    "str": (np.array(["1.0"]), "dtype"),
    "datetime": (np.array(["2020-01-01"], dtype="datetime64[D]"), "datetime64"),
    "structured": (np.zeros(3, dtype=[("a", "f4")]), "dtype"),
    "float8": (np.ones(4, dtype=ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    "list of bool": ([True, False], "bool"),
    "list of complex": ([1j, 2.0], "complex128"),
    "list of str": (["1.0", "2.0"], "dtype"),
    "list of None": ([1.0, None], "object"),
    "list of huge ints": ([10**400], "object"),
    "ragged list": ([[1.0], [1.0, 2.0]], "indptr"),
    "masked": (np.ma.masked_array([1.0, 2.0], [True, False]), "masked array.*mask="),
    "torch int": (torch.arange(4), "int64"),
    "torch bool": (torch.ones(4, dtype=torch.bool), "bool"),
    "torch complex": (torch.ones(4, dtype=torch.complex64), "complex64"),
    "torch float8": (torch.ones(4).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "torch sparse": (torch.eye(4).to_sparse(), r"sparse.*to_dense\(\)"),
    "torch meta": (torch.ones(4, device="meta"), "device meta.*holds no data"),
    "scalar": (1.0, "single number"),
    "0-d": (np.float32(1.0), "single number"),
    "0-d array": (np.array(1.0), "single number"),
    "0-d tensor": (torch.tensor(1.0), "single number"),
    "None": (None, "NoneType"),
    "string": ("scores.npy", "str"),
    "bytes": (b"1234", "bytes"),
    "dict": ({"scores": 1}, "dict"),
    "generator": ((x for x in (1.0, 2.0)), "generator"),
    "set": ({1.0, 2.0}, "set"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_things_are_refused_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ck.CertkError, match=message) as caught:
        ck.select(value, EPS)
    assert str(caught.value).startswith("scores ")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is float64 here")
def test_long_double_is_refused() -> None:
    with pytest.raises(ck.CertkError, match=np.dtype(np.longdouble).name):
        ck.select(np.ones(4, dtype=np.longdouble), EPS)
    with pytest.raises(ck.CertkError, match="eps"):
        ck.select(SCORES, np.longdouble("0.1"))


def test_sparse_matrices_are_refused() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(ck.CertkError, match="scores is a scipy"):
        ck.select(sparse.csr_matrix(SCORES[0]), EPS)


def test_a_tensor_on_another_device_names_the_device_and_the_remedy() -> None:
    # No accelerator is needed: an object that says where it is takes the tensor's place.
    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda:1")

    tensor = torch.ones(4).as_subclass(Elsewhere)
    with pytest.raises(
        ck.CertkError, match=r"scores is a tensor on device cuda:1; pass scores\.cpu"
    ):
        ck.select(tensor, EPS)
    with pytest.raises(ck.CertkError, match=r"mask is a tensor on device cuda:1; pass mask\.cpu"):
        ck.select(SCORES, EPS, mask=tensor)


def test_memoryviews_and_buffers_are_named_in_the_refusal() -> None:
    for value in (memoryview(SCORES), stdlib_array.array("d", [1.0])):
        with pytest.raises(ck.CertkError, match="scores is a"):
            ck.select(value, EPS)
