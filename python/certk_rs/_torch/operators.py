"""The operators of `certk_rs.torch`, in one table: what each takes, calls, and gives.

A row of the table has the arguments as torch's schemas have them, what is called with them, and the
tensors that come out, with their shapes for tracing. Arguments are named and ordered as those of
the function of the same name, but for what one type of a schema cannot say (see `_options`). None
is keyword-only: torch takes no gradient for an operator with tensors that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _native, keepset, sparse_attention
from .. import selection as rows
from .._arrays import coerce
from .._ragged import padded
from ..errors import CertkError
from ..key_index import IndexArrays
from ..paged_rows import PagedRows
from .gradient import remember, truncated

Given = dict[str, Any]
"""All arguments of a call by name, in the order of the schema."""

# ------------------------------------------------------------------------------- what is called


def _options(given: Given) -> Given:
    """Return the arguments of a call by the names of this package.

    Budgets per row, and a fraction for `max_keep`, have an argument of their own in schemas; and
    without `threads` as many are used as torch uses.
    """
    options = dict(given)
    per_row, fraction = options.pop("eps_per_row"), options.pop("max_fraction", None)
    if per_row is not None:
        options["eps"] = per_row
    if fraction is not None:
        if options["max_keep"] is not None:
            raise CertkError("max_keep and max_fraction exclude each other; pass one of them")
        options["max_keep"] = fraction
    if options["threads"] is None:
        options["threads"] = torch.get_num_threads()
    return options


def _certify(*, keep_indptr: Tensor | None, **options: Any) -> Any:
    if keep_indptr is not None:
        options["keep"] = _side_by_side(options["keep"], keep_indptr, _batch(options))
    return rows.certify(**options)


def _side_by_side(keep: Tensor, keep_indptr: Tensor, batch: tuple[int, ...]) -> NDArray[np.int64]:
    """Return rows of indices as one array, padded with -1."""
    starts = coerce.integers("keep.indptr", keep_indptr)
    flat = coerce.integers("keep.indices", keep)
    counts = np.diff(starts.reshape(-1))
    whole = starts.ndim == flat.ndim == 1 and counts.size == prod(batch)
    if not whole or starts[0] != 0 or starts[-1] != flat.size or (counts < 0).any():
        raise CertkError(
            f"keep.indptr does not lay out {flat.size} indices in {prod(batch)} rows; pass what "
            "select returned for scores of this shape"
        )
    table = padded(flat, counts)
    return table.reshape(*batch, table.shape[1])


# The dtype of each tensor of an index; values may be None. NumPy lacks bfloat16: bits stand for it.
INDEX_DTYPES = {
    "codes": torch.uint8,
    "scales": torch.bfloat16,
    "radii": torch.bfloat16,
    "bare": torch.int32,
    "mean": torch.float32,
    "gram": torch.float64,
    "numbers": torch.float64,
    "fingerprint": torch.int64,
    "values": torch.uint8,
}


def as_index(tensors: Sequence[Tensor | None]) -> IndexArrays:
    """Read an index from its tensors, where they are."""
    arrays: list[Any] = []
    for (name, dtype), tensor in zip(INDEX_DTYPES.items(), tensors, strict=True):
        if tensor is None:
            arrays.append(None)
            continue
        flat = name == "values"
        if tensor.dtype is not dtype or tensor.dim() == 0 or (flat and tensor.dim() > 1):
            axes = "one axis" if flat else "an axis for the parts of a head"
            raise CertkError(
                f"index.{name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}; that of "
                f"an index has {dtype} and {axes}: pass what index_tensors returned"
            )
        try:
            bits = tensor.view(torch.int16) if dtype is torch.bfloat16 else tensor
            arrays.append(bits.numpy())
        except (TypeError, RuntimeError):
            # Not on the CPU, not strided, or part of a graph of gradients: the long way says which.
            arrays.append(coerce.borrow(f"index.{name}", tensor)[0])
    return IndexArrays(arrays[:-1], arrays[-1])


def _attend(**options: Any) -> Any:
    parts = [options.pop(name) for name in INDEX_DTYPES if name in options]
    return sparse_attention.attention(**options, index=as_index(parts) if parts else None)


def _attend_paged(
    *, k: Tensor, v: Tensor, block_table: Tensor, key_lengths: Tensor, layout: Any, **options: Any
) -> Any:
    keys, values = (PagedRows(each, block_table, key_lengths, layout) for each in (k, v))
    return sparse_attention.attention(k=keys, v=values, **options)


# ---------------------------------------------------------------------- from a row to an operator

Outputs = Mapping[str, tuple[str, torch.dtype | None]]
"""The tensors that an operator gives: of what shape (see `_shape`) and dtype (None: that of q)."""

_NUMPY = {
    torch.int64: np.int64,
    torch.float64: np.float64,
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
}
# As light as torch has them: `torch.library.custom_op` takes 30 us a call more.
_LIBRARY: Any = torch.library.Library("certk", "DEF")  # type: ignore[no-untyped-call]


def _output(found: Any, name: str, dtype: torch.dtype | None) -> Tensor:
    """Copy one field of a result to a tensor of its own: an operator's outputs are nobody's."""
    if dtype is None:
        tensor: Tensor = getattr(found, name)
        return tensor
    if name == "mask":
        return torch.from_numpy(found.to_mask())
    value = getattr(found, name)
    # What was not asked about does not hold.
    value = np.zeros(found.k.shape) if value is None else value
    return torch.from_numpy(np.array(value, dtype=_NUMPY[dtype], order="C"))


def _batch(given: Given) -> tuple[Any, ...]:
    """Return the batch shape of scores, or the shape of q without its last axis."""
    starts = given.get("indptr")
    first: Tensor = next(iter(given.values()))
    return tuple(first.shape[:-1]) if starts is None else (starts.shape[0] - 1,)


def _shape(kind: str, given: Given) -> tuple[Any, ...]:
    """Return the shape of an output, from the arguments of a call."""
    batch = _batch(given)
    if kind == "out":
        return (*batch, given["v"].shape[-1])
    if kind == "mask":
        return tuple(given["scores"].shape)
    if kind == "found":
        return (torch.library.get_ctx().new_dynamic_size(),)
    return {"batch": batch, "starts": (prod(batch) + 1,), "one": ()}[kind]


def _traceable(given: Given) -> None:
    """Refuse by name, in a trace, what a kernel would refuse when the graph runs."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    devices = {tensor.device.type for tensor in tensors.values()}
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "meta") or len(devices) > 1:
            raise CertkError(f"{name} is a tensor on device {tensor.device}; pass CPU tensors only")


def _operator(
    name: str,
    arguments: str,
    call: Callable[..., Any],
    outputs: Outputs,
    *,
    differentiable: bool = False,
) -> Any:
    """Register an operator that mutates nothing, and through which no gradient flows unless told.

    Its kernel is called for every device, so that it can refuse by name what is not on the CPU.
    """
    schema = f"{name}({arguments}) -> ({', '.join(['Tensor'] * len(outputs))})"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.certk, name).default
    # torch leaves out arguments that are their defaults.
    defaults = {argument.name: argument.default_value for argument in operator._schema.arguments}
    columns = [(field, dtype) for field, (_, dtype) in outputs.items()]

    def named(arguments: tuple[Any, ...], options: Given) -> Given:
        return {**defaults, **dict(zip(defaults, arguments, strict=False)), **options}

    def kernel(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        given = _options(named(arguments, options))
        with _native.OpenMpTeam():
            found = call(**given)
        return tuple(_output(found, field, dtype) for field, dtype in columns)

    def fake(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        given = named(arguments, options)
        _traceable(given)
        first: Tensor = next(iter(given.values()))
        return tuple(
            first.new_empty(_shape(kind, given), dtype=dtype) for kind, dtype in outputs.values()
        )

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if not differentiable:
        # Outputs are made of numbers alone: they require no gradient, whatever the inputs do.
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"certk::{name}", fake, lib=_LIBRARY)
    return operator


# ------------------------------------------------------------------------------------- the table

_SELECT = (
    "Tensor scores, float eps, Tensor? eps_per_row=None, "
    "Tensor? mask=None, Tensor? lengths=None, Tensor? indptr=None, "
    'str kind="logits", float scale=1.0, int? causal_offset=None, '
    "int min_keep=1, int? max_keep=None, float? max_fraction=None, "
    "int keep_first=0, int keep_last=0, int block_size=1, bool prove_minimal=False, "
    "int? threads=None"
)
_CERTIFY = (
    "Tensor scores, Tensor keep, Tensor? keep_indptr, float? eps, Tensor? eps_per_row=None, "
    "Tensor? mask=None, Tensor? lengths=None, Tensor? indptr=None, "
    'str kind="logits", float scale=1.0, int? causal_offset=None, '
    "bool independent=False, int? threads=None"
)
_KEEP_SET = (
    "Tensor scores, float eps, Tensor? eps_per_row=None, "
    "Tensor? mask=None, Tensor? lengths=None, "
    'str kind="logits", float scale=1.0, int? causal_offset=None, '
    "int? max_keep=None, float? max_fraction=None, int keep_first=0, int keep_last=0, "
    'str effort="default", int? threads=None'
)
_VECTORS = "Tensor q, Tensor k, Tensor v"
_ATTEND = (
    "float eps, float? scale=None, bool causal=False, "
    "Tensor? eps_per_row=None, Tensor? lengths=None, Tensor? mask=None, int? threads=None"
)
_INDEX = ", ".join(f"Tensor {name}" for name in [*INDEX_DTYPES][:-1])

_COUNT, _MASS = ("batch", torch.int64), ("batch", torch.float64)
_FLAG, _CODE = ("batch", torch.bool), ("batch", torch.uint8)
_ROWS: Outputs = {"indptr": ("starts", torch.int64), "indices": ("found", torch.int64)}
_INTERVAL: Outputs = {"tail_mass_upper": _MASS, "tail_mass_lower": _MASS}
_ATTENDED: Outputs = {"out": ("out", None), "tail_mass_upper": _MASS, "k": _COUNT}

selection = _operator(
    "selection",
    _SELECT,
    rows.select,
    {**_ROWS, "k": _COUNT, **_INTERVAL, "minimal": _FLAG, "status": _CODE},
)
select = _operator("select", _SELECT, rows.select, {**_ROWS, "tail_mass_upper": _MASS})
select_mask = _operator(
    "select_mask", _SELECT, rows.select, {"mask": ("mask", torch.bool), "tail_mass_upper": _MASS}
)
certify = _operator(
    "certify", _CERTIFY, _certify, {"k": _COUNT, **_INTERVAL, "holds": _FLAG, "minimal": _FLAG}
)
keep_set = _operator(
    "keep_set",
    _KEEP_SET,
    keepset.keep_set,
    {
        "indices": ("found", torch.int64),
        **_INTERVAL,
        "lower_bound": ("one", torch.int64),
        "status": ("one", torch.uint8),
    },
)
attention = _operator(
    "attention", f"{_VECTORS}, {_ATTEND}", _attend, _ATTENDED, differentiable=True
)
torch.library.register_autograd("certk::attention", truncated, setup_context=remember, lib=_LIBRARY)
attention_indexed = _operator(
    "attention_indexed",
    f"{_VECTORS}, {_INDEX}, {_ATTEND}, Tensor? values=None",
    _attend,
    _ATTENDED,
)
attention_paged = _operator(
    "attention_paged",
    f"{_VECTORS}, Tensor block_table, Tensor key_lengths, str layout, {_ATTEND}",
    _attend_paged,
    _ATTENDED,
)
