"""Coercion of what users hold (NumPy, torch on the CPU, ml_dtypes, lists) to what `_native` takes.

Only dtype, stride and device are settled here; values and shapes are judged in Rust. An array is
taken without a copy when its last axis is contiguous, its other strides are non-negative and its
bytes are aligned and in native order; otherwise it is copied once. Neither torch nor ml_dtypes is
imported: a torch tensor can only exist where torch has been imported, and a bfloat16 dtype is
known by its name.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import CertkError

_FLOATS = {np.dtype(c): np.dtype(c).name for c in "efd"}
_INTEGERS = {np.dtype(c): np.dtype(c).name for c in "bBhHiIlLqQ"}
# NumPy puts a name together anew each time, which takes longer than a short row.
_NAMES = {**_FLOATS, **_INTEGERS, np.dtype("?"): "bool"}
_FLOAT_NAMES = frozenset((*_FLOATS.values(), "bfloat16"))
_INTEGER_NAMES = frozenset(_INTEGERS.values())
_NEEDED = "float16, bfloat16, float32 or float64"
_INT64_MAX = 2**63 - 1
# Integers up to this size are float64 numbers.
_EXACT = 2.0**53


def as_native_floats(name: str, value: object) -> tuple[NDArray[Any], str]:
    """Take `value`, of any shape with at least one axis, as an array of floating-point numbers.

    Args:
        name: What to call the argument in an error.
        value: An array or tensor of dtype float16, bfloat16, float32 or float64, or nested lists of
            numbers, which become float64.

    Returns:
        The array (16-bit dtypes as uint16 views) and the name of its dtype.

    Raises:
        CertkError: Another dtype, device or type, or no axis.
    """
    if type(value) is np.ndarray and (known := _FLOATS.get(value.dtype)) is not None:
        array, dtype = value, known
    else:
        array, dtype = borrow(name, value)
        if isinstance(value, list | tuple) and dtype in _FLOAT_NAMES | _INTEGER_NAMES:
            array, dtype = widen(array, dtype), "float64"
        if dtype not in _FLOAT_NAMES:
            raise CertkError(f"{name} has dtype {dtype}; convert it to {_NEEDED}")
    if array.ndim == 0:
        raise CertkError(
            f"{name} is a single number; pass an array with at least one axis (..., n)"
        )
    return lay_out(array.view(np.uint16) if array.itemsize == 2 else array), dtype


def as_native_mask(value: object, shape: tuple[int, ...]) -> tuple[NDArray[Any], str]:
    """Take a mask, boolean (True = may be kept) or an additive bias, broadcast to `shape`."""
    array, dtype = borrow("mask", value)
    if dtype != "bool" and dtype not in _FLOAT_NAMES:
        raise CertkError(
            f"mask has dtype {dtype}; pass bool (True = may be kept), or an additive bias of dtype "
            f"{_NEEDED}"
        )
    if dtype != "bool" and array.itemsize == 2:
        array = array.view(np.uint16)
    return broadcast("mask", array, shape), dtype


def broadcast(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """View an array broadcast to `shape`: leading axes with stride 0, the last axis in full."""
    if array.shape == shape:
        return lay_out(array)
    try:
        if array.shape[-1:] != shape[-1:]:
            array = np.broadcast_to(array, (*array.shape[:-1], *shape[-1:]))
        array = lay_out(array)
        if array.flags.c_contiguous:
            # Axes of length one may carry any stride; a flat view and back gives the usual ones.
            array = array.reshape(-1).reshape(array.shape)
        return np.broadcast_to(array, shape)
    except ValueError:
        raise CertkError(
            f"{name} has shape {array.shape}, which does not broadcast to the scores' shape {shape}"
        ) from None


def lay_out(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself if Rust can read its strides, else a C-ordered copy."""
    flags = array.flags
    if flags.aligned:
        if flags.c_contiguous:
            return array
        size = array.itemsize
        if array.strides[-1] == size and all(s >= 0 and s % size == 0 for s in array.strides):
            return array
    return np.array(array, order="C", copy=True, subok=False)


def is_mapped(value: object) -> bool:
    """Return True if an array or a tensor lies in a mapped file."""
    if getattr(value, "certk_mapped", False):
        return True
    base = value
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    return isinstance(base, mmap.mmap | _native.MappedPieces)


def borrow(name: str, value: object) -> tuple[NDArray[Any], str]:
    """View `value` as an ndarray in native byte order, and name its dtype.

    bfloat16 from torch comes as int16 bits under the name bfloat16.
    """
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray):
            raise CertkError(
                f"{name} is a masked array; pass its .data, and what may be kept as mask="
            )
        array: NDArray[Any] = np.asarray(value)
    elif (torch := sys.modules.get("torch")) and isinstance(value, getattr(torch, "Tensor", ())):
        return _borrow_torch(name, value, torch)
    elif isinstance(value, list | tuple) or hasattr(value, "__array__"):
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise CertkError(
                f"{name} cannot be read as one array ({_one_line(error)}); rows of unequal length "
                "need one flat array and indptr="
            ) from None
    elif isinstance(value, int | float):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        return _borrow_dlpack(name, value)
    else:
        raise CertkError(
            f"{name} is a {_type_name(value)}; pass a NumPy array, a torch CPU tensor or a list"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array, _NAMES.get(array.dtype) or array.dtype.name


def _borrow_dlpack(name: str, value: Any) -> tuple[NDArray[Any], str]:
    """View what another library lends by DLPack; bfloat16, which NumPy lacks, through torch."""
    try:
        array = np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        torch = sys.modules.get("torch")
        if torch is not None and "dtype" in str(error):
            return _borrow_torch(name, torch.from_dlpack(value), torch)
        raise CertkError(
            f"{name} cannot be read by DLPack ({_one_line(error)}); pass {_NEEDED} on the CPU "
            "(bfloat16 once torch is imported)"
        ) from None
    return array, _NAMES.get(array.dtype) or array.dtype.name


def _borrow_torch(name: str, tensor: Any, torch: Any) -> tuple[NDArray[Any], str]:
    """View a torch CPU tensor's memory, detached: gradients do not flow through a selection."""
    device = tensor.device
    if device.type == "meta":
        raise CertkError(
            f"{name} is a tensor on device meta, which holds no data; pass a CPU tensor"
        )
    if device.type != "cpu":
        raise CertkError(f"{name} is a tensor on device {device}; pass {name}.cpu()")
    if tensor.layout is not torch.strided:
        raise CertkError(f"{name} is a sparse tensor ({tensor.layout}); pass {name}.to_dense()")
    try:
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy(), "bfloat16"
        array: NDArray[Any] = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise CertkError(
            f"{name} is a {tensor.dtype} tensor that NumPy cannot read ({_one_line(error)}); "
            f"convert it to {_NEEDED} on the CPU"
        ) from None
    return array, _NAMES.get(array.dtype) or array.dtype.name


def widen(array: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Widen real numbers of any dtype that `borrow` names to a new float64 array."""
    if dtype == "bfloat16":
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    # A host that flushes subnormal numbers would make zeros of those.
    with _native.DefaultFloats():
        return np.array(array, dtype=np.float64, order="C")


def is_negative_infinity(array: NDArray[Any], dtype: str) -> NDArray[np.bool_] | None:
    """Find -inf in numbers as `as_native_floats` returns them; None if there is none."""
    lowest = {"float16": 0xFC00, "bfloat16": 0xFF80}.get(dtype, -np.inf)
    if lowest == -np.inf and np.min(array, initial=0) > lowest:
        return None
    found: NDArray[np.bool_] = array == lowest
    return found if found.any() else None


def floats(name: str, value: object) -> NDArray[np.float64]:
    """Copy real numbers of any shape exactly to a fresh float64 array; booleans are refused."""
    array, dtype = borrow(name, value)
    if dtype not in _FLOAT_NAMES | _INTEGER_NAMES:
        raise CertkError(f"{name} has dtype {dtype}; pass {_NEEDED}, or integers")
    wide = widen(array, dtype)
    if dtype in _INTEGER_NAMES:
        # A bound that rounding moves past what it bounds is none.
        large = np.abs(wide) >= _EXACT
        for stored, rounded in zip(array[large].tolist(), wide[large].tolist(), strict=True):
            if stored != int(rounded):
                raise CertkError(
                    f"{name} holds {stored}, which is no float64; pass float64, rounded as you need"
                )
    return wide


def together(
    first_name: str, first: object, second_name: str, second: object
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Copy two arrays of real numbers to fresh float64 arrays of their broadcast shape."""
    a, b = floats(first_name, first), floats(second_name, second)
    try:
        shape = np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise CertkError(
            f"{second_name} has shape {b.shape}, which does not broadcast with the shape {a.shape} "
            f"of {first_name}"
        ) from None
    wide = [np.array(np.broadcast_to(array, shape), order="C") for array in (a, b)]
    return wide[0], wide[1]


def per_row_floats(name: str, value: object, batch: tuple[int, ...]) -> NDArray[np.float64]:
    """Copy one number, or one per row, to a fresh float64 array of shape () or `batch`."""
    array, dtype = borrow(name, value)
    if dtype not in _FLOAT_NAMES | _INTEGER_NAMES:
        raise CertkError(
            f"{name} has dtype {dtype}; pass a number, or an array of numbers, one per row"
        )
    _need_batch(name, array.shape, batch)
    return widen(array, dtype)


def per_row_integers(name: str, value: object, batch: tuple[int, ...]) -> NDArray[np.int64]:
    """Copy one integer, or one per row, to a flat int64 array of length 1 or rows."""
    array = integers(name, value)
    _need_batch(name, array.shape, batch)
    return array.reshape(-1)


def integers(name: str, value: object) -> NDArray[np.int64]:
    """Copy integers of any width to a fresh int64 array; booleans and floats are refused."""
    array, dtype = borrow(name, value)
    if array.size == 0 and dtype == "float64":
        # What NumPy makes of an empty list.
        return np.empty(array.shape, dtype=np.int64)
    if dtype not in _INTEGER_NAMES:
        raise CertkError(f"{name} has dtype {dtype}; pass integers")
    if dtype == "uint64" and array.size and array.max() > _INT64_MAX:
        raise CertkError(f"{name} holds {array.max()}, beyond int64; pass smaller integers")
    return np.array(array, dtype=np.int64, order="C")


def _need_batch(name: str, shape: tuple[int, ...], batch: tuple[int, ...]) -> None:
    if shape not in ((), batch):
        raise CertkError(
            f"{name} has shape {shape}; pass one number or the scores' batch shape {batch}"
        )


def _type_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
