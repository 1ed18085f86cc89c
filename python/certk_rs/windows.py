"""Windows of n^C keys, and how many entries of a row carry weight.

Source: arXiv 2404.02690. Its first version is Deng, Song, Yang, "Attention is Naturally Sparse with
Gaussian Distributed Input"; later ones are Deng, Song, Xiong, Yang, "How Sparse Attention
Approximates Exact Attention? Your Attention is Naturally n^C-Sparse", with other theorems. Their
claims (a window of n^C keys has error O(n^-C), one of o(log n) keys cannot have vanishing error)
are about their own model of inputs and weights. Nothing here relies on them: these functions
compute, measure and fit, and iid Gaussian scores at a fixed sigma need k proportional to n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _native
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

    def __post_init__(self) -> None:
        """Judge the numbers."""
        alpha, exponent = _native.window_policy(self.alpha, self.C)
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "C", exponent)

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
        sizes = _native.window_sizes(self.alpha, self.C, counts).reshape(counts.shape)
        sizes.setflags(write=False)
        return sizes


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
    (alpha, exponent), alpha_interval, interval, residual = _native.fit_window(x, y, level)
    return WindowFit(
        alpha, exponent, alpha_interval, interval, float(level), residual, points=x.size
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

    Equal to `count`, unless a row hits the threshold to some 27 digits without being on it, or an
    additive mask beyond 2**26 blurs the scores.
    """
    n: NDArray[np.int64]
    """Visible entries."""
    ineffective_fraction: NDArray[np.float64] = field(init=False)
    """1 - count/n; 0 for a row without visible entries."""

    def __post_init__(self) -> None:
        """Add what follows from the counts."""
        fraction = np.zeros(self.n.shape)
        np.divide(self.n - self.count, self.n, out=fraction, where=self.n > 0)
        object.__setattr__(self, "ineffective_fraction", fraction)
        super().__post_init__()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by what the constructor takes."""
        return type(self), (self.eps, self.count, self.count_upper, self.n)


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
    """Count the entries whose probability is at least eps, and say what is left (arXiv 2404.02690).

    Decided rigorously: in float64 with a margin for all rounding, where that leaves it open with
    some 105 bits, and exactly where equal scores or stored probabilities hit eps.

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
    columns = _native.effective_entries(rows, eps, threads)
    batch = batch_shape(data, starts)
    count, upper, n = (column.reshape(batch) for column in columns)
    return EffectiveEntries(float(eps), count, upper, n)


def effective_entries(
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
) -> NDArray[np.int64]:
    """Count the entries of each row whose probability is at least eps (arXiv 2404.02690).

    The `count` of `effective`, which also tells the share that is not effective: proven entries
    only, which is all of them but for near-hits to 27 digits. Arguments and errors as there.

    Returns:
        int64 in the batch shape (...), never above 1 / eps.
    """
    return effective(
        scores,
        eps,
        kind=kind,
        scale=scale,
        mask=mask,
        lengths=lengths,
        indptr=indptr,
        causal_offset=causal_offset,
        threads=threads,
    ).count


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
    """Return the participation ratio 1 / sum P_i^2 of each row: how many entries share the weight.

    Between 1 (one entry has it all) and the number of visible entries (all equal); attention
    collapses where it stays O(1) as n grows. Arguments and errors as in `effective`.

    Returns:
        float64 of the batch shape, relative error below 4e-12; 0 for a row without visible entries.
    """
    rows, data, starts = as_native_rows(scores, mask, lengths, indptr, kind, scale, causal_offset)
    ratio = _native.participation(rows, threads).reshape(batch_shape(data, starts))
    ratio.setflags(write=False)
    return ratio


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
    entries = float(coerce.per_row_floats("B", B, ()))
    if not 0.0 <= entries < math.inf:
        raise CertkError(f"B is {entries}; pass a finite standard deviation >= 0")
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
    with np.errstate(over="ignore"), _native.DefaultFloats():
        # Powers of two keep squares of large or small weights in range and change no digit.
        (q, q_size), (k, k_size) = _scaled(q), _scaled(k)
        # A slice of W_Q at a time: the product of a wide model's weights is not held at once.
        for start in range(0, q.shape[-2], 512):
            part = q[..., start : start + 512, :] @ np.swapaxes(k, -1, -2)
            squares += np.square(part).sum(axis=(-2, -1))
        r = np.asarray(np.ldexp(entries * np.sqrt(squares) * entries, q_size + k_size))
    r.setflags(write=False)
    return r


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


def predict(n: int, R: float, delta: float, eps: float) -> Sparsity:  # noqa: N803
    """Return how sparse a row of n iid N(mu, R^2) scores is, from R, n and delta alone.

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
    delta, level = _share("delta", delta), _share("eps", eps)
    WindowPolicy(1.0, 0.5).size(n)
    n, scale = int(n), float(coerce.per_row_floats("R", R, ()))
    if not 0.0 <= scale < math.inf:
        raise CertkError(f"R is {scale:g}; pass a finite standard deviation >= 0")
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


def _share(name: str, value: float) -> float:
    share = float(coerce.per_row_floats(name, value, ()))
    if not 0.0 < share < 1.0:
        raise CertkError(f"{name} is {share:g}; pass a number above 0 and below 1")
    return share


def _quantile(share: float) -> float:
    """Where Phi_c is `share`."""
    return -float(_native.threshold(np.zeros(1), np.array([share]))[0])


def _upper_tail(x: float) -> float:
    """Phi_c(x)."""
    share = float(_native.keep_fraction(np.array([abs(x)]), np.array([0.5]))[0])
    return share if x >= 0 else 1.0 - share


def _least_mean_weight(n: int, scale: float, delta: float) -> float:
    """Logarithm of what the mean of n weights e^(s - mu) is at least, with probability 1 - delta.

    Weights above a cut count as 0. One cut is taken for given arguments, whatever the row is.
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
    """A number that a binomial (n, p) variate exceeds with probability at most delta (Chernoff)."""
    if p <= 0.0 or p >= 1.0:
        return 0 if p <= 0.0 else n

    def unlikely(count: int) -> bool:
        """Whether `count` or more is: P(X >= a n) <= e^(-n KL(a || p)) for a > p."""
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


def effective_exponent(n: int, sigma: float, eps: float) -> float:
    """Return ln k / ln n = 1 + ln Phi_c(c) / ln n of the Gaussian rule at a fixed sigma.

    It tends to 1: at a fixed sigma k is proportional to n.

    Args:
        n: Keys, >= 2.
        sigma: Standard deviation of the scores, natural-log units, finite and >= 0.
        eps: Budget of dropped mass, 0 < eps < 1.

    Raises:
        CertkError: An argument outside its range.
    """
    return _native.effective_exponent(n, sigma, eps)


def log_log_slope(n: int, sigma: float, eps: float) -> float:
    """Return d ln k / d ln n of the Gaussian rule where sigma grows as beta sqrt(2 ln n).

    It is 1 - [phi(c) / Phi_c(c)] sigma / (2 ln n) with c = sigma + Phi^-1(eps): what a log-log fit
    sees near n. Arguments and errors as in `effective_exponent`.
    """
    return _native.log_log_slope(n, sigma, eps)


def _points(name: str, value: ArrayLike) -> NDArray[np.float64]:
    array = coerce.floats(name, value)
    if array.ndim != 1:
        raise CertkError(f"{name} has shape {array.shape}; pass one number per point, (points,)")
    return array


def _weights(name: str, value: ArrayLike) -> NDArray[np.float64]:
    array = coerce.floats(name, value)
    if array.ndim < 2:
        raise CertkError(f"{name} has shape {array.shape}; pass (..., d, d_head)")
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        place = [int(i) for i in bad[0]]
        raise CertkError(f"{name}{place} is {array[tuple(place)]}; weights must be finite")
    return array


def _scaled(weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    size = int(np.frexp(np.abs(weights).max(initial=0.0))[1])
    return np.ldexp(weights, -size), size
