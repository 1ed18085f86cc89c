"""Analysis of saved caches: the keys that heads need, of each cache and of all of them together.

One bad file does not stop the others. The details of files go to the disk as they come; memory
holds those of one, and about a hundred bytes for each head of each file.
"""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, overload

from .._display.plain import plain
from .._display.shown import Shown
from .._files.new_file import write_json
from ..cache_format import LAYOUTS, Names
from ..errors import CertkError
from .aggregate import Aggregate, Numbers, aggregate_json
from .analyze_cache import CacheAnalysis, HeadAnalysis, analysis_json, analyze_cache
from .engine import Progress
from .inputs import Source, expand
from .request import SMALLEST_EPS
from .results import Failure, failure

EPS = (0.1, 0.01, 0.001)
# Caches beyond these have no line of their own in a summary.
_MOST_LINES = 20
# Bytes of details that are kept in memory, and not on the disk.
_IN_MEMORY = 1 << 25

Analyzed: TypeAlias = CacheAnalysis | Failure
_Item = TypeVar("_Item")


class Spool(Sequence[_Item], Generic[_Item]):
    """A sequence of values that can be pickled, kept in a temporary file beyond some megabytes."""

    def __init__(self, items: Iterable[_Item] = ()) -> None:
        self._starts: list[int] = []
        self._file: Any = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        for item in items:
            self.append(item)

    def append(self, item: _Item) -> None:
        """Add an item at the end."""
        self._starts.append(self._file.seek(0, 2))
        pickle.dump(item, self._file)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> _Item: ...

    @overload
    def __getitem__(self, place: slice) -> list[_Item]: ...

    def __getitem__(self, place: int | slice) -> _Item | list[_Item]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        self._file.seek(self._starts[place])
        item: _Item = pickle.load(self._file)  # nobody else can write there
        return item

    def __reduce__(self) -> tuple[type[Spool[_Item]], tuple[list[_Item]]]:
        return Spool, (list(self),)


@dataclass(frozen=True, eq=False, repr=False)
class Analysis(Shown):
    """The keys that the rows of some caches need, by layer and query head, and the failures.

    `main` is the position in `eps`, the largest first, of the budget that advice is given for.
    """

    eps: tuple[float, ...]
    main: int
    caches: Sequence[CacheAnalysis]
    """In the order of the inputs; each is read from a temporary file when it is asked for."""
    failures: tuple[Failure, ...]
    _numbers: Numbers

    def aggregate(self) -> Aggregate:
        """Return mean, quantiles and the worst file of every layer and head."""
        return self._numbers.aggregate(self.eps, self.main)

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
        for cache in itertools.islice(self.caches, _MOST_LINES):
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

    def _heads(self) -> Iterator[tuple[CacheAnalysis, HeadAnalysis]]:
        for cache in self.caches:
            for head in cache.heads:
                yield cache, head

    def _columns(self) -> dict[str, Any]:
        heads = list(self._heads())
        return {
            "cache": [str(cache.path) for cache, _ in heads],
            "layer": [head.layer for _, head in heads],
            "head": [head.head for _, head in heads],
            "queries": [head.queries for _, head in heads],
            "n": [head.n for _, head in heads],
            "sigma": [head.sigma for _, head in heads],
            "eps": [cache.eps[cache.main] for cache, _ in heads],
            "kept": [head.kept[cache.main] for cache, head in heads],
            "predicted": [head.predicted[cache.main] for cache, head in heads],
            "shared": [head.shared for _, head in heads],
            "shared_lower_bound": [head.shared_lower_bound for _, head in heads],
            "effective_entries": [head.effective_entries for _, head in heads],
            "participation": [head.participation for _, head in heads],
            "advice": [head.advice for _, head in heads],
        }


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
    return analyze_sources(
        lambda: expand(given, recursive, same_names=True),
        [eps] if isinstance(eps, (int, float)) else list(eps),
        names=names,
        layout=layout,
        fail_fast=fail_fast,
        threads=threads,
        on_file=on_file,
        progress=progress,
    )


def analyze_sources(
    find: Callable[[], Sequence[Source]],
    eps: Iterable[float] = EPS,
    *,
    names: str | None = None,
    layout: str | None = None,
    fail_fast: bool = False,
    threads: int | None = None,
    on_file: Callable[[Analyzed], None] | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Analyze the files that `find` finds, once the other arguments were checked."""
    budgets = _budgets(eps)
    if names is not None:
        Names(names)
    if layout is not None and layout not in LAYOUTS:
        raise CertkError(f"layout is {layout!r}: give {' or '.join(LAYOUTS)}")
    sources = find()
    numbers, found, failures = Numbers(), Spool[CacheAnalysis](), list[Failure]()
    meter = _Meter(progress, len(sources))
    for source in sources:
        outcome: Analyzed
        try:
            outcome = analyze_cache(
                source, budgets, names=names, layout=layout, threads=threads,
                step=meter.of(source),
            )  # fmt: skip
        except (CertkError, OSError, MemoryError) as error:
            if fail_fast or len(sources) == 1:
                raise
            outcome = failure(source, error)
            failures.append(outcome)
        else:
            numbers.add(outcome)
            found.append(outcome)
        meter.end()
        if on_file is not None:
            on_file(outcome)
    return Analysis(budgets, len(budgets) // 2, found, tuple(failures), numbers)


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


class _Meter:
    """Progress in heads; files that were not opened are taken to have as many as the last one."""

    def __init__(self, progress: Progress | None, files: int) -> None:
        self._progress, self._left, self._files = progress, files, files
        self._before = self._now = 0

    def of(self, source: Source) -> Callable[[int, int], None]:
        """Return what is called with the heads of one file that are done, and all that it has."""
        number = self._files - self._left + 1
        label = f"analyzing {source.name}"
        if self._files > 1:
            label += f" ({number} of {self._files})"

        def tell(done: int, heads: int) -> None:
            self._now = heads
            if self._progress is not None:
                self._progress(label, self._before + done, self._before + heads * self._left)

        return tell

    def end(self) -> None:
        """Count a file as done."""
        self._before += self._now
        self._now = 0
        self._left -= 1
