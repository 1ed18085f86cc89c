"""What an analysis of caches has found, for whoever asked for it in Python."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .._display.plain import plain
from .._display.shown import Shown
from .._files.new_file import write_json
from .aggregate import Aggregate, Numbers, aggregate_json
from .analyze_cache import CacheAnalysis, HeadAnalysis, analysis_json
from .prune import Failure

# Caches beyond these have no line of their own in a summary.
_MOST_LINES = 20


@dataclass(frozen=True, eq=False, repr=False)
class Analysis(Shown):
    """How many keys the rows of some caches need, by layer and query head, and what failed.

    `main` is the position in `eps`, the largest first, of the budget that advice is given for.
    """

    eps: tuple[float, ...]
    main: int
    caches: Sequence[CacheAnalysis]
    """In the order of the inputs; each is read from a temporary file when it is asked for."""
    failures: tuple[Failure, ...]
    _numbers: Numbers

    def aggregate(self) -> Aggregate:
        """Mean, quantiles and the worst file of every layer and head."""
        return self._numbers.aggregate(self.eps, self.main)

    def to_json(self) -> dict[str, Any]:
        """Plain values: what `certk analyze --json` prints."""
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
