"""Effective entries against the length of a row: where a window, or more precision, is due.

An entry is effective where its probability is at least eps, so that no row has more than 1/eps of
them. Three things may happen as n grows (arXiv 2404.02690 speaks of the first two). Few entries
carry the mass whatever n is: attention collapses, and a small window will do; but the weights of
all others fall like 1/n, and half precision has no digits left for them. Or the keys needed grow
like n^C, and so must a window. Or they grow like n itself, and no window smaller than a share of n
will do. What is told is what the measured lengths show, not what longer ones would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import selection, windows
from ..cache_format import Cache, Layer
from .prefixes import Prefix, prefixes, rows_of_heads, scores_of, some_of

# Scores of a head that are looked at at each length.
SCORES = 1 << 18
# A law k = n^C from this exponent on is a share of n; and where the number of keys that share the
# mass grows by less than this power, it does not grow.
SHARE, CONSTANT = 0.9, 0.2
SMALLEST_NORMAL = {"F16": 2.0**-14, "BF16": 2.0**-126, "F32": 2.0**-126}
"""Below it weights of this dtype lose digits, and soon are 0."""
COLLAPSE, WINDOW, PROPORTIONAL, UNKNOWN = (
    "collapse", "window n^C", "share of n", "too few lengths",
)  # fmt: skip
GROWTH = (COLLAPSE, WINDOW, PROPORTIONAL, UNKNOWN)


@dataclass(frozen=True)
class AtLength:
    """Means over the rows of one length; all but `n` and `rows` are numbers of keys."""

    n: int
    rows: int
    keys: float
    """Visible keys; below n where the cache is causal."""
    effective: float
    """Keys that weigh at least eps each."""
    participation: float
    """1 / sum of squared weights."""
    k: float
    """The fewest keys that are proven to be within eps."""


@dataclass(frozen=True)
class Watch:
    """One query head."""

    lengths: tuple[AtLength, ...]
    growth: str
    """One of `GROWTH`."""
    k_exponent: float | None
    """C of k = alpha n^C fitted to the lengths; None if there are fewer than three."""
    participation_exponent: float | None
    """The same of 1 / sum P^2."""
    typical_weight: float
    """exp(-sigma^2 / 2) / n in the mean over the longest rows: the median weight of a row of n
    normal scores of standard deviation sigma."""
    smallest_normal: float
    """Of the dtype that the keys are stored in."""
    drowned: float
    """Share of the visible keys of the longest rows whose weights are below that."""
    drowned_mass: float
    """What these weigh together, in the row where they weigh most."""
    more_precision: bool
    """Whether that is more than eps: weights of this dtype would then lose what the budget
    keeps."""


def watch(cache: Cache, layer: Layer, eps: float, threads: int | None = None) -> list[Watch]:
    """Watch the query heads of a layer, in their order.

    Args:
        cache: The open file.
        layer: One of its layers; without a query that sees a key the answer is empty.
        eps: Level of effective entries, and budget of k; 0 < eps < 1.
        threads: Passed on; nothing depends on it.
    """
    parts = prefixes(layer, cache.causal_offset, scores=SCORES)
    if not parts:
        parts = prefixes(layer, cache.causal_offset, 1, SCORES)[-1:]
    if not parts:
        return []
    normal = SMALLEST_NORMAL[layer.dtypes["key"]]
    return [
        _head(
            [(prefix, scores_of(prefix, queries, keys)) for prefix in parts], eps, normal, threads
        )
        for _, queries, keys in rows_of_heads(cache, layer)
    ]


def _head(
    parts: list[tuple[Prefix, NDArray[np.float64]]],
    eps: float,
    normal: float,
    threads: int | None,
) -> Watch:
    lengths = tuple(_at(prefix, scores, eps, threads) for prefix, scores in parts)
    growth, c, spread = UNKNOWN, None, None
    if len(lengths) >= 3:
        n = [each.keys for each in lengths]
        c = windows.fit(n, [each.k for each in lengths]).C
        spread = windows.fit(n, [each.participation for each in lengths]).C
        growth = PROPORTIONAL if c >= SHARE else WINDOW
        # Without an effective entry no few carry the mass, however few keys there are.
        if growth == WINDOW and spread <= CONSTANT and lengths[-1].effective >= 1:
            growth = COLLAPSE
    prefix, scores = parts[-1]
    seen = scores > -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    small = seen & (weights < normal)
    mass = float(np.where(small, weights, 0.0).sum(axis=1).max())
    sigma = np.std(np.where(seen, scores, 0.0), axis=1, where=seen)
    return Watch(
        lengths=lengths,
        growth=growth,
        k_exponent=c,
        participation_exponent=spread,
        typical_weight=float(np.mean(np.exp(-(sigma**2) / 2) / prefix.lengths)),
        smallest_normal=normal,
        drowned=float(np.mean(small.sum(axis=1) / prefix.lengths)),
        drowned_mass=mass,
        more_precision=mass > eps,
    )


def _at(prefix: Prefix, scores: NDArray[np.float64], eps: float, threads: int | None) -> AtLength:
    return AtLength(
        n=prefix.n,
        rows=len(scores),
        keys=float(prefix.lengths.mean()),
        effective=float(windows.effective_entries(scores, eps, threads=threads).mean()),
        participation=float(windows.participation(scores, threads=threads).mean()),
        k=float(selection.select(scores, eps, threads=threads).k.mean()),
    )


def shown_lengths(watches: Sequence[Watch], most: int = 2) -> list[int]:
    """The lengths at which a table shows heads."""
    lengths = sorted({each.n for one in watches for each in one.lengths})
    return some_of(lengths, most)


def watch_heads(lengths: Sequence[int]) -> list[str]:
    """What `watch_cells` has in its columns."""
    return ["layer", *(f"n = {n}" for n in lengths), "k", "1/sum P^2", "weight", "small", "mass"]


def watch_cells(watches: Sequence[tuple[int, Watch]], lengths: Sequence[int]) -> list[list[str]]:
    """A row per layer, of (layer, head's watch): means over heads, the mass of the worst."""
    rows = []
    for layer in dict.fromkeys(layer for layer, _ in watches):
        own = [one for number, one in watches if number == layer]
        entries = [
            [each.effective for one in own for each in one.lengths if each.n == n] for n in lengths
        ]
        rows.append(
            [
                str(layer),
                *(f"{np.mean(some):.1f}" if some else "" for some in entries),
                _power([one.k_exponent for one in own]),
                _power([one.participation_exponent for one in own]),
                f"{np.mean([one.typical_weight for one in own]):.1e}",
                f"{np.mean([one.drowned for one in own]):.3f}",
                f"{max(one.drowned_mass for one in own):.2g}",
            ]
        )
    return rows


def _power(exponents: Sequence[float | None]) -> str:
    known = [each for each in exponents if each is not None]
    return f"n^{np.mean(known):.2f}" if known else ""
