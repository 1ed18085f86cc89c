"""The Gaussian design rule: the number of keys that a budget needs when scores are normal.

Keep the iid N(mu, sigma^2) scores above mu + c sigma. This keeps the share Phi_c(c) of the keys and
drops the mass Phi(c - sigma), so a budget eps asks for c = sigma + Phi^-1(eps) (Tzachristas et al.,
arXiv 2512.07647, the Gaussian score model). The model plans and certifies nothing;
`certk_rs.select` finds the keys that a real row needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _planning
from ._arrays import coerce
from ._arrays.rows import as_native_rows, batch_shape, budgets
from .results import _Frozen
from .selection import select

_PRUNE = 2.0
_PRUNE_A_LITTLE = 1.25


@_planning.default_arithmetic
def keep_fraction(sigma: ArrayLike, eps: ArrayLike) -> NDArray[np.float64]:
    """Return the share of keys that a budget needs, Phi_c(sigma + Phi^-1(eps)), for long rows.

    Args:
        sigma: Standard deviation of the scores in natural-log units, finite and >= 0; any shape.
        eps: Budget of dropped mass, 0 < eps < 1; any shape that broadcasts with sigma.

    Returns:
        float64 of the broadcast shape, 0-d for numbers. Relative error about 1e-15 c^2, where c is
        the threshold; exactly 1 - eps where sigma is 0.

    Raises:
        CertkError: An argument outside its range; the place is that in the broadcast shape.
    """
    return _planning.read_only(_planning.keep_fraction(*_sigma_and_eps(sigma, eps)))


@_planning.default_arithmetic
def threshold(sigma: ArrayLike, eps: ArrayLike) -> NDArray[np.float64]:
    """Return c = sigma + Phi^-1(eps): keep the scores above their mean + c sigma.

    Arguments, shapes and errors as in `keep_fraction`; the unit of c is one sigma.
    """
    deviation, budget = _sigma_and_eps(sigma, eps)
    return _planning.read_only(deviation + _planning.quantile(budget))


@_planning.default_arithmetic
def tail_mass(sigma: ArrayLike, fraction: ArrayLike) -> NDArray[np.float64]:
    """Return the mass that is dropped when the best `fraction` of the keys is kept, for long rows.

    The inverse of `keep_fraction` in eps, and the same formula: Phi_c(sigma + Phi^-1(fraction)).

    Args:
        sigma: As in `keep_fraction`.
        fraction: Share of the keys kept, 0 <= fraction <= 1; broadcasts with sigma.

    Returns:
        float64 of the broadcast shape, with the accuracy of `keep_fraction`.

    Raises:
        CertkError: An argument outside its range; the place is that in the broadcast shape.
    """
    deviation, kept = coerce.together("sigma", sigma, "fraction", fraction)
    _planning.need_sigma(deviation)
    inside = (kept >= 0) & (kept <= 1)
    _planning.need("fraction", kept, inside, "pass a share of the keys in [0, 1]")
    return _planning.read_only(_planning.keep_fraction(deviation, kept))


@dataclass(frozen=True, eq=False)
class GaussianFit(_Frozen):
    """Normal laws fitted to rows by mean and standard deviation, and the quality of each fit.

    All arrays have the batch shape (...). Rows without a visible key have n = 0 and NaN elsewhere.
    """

    n: NDArray[np.int64]
    """Visible scores."""
    mean: NDArray[np.float64]
    """Mean of the visible scores, natural-log units, after scale and mask."""
    sigma: NDArray[np.float64]
    """Population standard deviation of the visible scores, natural-log units, to 1e-12."""
    ks_distance: NDArray[np.float64]
    """Kolmogorov-Smirnov distance of the row to N(mean, sigma^2), in [0, 1].

    As mean and sigma come from the same row, it is smaller than against a law known beforehand: the
    usual table of the Kolmogorov-Smirnov test does not apply (Lilliefors). 0 where sigma is 0.
    """
    skewness: NDArray[np.float64]
    """Third standardised central moment, 0 for a normal law; NaN where sigma is 0."""
    excess_kurtosis: NDArray[np.float64]
    """Fourth standardised central moment minus 3, 0 for a normal law; NaN where sigma is 0."""
    eps: NDArray[np.float64] | None = None
    """The budgets, shape () or (...), if given."""
    predicted: NDArray[np.float64] | None = None
    """k/n by the rule with the row's own sigma, if budgets were given."""
    actual: NDArray[np.float64] | None = None
    """k/n that `certk_rs.select` finds, if budgets were given."""


@_planning.default_arithmetic
def fit(
    scores: ArrayLike,
    *,
    eps: ArrayLike | None = None,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    indptr: ArrayLike | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
) -> GaussianFit:
    """Fit a normal law to each row; with budgets, compare the rule's k/n with the certified one.

    Args:
        scores: (..., n); dtypes and all row options as in `certk_rs.select`. With kind="probs" the
            logarithms of the weights are fitted.
        eps: Budget of dropped mass, 0 <= eps < 1: a number, or one per row, in the batch shape.
        kind: See `select`.
        scale: See `select`; sigma is that of the scaled scores.
        mask: See `select`. Where scores plus bias exceed 2**26 in size, the mean is relative to the
            row's largest score; nothing else depends on it.
        lengths: See `select`.
        indptr: See `select`.
        causal_offset: See `select`.
        threads: See `select`.

    Returns:
        A `GaussianFit`.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    rows, data, starts = as_native_rows(scores, mask, lengths, indptr, kind, scale, causal_offset)
    batch = batch_shape(data, starts)
    asked = found = None
    if eps is not None:
        asked = np.asarray(budgets(eps, data, starts))
        found = select(
            scores,
            asked,
            kind=kind,
            scale=scale,
            mask=mask,
            lengths=lengths,
            indptr=indptr,
            causal_offset=causal_offset,
            threads=threads,
        )
    n = np.zeros(math.prod(batch), np.int64)
    laws = {name: np.full(n.shape, np.nan) for name in _planning.MOMENTS}
    for part in _planning.visible_rows(rows, threads):
        n[part.at] = part.n
        for name, law in _planning.moments(part).items():
            laws[name][part.at] = law
    n, laws = n.reshape(batch), {name: law.reshape(batch) for name, law in laws.items()}
    if asked is None or found is None:
        return GaussianFit(n, **laws)
    predicted = _planning.keep_fraction(laws["sigma"], np.broadcast_to(asked, batch))
    actual = np.where(n, found.k / n, np.nan)
    return GaussianFit(n, **laws, eps=asked, predicted=predicted, actual=actual)


@dataclass(frozen=True)
class Plan:
    """Expected sizes of kept sets for rows of n iid N(mu, sigma^2) scores at the budget eps.

    These are expectations under a model, none of them a certificate.
    """

    n: int
    """Keys of a row."""
    sigma: float
    """Standard deviation of the scores, natural-log units."""
    eps: float
    """Budget of dropped mass."""
    threshold: float
    """c of the rule: keep the scores above their mean + c sigma."""
    asymptotic_fraction: float
    """k/n of the rule, exact as n grows at a fixed sigma."""
    asymptotic_k: float
    """n times that."""
    k: float
    """Mean of the minimal k over rows of this n (simulated; exact for n = 1 or sigma = 0)."""
    k_standard_error: float
    """Standard error of `k`; 0 where it is exact."""
    rows: int
    """Rows simulated; 0 where `k` is exact."""
    seed: int
    """Seed of the simulation."""
    freezing_sigma: float
    """sqrt(2 ln n), past which a row freezes onto few entries."""
    frozen: bool
    """True where sigma > sqrt(2 ln n): the asymptotic rule is then too low; trust `k`."""

    @property
    def scored_ratio(self) -> float:
        """Mean share of the keys that attention still has to read, k/n."""
        return self.k / self.n

    @property
    def speedup(self) -> float:
        """Expected ratio n/k of keys read.

        It is a ratio of times only if time is proportional to the keys read, choosing them costs
        nothing, and a row's kept keys are gathered as fast as adjacent ones.
        """
        return self.n / self.k

    @property
    def worthwhile(self) -> bool:
        """True where sparsifying pays: n/k is at least 1.25."""
        return self.speedup >= _PRUNE_A_LITTLE

    @property
    def advice(self) -> str:
        """One of "prune" (n/k >= 2), "prune a little" (n/k >= 1.25) and "leave dense"."""
        if self.speedup >= _PRUNE:
            return "prune"
        return "prune a little" if self.worthwhile else "leave dense"

    @property
    def reason(self) -> str:
        """The reason for the advice, in a sentence."""
        k = f"{self.k:.4g}" if self.k < 1000 else f"{self.k:.0f}"
        kept = f"{k} of {self.n} keys are needed on average"
        if not self.worthwhile:
            return f"{kept}: choosing and gathering them costs more than leaving out the rest saves"
        if self.frozen:
            return (
                f"{kept}; sigma is past sqrt(2 ln n) = {self.freezing_sigma:.4g}, so rows freeze "
                "onto few entries, and the asymptotic rule is too low"
            )
        return f"{kept}, if the scores are normal and their sigma is known"


@_planning.default_arithmetic
def plan(n: int, sigma: float, eps: float, *, seed: int = 0, threads: int | None = None) -> Plan:
    """Plan for rows of n iid N(mu, sigma^2) scores: the rule, and the mean of the minimal k.

    The mean is simulated from order statistics: a million random numbers, about a second for any n.
    The same seed and version of NumPy give the same plan.

    Args:
        n: Keys of a row, 1 <= n <= 2**53.
        sigma: Standard deviation of the scores, natural-log units, finite and >= 0.
        eps: Budget of dropped mass, 0 < eps < 1.
        seed: Any integer >= 0.
        threads: At least 1, or None; nothing depends on it.

    Returns:
        A `Plan` with the standard error of the simulated mean.

    Raises:
        CertkError: An argument outside its range.
    """
    n = _planning.count("n", n, 1, 2**53)
    sigma, eps = _planning.number("sigma", sigma), _planning.number("eps", eps)
    deviation, budget = _sigma_and_eps(sigma, eps)
    seed = _planning.count("seed", seed, 0)
    if threads is not None:
        _planning.count("threads", threads, 1)
    k, error, rows = _planning.expected_k(n, sigma, eps, seed)
    fraction = float(_planning.keep_fraction(deviation, budget))
    freezing = math.sqrt(2 * math.log(n))
    return Plan(
        n=n,
        sigma=sigma,
        eps=eps,
        threshold=float(deviation + _planning.quantile(budget)),
        asymptotic_fraction=fraction,
        asymptotic_k=n * fraction,
        k=k,
        k_standard_error=error,
        rows=rows,
        seed=seed,
        freezing_sigma=freezing,
        frozen=sigma > freezing,
    )


def _sigma_and_eps(
    sigma: ArrayLike, eps: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    deviation, budget = coerce.together("sigma", sigma, "eps", eps)
    _planning.need_sigma(deviation)
    _planning.need_eps(budget)
    return deviation, budget
