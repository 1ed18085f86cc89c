"""A number of keys from the Gaussian rule, and how often it is enough: adaptive k, then certified.

The standard deviation of a head's scores says by the rule (`certk_rs.gaussian`) which share of the
keys a budget needs. That is a model, so the certificate decides: in how many rows the best k keys
are proven to be enough, and by which factor k must be raised until nearly all rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import gaussian, selection
from ..errors import CertkError

SHARE = 0.99

Heads = Callable[[], Iterable[NDArray[np.float64]]]
"""Gives the scores (rows, n) of some heads, one after the other, the same whenever it is called."""


@dataclass(frozen=True)
class AdaptiveK:
    """What the rule keeps, and how often that is certified. Shares are in [0, 1].

    Sigma and factor come from every other row of each head, everything else from the rows between,
    so that no row is judged by what was fitted to it. Neighbouring rows are not independent: other
    texts may do worse.
    """

    sigma: float
    """Mean over the heads of the standard deviation of a row's scores, natural-log units."""
    rows: int
    """Rows that were judged."""
    needed: float
    """Mean share of the visible keys that certified selection keeps in them."""
    kept: float
    """The same of the rule."""
    holds: float
    """Share of the rows in which the certificate holds for what the rule keeps."""
    factor: float
    """What k is to be multiplied by; it is one for all heads."""
    kept_with_factor: float
    """Mean share of the visible keys that is kept then."""
    holds_with_factor: float
    """Share of the rows in which the certificate holds then."""


def adaptive_k(
    heads: Heads, eps: float, *, share: float = SHARE, threads: int | None = None
) -> AdaptiveK:
    """Judge the rule on the rows of some heads.

    Args:
        heads: Called twice; each time it gives the scores (rows, n) of each head, natural-log
            units, float64, -inf where a row does not see a key.
        eps: Budget of dropped mass, 0 < eps < 1.
        share: The factor is the least by which the rule would have been enough in this share of the
            rows that it is fitted to, 0 < share <= 1.
        threads: Passed on; nothing depends on it.

    Raises:
        CertkError: No rows.
    """
    sigmas: list[float] = []
    ratios: list[NDArray[np.float64]] = []
    needed: list[NDArray[np.float64]] = []
    for scores in heads():
        fitted, judged = _parted(scores)
        sigmas.append(float(gaussian.fit(fitted, threads=threads).sigma.mean()))
        wanted = _wanted(sigmas[-1], _visible(fitted), eps)
        ratios.append(selection.select(fitted, eps, threads=threads).k / wanted)
        needed.append(selection.select(judged, eps, threads=threads).k / _visible(judged))
    if not sigmas:
        raise CertkError("there are no rows to fit sigma to: give heads with rows")
    together = np.sort(np.concatenate(ratios))
    factor = float(together[math.ceil(share * len(together)) - 1])
    found: dict[float, tuple[list[NDArray[np.float64]], list[NDArray[np.bool_]]]] = {
        1.0: ([], []),
        factor: ([], []),
    }
    for scores, sigma in zip(heads(), sigmas, strict=True):
        _, judged = _parted(scores)
        for times, (kept, holds) in found.items():
            k = rule_k(sigma, _visible(judged), eps, times)
            proven = selection.certify(judged, best(judged, k), eps=eps, threads=threads)
            kept.append(k / _visible(judged))
            holds.append(np.asarray(proven.holds))
    means = {
        times: (float(np.concatenate(kept).mean()), float(np.concatenate(holds).mean()))
        for times, (kept, holds) in found.items()
    }
    all_needed = np.concatenate(needed)
    return AdaptiveK(
        sigma=float(np.mean(sigmas)),
        rows=len(all_needed),
        needed=float(all_needed.mean()),
        kept=means[1.0][0],
        holds=means[1.0][1],
        factor=factor,
        kept_with_factor=means[factor][0],
        holds_with_factor=means[factor][1],
    )


def rule_k(
    sigma: float, n: NDArray[np.int64], eps: float, factor: float = 1.0
) -> NDArray[np.int64]:
    """Return the Gaussian rule's share of n, at least 1, times a factor, rounded up; at most n.

    Args:
        sigma: Standard deviation of the scores, natural-log units.
        n: Visible keys of each row, (rows,), >= 1.
        eps: Budget of dropped mass, 0 < eps < 1.
        factor: Safety factor, > 0.
    """
    wanted = np.minimum(factor * _wanted(sigma, n, eps), n)
    return np.asarray(np.clip(np.ceil(wanted), 1, n), np.int64)


def _wanted(sigma: float, n: NDArray[np.int64], eps: float) -> NDArray[np.float64]:
    """What the rule asks for; where that is next to nothing, one key, which a factor can raise."""
    return np.asarray(np.maximum(float(gaussian.keep_fraction(sigma, eps)) * n, 1.0))


def best(scores: NDArray[np.float64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask (rows, n) of the k best keys of each row; equal scores by lower position first."""
    kept = np.zeros(scores.shape, np.bool_)
    order = np.argsort(-scores, axis=1, kind="stable")
    np.put_along_axis(kept, order, np.arange(scores.shape[1]) < k[:, None], axis=1)
    return kept


def _parted(scores: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The rows to fit to, and those to judge; a row on its own is both."""
    return (scores[::2], scores[1::2]) if len(scores) > 1 else (scores, scores)


def _visible(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.asarray(np.count_nonzero(scores > -np.inf, axis=1), np.int64)
