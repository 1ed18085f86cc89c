"""Token dropping in LMCache (0.5.6): certified choices, and certificates for the choices of others.

`drop_tokens` and `audited` return functions of LMCache's type `ModifyFnType`, for `modify_kv` of a
request stream and `modify` of a batch, whose contexts are of kinds KV and QUERY.

A certificate is about the attention that was stored: queries and keys as the model rotated them, at
their old positions. The engine then numbers the tokens that remain from 0. LMCache rotates no keys:
`rotate`, or the audited function, has to. No certificate covers what this changes, nor later
queries. Importing this needs neither LMCache nor torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import _native
from ._arrays import coerce
from .errors import CertkError

if TYPE_CHECKING:
    import torch

    Caches = Mapping[Any, torch.Tensor]
    ModifyFn = Callable[[Caches, Sequence[int]], tuple[torch.Tensor, Sequence[int]]]
    Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    OnResult = Callable[["DroppedTokens"], object]

__all__ = ["DroppedTokens", "audited", "drop_tokens", "rotation"]


@dataclass(frozen=True, eq=False)
class DroppedTokens:
    """The tokens of one sequence that remain, and what the stored queries lose to the others.

    The promise is about the stored queries and keys, at the old positions. It covers neither keys
    that were rotated to new positions, nor queries that were not given.
    """

    tokens: tuple[int, ...]
    """The n token ids before."""
    kept: NDArray[np.int64]
    """Old positions of the tokens that remain, ascending, (k,)."""
    eps: float | None
    """The budget, or None."""
    tail_mass_upper: NDArray[np.float64]
    """(layers, heads, m): the most attention mass that each of the last m queries loses."""
    lower_bound: int | None = None
    """No set within the budget is smaller, as in `KeepSet`; None for sets of others."""
    keys_changed: bool = False
    """True if keys that remain are not as before: they were rotated, or something else."""
    refused: bool = False
    """True if this set loses more than eps, so that the whole sequence was returned instead."""

    def __post_init__(self) -> None:
        for array in (self.kept, self.tail_mass_upper):
            array.setflags(write=False)

    @property
    def k(self) -> int:
        """Number of tokens that remain."""
        return self.kept.size

    @property
    def worst(self) -> float:
        """The most that any query loses."""
        return float(self.tail_mass_upper.max())

    @property
    def worst_row(self) -> tuple[int, int, int]:
        """Layer, head and old position of a query that may lose most."""
        shape = self.tail_mass_upper.shape
        layer, head, at = map(int, np.unravel_index(self.tail_mass_upper.argmax(), shape))
        return layer, head, at + len(self.tokens) - shape[2]

    @property
    def holds(self) -> bool | None:
        """True if every query loses at most eps, proven; None without eps."""
        return None if self.eps is None else self.worst <= self.eps

    def __str__(self) -> str:
        layer, head, at = self.worst_row
        return (
            f"{self.k} of {len(self.tokens)} tokens remain; each of the last "
            f"{self.tail_mass_upper.shape[2]} queries loses at most {self.worst:.3g} (layer "
            f"{layer}, head {head}, token {at}) of its attention at the old positions"
        )


def drop_tokens(
    eps: float,
    *,
    num_heads: int,
    num_kv_heads: int,
    rotate: Rotate | None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    chunk_size: int | None = None,
    effort: str = "default",
    threads: int | None = None,
    on_result: OnResult | None = None,
) -> ModifyFn:
    """Return a function for LMCache that drops the tokens which no stored query needs.

    It takes KV (2, layers, n, num_kv_heads * d) and QUERY (layers, n, num_heads * d) by cache kind,
    and n token ids. It returns copies of the rows that remain, and their ids. One set serves all
    layers and heads: every query of the window loses at most eps of its attention at the old
    positions (see `DroppedTokens`). Tensors are float32, float16 or bfloat16 on the CPU; a QUERY
    may have an axis of length 1 in front. A batch calls the function in several threads.

    Args:
        eps: Budget of dropped mass, 0 <= eps < 1.
        num_heads: Query heads of a stored row; neighbouring ones share a kv head.
        num_kv_heads: Kv heads of a stored row.
        rotate: Called with the KV that remains, its old and its new positions (int64), returns it
            with keys for the new ones: `rotation(...)`, or `rerotate_k_cache` of LMCache's
            examples with `model_config` bound. None: keys stay as they are, which is only right
            for models without rotary positions.
        scale: Of a product, its score; None: the float64 nearest d^-1/2.
        causal: Query i sees the keys up to its own; False: all.
        window: Number of last queries to certify for, at least 1; None: all.
        max_keep: See `certk_rs.keep_set_of_queries`; where it bites, `holds` is False.
        keep_first: Positions at the start that are always kept.
        keep_last: Positions at the end that are always kept.
        chunk_size: LMCache's; the set is filled up to whole chunks with the latest dropped tokens,
            even beyond `max_keep`. None: what is behind the last whole chunk is not stored, and the
            engine computes it again.
        effort: See `certk_rs.keep_set`.
        threads: Number of threads; None: all available.
        on_result: Called with the `DroppedTokens` of each call.

    Raises:
        CertkError: Bad arguments. When called: no queries, or not of all tokens; other shapes,
            dtypes or devices; numbers that are not finite; a rotation to another shape.
    """
    model = _Model(num_heads, num_kv_heads, scale, causal, window, threads)
    budget = _budget(eps)
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise CertkError(f"chunk_size is {chunk_size!r}; pass that of LMCache, or None")

    def modify(caches: Caches, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        import torch

        kv, blocks, ids = model.read(caches, tokens)
        n, constraints = len(ids), (max_keep, keep_first, keep_last, 1, effort)
        kept, bound, upper = model.solve(blocks, n, budget, None, constraints)
        if chunk_size is not None and (more := min(-len(kept) % chunk_size, n - len(kept))):
            kept = np.union1d(kept, np.setdiff1d(np.arange(n), kept)[-more:])
            upper = model.solve(blocks, n, budget, kept)[2]
        places = torch.from_numpy(np.array(kept))
        left = kv[:, :, places]
        if rotate is not None:
            told = left.shape, left.dtype
            left = rotate(left, places, torch.arange(len(kept)))
            if (left.shape, left.dtype) != told:
                raise CertkError(f"rotate returned {_told(left)}; let it change keys only")
        if on_result is not None:
            on_result(DroppedTokens(ids, kept, budget, upper, bound, rotate is not None))
        return left, [ids[at] for at in kept]

    return modify


def audited(
    fn: ModifyFn,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    on_breach: Literal["raise", "keep"] = "raise",
    threads: int | None = None,
    on_result: OnResult | None = None,
) -> ModifyFn:
    """Return a function for LMCache that does as `fn`, and proves what its choice of tokens loses.

    The tokens that remain are found by the bits of their rows: ids, values and keys, or, where keys
    were changed, ids and values. Of rows with equal bits the last ones count, since queries before
    may have lost their own. `fn` may write over its input: a copy is certified. What it did to keys
    is told, not judged (see `DroppedTokens`).

    Args:
        fn: A function of LMCache's type `ModifyFnType`.
        num_heads: See `drop_tokens`.
        num_kv_heads: See `drop_tokens`.
        eps: Budget of dropped mass, 0 <= eps < 1; None: certify only.
        scale: See `drop_tokens`.
        causal: See `drop_tokens`.
        window: See `drop_tokens`.
        on_breach: Answer to a set that may lose more than eps: "raise", or "keep", which returns
            the whole sequence.
        threads: See `drop_tokens`.
        on_result: Called with the `DroppedTokens` of each call, also before a breach is raised.

    Raises:
        CertkError: Bad arguments. When called: as `drop_tokens`; nothing can be certified, as
            values were changed, tokens reordered or repeated, or keys changed where equal values
            leave open which tokens remain; a breach.
    """
    if not callable(fn):
        raise CertkError(f"fn is a {type(fn).__name__}; pass a function of LMCache's ModifyFnType")
    if on_breach not in ("raise", "keep"):
        raise CertkError(f"on_breach is {on_breach!r}; pass 'raise' or 'keep'")
    model = _Model(num_heads, num_kv_heads, scale, causal, window, threads)
    budget = None if eps is None else _budget(eps)

    def modify(caches: Caches, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        copies = {kind: each.detach().clone() for kind, each in caches.items()}
        kv, blocks, ids = model.read(copies, tokens)
        left, names = fn(caches, tokens)
        kept, changed = _remaining(kv, ids, left, names)
        upper = model.solve(blocks, len(ids), 0.0, kept)[2]
        breach = budget is not None and bool(upper.max() > budget)
        refused = breach and on_breach == "keep"
        told = DroppedTokens(ids, kept, budget, upper, None, changed, refused)
        if on_result is not None:
            on_result(told)
        if breach and not refused:
            raise CertkError(f"fn: {told}; eps is {budget}: keep more, or pass on_breach='keep'")
        return (kv, list(ids)) if refused else (left, names)

    return modify


def rotation(inv_freq: Any, *, head_dim: int) -> Rotate:
    """Return a function that rotates keys from old to new positions, for `drop_tokens`.

    It is for rotary embeddings of Llama's layout (entries i and i + r of a head are a pair) whose
    frequencies do not depend on the length of a text. It computes in float64 and rounds once.

    Args:
        inv_freq: Radians a position, (r,), 2 r <= head_dim: `rotary_emb.inv_freq` of a model of
            transformers. Entries behind the first 2 r stay.
        head_dim: Entries of a head.

    Raises:
        CertkError: Frequencies that do not fit.
    """
    freq = coerce.floats("inv_freq", inv_freq)
    if freq.ndim != 1 or not 0 < 2 * freq.size <= head_dim or not np.isfinite(freq).all():
        raise CertkError(
            f"inv_freq has shape {freq.shape}; pass 1 to {head_dim // 2} finite numbers"
        )

    def rotate(kv: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        import torch

        if kv.shape[3] % head_dim:
            raise CertkError(f"head_dim is {head_dim}, but KV is {_told(kv)}; pass that of a head")
        angle = torch.outer((new - old).double(), torch.from_numpy(freq))[:, None]
        cos, sin = angle.cos(), angle.sin()
        kv = kv.clone(memory_format=torch.contiguous_format)
        for keys in kv[0].view(*kv.shape[1:3], -1, head_dim):
            a, b = keys[..., : 2 * freq.size].chunk(2, -1)
            x, y = a.double(), b.double()
            turned = x * cos - y * sin, y * cos + x * sin
            a.copy_(turned[0])
            b.copy_(turned[1])
        return kv

    return rotate


@dataclass(frozen=True)
class _Model:
    """The layout of stored rows, and which queries see which keys."""

    num_heads: int
    num_kv_heads: int
    scale: float | None
    causal: bool
    window: int | None
    threads: int | None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", *(["window"] if self.window is not None else [])):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise CertkError(f"{name} is {value!r}; pass a whole number >= 1")
        if self.num_heads % self.num_kv_heads:
            raise CertkError(
                f"num_heads is {self.num_heads}, no multiple of num_kv_heads, {self.num_kv_heads}; "
                "pass those of the model's config"
            )
        if self.scale is not None and not np.isfinite(coerce.floats("scale", self.scale)).all():
            raise CertkError(f"scale is {self.scale!r}; pass a finite number, or None for d^-1/2")

    def read(self, caches: Caches, tokens: Sequence[int]) -> tuple[Any, list[Any], tuple[int, ...]]:
        """Return the KV, a block of queries and keys per layer as `_native` has it, and the ids."""
        # Kinds are members of LMCache's enumeration, which is not imported here.
        of = {str(getattr(kind, "value", kind)).lower(): each for kind, each in caches.items()}
        for name, module in (("kv", "kvcache"), ("query", "qcache")):
            if name not in of:
                raise CertkError(
                    f"caches has no {name.upper()}; give the request a context of "
                    f"lmcache.sdk.{module}.connect, too"
                )
        kv, query, ids = of["kv"].detach(), of["query"].detach(), tuple(int(t) for t in tokens)
        query = query[0] if query.ndim == 4 and len(query) == 1 else query
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if kv.ndim != 4 or len(kv) != 2 or not kv.numel() or kv.shape[3] % kv_heads:
            raise CertkError(
                f"KV is {_told(kv)}; pass keys and values (2, layers, n, {kv_heads} * d), n >= 1"
            )
        layers, n, d = kv.shape[1], kv.shape[2], kv.shape[3] // kv_heads
        if len(ids) != n:
            raise CertkError(f"tokens has {len(ids)} ids for the {n} tokens of KV; pass one each")
        if query.ndim == 3 and query.shape[1] != n:
            raise CertkError(
                f"QUERY has {query.shape[1]} tokens, KV {n}: queries of the others are not stored; "
                "try a larger lmcache.q.ring_depth, and modify a prompt once"
            )
        if query.shape != (layers, n, heads * d):
            raise CertkError(
                f"QUERY is {_told(query)}; beside KV {_told(kv)} it must be {layers, n, heads * d}"
            )
        start = max(0, n - (self.window or n))
        scale = _native.nearest_rsqrt(d) if self.scale is None else float(self.scale)
        blocks = []
        for layer in range(layers):
            pair = []
            for name, rows, count in (
                ("QUERY", query[layer], heads),
                ("KV", kv[0, layer], kv_heads),
            ):
                begin = start if name == "QUERY" else 0
                by_head = rows[begin:].reshape(-1, count, d).transpose(0, 1)
                pair.append(coerce.as_native_floats(f"{name} of layer {layer}", by_head))
                if len(bad := (~rows.isfinite()).nonzero()):
                    raise CertkError(
                        f"{name} of layer {layer}, token {int(bad[0, 0])} is not finite; compute "
                        "the prompt again"
                    )
            blocks.append((*pair, scale))
        return kv, blocks, ids

    def solve(
        self,
        blocks: list[Any],
        n: int,
        eps: float,
        kept: NDArray[np.int64] | None,
        constraints: tuple[Any, ...] = (None, 0, 0, 1, "fast"),
    ) -> tuple[NDArray[np.int64], int, NDArray[np.float64]]:
        """Find a set, or certify one; return it, its lower bound and what each row may lose."""
        given = None if kept is None else np.isin(np.arange(n), kept)
        heads, m, _ = blocks[0][0][0].shape
        how = (None, given, 0.0, 16, n - m if self.causal else None, *constraints, self.threads)
        found = _native.keep_set_of_queries(blocks, eps, *how)
        upper = found.tail_mass_upper.reshape(len(blocks), heads, m)
        return found.indices, found.lower_bound, upper


def _budget(eps: object) -> float:
    number = coerce.floats("eps", eps)
    if number.shape != () or not 0 <= number < 1:
        raise CertkError(f"eps is {eps!r}; pass one number with 0 <= eps < 1")
    return float(number)


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _lines(kv: torch.Tensor, ids: Sequence[int]) -> list[tuple[int, bytes, bytes]]:
    """Return the id of each token, and digests of its values and of its keys in all layers."""
    import torch

    def digest(rows: torch.Tensor) -> bytes:
        return hashlib.sha256(rows.contiguous().view(torch.uint8).numpy().data).digest()

    kv = kv.detach().cpu()
    return [(int(t), digest(kv[1, :, i]), digest(kv[0, :, i])) for i, t in enumerate(ids)]


def _latest(old: Sequence[object], left: Sequence[object]) -> list[int] | None:
    """Return the last places of `left` in `old`, in this order; None if it is no subsequence."""
    places, at = list[int](), len(old)
    for line in reversed(left):
        at = next((i for i in range(at - 1, -1, -1) if old[i] == line), -1)
        if at < 0:
            return None
        places.append(at)
    return places[::-1]


def _remaining(
    kv: torch.Tensor, ids: tuple[int, ...], left: torch.Tensor, names: Sequence[int]
) -> tuple[NDArray[np.int64], bool]:
    """Return the old places of the tokens that remain, and whether their keys were changed."""
    shape = (2, kv.shape[1], len(names), kv.shape[3])
    if len(names) == 0 or (left.shape, left.dtype) != (shape, kv.dtype):
        raise CertkError(
            f"fn returned {_told(left)} for {len(names)} tokens; let it return rows of "
            f"{_told(kv)}, of one token or more"
        )
    old, new = _lines(kv, ids), _lines(left, names)
    if (places := _latest(old, new)) is not None:
        return np.array(places), False
    plain, asked = [line[:2] for line in old], [line[:2] for line in new]
    if (places := _latest(plain, asked)) is None:
        known = set(plain)
        made = [at for at, line in enumerate(asked) if line not in known]
        what = (
            f"changes id or values of token {made[0]} of its answer" if made else "reorders tokens"
        )
        raise CertkError(f"fn {what}: nothing can be certified; let it choose among tokens only")
    mirrored = _latest(plain[::-1], asked[::-1]) or []
    for last, first in zip(places, (len(old) - 1 - at for at in mirrored[::-1]), strict=True):
        # The last of some tokens with equal keys loses no less than any other: queries see fewer.
        if len({old[i][2] for i in range(first, last + 1) if plain[i] == plain[last]}) > 1:
            raise CertkError(
                f"fn changes keys, and tokens {first} and {last} have equal ids and values but "
                "unlike keys: nothing can be certified; let fn leave keys as they are"
            )
    return np.array(places), True
