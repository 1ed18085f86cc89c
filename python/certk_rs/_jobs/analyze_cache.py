"""Analysis of one cache: the keys that its rows need, and the rules that would find them.

Every number is a mean over rows, a row being one query of one query head, and every share is of the
keys that the query sees. A head with very many scores is judged by some of its queries, evenly
spaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import bounds, gaussian, keepset, selection, windows
from .._files.cache import Cache
from .._files.layers import Layer
from ..errors import CertkError
from .inputs import Source

# Scores of a head that are looked at, at least so many queries, and the queries whose gap bounds
# are found, which takes longer.
SCORES = 1 << 22
QUERIES = 256
GAP_QUERIES = 16
# Up to these shares of the keys, needed for all queries of a head at once, pruning is worth it; and
# up to this share, needed for a query on its own, selecting anew for each is.
PRUNE, PRUNE_A_LITTLE = 0.5, 0.85
PER_QUERY = 0.5


ADVICE = ("prune", "prune a little", "per query", "leave dense")
PAYS = ADVICE[:2]


@dataclass(frozen=True)
class HeadAnalysis:
    """One query head of one layer. Shares are means over its rows, in [0, 1]."""

    layer: int
    head: int
    queries: int
    n: int
    sigma: float
    """Standard deviation of the visible scores of a row, in natural-log units."""
    kept: tuple[float, ...]
    """The fewest keys within each budget."""
    predicted: tuple[float, ...]
    """The same by the Gaussian rule, from each row's own sigma."""
    effective_entries: float
    """Keys (a number) that weigh at least the main budget each."""
    participation: float
    """1 / sum of squared weights (a number)."""
    single_gap: float
    multi_gap: float
    """The fewest keys that these bounds prove to be enough, at the main budget: the mean of a few
    rows, evenly spaced in the order of k, and no less than what is kept."""
    shared: float
    shared_lower_bound: float
    """One set for all rows at the main budget, and the proven least size of any."""
    advice: str
    """The advice for the main budget, one of `ADVICE`."""


@dataclass(frozen=True)
class Means:
    """Means over some heads; tuples have an entry per budget."""

    heads: int
    kept: tuple[float, ...]
    rule_error: tuple[float, ...]
    """By how much the Gaussian rule misses what is kept, whichever way."""
    shared: float


@dataclass(frozen=True)
class CacheAnalysis:
    """One file. `main` is the position in `eps` of the budget that advice is given for."""

    name: str
    """As of an output of `certk prune`: relative to what was given."""
    path: str
    """As it was given."""
    eps: tuple[float, ...]
    main: int
    heads: tuple[HeadAnalysis, ...]
    causal: bool = False
    """True if every query sees its own prefix."""

    def layers(self) -> dict[int, Means]:
        """Means of each layer, by its number."""
        numbers = dict.fromkeys(head.layer for head in self.heads)
        return {i: _means([head for head in self.heads if head.layer == i]) for i in numbers}

    def of_layer(self, layer: int) -> tuple[HeadAnalysis, ...]:
        """Return the heads of one layer."""
        return tuple(head for head in self.heads if head.layer == layer)

    def all(self) -> Means:
        """Means of the whole file."""
        return _means(self.heads)

    def advice(self) -> str:
        """Return the advice, with how many heads it is for."""
        return counted(Counter(head.advice for head in self.heads), ADVICE)


def analyze_cache(
    source: Source,
    eps: tuple[float, ...],
    *,
    names: str | None = None,
    layout: str | None = None,
    threads: int | None = None,
    step: Callable[[int, int], None] = lambda _done, _total: None,
) -> CacheAnalysis:
    """Analyze one file.

    Args:
        source: The file.
        eps: Budgets, 0 < eps < 1, the largest first.
        names: Pattern of the tensor names, None to find out.
        layout: Order of the axes, see docs/files.md; None: "hnd", with doubts an error.
        threads: Passed on; nothing depends on it.
        step: Told (heads done, all heads).

    Raises:
        CertkError: The file is not a cache, or cannot be analyzed.
        OSError: The system refuses to read it.
    """
    main = len(eps) // 2
    heads: list[HeadAnalysis] = []
    with Cache(source.location, names, layout) as cache:
        every = sum(layer.heads for layer in cache.layers)
        cache.check_values(lambda _: None)
        for layer in cache.layers:
            rows = _rows(cache, layer)
            for head, scores, lengths in rows:
                heads.append(_head(layer, head, scores, lengths, eps, main, threads))
                step(len(heads), every)
        causal = cache.causal_offset is not None
    place = str(source.location)
    return CacheAnalysis(source.name, place, eps, main, tuple(heads), causal)


def counted(counts: Mapping[str, int], words: Sequence[str]) -> str:
    """Return counts of words, without zeros: "3 prune, 1 leave dense"."""
    return ", ".join(f"{counts[word]} {word}" for word in words if counts.get(word))


def _rows(
    cache: Cache, layer: Layer
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
    """Return each query head with scores (rows, n) of some queries, and the keys they see."""
    most = min(layer.m, max(QUERIES, SCORES // layer.n))
    chosen = np.unique(np.linspace(0, layer.m - 1, most).round().astype(np.int64))
    offset = cache.causal_offset
    lengths = np.full(len(chosen), layer.n, np.int64)
    if offset is not None:
        lengths = np.clip(chosen + offset + 1, 0, layer.n)
    chosen, lengths = chosen[lengths > 0], lengths[lengths > 0]
    if not len(chosen):
        raise CertkError(
            f"{cache.path}: layer {layer.index}: no query sees a key: check causal_offset"
        )
    scale = cache.scales[layer.index]
    for head, queries, keys in cache.heads(layer):
        scores = queries[chosen] @ keys.T
        scores *= scale
        yield head, scores, lengths


def _head(
    layer: Layer,
    head: int,
    scores: NDArray[np.float64],
    lengths: NDArray[np.int64],
    eps: tuple[float, ...],
    main: int,
    threads: int | None,
) -> HeadAnalysis:
    seen = np.arange(layer.n) < lengths[:, None]
    sigma = np.std(scores, axis=1, where=seen)
    needed, predicted = [], []
    for budget in eps:
        found = selection.select(scores, budget, lengths=lengths, threads=threads)
        needed.append(found.k / lengths)
        predicted.append(float(np.mean(gaussian.keep_fraction(sigma, budget))))
    masked = np.where(seen, scores, -np.inf)
    exact = needed[main]
    count = min(len(scores), GAP_QUERIES)
    ranks = (np.arange(count) * 2 + 1) * len(scores) // (2 * count)
    few = np.argsort(exact, kind="stable")[ranks]

    def enough(rule: bounds.Rule) -> float:
        k = bounds.smallest_k(masked[few], eps[main], rule=rule)
        return max(float((k / lengths[few]).mean()), float(exact.mean()))

    one = keepset.keep_set(scores, eps[main], lengths=lengths, threads=threads)
    shared = one.k / int(lengths.max())
    kept = tuple(float(share.mean()) for share in needed)
    return HeadAnalysis(
        layer=layer.index,
        head=head,
        queries=len(scores),
        n=layer.n,
        sigma=float(sigma.mean()),
        kept=kept,
        predicted=tuple(predicted),
        effective_entries=float(np.mean(windows.effective(masked, eps[main]).count)),
        participation=float(np.mean(windows.participation(masked))),
        single_gap=enough("single_gap"),
        multi_gap=enough("multi_gap"),
        shared=shared,
        shared_lower_bound=one.lower_bound / int(lengths.max()),
        advice=_advice(shared, kept[main]),
    )


def _advice(shared: float, kept: float) -> str:
    """Return the advice for a head whose one set and whose single queries need these shares.

    "prune" or "prune a little": one set for all queries of the head. "per query": no such set is
    small, but a query on its own needs few keys. "leave dense": neither.
    """
    if shared <= PRUNE_A_LITTLE:
        return "prune" if shared <= PRUNE else "prune a little"
    return "per query" if kept <= PER_QUERY else "leave dense"


def _means(heads: Sequence[HeadAnalysis]) -> Means:
    kept = np.array([head.kept for head in heads])
    off = np.abs(kept - np.array([head.predicted for head in heads]))
    return Means(
        len(heads),
        tuple(kept.mean(axis=0).tolist()),
        tuple(off.mean(axis=0).tolist()),
        float(np.mean([head.shared for head in heads])),
    )


def analysis_json(found: CacheAnalysis) -> dict[str, Any]:
    """Return the analysis as a JSON object."""
    return {
        "cache": found.path,
        "name": found.name,
        "eps": list(found.eps),
        "main_eps": found.eps[found.main],
        "layers": [{"layer": i, **vars(means)} for i, means in found.layers().items()],
        "heads": [asdict(head) for head in found.heads],
    }
