"""Pruning saved KV caches from Python: what `certk prune` does, as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .errors import CertkError
from .jobs.engines.engine import Engine
from .jobs.engines.local import LocalEngine
from .jobs.engines.ray import RayEngine
from .jobs.progress import Progress
from .jobs.prune import FileOutcome, JobResult, Manner, make_plan, run_plan
from .jobs.request import Request

ENGINES = ("local", "ray")


def prune(
    caches: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    eps: float | str | Path | Mapping[str | int, float] | None = None,
    *,
    size: float | int | None = None,
    size_bytes: int | None = None,
    hot: float | int | None = None,
    out_tol: float | None = None,
    granularity: str = "head",
    max_keep: int | float | None = None,
    keep_first: int = 0,
    keep_last: int = 0,
    block_size: int = 1,
    coverage: float = 1.0,
    holdout: float = 0.0,
    proof: str = "auto",
    guard: str = "none",
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    resume: bool = False,
    existing: str = "refuse",
    fail_fast: bool = False,
    engine: str = "local",
    address: str | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    unit: str = "auto",
    on_file: Callable[[FileOutcome], None] | None = None,
    progress: Progress | None = None,
) -> JobResult:
    """Make saved KV caches smaller, with a certificate of what was lost in every output.

    Exactly one of `eps`, `size`, `size_bytes` and `out_tol` says how much smaller. The promise
    covers the queries in the files, but for those that `coverage` leaves out; docs/files.md says
    what is in an output, docs/prune.md how a job behaves. No output replaces an input.

    Args:
        caches: Files, directories, glob patterns and URLs of input caches, one or several.
        out: The directory (or URL) to write to; each output has its input's name.
        eps: Tail mass that every row (one query of one query head) may lose, 0 or 1e-300 <= eps <
            1; or by layer: a rule such as "0-3=0.01,*=0.05", a mapping {"0-3": 0.01, "*": 0.05},
            or a `.json` file that holds one.
        size: The keys that each file may keep in all, a count or a fraction of the visible ones:
            distributed over heads and layers so that the worst tail mass is least.
        size_bytes: The same, as the bytes that each output may have.
        hot: With `eps` and a `guard`: how many keys each file keeps in all, a count or a
            fraction; those stay that its queries need most often, in whatever head. eps is then
            what later queries may lose, and what is not here is for the guard to name.
        out_tol: The Euclidean error, in the unit of the values, that dropping keys may cause in
            the attention output of a row.
        granularity: One keep-set per kv "head", per "layer", or one for all layers ("token").
        max_keep: The most keys of a set, a count or a fraction of the visible keys; rows may then
            lose more than eps, and the output says how much.
        keep_first: So many visible positions at the start are always kept.
        keep_last: So many visible positions at the end are always kept.
        block_size: Whole blocks of so many positions are kept, as paged caches need it.
        coverage: Share of the rows of each set that must be within the budget, in (0, 1].
        holdout: Share of the queries, in [0, 1), that is set aside in a trial: sets are made for
            the others, and `held_out` of their reports says how many of these lose more than the
            budget. The sets that are written are then made for all queries. It doubles the work.
        proof: How much of the proof is written: "full", "compact", "none", or "auto": full where
            that takes at most 2 % of the bytes of keys and values, else compact.
        guard: What is remembered of the dropped keys and values, so that what any later query loses
            can be proven (`certk_rs.transformers.from_cache`): "codes", a byte an entry of every
            dropped key and bounds for each kv head, or "none".
        names: Pattern of the tensor names, None to find out; see docs/files.md.
        layout: Order of the axes, "hnd" (heads, n, d) or "nhd"; None: hnd, with doubts an error.
        recursive: Whether directories within directories are searched.
        resume: Go on with a job that was interrupted, after a check of what is there.
        existing: What to do about outputs that exist: "refuse" the job, "skip" or "replace" them.
        fail_fast: Whether the first bad input ends the job with its exception.
        engine: "local" (threads of this process) or "ray" (workers of a cluster).
        address: Of the Ray cluster; None: a local one.
        jobs: How many units are under way at a time; None: what suits the engine.
        threads: Threads of all units here together, or of each unit in a cluster.
        unit: What one unit of work is, a "layer" or a "head" of one; "auto": a head where layers
            are too few to keep all workers busy.
        on_file: Called with what became of each input, as soon as it is known.
        progress: Called with (name of the input, units done, units known of).

    Returns:
        A `JobResult`: reports of the outputs, and the failures of inputs that could not be pruned.

    Raises:
        CertkError: Bad arguments, no input, an output that exists or that would have the place of
            an input, another job in `out`.
        OSError: The system refuses something that all inputs need.
    """
    request = Request.of(
        eps=eps,
        size=size,
        size_bytes=size_bytes,
        hot=hot,
        out_tol=out_tol,
        granularity=granularity,
        max_keep=max_keep,
        keep_first=keep_first,
        keep_last=keep_last,
        block_size=block_size,
        coverage=coverage,
        holdout=holdout,
        proof=proof,
        guard=guard,
        names=names,
        layout=layout,
    )
    if unit not in ("auto", "layer", "head"):
        raise CertkError(f"unit is {unit!r}: give auto, layer or head")
    if existing not in ("refuse", "skip", "replace"):
        raise CertkError(f"existing is {existing!r}: give refuse, skip or replace")
    manner = Manner(resume, existing, fail_fast, unit)
    given = [caches] if isinstance(caches, (str, os.PathLike)) else caches
    plan = make_plan(given, out, request, manner, recursive)
    return run_plan(plan, make_engine(engine, address, jobs, threads), manner, on_file, progress)


def make_engine(
    engine: str = "local",
    address: str | None = None,
    jobs: int | None = None,
    threads: int | None = None,
) -> Engine:
    """Return the engine of that name; a `CertkError` if there is none, or it cannot be had."""
    if engine not in ENGINES:
        raise CertkError(f"engine is {engine!r}: give {' or '.join(ENGINES)}")
    if engine == "ray":
        return RayEngine(address, jobs, threads)
    if address is not None:
        raise CertkError("address is that of a Ray cluster: give engine ray with it")
    return LocalEngine(jobs, threads)
