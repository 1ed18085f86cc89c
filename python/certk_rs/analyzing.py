"""Analyzing saved KV caches from Python: what `certk analyze` does, as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from .jobs.analysis import Analysis
from .jobs.analyze import EPS, Analyzed
from .jobs.analyze import analyze as analyze_caches
from .jobs.progress import Progress

Place = str | os.PathLike[str]


def analyze(
    caches: Place | Iterable[Place],
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
        threads: How many; the result does not depend on it. None for all available.
        on_file: Called with what was found in each file, or why nothing was, as soon as it is.
        progress: Called with (label, heads done, heads in all).

    Returns:
        An `Analysis`, with a `CacheAnalysis` for each file.

    Raises:
        CertkError: Bad arguments, no input, or one input that cannot be analyzed.
        OSError: The system refuses the only file.
    """
    budgets = [eps] if isinstance(eps, (int, float)) else list(eps)
    return analyze_caches(
        caches,
        budgets,
        names=names,
        layout=layout,
        recursive=recursive,
        fail_fast=fail_fast,
        threads=threads,
        on_file=on_file,
        progress=progress,
    )
