"""Output error of dropped keys: proven bounds, and sets within a budget on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.kept import Keep, as_native_kept
from ._arrays.rows import as_native_rows
from .results import Selection, Status, _Frozen, _on_demand

_NAMES = np.array(["exact", "diameter", "ball", "spectral", "variance"])
_DIAMETERS = np.array(["centre", "pair"])


@_on_demand
@dataclass(frozen=True, eq=False)
class OutputError(_Frozen):
    """Upper bounds on ||Attn - Attn_S||, per row, float64 of the batch shape `...`.

    Euclidean norm over the components, in the units of the values. Each holds for the real-number
    softmax of exactly the stored scores and exactly the stored values: rounding is inside. tau is
    the tail mass, S the kept set, T its complement among the visible keys.
    """

    exact: NDArray[np.float64]
    """tau ||mu_T - mu_S||: the error itself, rounded up, (...)."""
    diameter: NDArray[np.float64]
    """tau times the distance that `diameter_kind` names, (...)."""
    ball: NDArray[np.float64]
    """tau (||c - Attn_S|| + r), all seen values in the ball (c, r), (...)."""
    spectral: NDArray[np.float64]
    """sqrt(sum_T P_j^2) sqrt(lambda_max(C_V) + n ||mean V - Attn_S||^2), (...)."""
    variance: NDArray[np.float64]
    """sqrt(tau / (1 - tau)) sqrt(Var_P(V) - (1 - tau) Var_S(V)), (...); inf if S is empty."""
    best: NDArray[np.float64]
    """The smallest of the five, (...)."""
    which: NDArray[np.str_]
    """The name of the smallest, the first in this order if equal, (...)."""
    diameter_kind: NDArray[np.str_]
    """"pair": max over S x T of ||v_i - v_j||; "centre": max over T of ||v_j - Attn_S||; (...)."""
    norm: NDArray[np.float64]
    """2 C tau, C the longest value that the row sees, (...)."""
    chi_square: NDArray[np.float64]
    """sqrt(chi2) sqrt(Var_P(V)), chi2 = tau / (1 - tau), (...); inf if S is empty.

    `norm` and `chi_square` are forms of the paper (Theorem 5.6). In real arithmetic `diameter` (of
    pairs) and `variance` are never above them, so `best` is the smallest of the other five.
    """

    def __repr__(self) -> str:
        if self.best.size == 0:
            return f"OutputError(no rows, batch shape {self.best.shape})"
        names, counts = np.unique(self.which, return_counts=True)
        shares = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        return (
            f"OutputError(batch shape {self.best.shape}, best <= {self.best.max():.6g}, {shares})"
        )


@_on_demand
@dataclass(frozen=True, eq=False)
class OutputSelection(_Frozen):
    """The shortest prefix of each row's ranking that is within a budget on the output error."""

    selection: Selection
    """The kept keys, certified for the tail mass that they drop (its `eps`, rounded up)."""
    out_tol: NDArray[np.float64]
    """The budgets asked for, in the units of the values, shape () or (...)."""
    error_upper: NDArray[np.float64]
    """Proven upper end of ||Attn - Attn_S||, (...); at most out_tol."""
    minimal: NDArray[np.bool_]
    """Whether every shorter prefix provably exceeds out_tol, (...)."""

    @property
    def k(self) -> NDArray[np.int64]:
        """Keys kept, (...)."""
        return self.selection.k

    def to_mask(self) -> NDArray[np.bool_]:
        """Return a new bool array of the scores' shape, True where kept."""
        return self.selection.to_mask()

    def __repr__(self) -> str:
        return (
            f"OutputSelection({self.selection!r}, error <= {self.error_upper.max(initial=0.0):.6g})"
        )


def output_error(
    scores: ArrayLike,
    values: ArrayLike,
    keep: Keep,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
) -> OutputError:
    """Bound what each row's attention output loses if only the kept keys are attended to.

    Attn is the softmax-weighted mean of the values, Attn_S that over the kept keys, renormalised;
    an empty kept set has tail mass 1 and Attn_S = 0 by convention, so that the error is ||Attn||.
    The forms and their names are those of section 3 of the theory: the head-tail identity and what
    follows from it. A row that drops nothing has error exactly 0 in every form.

    Args:
        scores: (..., n) or (batch, heads, m, n), dtypes and row options as in `certk_rs.select`.
        values: (..., n, d_v), float16, bfloat16, float32 or float64; finite at every key that some
            row sees. The leading axes go with those of the scores without the query axis (or with
            all of them, one value matrix per row), from the right, each of the same length or 1;
            the last may divide its partner: (batch, kv_heads, n, d_v) serves grouped heads.
        keep: As in `certk_rs.certify`. Kept keys that are masked count for nothing.
        kind: See `select`.
        scale: See `select`.
        mask: See `select`.
        lengths: See `select`.
        causal_offset: See `select`.
        threads: See `select`; bounds have the same bits for any number.

    Returns:
        An `OutputError`. `ball` and `spectral` speak of the values of all keys that any row of the
        head sees, the other forms of the row's own. `variance` is the sharpened form, which is
        never above sqrt(tau / (1 - tau)) sqrt(Var_P(V)). `diameter` looks at all pairs of a kept
        and a dropped value up to 2**20 components of differences, else at Attn_S only.

    Raises:
        CertkError: Bad input, also a value that is not finite; the message names the place.
    """
    rows, data, _ = as_native_rows(scores, mask, lengths, None, kind, scale, causal_offset)
    vectors = coerce.as_native_floats("values", values)
    found = _native.output_error(rows, vectors, as_native_kept(keep, data, None), threads)
    return OutputError._of(
        found,
        which=_NAMES[found.which],
        diameter_kind=_DIAMETERS[found.farthest_pair.astype(np.uint8)],
    )


def select_output(
    scores: ArrayLike,
    values: ArrayLike,
    out_tol: ArrayLike,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
) -> OutputSelection:
    """Keep, in each row, the fewest of the best keys whose output error is proven within out_tol.

    The sets looked at are the prefixes of the ranking by score (equal scores by lower index), of
    one key or more. The error ||Attn - Attn_S|| is not monotone in k: one more key may pull the
    output away from where it should be, so a longer prefix may exceed a budget that a shorter one
    meets, and all prefixes are examined. The smallest k is the first whose certified error (the
    `exact` form of `output_error`) is at most out_tol; `minimal` says where rounding leaves no
    doubt that every shorter prefix is above it. Only in long rows with budgets next to rounding
    errors, where many prefixes stay open, a later one may be taken (at least eight open ones are
    certified, and as many as 2**22 components hold); `minimal` is then False. Other sets of k keys
    may do better than a prefix.

    Args:
        scores: As in `output_error`.
        values: As in `output_error`.
        out_tol: Budget on the error in the units of the values (Euclidean norm), finite, >= 0: a
            number, or one per row, in the batch shape.
        kind: See `select`.
        scale: See `select`.
        mask: See `select`.
        lengths: See `select`.
        causal_offset: See `select`.
        threads: See `select`.

    Returns:
        An `OutputSelection`; a row without visible keys keeps none, and has error 0.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    rows, data, _ = as_native_rows(scores, mask, lengths, None, kind, scale, causal_offset)
    vectors = coerce.as_native_floats("values", values)
    batch = data.shape[:-1]
    budget = coerce.per_row_floats("out_tol", out_tol, batch)
    found = _native.select_output(rows, vectors, budget, threads)
    k = np.diff(found.indptr).reshape(batch)
    selection = Selection(
        data.shape,
        found.tail_mass_upper,
        k,
        found.indptr,
        found.indices,
        found.tail_mass_upper,
        found.tail_mass_lower,
        np.zeros(batch, dtype=np.bool_),
        np.where(k == 0, Status.EMPTY, Status.CERTIFIED).astype(np.uint8),
    )
    return OutputSelection._of(found, selection=selection)
