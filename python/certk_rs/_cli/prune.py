"""`certk prune`: saved KV caches made smaller, with certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ..errors import CertkError
from .options import Option
from .terminal import complain, print_json, progress_bar, warn

if TYPE_CHECKING:
    from .._jobs.plan import Plan
    from .._jobs.steps import Estimate

OPTIONS = {
    "out": Option("-o", "--out", metavar="OUT", help="Output directory or URL."),
    "resume": Option("--resume", help="Go on with an interrupted job."),
    "skip_existing": Option("--skip-existing", help="Leave outputs that exist, and do the others."),
    "force": Option("--force", help="Replace outputs that exist, but never an input."),
    "dry_run": Option("--dry-run", help="Tell what it would cost and save; write nothing."),
    "engine": Option(help="Where the work is done: in threads, or by the workers of Ray."),
    "address": Option(metavar="ADDRESS", help="Of the Ray cluster; default: a local one."),
    "strict": Option("--strict", help="Exit code 1 if any row is over eps."),
    "jobs": Option(metavar="N", min=1, help="Units under way at a time."),
    "shard": Option(metavar="I/N", help="Take every N-th input, from the I-th: one of N jobs."),
    "unit": Option(help="A unit of work: a layer, a head, or auto."),
}
PANELS = {
    "How small": ("eps", "size", "size_bytes", "out_tol", "hot", "max_keep", "coverage"),
    "Sets": ("granularity", "keep_first", "keep_last", "block_size", "holdout", "effort"),
    "Inputs": ("names", "layout", "queries", "recursive"),
    "Outputs": ("out", "proof", "rest", "key_bits", "value_bits", "skip_existing", "force"),
    "The job": ("dry_run", "resume", "fail_fast", "strict", "jobs", "threads", "unit", "shard",
                "engine", "address", "as_json"),
}  # fmt: skip


def prune(
    caches: list[str],
    out: str,
    recursive: bool = False,
    resume: bool = False,
    skip_existing: bool = False,
    force: bool = False,
    fail_fast: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    jobs: int | None = None,
    unit: Literal["auto", "layer", "head"] = "auto",
    shard: str | None = None,
    threads: int | None = None,
    as_json: bool = False,
    quiet: bool = False,
    **asked: Any,
) -> int:
    """Prune saved KV caches, with certificates.

    Every query in a file loses at most eps of its attention mass, and the output says how much: the
    certificate is in the same file. One keep-set serves all queries of a kv head (or of a layer).
    Many files are one job: it can be resumed, and one bad file does not stop the others.
    """
    from .._jobs.plan import Manner, make_plan, read_shard
    from .._jobs.prune import make_engine, run_plan
    from .._jobs.request import TARGETS, Request
    from .prune_report import Shown, show_summary

    if asked["queries"] == "file" and all(asked[name] is None for name in TARGETS):
        raise CertkError("how small? Give --eps, or --size, --bytes or --out-tol instead")
    request = Request.of(**asked)
    if skip_existing and force:
        raise CertkError("--skip-existing and --force exclude each other: leave one out")
    existing = "skip" if skip_existing or dry_run else "replace" if force else "refuse"
    manner = Manner(resume, existing, fail_fast, unit, read_shard(shard))
    plan = make_plan(caches, out, request, manner, recursive)
    for task in plan.tasks:
        for warning in task.warnings:
            warn(warning)
    if dry_run:
        return _dry_run(plan, threads, as_json, quiet)
    workers = make_engine(engine, address, jobs, threads)
    shown = Shown(plan, as_json)
    try:
        with progress_bar(quiet) as progress:
            result = run_plan(plan, workers, shown.tell, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(shown.how_far()) from None
    if as_json:
        eps = request.eps
        budget = None if eps is None else str(eps) if eps.rules else eps.default
        print_json({"eps": budget, **result.to_json()})
    else:
        show_summary(result)
    # 2 if the only input was bad, 1 if some of several were.
    if result.failures:
        return 1 if result.outputs or result.skipped or len(result.failures) > 1 else 2
    over = any(report.count.rows_over_budget for report in result.outputs)
    return 1 if over and strict else 0


def _dry_run(plan: Plan, threads: int | None, as_json: bool, quiet: bool) -> int:
    from .._jobs.results import failure
    from .._jobs.steps import estimate
    from .prune_report import show_estimates

    found: list[Estimate] = []
    bad = list(plan.failures)
    with progress_bar(quiet) as progress:
        for number, task in enumerate(plan.tasks):
            if progress is not None:
                progress(f"trying {task.source.name}", number, len(plan.tasks))
            try:
                found.append(estimate(task, threads))
            except (CertkError, OSError) as error:
                bad.append(failure(task.source, error))
    for each in bad:
        complain(f"error: {each.message}")
    if as_json:
        outputs, failures = ([vars(each) for each in some] for some in (found, bad))
        print_json({"dry_run": True, "outputs": outputs, "failures": failures})
    else:
        show_estimates(found)
    return 1 if bad else 0
