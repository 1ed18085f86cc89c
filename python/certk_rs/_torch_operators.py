"""The operators of `certk_rs.torch`: schemas, kernels, shapes for tracing.

A kernel calls the function of the same name, which reads the tensors where they are. No argument is
keyword-only: torch takes no gradient for an operator with tensors that are.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _arrays, keepset, sparse_attention
from . import selection as rows
from ._torch_gradient import remember, truncated
from .errors import CertkError
from .key_index import IndexArrays


def _tensor(array: Any, dtype: Any = None) -> Tensor:
    """Copy to a tensor: an operator's outputs are nobody else's."""
    return torch.from_numpy(np.array(array, dtype=dtype, order="C"))


def _traceable(**tensors: Tensor | None) -> None:
    """Refuse by name, in a trace, what a kernel would refuse when the graph runs."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    devices = {tensor.device.type for tensor in given.values()}
    for name, tensor in given.items():
        if tensor.device.type not in ("cpu", "meta") or len(devices) > 1:
            raise CertkError(f"{name} is a tensor on device {tensor.device}; pass CPU tensors only")


_Kernel = Callable[..., tuple[Tensor, ...]]


# As light as torch has them: `torch.library.custom_op` takes 30 us a call more.
_LIBRARY: Any = torch.library.Library("certk", "DEF")  # type: ignore[no-untyped-call]


def _operator(
    name: str, arguments: str, returns: int, fake: _Kernel, *, differentiable: bool = False
) -> Callable[[_Kernel], Any]:
    """Register an operator that mutates nothing, and through which no gradient flows unless told.

    Its kernel is called for every device, so that it can refuse by name what is not on the CPU.
    """
    schema = f"{name}({arguments}) -> ({', '.join(['Tensor'] * returns)})"

    def register(kernel: _Kernel) -> Any:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        if not differentiable:
            # Outputs are made of numbers alone: they require no gradient, whatever the inputs do.
            _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"certk::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.certk, name).default

    return register


# ---------------------------------------------------------------------------------- selection

_ROW_ARGUMENTS = (
    "Tensor scores, float eps, Tensor? eps_per_row=None, Tensor? mask=None, Tensor? lengths=None, "
    'Tensor? indptr=None, str kind="logits", float scale=1.0, int? causal_offset=None'
)
_SELECT_ARGUMENTS = (
    f"{_ROW_ARGUMENTS}, int min_keep=1, int? max_keep=None, float? max_fraction=None, "
    "int keep_first=0, int keep_last=0, int block_size=1, bool prove_minimal=False, "
    "int? threads=None"
)


def _batch(scores: Tensor, indptr: Tensor | None) -> tuple[Any, ...]:
    return tuple(scores.shape[:-1]) if indptr is None else (indptr.shape[0] - 1,)


def _found(
    scores: Tensor,
    eps: float,
    eps_per_row: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    kind: str = "logits",
    scale: float = 1.0,
    causal_offset: int | None = None,
    min_keep: int = 1,
    max_keep: int | None = None,
    max_fraction: float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    prove_minimal: bool = False,
    threads: int | None = None,
) -> Any:
    return rows.select(
        scores,
        eps if eps_per_row is None else eps_per_row,
        kind=kind,
        scale=scale,
        mask=mask,
        lengths=lengths,
        indptr=indptr,
        causal_offset=causal_offset,
        min_keep=min_keep,
        max_keep=_most(max_keep, max_fraction),
        keep_first=keep_first,
        keep_last=keep_last,
        block_size=block_size,
        prove_minimal=prove_minimal,
        threads=_threads(threads),
    )


def _most(max_keep: int | None, max_fraction: float | None) -> int | float | None:
    if max_keep is not None and max_fraction is not None:
        raise CertkError("max_keep and max_fraction exclude each other; pass one of them")
    return max_keep if max_fraction is None else max_fraction


def _threads(threads: int | None) -> int:
    return torch.get_num_threads() if threads is None else threads


def _fake_selection(
    scores: Tensor,
    eps: float,
    eps_per_row: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    *options: object,
    **more: object,
) -> tuple[Tensor, ...]:
    _traceable(scores=scores, eps_per_row=eps_per_row, mask=mask, lengths=lengths, indptr=indptr)
    batch = _batch(scores, indptr)
    found = torch.library.get_ctx().new_dynamic_size()
    return (
        scores.new_empty((prod(batch) + 1,), dtype=torch.int64),
        scores.new_empty((found,), dtype=torch.int64),
        scores.new_empty(batch, dtype=torch.int64),
        scores.new_empty(batch, dtype=torch.float64),
        scores.new_empty(batch, dtype=torch.float64),
        scores.new_empty(batch, dtype=torch.bool),
        scores.new_empty(batch, dtype=torch.uint8),
    )


def _fake_select(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    indptr, indices, _, upper, *_ = _fake_selection(*arguments, **options)
    return indptr, indices, upper


def _fake_select_mask(
    scores: Tensor,
    eps: float,
    eps_per_row: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    *options: object,
    **more: object,
) -> tuple[Tensor, ...]:
    _traceable(scores=scores, eps_per_row=eps_per_row, mask=mask, lengths=lengths, indptr=indptr)
    kept = scores.new_empty(tuple(scores.shape), dtype=torch.bool)
    return kept, scores.new_empty(_batch(scores, indptr), dtype=torch.float64)


@_operator("selection", _SELECT_ARGUMENTS, 7, _fake_selection)
def selection(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    found = _found(*arguments, **options)
    return (
        _tensor(found.indptr),
        _tensor(found.indices, np.int64),
        _tensor(found.k),
        _tensor(found.tail_mass_upper),
        _tensor(found.tail_mass_lower),
        _tensor(found.minimal),
        _tensor(found.status),
    )


@_operator("select", _SELECT_ARGUMENTS, 3, _fake_select)
def select(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    found = _found(*arguments, **options)
    return (
        _tensor(found.indptr),
        _tensor(found.indices, np.int64),
        _tensor(found.tail_mass_upper),
    )


@_operator("select_mask", _SELECT_ARGUMENTS, 2, _fake_select_mask)
def select_mask(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    found = _found(*arguments, **options)
    return torch.from_numpy(found.to_mask()), _tensor(found.tail_mass_upper)


# -------------------------------------------------------------------------------- certificates


def _fake_certify(
    scores: Tensor,
    keep: Tensor,
    keep_indptr: Tensor | None,
    eps: float | None,
    eps_per_row: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    *options: object,
    **more: object,
) -> tuple[Tensor, ...]:
    _traceable(
        scores=scores,
        keep=keep,
        keep_indptr=keep_indptr,
        eps_per_row=eps_per_row,
        mask=mask,
        lengths=lengths,
        indptr=indptr,
    )
    batch = _batch(scores, indptr)
    return (
        scores.new_empty(batch, dtype=torch.int64),
        scores.new_empty(batch, dtype=torch.float64),
        scores.new_empty(batch, dtype=torch.float64),
        scores.new_empty(batch, dtype=torch.bool),
        scores.new_empty(batch, dtype=torch.bool),
    )


def _padded(keep: Tensor, keep_indptr: Tensor, batch: tuple[int, ...]) -> NDArray[np.int64]:
    """Rows of indices as one array, padded with -1."""
    starts = _arrays.integers("keep.indptr", keep_indptr)
    flat = _arrays.integers("keep.indices", keep)
    counts = np.diff(starts.reshape(-1))
    whole = starts.ndim == flat.ndim == 1 and counts.size == prod(batch)
    if not whole or starts[0] != 0 or starts[-1] != flat.size or (counts < 0).any():
        raise CertkError(
            f"keep.indptr does not lay out {flat.size} indices in {prod(batch)} rows; pass what "
            "select returned for scores of this shape"
        )
    padded = np.full((counts.size, int(counts.max(initial=0))), -1, np.int64)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = flat
    return padded.reshape(*batch, padded.shape[1])


@_operator(
    "certify",
    _ROW_ARGUMENTS.replace("float eps", "Tensor keep, Tensor? keep_indptr, float? eps")
    + ", bool independent=False, int? threads=None",
    5,
    _fake_certify,
)
def certify(
    scores: Tensor,
    keep: Tensor,
    keep_indptr: Tensor | None,
    eps: float | None,
    eps_per_row: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    kind: str = "logits",
    scale: float = 1.0,
    causal_offset: int | None = None,
    independent: bool = False,
    threads: int | None = None,
) -> tuple[Tensor, ...]:
    kept = keep if keep_indptr is None else _padded(keep, keep_indptr, _batch(scores, indptr))
    proven = rows.certify(
        scores,
        kept,
        eps=eps if eps_per_row is None else eps_per_row,
        kind=kind,
        scale=scale,
        mask=mask,
        lengths=lengths,
        indptr=indptr,
        causal_offset=causal_offset,
        threads=_threads(threads),
        independent=independent,
    )
    unasked = np.zeros(proven.k.shape, np.bool_)
    return (
        _tensor(proven.k),
        _tensor(proven.tail_mass_upper),
        _tensor(proven.tail_mass_lower),
        _tensor(unasked if proven.holds is None else proven.holds),
        _tensor(unasked if proven.minimal is None else proven.minimal),
    )


# ------------------------------------------------------------------------- one set for many rows


def _fake_keep_set(
    scores: Tensor,
    eps: float,
    eps_per_row: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    *options: object,
    **more: object,
) -> tuple[Tensor, ...]:
    _traceable(scores=scores, eps_per_row=eps_per_row, mask=mask, lengths=lengths)
    batch = tuple(scores.shape[:-1])
    return (
        scores.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.int64),
        scores.new_empty(batch, dtype=torch.float64),
        scores.new_empty(batch, dtype=torch.float64),
        scores.new_empty((), dtype=torch.int64),
        scores.new_empty((), dtype=torch.uint8),
    )


@_operator(
    "keep_set",
    _ROW_ARGUMENTS.replace("Tensor? indptr=None, ", "")
    + ", int? max_keep=None, float? max_fraction=None, int keep_first=0, int keep_last=0, "
    "int? threads=None",
    5,
    _fake_keep_set,
)
def keep_set(
    scores: Tensor,
    eps: float,
    eps_per_row: Tensor | None = None,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    kind: str = "logits",
    scale: float = 1.0,
    causal_offset: int | None = None,
    max_keep: int | None = None,
    max_fraction: float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    threads: int | None = None,
) -> tuple[Tensor, ...]:
    found = keepset.keep_set(
        scores,
        eps if eps_per_row is None else eps_per_row,
        kind=kind,
        scale=scale,
        mask=mask,
        lengths=lengths,
        causal_offset=causal_offset,
        max_keep=_most(max_keep, max_fraction),
        keep_first=keep_first,
        keep_last=keep_last,
        threads=_threads(threads),
    )
    return (
        _tensor(found.indices),
        _tensor(found.tail_mass_upper),
        _tensor(found.tail_mass_lower),
        torch.tensor(found.lower_bound),
        torch.tensor(int(found.status), dtype=torch.uint8),
    )


# ----------------------------------------------------------------------------------- attention

# The dtype of each tensor of an index. NumPy has no bfloat16: bits are lent.
INDEX_DTYPES = {
    "codes": torch.uint8,
    "scales": torch.bfloat16,
    "radii": torch.bfloat16,
    "bare": torch.int32,
    "mean": torch.float32,
    "gram": torch.float64,
    "numbers": torch.float64,
    "fingerprint": torch.int64,
}


def _lend_index(tensors: tuple[Tensor, ...]) -> IndexArrays:
    arrays = []
    for (name, dtype), tensor in zip(INDEX_DTYPES.items(), tensors, strict=True):
        if tensor.dtype is not dtype or tensor.dim() == 0:
            raise CertkError(
                f"index.{name} has dtype {tensor.dtype} and shape {tuple(tensor.shape)}; that of "
                f"an index has {dtype} and an axis for the parts of a head: pass what "
                "index_tensors returned"
            )
        try:
            bits = tensor.view(torch.int16) if dtype is torch.bfloat16 else tensor
            arrays.append(bits.numpy())
        except (TypeError, RuntimeError):
            # Not on the CPU, not strided, or part of a graph of gradients: the long way says which.
            arrays.append(_arrays.borrow(f"index.{name}", tensor)[0])
    return IndexArrays(arrays)


_HOW_ARGUMENTS = (
    "float eps, float? scale=None, bool causal=False, Tensor? eps_per_row=None, "
    "Tensor? lengths=None, Tensor? mask=None, int? threads=None"
)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: IndexArrays | None,
    eps: float,
    scale: float | None = None,
    causal: bool = False,
    eps_per_row: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, ...]:
    found = sparse_attention.attention(
        q,
        k,
        v,
        eps if eps_per_row is None else eps_per_row,
        index=index,
        scale=scale,
        causal=causal,
        lengths=lengths,
        mask=mask,
        threads=_threads(threads),
    )
    return found.out, _tensor(found.tail_mass_upper), _tensor(found.k)


def _fake_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float,
    scale: float | None = None,
    causal: bool = False,
    eps_per_row: Tensor | None = None,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    threads: int | None = None,
) -> tuple[Tensor, ...]:
    _traceable(q=q, k=k, v=v, eps_per_row=eps_per_row, lengths=lengths, mask=mask)
    rows = tuple(q.shape[:-1])
    return (
        q.new_empty((*rows, v.shape[-1])),
        q.new_empty(rows, dtype=torch.float64),
        q.new_empty(rows, dtype=torch.int64),
    )


def _fake_attend_indexed(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    parts = len(INDEX_DTYPES)
    named = zip(INDEX_DTYPES, others[:parts], strict=True)
    _traceable(q=q, **{f"index.{name}": tensor for name, tensor in named})
    return _fake_attend(q, k, v, *others[parts:])


@_operator(
    "attention",
    f"Tensor q, Tensor k, Tensor v, {_HOW_ARGUMENTS}",
    3,
    _fake_attend,
    differentiable=True,
)
def attention(q: Tensor, k: Tensor, v: Tensor, *how: Any, **more: Any) -> tuple[Tensor, ...]:
    return _attend(q, k, v, None, *how, **more)


@_operator(
    "attention_indexed",
    "Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor {name}" for name in INDEX_DTYPES)
    + f", {_HOW_ARGUMENTS}",
    3,
    _fake_attend_indexed,
)
def attention_indexed(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, ...]:
    parts = len(INDEX_DTYPES)
    return _attend(q, k, v, _lend_index(others[:parts]), *others[parts:], **more)


torch.library.register_autograd("certk::attention", truncated, setup_context=remember, lib=_LIBRARY)
