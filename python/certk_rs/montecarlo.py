"""Tail masses from a few drawn scores, with a stated probability of being wrong.

A certificate reads every score. Here only some of a row's tail is drawn, and each end of the
interval is wrong with probability at most delta over the draws, whatever the scores are, provided
that the kept set was fixed before the draws and the scores do not depend on the seed.

Sources: "A Mathematical Theory of Top-k Sparse Attention via Total Variation Distance"
(arXiv 2512.07647); Hoeffding (1963) and Serfling (1974); Maurer and Pontil, "Empirical Bernstein
bounds" (COLT 2009); Bardenet and Maillard, "Concentration inequalities for sampling without
replacement" (Bernoulli 21(3), 2015); Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting" (JRSS B 86(1), 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
from ._arrays import coerce
from ._arrays.kept import Keep, as_native_kept
from ._arrays.rows import as_native_rows, budgets
from .errors import CertkError
from .results import _Frozen, _on_demand

Method = Literal["betting", "bernstein", "hoeffding"]
Family = Literal["row", "all"]
__all__ = ["Confidence", "TailEstimate", "clt_interval", "tail_mass"]


@_on_demand
@dataclass(frozen=True, eq=False)
class TailEstimate(_Frozen):
    """Intervals for tail masses that hold with a stated probability; not deterministic ones.

    Each of `lower` and `upper` is wrong with probability at most `delta` over the draws: for each
    row with family "row", for all rows together with family "all". An interval of both ends is
    therefore wrong with probability at most 2 delta. Tail masses are fractions of a row's softmax
    mass; `...` is the batch shape.
    """

    lower: NDArray[np.float64]
    """Lower confidence bound, (...)."""
    upper: NDArray[np.float64]
    """Upper confidence bound, (...)."""
    point: NDArray[np.float64]
    """Plain estimate inside the interval, without any promise, (...)."""
    delta: float
    """Failure probability of each end."""
    draws: NDArray[np.int64]
    """Draws used, (...): fewer than asked for if a budget was decided, 0 if nothing was open."""
    method: Method
    """Which confidence bound."""
    seed: int
    """What the draws depend on, beside the row's number."""
    family: Family = "row"
    """What delta is for: each row, or all rows together."""


def tail_mass(
    scores: ArrayLike,
    keep: Keep,
    *,
    delta: float,
    draws: int,
    method: Method = "betting",
    seed: int,
    upper_bounds: ArrayLike | None = None,
    eps: ArrayLike | None = None,
    family: Family = "row",
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    indptr: ArrayLike | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
) -> TailEstimate:
    """Bound the mass that a kept set drops, from `draws` scores of each row's tail.

    The kept mass is computed in full. Without `upper_bounds` the tail is drawn uniformly, without
    replacement, and its largest weight is looked up first (every score is read, few are weighed).
    With them, draws are by importance, with replacement, in proportion to exp(upper_bounds), and
    only kept and drawn scores are read; the closer the bounds, the narrower the result.

    Args:
        scores: (..., n) and its row options as in `certk_rs.select`.
        keep: The kept set, in any form that `certk_rs.certify` takes, fixed before the draws.
        delta: Failure probability of each end of an interval, 0 < delta < 1.
        draws: Draws per row, at least 1; without replacement at most the size of each tail.
        method: "betting" (narrowest; holds at all numbers of draws at once), "bernstein" (empirical
            Bernstein) or "hoeffding".
        seed: 0 <= seed < 2**63. Row r draws from stream r of ChaCha12 keyed with the seed, so the
            draws are the same for any number of threads.
        upper_bounds: (..., n), broadcast to the shape of the scores, natural-log units: no smaller
            than the scores times scale, -inf for keys that weigh nothing; any dtype of scores.
        eps: Budget of dropped mass, a number or one per row. Drawing stops once the interval is on
            one side of it; checked at 32, 64, 128, ... draws. Betting only.
        family: "row": delta is for each row; "all": delta is shared out over the rows, so that all
            upper (or all lower) ends hold at once.
        kind: See `select`; upper_bounds need "logits" or "logprobs".
        scale: See `select`.
        mask: See `select`; upper_bounds need a boolean one.
        lengths: See `select`.
        indptr: See `select`; upper_bounds are then flat, too.
        causal_offset: See `select`.
        threads: See `select`.

    Returns:
        A `TailEstimate`. Where nothing is open it is exact without a draw: mass 0 if no visible key
        is dropped (or none is visible), 1 if none is kept. Bounds alone do not say that a key is
        visible: if none is kept, 1 is promised once a draw has found one that weighs anything. If
        all keys of a tail are equal, or all have been drawn without replacement, the ends differ by
        rounding alone.

    Raises:
        CertkError: Bad input, or a drawn score above its bound; the message names the argument and
            the place.
    """
    if family not in ("row", "all"):
        raise CertkError(f'family is {family!r}; pass "row" or "all"')
    rows, data, starts = as_native_rows(scores, mask, lengths, indptr, kind, scale, causal_offset)
    bounds = None
    if upper_bounds is not None:
        above, dtype = coerce.as_native_floats("upper_bounds", upper_bounds)
        bounds = coerce.broadcast("upper_bounds", above, data.shape), dtype
    kept = as_native_kept(keep, data, starts)
    limits = None if eps is None else budgets(eps, data, starts)
    drawing = (delta, draws, method, seed, limits, family == "all", threads)
    found = _native.tail_mass(rows, kept, bounds, drawing)
    return TailEstimate._of(found, delta=float(delta), method=method, seed=int(seed), family=family)


class Confidence:
    """A confidence sequence for the mean of values in [0, 1]: feed draws, look at any time.

    At all looks together each end is wrong with probability at most delta (betting, Waudby-Smith
    and Ramdas 2024). The values must be drawn uniformly: without replacement from `population`
    items, or, if that is None, independently with replacement.
    """

    def __init__(self, delta: float, *, population: int | None = None, horizon: int = 1024) -> None:
        """Start without a draw.

        Args:
            delta: Failure probability of each end over all looks, 0 < delta < 1.
            population: How many items are drawn from without replacement; None with replacement.
            horizon: About how many draws are expected; betting is tuned to it, the promise is not.

        Raises:
            CertkError: Bad input.
        """
        self._values = np.empty(0, dtype=np.float64)
        self.delta = delta
        self.population = population
        self.horizon = horizon
        self.interval()

    @property
    def draws(self) -> int:
        """Values fed so far."""
        return self._values.size

    def feed(self, values: ArrayLike) -> Confidence:
        """Append drawn values (m,), each in [0, 1], in the order drawn; returns itself.

        Raises:
            CertkError: A value outside [0, 1], or more values than the population has. Nothing has
                been appended then.
        """
        more = _values(values)
        joined = np.concatenate([self._values, more])
        self._look(joined)
        self._values = joined
        return self

    def interval(self) -> tuple[float, float]:
        """Return the lower and the upper confidence bound of the mean as of now."""
        return self._look(self._values)

    def _look(self, values: NDArray[np.float64]) -> tuple[float, float]:
        lower, upper = _native.mean_bounds(
            values.reshape(1, -1), self.population, self.delta, "betting", self.horizon
        )
        return float(lower[0]), float(upper[0])


def clt_interval(
    values: ArrayLike, delta: float, *, population: int | None = None
) -> tuple[float, float]:
    """Return the interval that the central limit theorem suggests. NO GUARANTEE: to compare only.

    Its ends may be wrong far more often than delta, above all for skewed values and few draws.

    Args:
        values: (m,) draws, m >= 2.
        delta: Nominal failure probability of each end, 0 < delta < 1.
        population: Size, if drawn without replacement; adds the usual finite-population factor.

    Raises:
        CertkError: Fewer than two values, delta outside (0, 1), more values than the population.
    """
    # Loaded here, because importing the package should cost nothing beyond NumPy.
    from statistics import NormalDist

    array = _values(values)
    if array.size < 2:
        raise CertkError(f"values has {array.size} entries; a variance needs at least 2")
    if not 0.0 < delta < 1.0:
        raise CertkError(f"delta is {delta}; a failure probability must lie in (0, 1)")
    if population is not None and population < array.size:
        raise CertkError(f"population is {population}, but there are {array.size} values")
    left = 1.0 if population is None else 1.0 - array.size / population
    with _native.DefaultFloats():
        width = -NormalDist().inv_cdf(delta) * float(array.std(ddof=1)) * (left / array.size) ** 0.5
        mean = float(array.mean())
        return mean - width, mean + width


def _values(values: ArrayLike) -> NDArray[np.float64]:
    array, dtype = coerce.as_native_floats("values", values)
    if array.ndim != 1:
        raise CertkError(f"values has shape {array.shape}; pass a flat array (m,)")
    return _wide(array, dtype)


def _wide(array: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    """Widen what `as_native_floats` gives, 16-bit dtypes being bits."""
    return coerce.widen(array.view(np.float16) if dtype == "float16" else array, dtype)
