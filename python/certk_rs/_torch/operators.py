"""The operators of `certk_rs.torch`, in one table: what each calls, and the tensors it gives.

Of a row of the table are made its schema (the signature of what it calls is in the words of
schemas), its kernel, which calls the function of the same name on tensors where they are, and the
shapes for tracing. No argument is keyword-only: torch takes no gradient for an operator with
tensors that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature, signature
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import keepset, sparse_attention
from .. import selection as rows
from .._arrays import coerce
from .._ragged import padded
from ..errors import CertkError
from ..key_index import IndexArrays
from .gradient import remember, truncated

# ------------------------------------------------------------------------------- what is called


def _batch(scores: Tensor, indptr: Tensor | None) -> tuple[Any, ...]:
    return tuple(scores.shape[:-1]) if indptr is None else (indptr.shape[0] - 1,)


def _most(max_keep: int | None, max_fraction: float | None) -> int | float | None:
    if max_keep is not None and max_fraction is not None:
        raise CertkError("max_keep and max_fraction exclude each other; pass one of them")
    return max_keep if max_fraction is None else max_fraction


def _threads(threads: int | None) -> int:
    return torch.get_num_threads() if threads is None else threads


def _select(
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


def _side_by_side(keep: Tensor, keep_indptr: Tensor, batch: tuple[int, ...]) -> NDArray[np.int64]:
    """Rows of indices as one array, padded with -1."""
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


def _certify(
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
) -> Any:
    kept = keep if keep_indptr is None else _side_by_side(keep, keep_indptr, _batch(scores, indptr))
    return rows.certify(
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


def _keep_set(
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
) -> Any:
    return keepset.keep_set(
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


# The dtype of each tensor of an index. NumPy has no bfloat16: bits stand for it.
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


def as_index(tensors: Sequence[Tensor]) -> IndexArrays:
    """Read an index from its tensors, where they are."""
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
            arrays.append(coerce.borrow(f"index.{name}", tensor)[0])
    return IndexArrays(arrays)


def _attend(
    index: IndexArrays | None,
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
) -> Any:
    return sparse_attention.attention(
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


def _attend_indexed(q: Tensor, k: Tensor, v: Tensor, *others: Any, **more: Any) -> Any:
    parts = len(INDEX_DTYPES)
    return _attend(as_index(others[:parts]), q, k, v, *others[parts:], **more)


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


def _schema(name: str, arguments: Signature, returns: int) -> str:
    """What torch reads, from a signature whose annotations are the words of schemas."""
    words = []
    for argument in arguments.parameters.values():
        kind = str(argument.annotation).replace(" | None", "?")
        default = argument.default
        quoted = f'"{default}"' if isinstance(default, str) else repr(default)
        words.append(f"{kind} {argument.name}" + f"={quoted}" * (default is not Parameter.empty))
    return f"{name}({', '.join(words)}) -> ({', '.join(['Tensor'] * returns)})"


def _output(found: Any, name: str, dtype: torch.dtype | None) -> Tensor:
    """One field of what was found, as a tensor of its own: an operator's outputs are nobody's."""
    if dtype is None:
        tensor: Tensor = getattr(found, name)
        return tensor
    if name == "mask":
        return torch.from_numpy(found.to_mask())
    value = getattr(found, name)
    # What was not asked about does not hold.
    value = np.zeros(found.k.shape) if value is None else value
    return torch.from_numpy(np.array(value, dtype=_NUMPY[dtype], order="C"))


def _shape(kind: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shape of an output, from the arguments of a call."""
    first: Tensor = given["q"] if "q" in given else given["scores"]
    batch = _batch(first, given.get("indptr"))
    if kind == "found":
        return (torch.library.get_ctx().new_dynamic_size(),)
    shapes = {"batch": batch, "starts": (prod(batch) + 1,), "mask": tuple(first.shape), "one": ()}
    return (*batch, given["v"].shape[-1]) if kind == "out" else shapes[kind]


def _traceable(given: Mapping[str, Any]) -> None:
    """Refuse by name, in a trace, what a kernel would refuse when the graph runs."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    devices = {tensor.device.type for tensor in tensors.values()}
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "meta") or len(devices) > 1:
            raise CertkError(f"{name} is a tensor on device {tensor.device}; pass CPU tensors only")


def _operator(
    name: str,
    call: Callable[..., Any],
    outputs: Outputs,
    *,
    arguments: Signature | None = None,
    differentiable: bool = False,
) -> Any:
    """Register an operator that mutates nothing, and through which no gradient flows unless told.

    Its kernel is called for every device, so that it can refuse by name what is not on the CPU.
    """
    takes = signature(call) if arguments is None else arguments
    columns = [(field, dtype) for field, (_, dtype) in outputs.items()]

    def kernel(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        found = call(*arguments, **options)
        return tuple(_output(found, field, dtype) for field, dtype in columns)

    def fake(*arguments: Any, **options: Any) -> tuple[Tensor, ...]:
        given = takes.bind(*arguments, **options).arguments
        _traceable(given)
        first: Tensor = next(iter(given.values()))
        return tuple(
            first.new_empty(_shape(kind, given), dtype=dtype) for kind, dtype in outputs.values()
        )

    _LIBRARY.define(_schema(name, takes, len(outputs)), tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    if not differentiable:
        # Outputs are made of numbers alone: they require no gradient, whatever the inputs do.
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"certk::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.certk, name).default


# ------------------------------------------------------------------------------------- the table

_COUNT, _MASS = ("batch", torch.int64), ("batch", torch.float64)
_FLAG, _CODE = ("batch", torch.bool), ("batch", torch.uint8)
_ROWS: Outputs = {"indptr": ("starts", torch.int64), "indices": ("found", torch.int64)}
_INTERVAL: Outputs = {"tail_mass_upper": _MASS, "tail_mass_lower": _MASS}
_ATTENDED: Outputs = {"out": ("out", None), "tail_mass_upper": _MASS, "k": _COUNT}

selection = _operator(
    "selection",
    _select,
    {**_ROWS, "k": _COUNT, **_INTERVAL, "minimal": _FLAG, "status": _CODE},
)
select = _operator("select", _select, {**_ROWS, "tail_mass_upper": _MASS})
select_mask = _operator(
    "select_mask", _select, {"mask": ("mask", torch.bool), "tail_mass_upper": _MASS}
)
certify = _operator(
    "certify", _certify, {"k": _COUNT, **_INTERVAL, "holds": _FLAG, "minimal": _FLAG}
)
keep_set = _operator(
    "keep_set",
    _keep_set,
    {
        "indices": ("found", torch.int64),
        **_INTERVAL,
        "lower_bound": ("one", torch.int64),
        "status": ("one", torch.uint8),
    },
)
_attention = partial(_attend, None)
attention = _operator("attention", _attention, _ATTENDED, differentiable=True)
torch.library.register_autograd("certk::attention", truncated, setup_context=remember, lib=_LIBRARY)

# The tensors of an index come behind q, k and v.
_plain = [*signature(_attention).parameters.values()]
_parts = [
    Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation="Tensor") for name in INDEX_DTYPES
]
attention_indexed = _operator(
    "attention_indexed",
    _attend_indexed,
    _ATTENDED,
    arguments=Signature([*_plain[:3], *_parts, *_plain[3:]]),
)
