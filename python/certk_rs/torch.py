"""The functions of this package for PyTorch: tensors in, tensors out, and operators for compilers.

Importing this module registers the operators `torch.ops.certk.select`, `select_mask`, `keep_set`,
`certify`, `attention` and `attention_indexed` (and `selection`, which `select` here stands on).
They are opaque to torch, have shapes for tracing, and so work under `torch.compile(fullgraph=True)`
and `torch.export`, with the same bits as without. The functions of this module are what to call;
each runs one operator.

CPU tensors only, read in place; a tensor elsewhere is refused by name. Nothing is differentiable
but `attention` (see there). By default as many threads are used as torch uses at the time of the
call (`torch.get_num_threads()`), which is one in a worker of a DataLoader. Answers do not depend on
that number. See docs/torch.md.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from .errors import CertkError, pip_install
from .key_index import KeyIndex
from .kv_index import KvIndex

try:
    import torch
    from torch import Tensor
    from torch.autograd import forward_ad
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        f"certk_rs.torch needs PyTorch, which is not installed: {pip_install('torch')}",
        name="torch",
    ) from error

from ._torch import operators as _operators

__all__ = [
    "AttentionResult",
    "Certificate",
    "IndexTensors",
    "KeepSet",
    "Selection",
    "attention",
    "certify",
    "index_tensors",
    "keep_set",
    "select",
    "select_mask",
]


class Selection(NamedTuple):
    """The result of `select`, with the fields of `certk_rs.Selection`; `...` is the batch shape."""

    indptr: Tensor
    """(rows + 1,) int64: row r keeps indices[indptr[r]:indptr[r + 1]]."""
    indices: Tensor
    """(total,) int64, ascending within a row."""
    k: Tensor
    """(...) int64, how many each row keeps."""
    tail_mass_upper: Tensor
    """(...) float64: the real-number mass dropped is at most this."""
    tail_mass_lower: Tensor
    """(...) float64: and at least this."""
    minimal: Tensor
    """(...) bool: no smaller set under the same constraints is within the budget."""
    status: Tensor
    """(...) uint8 of `certk_rs.Status`."""


class Certificate(NamedTuple):
    """The result of `certify`, as a `certk_rs.Certificate`; `...` is the batch shape."""

    k: Tensor
    """(...) int64, how many each row keeps."""
    tail_mass_upper: Tensor
    """(...) float64."""
    tail_mass_lower: Tensor
    """(...) float64."""
    holds: Tensor | None
    """(...) bool: the row is within eps; None without eps."""
    minimal: Tensor | None
    """(...) bool: no smaller set is; None without eps."""


class KeepSet(NamedTuple):
    """The result of `keep_set`, with the fields of `certk_rs.KeepSet`; `...` is the batch shape."""

    indices: Tensor
    """(k,) int64, ascending."""
    tail_mass_upper: Tensor
    """(...) float64."""
    tail_mass_lower: Tensor
    """(...) float64."""
    lower_bound: Tensor
    """() int64: no set under the same constraints can be smaller."""
    status: Tensor
    """() uint8 of `certk_rs.Status`."""


class AttentionResult(NamedTuple):
    """The result of `attention`; `...` is the shape of q without its last axis."""

    out: Tensor
    """(..., d_v) in the dtype of q."""
    tail_mass_upper: Tensor
    """(...) float64: the real-number mass dropped is at most this, and within eps."""
    k: Tensor
    """(...) int64: keys that went into each average."""


class IndexTensors(NamedTuple):
    """A `KeyIndex` or `KvIndex` as tensors, from `index_tensors`; `...` is `keys.shape[:-2]`.

    They may be moved, saved, or be inputs of a compiled graph. They are trusted to be those of an
    index of exactly the keys that a call is given. Others make a certificate about nothing, or an
    error, but never a crash.
    """

    codes: Tensor
    """(..., bytes) uint8: sixteen keys to a block, four dimensions to a line of it."""
    scales: Tensor
    """(..., n in whole sixteens) bfloat16: what a key's codes are multiplied by."""
    radii: Tensor
    """(..., n in whole sixteens) bfloat16: bounds of what each code loses, Euclidean norm."""
    bare: Tensor
    """(..., most) int32, ascending, padded with -1: keys without a code, as bits of uint32."""
    mean: Tensor
    """(..., d in whole sixteens) float32: what was subtracted from keys."""
    gram: Tensor
    """(..., square of that) float64: sums of products of what codes lose."""
    numbers: Tensor
    """(..., 7) float64: what bounds the roundings of all that."""
    fingerprint: Tensor
    """(..., 2) int64: of the keys, as bits of uint64."""
    values: Tensor | None = None
    """(bytes) uint8: a file of the codes of values, and bounds of its matrices; of a `KvIndex`."""


# ------------------------------------------------------------------------- what functions share


def _need_tensors(**tensors: object) -> None:
    """Refuse by name what is no tensor on the CPU. Tensors of a trace say that they are."""
    for name, tensor in tensors.items():
        # Asking for the name of a device takes ten times as long.
        if tensor is None or (isinstance(tensor, Tensor) and tensor.is_cpu):
            continue
        if not isinstance(tensor, Tensor):
            raise CertkError(
                f"{name} is a {type(tensor).__name__}; pass a torch tensor, or call the function "
                "of the same name in certk_rs"
            )
        if tensor.device.type == "meta":
            raise CertkError(
                f"{name} is a tensor on device meta, which holds no data; pass a CPU tensor"
            )
        raise CertkError(f"{name} is a tensor on device {tensor.device}; pass {name}.cpu()")


def _need_no_tangents(**tensors: Tensor) -> None:
    """Refuse forward-mode differentiation: an operator would drop the tangents silently."""
    if torch.compiler.is_compiling():
        return
    unpack: Any = forward_ad.unpack_dual
    for name, tensor in tensors.items():
        if unpack(tensor).tangent is not None:
            raise CertkError(
                f"{name} has a tangent, and attention has no forward-mode derivative: use "
                "reverse mode (torch.autograd.grad), or detach it"
            )


def _budget(eps: object) -> tuple[float, Tensor | None]:
    """Split a budget into a number for all rows, and the tensor of budgets per row."""
    if isinstance(eps, Tensor):
        return 0.0, eps
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise CertkError(
            f"eps is a {type(eps).__name__}; pass a number, or a tensor of one per row"
        )
    return float(eps), None


def _most(max_keep: int | float | None) -> tuple[int | None, float | None]:
    """Split `max_keep` into a count and a fraction."""
    if isinstance(max_keep, bool):
        raise CertkError(f"max_keep is {max_keep}; pass an integer, or a fraction as a float")
    return (None, max_keep) if isinstance(max_keep, float) else (max_keep, None)


# ---------------------------------------------------------------------------------- selection


def select(
    scores: Tensor,
    eps: float | Tensor,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    causal_offset: int | None = None,
    min_keep: int = 1,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    prove_minimal: bool = False,
    threads: int | None = None,
) -> Selection:
    """Keep, in each row, the fewest keys whose dropped softmax mass is proven to be within eps.

    Arguments, guarantee and errors are those of `certk_rs.select`, with tensors for arrays: scores
    (..., n) in float16, bfloat16, float32 or float64; eps a number, or a tensor of one per row;
    mask boolean or additive; lengths and indptr integers; `threads=None` means as many as torch
    uses. No gradient flows.

    Returns:
        A `Selection` of tensors.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    _need_tensors(scores=scores, mask=mask, lengths=lengths, indptr=indptr)
    read = (mask, lengths, indptr, kind, scale, causal_offset)
    chosen = (min_keep, *_most(max_keep), keep_first, keep_last, block_size, prove_minimal)
    return Selection(*_operators.selection(scores, *_budget(eps), *read, *chosen, threads))


def select_mask(
    scores: Tensor,
    eps: float | Tensor,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    causal_offset: int | None = None,
    min_keep: int = 1,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    prove_minimal: bool = False,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Do as `select`, with an answer of a shape that is known beforehand.

    Returns:
        The kept set as booleans in the shape of scores, and tail_mass_upper (...), float64.

    Raises:
        CertkError: See `select`.
    """
    _need_tensors(scores=scores, mask=mask, lengths=lengths, indptr=indptr)
    read = (mask, lengths, indptr, kind, scale, causal_offset)
    chosen = (min_keep, *_most(max_keep), keep_first, keep_last, block_size, prove_minimal)
    kept, upper = _operators.select_mask(scores, *_budget(eps), *read, *chosen, threads)
    return kept, upper


# -------------------------------------------------------------------------------- certificates


def certify(
    scores: Tensor,
    keep: Tensor | Selection,
    *,
    eps: float | Tensor | None = None,
    kind: str = "logits",
    scale: float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    indptr: Tensor | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
    independent: bool = False,
) -> Certificate:
    """Prove an interval for the softmax mass that a given kept set drops from each row.

    Arguments are those of `certk_rs.certify`, with tensors for arrays; see `select`. `keep` is a
    boolean mask that broadcasts to the scores, integer indices (..., k) padded with -1, or a
    `Selection` of this module; `eps` fills `holds` and `minimal`.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    listed, starts = (keep.indices, keep.indptr) if isinstance(keep, Selection) else (keep, None)
    _need_tensors(scores=scores, keep=listed, mask=mask, lengths=lengths, indptr=indptr)
    budget = (None, None) if eps is None else _budget(eps)
    read = (mask, lengths, indptr, kind, scale, causal_offset)
    k, upper, lower, holds, minimal = _operators.certify(
        scores, listed, starts, *budget, *read, independent, threads
    )
    if eps is None:
        return Certificate(k, upper, lower, None, None)
    return Certificate(k, upper, lower, holds, minimal)


# ------------------------------------------------------------------------- one set for many rows


def keep_set(
    scores: Tensor,
    eps: float | Tensor,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal_offset: int | None = None,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    effort: str = "default",
    threads: int | None = None,
) -> KeepSet:
    """Find a small set of keys that is within every row's budget at once, and bound the smallest.

    Arguments, guarantee and errors are those of `certk_rs.keep_set`, with tensors for arrays; see
    `select`. `threads=None` means as many as torch uses. No gradient flows.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    _need_tensors(scores=scores, mask=mask, lengths=lengths)
    read = (mask, lengths, kind, scale, causal_offset)
    chosen = (*_most(max_keep), keep_first, keep_last)
    return KeepSet(*_operators.keep_set(scores, *_budget(eps), *read, *chosen, effort, threads))


# ----------------------------------------------------------------------------------- attention


def index_tensors(index: KeyIndex) -> IndexTensors:
    """Copy an index to tensors, which `attention` and `certk::attention_indexed` then only read.

    Args:
        index: A `certk_rs.KeyIndex`, for instance `certk_rs.KeyIndex.build(k, keep_keys=False)`, or
            a `certk_rs.KvIndex`, with which few rows may have weights and values from codes.

    Raises:
        CertkError: It is no index.
    """
    if not isinstance(index, KeyIndex):
        raise CertkError(f"index is a {type(index).__name__}; pass a certk_rs.KeyIndex")
    arrays = index.arrays()
    if isinstance(index, KvIndex):
        arrays.append(index._values.to_operators())
    stored = zip(map(torch.from_numpy, arrays), _operators.INDEX_DTYPES.values(), strict=False)
    return IndexTensors(*(tensor.view(dtype) for tensor, dtype in stored))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float | Tensor,
    *,
    index: IndexTensors | None = None,
    scale: float | None = None,
    causal: bool = False,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    block_table: Tensor | None = None,
    key_lengths: Tensor | None = None,
    layout: Literal["hnd", "nhd"] = "hnd",
    threads: int | None = None,
) -> AttentionResult:
    """Softmax attention that drops what it can prove to be small, and says what was lost.

    Arguments, guarantee and errors are those of `certk_rs.attention`, which takes tensors as well,
    and also has budgets on the output and bounds of its error; this one can be compiled and
    differentiated.

    Its gradient with respect to q, k and v is that of attention truncated to the keys that were
    kept, with that set held fixed. The backward pass computes all scores again in float64 and
    ranks them, which takes the time and the memory (rows x keys) of dense attention. With `index`
    there is no gradient, and tensors that require one are refused; so are tangents of forward mode.

    Args:
        q: Queries (..., heads, m, d), or (m, d); float16, bfloat16, float32 or float64.
        k: Keys (..., kv_heads, n, d), or (n, d), not repeated.
        v: Values (..., kv_heads, n, d_v), or (n, d_v).
        eps: Budget of dropped softmax mass, a number, or a tensor of shape () or q.shape[:-1].
        index: The index of exactly these keys, or of these keys and values, from `index_tensors`;
            nothing of it is copied or built in the call.
        scale: Multiplies q.k; None for the float64 nearest d**-0.5.
        causal: Query i of m sees keys up to i + n - m.
        lengths: How many keys a row sees, from the first; integers of shape () or q.shape[:-1].
        mask: Boolean (True = seen), broadcasts to q.shape[:-1] + (n,); or additive, of 0 and
            entries <= finfo.min / 2.
        block_table: With it k and v are the blocks of a paged cache, as those of
            `certk_rs.PagedRows`, and these are the numbers of the blocks of each sequence. Without
            an index and a gradient.
        key_lengths: With `block_table`: how many keys each sequence has.
        layout: With `block_table`: the order of the axes of a block, as in `PagedRows`.
        threads: Number of threads; None for as many as torch uses.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    _need_tensors(q=q, k=k, v=v, lengths=lengths, mask=mask)
    _need_no_tangents(q=q, k=k, v=v)
    number, per_row = _budget(eps)
    how = (number, scale, causal, per_row, lengths, mask, threads)
    if block_table is not None:
        if index is not None or key_lengths is None:
            raise CertkError("block_table goes with key_lengths, and without an index")
        _need_tensors(block_table=block_table, key_lengths=key_lengths)
        _need_no_gradient("pages", q, k, v)
        pages = (block_table, key_lengths, layout)
        return AttentionResult(*_operators.attention_paged(q, k, v, *pages, *how))
    if index is None:
        return AttentionResult(*_operators.attention(q, k, v, *how))
    if not isinstance(index, IndexTensors):
        raise CertkError(
            f"index is a {type(index).__name__}; pass index_tensors(index) of a certk_rs.KeyIndex"
        )
    # Whatever the annotations say: anybody can make one of these.
    parts: tuple[object, ...] = index if index.values is not None else index[:-1]
    if not all(isinstance(part, Tensor) and part.is_cpu for part in parts):
        _need_tensors(**{f"index.{name}": tensor for name, tensor in index._asdict().items()})
    _need_no_gradient("an index", q, k, v)
    found = _operators.attention_indexed(q, k, v, *index[:-1], *how, index.values)
    return AttentionResult(*found)


def _need_no_gradient(what: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise CertkError(
            f"q, k or v requires a gradient, and attention with {what} has none; call it under "
            f"torch.no_grad(), detach them, or do without {what}"
        )
