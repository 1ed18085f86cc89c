"""Analysis of saved caches: the keys that their rows need, and the rules that would find them.

Every number is a mean over rows, a row being one query of one query head, and every share is of the
keys that the query sees. A head with very many scores is judged by some of its queries, evenly
spaced. One bad file does not stop the others.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import bounds, gaussian, keepset, selection, windows
from .._display.plain import plain
from .._display.shown import Shown
from .._files.cache import Cache
from .._files.layers import Layer
from .._files.names import Names
from .._files.new_file import write_json
from .._files.transposed import LAYOUTS
from ..errors import CertkError
from .engine import Progress
from .inputs import Source, expand
from .later import Later, later_in_all, lengths, spread
from .request import SMALLEST_EPS
from .results import Failure, failure

EPS = (0.1, 0.01, 0.001)
# Budgets of later queries.
LATER = (0.05, 0.01)
QUANTILES = (0.1, 0.5, 0.9)
# Caches beyond these have no line of their own in a summary.
_MOST_LINES = 20
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


@dataclass(frozen=True, slots=True)
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
    later: tuple[Later, ...] = ()
    """Losses of the later half of the queries, at `LATER`; none of a single query."""

    def layers(self) -> dict[int, Means]:
        """Means of each layer, by its number."""
        return {i: _means(self.of_layer(i)) for i in dict.fromkeys(h.layer for h in self.heads)}

    def of_layer(self, layer: int) -> tuple[HeadAnalysis, ...]:
        """Return the heads of one layer."""
        return tuple(head for head in self.heads if head.layer == layer)

    def all(self) -> Means:
        """Means of the whole file."""
        return _means(self.heads)

    def advice(self) -> str:
        """Return the advice, with how many heads it is for."""
        return counted(Counter(head.advice for head in self.heads), ADVICE)


@dataclass(frozen=True)
class Spread:
    """The spread of a number over files (of a layer: over its heads in all files)."""

    mean: float
    quantiles: tuple[float, ...]
    """At `QUANTILES`, with linear interpolation between neighbours."""
    worst: float
    """The largest."""
    worst_in: str
    """The file that it is in, the first of them: its name, or its path where others have that."""


@dataclass(frozen=True)
class Together:
    """One head of one layer (head None: all of the layer; layer None: everything), in all files."""

    layer: int | None
    head: int | None
    files: int
    sigma: Spread
    """Standard deviation of the scores of a row."""
    kept: tuple[Spread, ...]
    """Share of the keys that a row needs on its own, by budget."""
    shared: Spread
    """Share that one set for all rows takes, at the main budget."""
    advice: tuple[tuple[str, int], ...]
    """Advice that is given, and to how many heads."""

    def advised(self) -> str:
        """Return the advice in words."""
        return counted(dict(self.advice), ADVICE)


@dataclass(frozen=True)
class Aggregate:
    """All files together. `main` is the position in `eps` of the main budget."""

    eps: tuple[float, ...]
    main: int
    files: int
    heads: tuple[Together, ...]
    layers: tuple[Together, ...]
    all: Together | None
    """None if there is no file."""


Analyzed: TypeAlias = CacheAnalysis | Failure


@dataclass(frozen=True, eq=False, repr=False)
class Analysis(Shown):
    """The keys that the rows of some caches need, by layer and query head, and the failures.

    `main` is the position in `eps`, the largest first, of the budget that advice is given for.
    """

    eps: tuple[float, ...]
    main: int
    caches: tuple[CacheAnalysis, ...]
    """In the order of the inputs."""
    failures: tuple[Failure, ...]

    def aggregate(self) -> Aggregate:
        """Return mean, quantiles and the worst file of every layer and head."""
        return _aggregate(self.caches, self.eps, self.main)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as `certk analyze --json` prints them."""
        return {
            "aggregate": aggregate_json(self.aggregate()),
            "failures": [vars(failure) for failure in self.failures],
            "caches": [analysis_json(cache) for cache in self.caches],
        }

    def save(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Write `to_json` as a file of JSON; written aside, then given its name.

        Raises:
            CertkError: The file is there, and `replace` is not set.
            OSError: It cannot be written.
        """
        write_json(path, self.to_json(), replace=replace)

    def summary(self) -> str:
        """Return a line for all caches together, and one for each of the first twenty."""
        every = len(self.caches) + len(self.failures)
        lines = [f"Analysis of {len(self.caches)} of {every} caches"]
        if (together := self.aggregate().all) is not None:
            kept, shared = together.kept[self.main], together.shared
            lines.append(
                f"  at eps = {self.eps[self.main]:g} rows need {kept.mean:.3f} of their keys in "
                f"the mean, one set per head takes {shared.mean:.3f} (worst {shared.worst:.3f}, in "
                f"{plain(shared.worst_in)}); advice: {together.advised()}"
            )
        for cache in self.caches[:_MOST_LINES]:
            means = cache.all()
            lines.append(
                f"  {plain(str(cache.path))}: a row {means.kept[cache.main]:.3f}, one set per head "
                f"{means.shared:.3f}; advice for {means.heads} heads: {cache.advice()}"
            )
        if len(self.caches) > _MOST_LINES:
            lines.append(f"  ... and {len(self.caches) - _MOST_LINES} more")
        return "\n".join(lines)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"Analysis({len(self.caches)} caches{failed})"

    def _columns(self) -> dict[str, Any]:
        heads = [(cache, head) for cache in self.caches for head in cache.heads]

        def cell(cache: CacheAnalysis, head: HeadAnalysis, name: str) -> Any:
            value = getattr(cache if name in ("path", "eps") else head, name)
            return value[cache.main] if isinstance(value, tuple) else value

        names = (
            *("layer", "head", "queries", "n", "sigma", "eps", "kept", "predicted", "shared"),
            *("shared_lower_bound", "effective_entries", "participation", "advice"),
        )
        columns = {"cache": "path", **{name: name for name in names}}
        return {called: [cell(*each, name) for each in heads] for called, name in columns.items()}


def analyze(
    caches: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    eps: float | Iterable[float] = EPS,
    *,
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    fail_fast: bool = False,
    threads: int | None = None,
    on_file: Callable[[Analyzed], None] | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Tell how many keys each head of saved KV caches needs, and whether pruning it is worth it.

    Args:
        caches: Files, directories, glob patterns and URLs, one or several.
        eps: Budgets, 0 < eps < 1, one or several; the middle one is the main one.
        names: Pattern of the tensor names, None to find out; see docs/files.md.
        layout: Order of the axes, "hnd" or "nhd"; None: hnd, with doubts an error.
        recursive: Whether directories within directories are searched.
        fail_fast: Whether the first bad file ends it with its exception; so does the only one.
        threads: The most threads, None for all; the result does not depend on it.
        on_file: Called with the analysis or the failure of each file, as soon as it is known.
        progress: Called with (label, heads done, heads in all).

    Returns:
        An `Analysis`, with a `CacheAnalysis` for each file.

    Raises:
        CertkError: Bad arguments, no input, or one input that cannot be analyzed.
        OSError: The system refuses the only file.
    """
    given = [caches] if isinstance(caches, (str, os.PathLike)) else list(caches)
    budgets = [eps] if isinstance(eps, (int, float)) else list(eps)
    sources = expand(given, recursive, same_names=True)
    return analyze_sources(
        sources, budgets, names, layout, fail_fast, threads, on_file or (lambda _: None), progress
    )


def analyze_sources(
    sources: Sequence[Source],
    eps: Iterable[float],
    names: str | None,
    layout: str | None,
    fail_fast: bool,
    threads: int | None,
    on_file: Callable[[Analyzed], None],
    progress: Progress | None,
) -> Analysis:
    """Analyze files as `analyze` does. Files that were not opened count as the last one."""
    budgets = _budgets(eps)
    if names is not None:
        Names(names)
    if layout is not None and layout not in LAYOUTS:
        raise CertkError(f"layout is {layout!r}: give {' or '.join(LAYOUTS)}")
    found: list[CacheAnalysis] = []
    failures: list[Failure] = []
    before = now = 0

    def step(done: int, heads: int) -> None:
        nonlocal now
        now = heads
        if progress is not None:
            progress(label, before + done, before + heads * (len(sources) - number + 1))

    for number, source in enumerate(sources, 1):
        label = f"analyzing {source.name}"
        if len(sources) > 1:
            label += f" ({number} of {len(sources)})"
        outcome: Analyzed
        try:
            outcome = analyze_cache(source, budgets, names, layout, threads, step)
            found.append(outcome)
        except (CertkError, OSError, MemoryError) as error:
            if fail_fast or len(sources) == 1:
                raise
            outcome = failure(source, error)
            failures.append(outcome)
        before, now = before + now, 0
        on_file(outcome)
    return Analysis(budgets, len(budgets) // 2, tuple(found), tuple(failures))


def _budgets(eps: Iterable[float]) -> tuple[float, ...]:
    budgets = tuple(sorted({float(budget) for budget in eps}, reverse=True))
    if not budgets:
        raise CertkError("eps is empty: give at least one budget")
    for budget in budgets:
        if budget == 0:
            raise CertkError("eps is 0: every key is needed then; give a budget above 0")
        if not SMALLEST_EPS <= budget < 1:
            raise CertkError(f"eps is {budget!r}: give a number from {SMALLEST_EPS} to below 1")
    return budgets


def analyze_cache(
    source: Source,
    eps: tuple[float, ...],
    names: str | None,
    layout: str | None,
    threads: int | None,
    step: Callable[[int, int], None],
) -> CacheAnalysis:
    """Analyze one file at budgets, the largest first; `step` is told (heads done, all heads).

    Raises:
        CertkError: The file is not a cache, or cannot be analyzed.
        OSError: The system refuses to read it.
    """
    main = len(eps) // 2
    heads: list[HeadAnalysis] = []
    with Cache(source.location, names, layout) as cache:
        every = sum(layer.heads for layer in cache.layers)
        cache.check_values()
        for layer in cache.layers:
            rows = _rows(cache, layer)
            for head, scores, lengths in rows:
                heads.append(_head(layer, head, scores, lengths, eps, main, threads))
                step(len(heads), every)
        causal = cache.causal_offset is not None
        later = later_in_all(cache, LATER, threads)
    place = str(source.location)
    return CacheAnalysis(source.name, place, eps, main, tuple(heads), causal, later)


def counted(counts: Mapping[str, int], words: Sequence[str]) -> str:
    """Return counts of words, without zeros: "3 prune, 1 leave dense"."""
    return ", ".join(f"{counts[word]} {word}" for word in words if counts.get(word))


def _rows(
    cache: Cache, layer: Layer
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.int64]]]:
    """Return each query head with scores (rows, n) of some queries, and the keys they see."""
    chosen = spread(np.arange(layer.m), max(QUERIES, SCORES // layer.n))
    seen = lengths(cache, layer, chosen)
    chosen, seen = chosen[seen > 0], seen[seen > 0]
    if not len(chosen):
        raise CertkError(
            f"{cache.path}: layer {layer.index}: no query sees a key: check causal_offset"
        )
    scale = cache.scales[layer.index]
    for head, queries, keys in cache.heads(layer):
        scores = queries[chosen] @ keys.T
        scores *= scale
        yield head, scores, seen


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
        "later": [asdict(each) for each in found.later],
    }


def _aggregate(caches: Sequence[CacheAnalysis], eps: tuple[float, ...], main: int) -> Aggregate:
    """Return the spread of every number over files: by layer and head, by layer, and in all."""
    times = Counter(cache.name for cache in caches)
    files = [cache.name if times[cache.name] == 1 else cache.path for cache in caches]
    rows = [(file, head) for file, cache in enumerate(caches) for head in cache.heads]
    values = np.array([[head.sigma, head.shared, *head.kept] for _, head in rows])
    groups: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
    for row, (_, head) in enumerate(rows):
        for place in ((head.layer, head.head), (head.layer, None), (None, None)):
            groups[place].append(row)

    def spread(own: list[int], column: int) -> Spread:
        some = values[own, column]
        worst = int(some.argmax())
        quantiles = tuple(np.quantile(some, QUANTILES).tolist())
        return Spread(float(some.mean()), quantiles, float(some[worst]), files[rows[own[worst]][0]])

    def together(layer: int | None, head: int | None) -> Together:
        own = groups[layer, head]
        sigma, shared, *kept = (spread(own, column) for column in range(values.shape[1]))
        given = Counter(rows[row][1].advice for row in own)
        advice = tuple((word, given[word]) for word in ADVICE if given[word])
        count = len({rows[row][0] for row in own})
        return Together(layer, head, count, sigma, tuple(kept), shared, advice)

    heads = sorted((i, j) for i, j in groups if i is not None and j is not None)
    return Aggregate(
        eps,
        main,
        len(files),
        tuple(together(*place) for place in heads),
        tuple(together(layer, None) for layer in sorted({layer for layer, _ in heads})),
        together(None, None) if rows else None,
    )


def aggregate_json(found: Aggregate) -> dict[str, Any]:
    """Return the aggregate as a JSON object."""
    return {
        "files": found.files,
        "eps": list(found.eps),
        "main_eps": found.eps[found.main],
        "quantiles": list(QUANTILES),
        "all": None if found.all is None else _json(found.all),
        "layers": [_json(each) for each in found.layers],
        "heads": [_json(each) for each in found.heads],
    }


def _json(each: Together) -> dict[str, Any]:
    return {
        "layer": each.layer,
        "head": each.head,
        "files": each.files,
        "sigma": vars(each.sigma),
        "kept": [vars(spread) for spread in each.kept],
        "shared": vars(each.shared),
        "advice": dict(each.advice),
    }
