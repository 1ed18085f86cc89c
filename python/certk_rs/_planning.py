"""Laws and measurements behind `gaussian` and `windows`: they plan, and certify no kept set.

The normal law comes from `math.erfc` and `statistics.NormalDist`. Functions that compute run under
`default_arithmetic`, so that a host that flushes subnormal numbers gets the same answers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from statistics import NormalDist
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import _native
from ._arrays import coerce
from .errors import CertkError

if TYPE_CHECKING:
    from ._native import _Rows

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_normal = NormalDist()


def default_arithmetic(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function under default floating-point modes, without NumPy's warnings."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _native.DefaultFloats(), np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run


_Array = TypeVar("_Array", bound=np.generic)


def read_only(values: NDArray[_Array]) -> NDArray[_Array]:
    """Return an array, 0-d for a number, that nobody writes to."""
    answer = np.asarray(values)
    answer.setflags(write=False)
    return answer


# -------------------------------------------------------------------------------------- arguments


def count(name: str, value: object, least: int, most: int = 2**63 - 1) -> int:
    """Return an integer of any type, from `least` to `most`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise CertkError(f"{name} is {_shown(value)}; pass an integer") from None
    if isinstance(value, bool) or not least <= number <= most:
        raise CertkError(f"{name} is {_shown(value)}; pass an integer from {least} to {most}")
    return number


def number(name: str, value: object) -> float:
    """Return one real number that float64 holds."""
    if not isinstance(value, int | float | np.generic | np.ndarray):
        raise CertkError(f"{name} is {_shown(value)}; pass a number")
    array = coerce.floats(name, value)
    if array.ndim:
        raise CertkError(f"{name} has shape {array.shape}; pass one number")
    return float(array)


def need(
    name: str, values: Floats | Counts | float, good: NDArray[np.bool_] | bool, remedy: str
) -> None:
    """Raise a `CertkError` that names the first place where `good` is False."""
    bad = np.argwhere(~np.asarray(good))
    if len(bad):
        place = [int(i) for i in bad[0]]
        value = np.asarray(values)[tuple(place)].item()
        at = f"[{', '.join(map(str, place))}]" if place else ""
        shown = "NaN" if value != value else str(value).removesuffix(".0")
        raise CertkError(f"{name}{at} is {shown}; {remedy}")


def need_sigma(sigma: Floats | float) -> None:
    """Refuse a standard deviation that is negative or not finite."""
    good = np.isfinite(sigma) & np.greater_equal(sigma, 0)
    need("sigma", sigma, good, "pass a finite standard deviation >= 0, in natural-log units")


def need_share(name: str, share: Floats | float, remedy: str) -> None:
    """Refuse a share that is not strictly between 0 and 1."""
    need(name, share, np.greater(share, 0) & np.less(share, 1), remedy)


def need_eps(eps: Floats | float) -> None:
    """Refuse a budget or a level outside (0, 1)."""
    need_share("eps", eps, "pass a tail mass strictly between 0 and 1")


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"a {type(value).__name__}"


# ----------------------------------------------------------------------------------- normal law


def survival(x: Floats) -> Floats:
    """Return P(Z > x), with relative error about 1e-16 x^2 where x is positive."""
    scaled = (np.ravel(x) * math.sqrt(0.5)).tolist()
    return 0.5 * np.fromiter(map(math.erfc, scaled), float, len(scaled)).reshape(np.shape(x))


def quantile(p: Floats) -> Floats:
    """Return x with P(Z <= x) = p; p in [0, 1], and -inf and inf at its ends."""
    inside = np.clip(np.ravel(p), math.ulp(0.0), 1 - 2.0**-53).tolist()
    found = np.fromiter(map(_normal.inv_cdf, inside), float, len(inside)).reshape(np.shape(p))
    return np.where(p == 0.0, -np.inf, np.where(p == 1.0, np.inf, found))


def keep_fraction(sigma: Floats, share: Floats) -> Floats:
    """Return Phi_c(sigma + Phi^-1(share)), exactly 1 - share where sigma is 0."""
    return np.where(sigma == 0.0, 1.0 - share, survival(sigma + quantile(share)))


def student(level: float, freedom: int) -> float:
    """Return t with P(|T| <= t) = level for Student's T with `freedom` degrees.

    With t = sqrt(freedom) tan(angle) the probability is a finite sum (Abramowitz and Stegun 26.7.3
    and 26.7.4). It is concave in the angle, so Newton's steps from 0 never pass the root.
    """
    odd = freedom % 2
    j = np.arange(1, freedom // 2)
    ratios = 2 * j / (2 * j + 1) if odd else (2 * j - 1) / (2 * j)
    log_ratio = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    slope = 2 / math.sqrt(math.pi) * math.exp(log_ratio)
    angle = 0.0
    for _ in range(200):
        sine, cosine = math.sin(angle), math.cos(angle)
        terms = 1.0 + float(np.cumprod(ratios * cosine**2).sum())
        if odd:
            inside = 2 / math.pi * (angle + (sine * cosine * terms if freedom > 1 else 0.0))
        else:
            inside = sine * terms
        step = (level - inside) / (slope * cosine ** (freedom - 1))
        if step <= 1e-16 * angle:
            break
        angle = min(angle + step, 0.5 * angle + 0.25 * math.pi)
    return math.sqrt(freedom) * math.tan(angle)


# --------------------------------------------------------------------------------- simulated rows

# Order statistics that are drawn one by one; beyond them a run is 1/_PART of its rank.
_SINGLE, _PART = 1024, 64
# Draws that a plan may cost, and those of one step.
_DRAWS, _STEP = 1 << 20, 1 << 17
_ROWS = (256, 16384)


def expected_k(n: int, sigma: float, eps: float, seed: int) -> tuple[float, float, int]:
    """Return the mean of the minimal k over rows of n normal scores, its standard error, the rows.

    In descending order the uniform variates of a row are S_i / S_(n+1), partial sums of exponential
    variates (Renyi), so that the largest scores come first. Past the first 1024 of them a gamma
    variate steps over a run of a 64th of its rank, whose mean weight is that of two Gauss points.
    """
    if n == 1 or sigma == 0.0:
        return float(max(n - math.floor(Fraction(eps) * n), 1)), 0.0, 0
    sizes = [1] * min(n, _SINGLE)
    done = len(sizes)
    while done < n:
        sizes.append(min(done // _PART, n - done))
        done += sizes[-1]
    rows = min(max(_DRAWS // len(sizes), _ROWS[0]), _ROWS[1])
    draws = np.random.default_rng(seed)
    shapes = np.array([*sizes, 1], float)
    step = max(_STEP // len(shapes), 1)
    found = [
        _minimal_k(shapes[:-1], sigma, eps, draws.standard_gamma(shapes, (some, len(shapes))))
        for some in (min(step, rows - at) for at in range(0, rows, step))
    ]
    k = np.concatenate(found)
    return float(k.mean()), float(k.std(ddof=1) / math.sqrt(rows)), rows


def _minimal_k(sizes: Floats, sigma: float, eps: float, steps: Floats) -> Floats:
    """Return the minimal k of simulated rows (rows,) from gamma variates (rows, runs + 1)."""
    ends = np.cumsum(steps, axis=1)
    ends = ends[:, :-1] / ends[:, -1:]
    single = min(len(sizes), _SINGLE)
    scores = -quantile(ends[:, :single])
    largest = scores[:, :1]
    masses = np.empty_like(ends)
    masses[:, :single] = np.exp(sigma * (scores - largest))
    start, end = ends[:, single - 1 : -1], ends[:, single:]
    centre, offset = 0.5 * (start + end), 0.5 * (end - start) / math.sqrt(3)
    points = [np.exp(sigma * (-quantile(centre + side * offset) - largest)) for side in (-1, 1)]
    masses[:, single:] = 0.5 * sizes[single:] * (points[0] + points[1])
    # From the lightest run on: those that are dropped whole, and part of the next one.
    masses, sizes = masses[:, ::-1], sizes[::-1]
    tails = np.cumsum(masses, axis=1)
    budget = eps * tails[:, -1:]
    whole = np.minimum((tails <= budget).sum(axis=1, keepdims=True), len(sizes) - 1)
    dropped = np.concatenate([[0.0], np.cumsum(sizes)])[whole]
    mass, size = np.take_along_axis(masses, whole, 1), sizes[whole]
    rest = budget - (np.take_along_axis(tails, whole, 1) - mass)
    part = np.where(size > 1, np.floor(np.clip(rest / mass, 0, 1) * size), 0)
    return np.asarray(np.maximum(sizes.sum() - dropped - part, 1.0)[:, 0])


# ----------------------------------------------------------------------------------- visible rows


@dataclass(frozen=True, eq=False)
class VisibleRows:
    """Visible scores of some rows that have any, row after row.

    `stored` (scores,) times `scales` (rows,) is in natural-log units; where the scale is 0,
    `stored` holds weights. A score may lie `radii` (rows,) from the real one.
    """

    at: Counts
    """Position of each row among all, (rows,)."""
    n: Counts
    """Visible scores of each row, (rows,)."""
    stored: Floats
    scales: Floats
    radii: Floats

    @functools.cached_property
    def starts(self) -> Counts:
        """Position of each row's first score."""
        return np.cumsum(self.n) - self.n

    def spread(self, per_row: NDArray[_Array]) -> NDArray[_Array]:
        """Repeat a number per row for each of its scores."""
        return np.repeat(per_row, self.n)

    def sums(self, values: NDArray[_Array]) -> NDArray[_Array]:
        """Sum values over each row."""
        return np.asarray(np.add.reduceat(values, self.starts))

    def largest(self, values: Floats) -> Floats:
        """Return the largest of each row's values."""
        return np.asarray(np.maximum.reduceat(values, self.starts))

    @functools.cached_property
    def logs(self) -> tuple[Floats, Floats]:
        """Scores as natural logarithms up to a factor >= 0, and that factor, (scores,) each."""
        scales = self.spread(self.scales)
        weights = scales == 0.0
        logs = np.where(weights, np.log(np.where(weights, self.stored, 1.0)), self.stored)
        return logs, np.where(weights, 1.0, scales)

    @functools.cached_property
    def log_weights(self) -> Floats:
        """Natural logarithms of the weights relative to the largest of their row, finite."""
        logs, scales = self.logs
        # Halves, because a difference of two float64 numbers can overflow.
        halves = 0.5 * logs - self.spread(0.5 * self.largest(logs))
        return np.maximum(halves * scales * 2.0, -1e300)


def visible_rows(rows: _Rows, threads: int | None) -> Iterator[VisibleRows]:
    """Read rows some 2^20 scores at a time; rows without a visible score are left out."""
    first = 0
    while True:
        stored, n, scales, radii = _native.visible_rows(rows, first, threads)
        if not n.size:
            return
        seen = np.flatnonzero(n)
        if seen.size:
            yield VisibleRows(first + seen, n[seen], stored, scales[seen], radii[seen])
        first += n.size


def effective_counts(rows: VisibleRows, eps: float) -> tuple[Counts, Counts]:
    """Return per row how many weights are proven to be at least eps, and not proven to be below."""
    logs = rows.log_weights
    distance = logs - rows.spread(np.log(rows.sums(np.exp(logs)))) - math.log(eps)
    # Rounding of logarithms and of exponents, of sums in any order, and of the scores themselves.
    margin = 1e-11 + 1e-15 * np.abs(logs) + rows.spread(2.0**-52 * rows.n + 2 * rows.radii)
    above, not_below = distance > margin, distance >= -margin
    counts, uppers = rows.sums(above.astype(np.int64)), rows.sums(not_below.astype(np.int64))
    for row in np.flatnonzero((counts < uppers) & (rows.radii == 0)):
        part = slice(rows.starts[row], rows.starts[row] + rows.n[row])
        values, times = np.unique(rows.stored[part], return_counts=True)
        for own in np.unique(rows.stored[part][not_below[part] & ~above[part]]):
            holds = _at_least(values, times, own, rows.scales[row], eps)
            same = times[values == own][0]
            counts[row] += same if holds else 0
            uppers[row] -= same if holds is False else 0
    return counts, uppers


def _at_least(values: Floats, times: Counts, own: float, scale: float, eps: float) -> bool | None:
    """Return whether the weight of `own` is at least eps of all weights; None if undecided."""
    if scale == 0.0:
        total = sum(Fraction(v) * t for v, t in zip(values.tolist(), times.tolist(), strict=True))
        return bool(Fraction(float(own)) >= Fraction(eps) * total)
    others = values != own
    # P >= eps is eps (same + rest) <= 1; `rest` sums e^(scale (other - own)) over other scores.
    gap = 1 / Fraction(eps) - int(times[~others][0])
    if gap <= 0 or not others.any():
        return bool(gap >= 0 and not others.any())
    factor, here = Decimal(float(scale)), Decimal(float(own))
    for digits in (50, 700):
        if digits > 50 and len(values) > 4096:
            break
        exact = Context(prec=digits, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
        rest = Decimal(0)
        for v, t in zip(values[others].tolist(), times[others].tolist(), strict=True):
            x = exact.multiply(factor, exact.subtract(Decimal(v), here))
            rest = exact.add(rest, exact.multiply(Decimal(t), exact.exp(x)))
        line = exact.divide(Decimal(gap.numerator), Decimal(gap.denominator))
        doubt = exact.multiply(line, Decimal(10) ** (10 - digits))
        if rest < exact.subtract(line, doubt):
            return True
        if rest > exact.add(line, doubt):
            return False
    return None


MOMENTS = ("mean", "sigma", "ks_distance", "skewness", "excess_kurtosis")


def moments(rows: VisibleRows) -> dict[str, Floats]:
    """Fit a normal law to each row: `MOMENTS`, (rows,) each, as in `gaussian.GaussianFit`."""
    logs, scales = rows.logs
    scale, n, logs = scales[rows.starts], rows.n, logs.copy()
    for start, end in zip(rows.starts.tolist(), (rows.starts + n).tolist(), strict=True):
        logs[start:end].sort()
    low, high = logs[rows.starts], logs[rows.starts + n - 1]
    centre, half = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
    equal = half == 0.0
    # In [-1/2, 1/2]: no square overflows.
    t = (0.5 * logs - rows.spread(0.5 * centre)) / rows.spread(np.where(equal, 1.0, half))
    mean = rows.sums(t) / n
    off = t - rows.spread(mean)
    square = off * off
    variance = rows.sums(square) / n
    deviation = np.where(equal, 1.0, np.sqrt(variance))
    below = survival(-off / rows.spread(deviation))
    rank = np.arange(len(t)) - rows.spread(rows.starts)
    size = rows.spread(n)
    distance = rows.largest(np.maximum(below - rank / size, (rank + 1) / size - below))
    skewness = rows.sums(square * off) / n / deviation**3
    kurtosis = rows.sums(square * square) / n / deviation**4 - 3.0
    fitted = (
        np.where(equal, scale * low, scale * (2.0 * (0.5 * centre + half * mean))),
        np.where(equal, 0.0, scale * half * 2.0 * deviation),
        np.where(equal, 0.0, distance),
        np.where(equal, np.nan, skewness),
        np.where(equal, np.nan, kurtosis),
    )
    return dict(zip(MOMENTS, fitted, strict=True))
