"""What could be pruned from many caches: each on its own, and all of them together.

One bad file does not stop the others. The details of files go to the disk as they come (see
`spool.py`); memory holds those of one, and about a hundred bytes for each head of each file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ..cache_format import LAYOUTS, Names
from ..errors import CertkError
from .aggregate import Numbers
from .analysis import Analysis
from .analyze_cache import CacheAnalysis, analyze_cache
from .budgets import SMALLEST_EPS
from .inputs import Source, expand
from .progress import Progress
from .prune import Failure, failure
from .spool import Spool

EPS = (0.1, 0.01, 0.001)

Analyzed: TypeAlias = CacheAnalysis | Failure


def analyze(
    caches: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    eps: Iterable[float] = EPS,
    *,
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    fail_fast: bool = False,
    threads: int | None = None,
    on_file: Callable[[Analyzed], None] | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Tell how many keys each head of some caches needs, and whether pruning them is worth it.

    Args:
        caches: Files, directories, glob patterns and URLs, one or several, as in `prune`.
        eps: Budgets, 0 < eps < 1; the middle one is the main one.
        names: Pattern of the tensor names, None to find out.
        layout: Order of the axes, "hnd" or "nhd"; None: hnd, with doubts an error.
        recursive: Whether directories within directories are searched.
        fail_fast: Whether the first bad file ends it with its exception; so does the only one.
        threads: How many threads are used; nothing depends on it.
        on_file: Called with what was found in each file, or why nothing was, as soon as it is.
        progress: Called with (what is done, heads done, how many there may be).

    Raises:
        CertkError: For whatever is wrong with the arguments, or if there is no input.
    """
    given = [caches] if isinstance(caches, (str, os.PathLike)) else list(caches)
    return analyze_sources(
        lambda: expand(given, recursive, same_names=True), eps,
        names=names, layout=layout, fail_fast=fail_fast, threads=threads,
        on_file=on_file, progress=progress,
    )  # fmt: skip


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
    """The same of files that `find` finds, after the other arguments were seen to be right."""
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
        """What is called with the heads of one file that are done, and how many it has."""
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
        """A file is done."""
        self._before += self._now
        self._now = 0
        self._left -= 1
