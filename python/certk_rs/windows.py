"""Windows of n^C keys, and counts of the entries of a row that carry weight.

Source: arXiv 2404.02690. Its first version is Deng, Song, Yang, "Attention is Naturally Sparse with
Gaussian Distributed Input"; later ones are Deng, Song, Xiong, Yang, "How Sparse Attention
Approximates Exact Attention? Your Attention is Naturally n^C-Sparse", with other theorems. Their
claims (a window of n^C keys has error O(n^-C), one of o(log n) keys cannot have vanishing error)
are about their own model of inputs and weights. Nothing here relies on them: these functions
compute, measure and fit, and iid Gaussian scores at a fixed sigma need k proportional to n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _planning
from ._arrays import coerce
from ._arrays.rows import as_native_rows, batch_shape
from .errors import CertkError
from .results import _Frozen

Interval = tuple[float, float]


@dataclass(frozen=True)
class WindowPolicy:
    """Keep ceil(alpha n^C) of n keys; alpha > 0 and 0 < C < 1, or a CertkError."""

    alpha: float
    C: float

    @_planning.default_arithmetic
    def __post_init__(self) -> None:
        """Judge the numbers."""
        alpha, exponent = _planning.number("alpha", self.alpha), _planning.number("C", self.C)
        _planning.need("alpha", alpha, 0 < alpha < math.inf, "pass a finite factor > 0")
        _planning.need_share("C", exponent, "pass an exponent strictly between 0 and 1")
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "C", exponent)

    @_planning.default_arithmetic
    def size(self, n: ArrayLike) -> NDArray[np.int64]:
        """Return ceil(alpha n^C), at least 1 and at most n.

        A value that exceeds an integer by no more than the rounding of alpha, C and the power
        explains counts as that integer: 0.1 * 10000**0.5 is 10.

        Args:
            n: Numbers of keys, integers >= 1, of any shape.

        Returns:
            int64 of that shape, 0-d for a number.

        Raises:
            CertkError: An n below 1, or not an integer.
        """
        counts = coerce.integers("n", n)
        _planning.need("n", counts, counts >= 1, "pass a number of keys of at least 1")
        value = self.alpha * counts.astype(np.float64) ** self.C
        # Half a unit of alpha, of the power, of n and of the product, and of C, counted ln n times.
        doubt = value * (4 + np.log(counts)) * np.finfo(np.float64).eps
        whole = np.floor(np.minimum(value, counts))
        sizes = (whole + (value - whole > doubt)).astype(np.int64)
        return _planning.read_only(np.where(value >= counts, counts, np.clip(sizes, 1, counts)))


@dataclass(frozen=True)
class WindowFit:
    """A law k = alpha n^C fitted to measured pairs by least squares of ln k on ln n.

    Each interval alone covers its parameter with probability `level` if the residuals of ln k are
    independent normal variates of one variance; two lengths of one text are not independent.
    """

    alpha: float
    """The factor."""
    C: float
    """The exponent; unlike a policy's it may be any number."""
    alpha_interval: Interval
    """Interval of alpha (Student's t, points - 2 degrees of freedom)."""
    C_interval: Interval
    """Interval of C, likewise."""
    level: float
    """Confidence of each interval."""
    residual: float
    """Standard deviation of ln k about the line."""
    points: int
    """Pairs."""

    def policy(self) -> WindowPolicy:
        """Return the fitted law as a policy; a CertkError unless 0 < C < 1."""
        return WindowPolicy(self.alpha, self.C)


@_planning.default_arithmetic
def fit(n: ArrayLike, k: ArrayLike, *, level: float = 0.95) -> WindowFit:
    """Fit k = alpha n^C to measured pairs.

    Args:
        n: (points,) numbers of keys, >= 1; at least three, two of them different.
        k: (points,) kept keys, > 0, also fractional (means).
        level: Confidence of each interval, strictly between 0 and 1.

    Returns:
        A `WindowFit`.

    Raises:
        CertkError: Lengths that differ, too few pairs, or a number outside its range.
    """
    x, y = (_points(name, value) for name, value in (("n", n), ("k", k)))
    level, points = _planning.number("level", level), x.size
    if y.size != points:
        raise CertkError(f"k has {y.size} entries but {points} are needed; pass one k for each n")
    _planning.need("n", x, (x >= 1) & (x < math.inf), "pass finite numbers of keys >= 1")
    _planning.need("k", y, (y > 0) & (y < math.inf), "pass finite numbers of kept keys > 0")
    _planning.need_share("level", level, "pass a confidence strictly between 0 and 1")
    distinct = len(np.unique(x))
    if points < 3 or distinct < 2:
        raise CertkError(
            f"n is {points} values, {distinct} of them distinct; a line with intervals needs three "
            "pairs or more, with at least two different n"
        )
    x, y = np.log(x), np.log(y)
    x_mean, y_mean = x.mean(), y.mean()
    x, y = x - x_mean, y - y_mean
    spread = (x * x).sum()
    exponent = (x * y).sum() / spread
    variance = ((y - exponent * x) ** 2).sum() / (points - 2)
    t = _planning.student(level, points - 2)
    intercept = y_mean - exponent * x_mean
    off = t * np.sqrt(variance * (1 / points + x_mean**2 / spread))
    slope_off = t * np.sqrt(variance / spread)
    return WindowFit(
        alpha=float(np.exp(intercept)),
        C=float(exponent),
        alpha_interval=(float(np.exp(intercept - off)), float(np.exp(intercept + off))),
        C_interval=(float(exponent - slope_off), float(exponent + slope_off)),
        level=level,
        residual=float(np.sqrt(variance)),
        points=points,
    )


@dataclass(frozen=True, eq=False)
class EffectiveEntries(_Frozen):
    """Entries of probability at least eps in each row; all arrays have the batch shape (...)."""

    eps: float
    """The level."""
    count: NDArray[np.int64]
    """Entries with P_i >= eps, proven for the softmax of exactly the stored scores; <= 1/eps."""
    count_upper: NDArray[np.int64]
    """Entries not proven to be below eps.

    Equal to `count`, unless a row hits the threshold to some 40 digits without being on it, or an
    additive mask beyond 2**26 blurs the scores.
    """
    n: NDArray[np.int64]
    """Visible entries."""

    @property
    def ineffective_fraction(self) -> NDArray[np.float64]:
        """1 - count/n, (...); 0 for a row without visible entries."""
        return _planning.read_only((self.n - self.count) / np.maximum(self.n, 1))


@_planning.default_arithmetic
def effective(
    scores: ArrayLike,
    eps: float,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    indptr: ArrayLike | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
) -> EffectiveEntries:
    """Count the entries whose probability is at least eps, and the others (arXiv 2404.02690).

    Decided in float64 with a margin for all rounding, and what that leaves open in 50 to 700
    decimal digits. Hits of equal scores and of stored probabilities are decided exactly.

    Args:
        scores: (..., n); dtypes and all row options as in `certk_rs.select`.
        eps: The level, 0 < eps < 1.
        kind: See `select`.
        scale: See `select`.
        mask: See `select`.
        lengths: See `select`.
        indptr: See `select`.
        causal_offset: See `select`.
        threads: See `select`.

    Returns:
        An `EffectiveEntries`.

    Raises:
        CertkError: Bad input; the message names the argument and the place.
    """
    rows, data, starts = as_native_rows(scores, mask, lengths, indptr, kind, scale, causal_offset)
    eps = _planning.number("eps", eps)
    _planning.need_eps(eps)
    batch = batch_shape(data, starts)
    count, upper, n = np.zeros((3, math.prod(batch)), np.int64)
    for part in _planning.visible_rows(rows, threads):
        n[part.at] = part.n
        count[part.at], upper[part.at] = _planning.effective_counts(part, eps)
    return EffectiveEntries(eps, count.reshape(batch), upper.reshape(batch), n.reshape(batch))


@_planning.default_arithmetic
def participation(
    scores: ArrayLike,
    *,
    kind: str = "logits",
    scale: float = 1.0,
    mask: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    indptr: ArrayLike | None = None,
    causal_offset: int | None = None,
    threads: int | None = None,
) -> NDArray[np.float64]:
    """Return the participation ratio 1 / sum P_i^2 of each row, an effective number of entries.

    Between 1 (one entry has it all) and the number of visible entries (all equal); attention
    collapses where it stays O(1) as n grows. Arguments and errors as in `effective`.

    Returns:
        float64 of the batch shape, relative error below 1e-11; 0 for a row without visible entries.
    """
    rows, data, starts = as_native_rows(scores, mask, lengths, indptr, kind, scale, causal_offset)
    batch = batch_shape(data, starts)
    ratio = np.zeros(math.prod(batch))
    for part in _planning.visible_rows(rows, threads):
        weights = np.exp(part.log_weights)
        shared = part.sums(weights) ** 2 / part.sums(weights * weights)
        ratio[part.at] = np.clip(shared, 1.0, part.n)
    return _planning.read_only(ratio.reshape(batch))


@_planning.default_arithmetic
def scale_r(B: float, w_q: ArrayLike, w_k: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
    """Return R = B^2 ||W_Q W_K^T||_F, the scale of the scores (arXiv 2404.02690).

    R is the standard deviation of x^T W_Q W_K^T y when the entries of x and y are independent with
    mean 0 and standard deviation B, before any division by sqrt(d). For entries that are bounded by
    B it is no bound.

    Args:
        B: Standard deviation of the entries, finite and >= 0.
        w_q: (..., d, d_head): queries are x @ w_q. A torch Linear stores the transpose.
        w_k: (..., d', d_head): keys are y @ w_k; leading axes broadcast with those of w_q.

    Returns:
        float64 of the broadcast leading axes, natural-log units. Relative error about 1e-15 d_head
        ||W_Q||_F ||W_K||_F / ||W_Q W_K^T||_F.

    Raises:
        CertkError: A B or an entry that is not finite, or shapes that do not fit.
    """
    entries = _deviation("B", B)
    q, k = _weights("w_q", w_q), _weights("w_k", w_k)
    if q.shape[-1] != k.shape[-1]:
        raise CertkError(
            f"w_k has shape {k.shape}, whose last axis must be that of w_q, {q.shape[-1]}: pass "
            "both as (..., d, d_head)"
        )
    try:
        lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    except ValueError:
        raise CertkError(
            f"w_k has shape {k.shape}, whose leading axes do not broadcast with those of w_q, "
            f"{q.shape}"
        ) from None
    squares = np.zeros(lead)
    # Powers of two keep squares of large or small weights in range and change no digit.
    (q, q_size), (k, k_size) = _scaled(q), _scaled(k)
    # A slice of W_Q at a time: the product of a wide model's weights is not held at once.
    for start in range(0, q.shape[-2], 512):
        part = q[..., start : start + 512, :] @ np.swapaxes(k, -1, -2)
        squares += np.square(part).sum(axis=(-2, -1))
    return _planning.read_only(np.ldexp(entries * np.sqrt(squares) * entries, q_size + k_size))


@dataclass(frozen=True)
class Sparsity:
    """Bounds for the weights of n iid N(mu, R^2) scores, each of probability 1 - delta.

    Statements of a model, none of them about a given row; R is the sigma of `gaussian`.
    """

    n: int
    """Keys of a row."""
    R: float
    """Standard deviation of the scores, natural-log units."""
    delta: float
    """Probability that `largest_weight` fails for a row, and that `effective_upper` does.

    Both hold with probability at least 1 - 1.5 delta: they share one of their two events.
    """
    eps: float
    """The level: an entry is effective if P_i >= eps."""
    largest_weight: float
    """No entry exceeds it: a row is (eps, 0)-sparse at every level above. At most 1."""
    effective_upper: int
    """At most so many entries are effective."""
    effective_expected: float
    """n Phi_c((ln(n eps) + R^2/2) / R): their mean for long rows, R < sqrt(2 ln n); no promise."""


@_planning.default_arithmetic
def predict(n: int, R: float, delta: float, eps: float) -> Sparsity:  # noqa: N803
    """Bound the weights of a row of n iid N(mu, R^2) scores, from R, n and delta alone.

    The route is that of arXiv 2404.02690 (scores concentrate at the scale R, so weights do), the
    constants are ours. With probability 1 - delta/2 the sum of weights is at least what the mean
    of the scores says (Jensen) or, where that is more, the mean of the weights up to a cut
    (Maurer's inequality for sums of positive variates, 2003). With probability 1 - delta/2 no score
    is above mu + R q, Phi_c(q) = delta / (2 n), which gives `largest_weight`; and with probability
    1 - delta/2 the number of scores above the level, a binomial variate, is at most what Chernoff's
    bound says, which gives `effective_upper`. `scale_r` has R from weights and inputs; divide it by
    sqrt(d) where the scores are.

    Args:
        n: Keys, 1 <= n <= 2**53.
        R: Standard deviation of the scores, natural-log units, finite and >= 0.
        delta: Probability of failure, 0 < delta < 1.
        eps: Level, 0 < eps < 1.

    Raises:
        CertkError: An argument outside its range.
    """
    delta, level = _planning.number("delta", delta), _planning.number("eps", eps)
    _planning.need_share("delta", delta, "pass a probability strictly between 0 and 1")
    _planning.need_share("eps", level, "pass a level strictly between 0 and 1")
    n, scale = _planning.count("n", n, 1, 2**53), _deviation("R", R)
    if scale == 0.0:
        largest = 1 / n
        if Fraction(largest) < Fraction(1, n):
            largest = math.nextafter(largest, 1.0)
        count = n if level * n <= 1 else 0
        return Sparsity(n, scale, delta, level, largest, count, float(count))
    least = _least_mean_weight(n, scale, delta / 2)
    reach = _quantile(delta / (2 * n)) * scale
    # Raised by more than rounding takes from it.
    largest = math.exp(min(0.0, reach - least - math.log(n) + 1e-12))
    among = _upper_tail((math.log(n * level) + least) / scale)
    expected = n * _upper_tail((math.log(n * level) + scale * scale / 2) / scale)
    most = min(n, math.floor(1 / level), _binomial_upper(n, among, delta / 2))
    return Sparsity(n, scale, delta, level, largest, 0 if level > largest else most, expected)


def _quantile(share: float) -> float:
    """Return where Phi_c is `share`."""
    return -float(_planning.quantile(np.array(share)))


def _upper_tail(x: float) -> float:
    """Return Phi_c(x)."""
    return float(_planning.survival(np.array(x)))


def _least_mean_weight(n: int, scale: float, delta: float) -> float:
    """Return ln of a lower bound on the mean of n weights e^(s - mu), of probability 1 - delta.

    Weights above a cut count as 0. The cut depends on the arguments, not on the row.
    """
    least = -_quantile(delta) * scale / math.sqrt(n)
    if scale > 30.0:  # a mean that no row of at most 2^53 keys comes near
        return least
    growth = math.exp(scale * scale / 2)
    loss = growth * math.sqrt(2 * math.log(1 / delta) / n)
    cuts = [scale * i / 16 for i in range(8, 33)]
    means = [
        _upper_tail(scale - cut) - loss * math.sqrt(_upper_tail(2 * scale - cut)) for cut in cuts
    ]
    most = max(means)
    return max(least, scale * scale / 2 + math.log(most)) if most > 0 else least


def _binomial_upper(n: int, p: float, delta: float) -> int:
    """Return a bound that a binomial (n, p) variate exceeds with probability <= delta."""
    if p <= 0.0 or p >= 1.0:
        return 0 if p <= 0.0 else n

    def unlikely(count: int) -> bool:
        """Apply P(X >= a n) <= e^(-n KL(a || p)), a > p, to `count` or more."""
        a = count / n
        if a <= p:
            return False
        rest = (1 - a) * math.log((1 - a) / (1 - p)) if a < 1 else 0.0
        return n * (a * math.log(a / p) + rest) >= math.log(1 / delta)

    low, high = 0, n + 1
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle <= n and unlikely(middle) else (middle, high)
    return min(high - 1, n) if high <= n else n


def _deviation(name: str, value: float) -> float:
    deviation = _planning.number(name, value)
    good = 0 <= deviation < math.inf
    _planning.need(name, deviation, good, "pass a finite standard deviation >= 0")
    return deviation


def _points(name: str, value: ArrayLike) -> NDArray[np.float64]:
    array = coerce.floats(name, value)
    if array.ndim != 1:
        raise CertkError(f"{name} has shape {array.shape}; pass one number per point, (points,)")
    return array


def _weights(name: str, value: ArrayLike) -> NDArray[np.float64]:
    array = coerce.floats(name, value)
    if array.ndim < 2:
        raise CertkError(f"{name} has shape {array.shape}; pass (..., d, d_head)")
    _planning.need(name, array, np.isfinite(array), "weights must be finite")
    return array


def _scaled(weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    size = int(np.frexp(np.abs(weights).max(initial=0.0))[1])
    return np.ldexp(weights, -size), size
