"""What could be pruned from a cache: how many keys its rows need, and which rules would find them.

Every number is a mean over rows, a row being one query of one query head, and every share is of the
keys that the query sees. A head with many queries is judged by some of them, evenly spaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import bounds, gaussian, keepset, selection, windows
from ..cache_format import Cache, Layer, Names, widen
from ..errors import CertkError
from .plan import Progress, check_eps, expand

# Queries of a head that are looked at, and those whose gap bounds are found, which takes longer.
QUERIES = 256
GAP_QUERIES = 16
# Up to these shares of the keys, needed for all queries of a head at once, pruning is worth it.
PRUNE, PRUNE_A_LITTLE = 0.5, 0.85


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
    effective: float
    """Keys (a number) that weigh at least the main budget each."""
    participation: float
    """1 / sum of squared weights (a number)."""
    single_gap: float
    multi_gap: float
    """The fewest keys that these bounds prove to be enough, at the main budget."""
    shared: float
    shared_bound: float
    """One set for all rows at the main budget, and the proven least size of any."""

    @property
    def advice(self) -> str:
        """Whether pruning this head for all its queries at the main budget is worth it."""
        if self.shared <= PRUNE:
            return "prune"
        return "prune a little" if self.shared <= PRUNE_A_LITTLE else "leave dense"


@dataclass(frozen=True)
class CacheAnalysis:
    """One file. `main` is the position in `eps` of the budget that advice is given for."""

    path: Path
    eps: tuple[float, ...]
    main: int
    heads: tuple[HeadAnalysis, ...]


def analyze(
    caches: Sequence[Path],
    eps: Sequence[float],
    names: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
) -> list[CacheAnalysis]:
    """Analyze caches, or directories of them.

    Args:
        caches: Files, and directories that stand for the `.safetensors` files in them.
        eps: Budgets, 0 < eps < 1; the middle one is the main one.
        names: Pattern of the tensor names, None to find out.
        progress: Told about the heads that are done.
        threads: Passed on; nothing depends on it.

    Raises:
        CertkError: For whatever is wrong with the arguments or the files.
    """
    if not eps:
        raise CertkError("eps is empty: give at least one budget")
    for budget in eps:
        check_eps(budget)
        if budget == 0:
            raise CertkError("eps is 0: every key is needed then; give a budget above 0")
    if names is not None:
        Names(names)
    paths = [path for cache in caches for path in expand(cache)]
    if not paths:
        raise CertkError("no input: give at least one cache file")
    total = 0
    for path in paths:
        with Cache(path, names) as cache:
            total += sum(layer.heads for layer in cache.layers)
    done = 0

    def step(label: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(label, done, total)

    ordered = tuple(sorted({float(budget) for budget in eps}, reverse=True))
    return [_cache(path, names, ordered, step, threads) for path in paths]


def _cache(
    path: Path,
    names: str | None,
    eps: tuple[float, ...],
    step: Callable[[str], None],
    threads: int | None,
) -> CacheAnalysis:
    main = len(eps) // 2
    heads = []
    with Cache(path, names) as cache:
        cache.check_values(lambda _: None)
        for layer in cache.layers:
            for head, scores, lengths in _rows(cache, layer):
                heads.append(_head(layer, head, scores, lengths, eps, main, threads))
                step(f"analyzing {path.name}")
    return CacheAnalysis(path, eps, main, tuple(heads))


def _rows(
    cache: Cache, layer: Layer
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
    """Each query head with the scores (rows, n) of some of its queries, and what those see."""
    query, key = cache.read(layer, "query"), cache.read(layer, "key")
    group = layer.heads // layer.kv_heads
    chosen = np.unique(np.linspace(0, layer.m - 1, min(layer.m, QUERIES)).round().astype(np.int64))
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
    for head in range(layer.heads):
        keys = widen(key[head // group], layer.dtypes["key"])
        scores = widen(query[head][chosen], layer.dtypes["query"]) @ keys.T
        yield head, scores * scale, lengths


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
    kept, predicted = [], []
    for budget in eps:
        found = selection.select(scores, budget, lengths=lengths, threads=threads)
        kept.append(float((found.k / lengths).mean()))
        predicted.append(float(np.mean(gaussian.keep_fraction(sigma, budget))))
    masked = np.where(seen, scores, -np.inf)
    few = np.unique(np.linspace(0, len(scores) - 1, GAP_QUERIES).round().astype(np.int64))

    def share(rule: bounds.Rule) -> float:
        k = bounds.smallest_k(masked[few], eps[main], rule=rule)
        return float((k / lengths[few]).mean())

    one = keepset.keep_set(scores, eps[main], lengths=lengths, threads=threads)
    visible = int(lengths.max())
    return HeadAnalysis(
        layer=layer.index,
        head=head,
        queries=len(scores),
        n=layer.n,
        sigma=float(sigma.mean()),
        kept=tuple(kept),
        predicted=tuple(predicted),
        effective=float(np.mean(windows.effective_entries(masked, eps[main]))),
        participation=float(np.mean(windows.participation(masked))),
        single_gap=share("single_gap"),
        multi_gap=share("multi_gap"),
        shared=one.k / visible,
        shared_bound=one.lower_bound / visible,
    )


def analysis_json(found: CacheAnalysis) -> dict[str, Any]:
    """The same as plain numbers, for one JSON object."""
    return {
        "cache": str(found.path),
        "eps": list(found.eps),
        "main_eps": found.eps[found.main],
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "queries": head.queries,
                "n": head.n,
                "sigma": head.sigma,
                "kept": list(head.kept),
                "predicted": list(head.predicted),
                "effective_entries": head.effective,
                "participation": head.participation,
                "single_gap": head.single_gap,
                "multi_gap": head.multi_gap,
                "shared": head.shared,
                "shared_lower_bound": head.shared_bound,
                "advice": head.advice,
            }
            for head in found.heads
        ],
    }
