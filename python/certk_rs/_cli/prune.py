"""`certk prune`: saved KV caches made smaller, with certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import CertkError
from .options import (
    AsJson,
    Inputs,
    Job,
    KeepFirst,
    KeepLast,
    Layout,
    MaxKeep,
    Names,
    Quiet,
    Recursive,
    Threads,
    read_max_keep,
)
from .prune_options import (
    Address,
    BlockSize,
    Coverage,
    DryRun,
    EngineName,
    EpsRule,
    FailFast,
    Force,
    Guard,
    GuardKind,
    Holdout,
    Hot,
    HowManyJobs,
    OneSetPer,
    OutTol,
    Proof,
    ProofKind,
    Resume,
    SetPer,
    Shard,
    Size,
    SizeBytes,
    SkipExisting,
    Strict,
    UnitKind,
    UnitName,
    WhichEngine,
)
from .quantities import PLACE, Place
from .terminal import complain, print_json, progress_bar, round_up, say, warn

if TYPE_CHECKING:
    from .._jobs.estimate import Estimate
    from .._jobs.prune import Plan
    from .._jobs.request import Request
    from .._jobs.results import Failure, FileOutcome, JobResult

# What goes together in the help.
PANELS = {
    "How small": ("eps", "size", "size_bytes", "out_tol", "hot", "max_keep", "coverage"),
    "Sets": ("granularity", "keep_first", "keep_last", "block_size", "holdout"),
    "Inputs": ("names", "layout", "recursive"),
    "Outputs": ("out", "proof", "guard", "skip_existing", "force"),
    "The job": ("dry_run", "resume", "fail_fast", "strict", "jobs", "threads", "unit", "shard",
                "engine", "address", "as_json"),
}  # fmt: skip


def prune(
    caches: Inputs,
    out: Annotated[
        Place,
        typer.Option("-o", "--out", parser=PLACE, metavar="OUT", help="Output directory or URL."),
    ],
    eps: EpsRule = None,
    size: Size = None,
    size_bytes: SizeBytes = None,
    out_tol: OutTol = None,
    hot: Hot = None,
    granularity: OneSetPer = SetPer.head,
    max_keep: MaxKeep = None,
    keep_first: KeepFirst = 0,
    keep_last: KeepLast = 0,
    block_size: BlockSize = 1,
    coverage: Coverage = 1.0,
    holdout: Holdout = 0.0,
    proof: ProofKind = Proof.auto,
    guard: GuardKind = Guard.none,
    names: Names = None,
    layout: Layout = None,
    recursive: Recursive = False,
    resume: Resume = False,
    skip_existing: SkipExisting = False,
    force: Force = False,
    fail_fast: FailFast = False,
    strict: Strict = False,
    dry_run: DryRun = False,
    engine: WhichEngine = EngineName.local,
    address: Address = None,
    jobs: HowManyJobs = None,
    unit: UnitKind = UnitName.auto,
    shard: Shard = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Prune saved KV caches, with certificates.

    Every query in a file loses at most eps of its attention mass, and the output says how much: the
    certificate is in the same file. One keep-set serves all queries of a kv head (or of a layer).
    Many files are one job: it can be resumed, and one bad file does not stop the others.
    """

    def job() -> int:
        from .._jobs.budgets import read_budgets
        from .._jobs.prune import Manner, make_engine, make_plan, read_shard, run_plan
        from .._jobs.request import Request
        from .prune_report import show_summary

        if eps is None and size is None and size_bytes is None and out_tol is None:
            raise CertkError("how small? Give --eps, or --size, --bytes or --out-tol instead")
        request = Request(
            eps=None if eps is None else read_budgets(eps),
            size=read_max_keep(size),
            size_bytes=size_bytes,
            out_tol=out_tol,
            hot=read_max_keep(hot),
            granularity=granularity.value,
            max_keep=read_max_keep(max_keep),
            keep_first=keep_first,
            keep_last=keep_last,
            block_size=block_size,
            coverage=coverage,
            holdout=holdout,
            proof=proof.value,
            guard=guard.value,
            names=names,
            layout=None if layout is None else layout.value,
        )
        if skip_existing and force:
            raise CertkError("--skip-existing and --force exclude each other: leave one out")
        existing = "skip" if skip_existing else "replace" if force else "refuse"
        existing = "skip" if dry_run else existing
        manner = Manner(resume, existing, fail_fast, unit.value, read_shard(shard))
        plan = make_plan(caches, out, request, manner, recursive)
        for task in plan.tasks:
            for warning in task.warnings:
                warn(warning)
        if dry_run:
            return _dry_run(plan, threads, as_json, quiet)
        workers = make_engine(engine.value, address, jobs, threads)
        shown = _Shown(plan, as_json, strict)
        try:
            with progress_bar(quiet) as progress:
                result = run_plan(plan, workers, manner, shown.tell, progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(shown.how_far()) from None
        if as_json:
            print_json({"command": "prune", "eps": _eps(request), **result.to_json()})
        else:
            show_summary(result)
        return shown.code(result)

    return job


class _Shown:
    """Says what became of every file as soon as it is known."""

    def __init__(self, plan: Plan, as_json: bool, strict: bool) -> None:
        self._plan, self._as_json, self._strict = plan, as_json, strict
        # Hot sets are not made to keep rows within eps: nothing is amiss.
        self._hot = any(task.options.hot for task in plan.tasks)
        self._told = {warning for task in plan.tasks for warning in task.warnings}
        self._ended = 0
        self._first: Failure | None = None

    def tell(self, outcome: FileOutcome) -> None:
        """Print the line of one input, and its warnings."""
        from .._jobs.results import Failure, FileReport, totals
        from .prune_report import said_of

        self._ended += 1
        if isinstance(outcome, Failure):
            self._first = self._first or outcome
            complain(f"error: {outcome.message}")
            return
        if isinstance(outcome, FileReport):
            for warning in outcome.warnings:
                if warning not in self._told:
                    warn(warning)
            every = totals(outcome.layers)
            over = every["rows_over_budget"]
            if over and not self._hot:
                warn(
                    f"{outcome.target}: {over} of {every['rows']} rows are over eps because of "
                    f"--max-keep, the worst loses {round_up(every['worst_tail_mass'])}"
                )
        if not self._as_json:
            say(said_of(outcome))

    def how_far(self) -> str:
        """How far it came, and how to go on."""
        every = len(self._plan.tasks) + len(self._plan.failures)
        return (
            f"interrupted: {self._ended} of {every} files are finished; the same command with "
            "--resume goes on"
        )

    def code(self, result: JobResult) -> int:
        """The exit code: 2 if no input was any good, 1 if some were not (or --strict)."""
        if result.failures:
            return 1 if result.outputs or result.skipped or len(result.failures) > 1 else 2
        over = any(report.count.rows_over_budget for report in result.outputs)
        return 1 if over and self._strict else 0


def _eps(request: Request) -> float | str | None:
    if request.eps is None or request.eps.rules:
        return None if request.eps is None else str(request.eps)
    return request.eps.default


def _dry_run(plan: Plan, threads: int | None, as_json: bool, quiet: bool) -> int:
    from .._jobs.estimate import estimate
    from .._jobs.results import failure

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
        body: dict[str, Any] = {"outputs": [vars(each) for each in found]}
        body["failures"] = [vars(each) for each in bad]
        print_json({"command": "prune", "dry_run": True, **body})
    else:
        _show_estimates(found)
    return 1 if bad else 0


def _show_estimates(found: list[Estimate]) -> None:
    for each in found:
        say(
            f"{each.source}: keys and values of {_mb(each.cache_bytes)}, about "
            f"{_mb(each.output_bytes)} afterwards ({100 * each.kept_share:.0f} % of the keys kept "
            f"in the heads tried); {each.scores:.2g} scores, about {each.seconds:.1f} s of one "
            f"worker, {_mb(each.memory)} of memory for each"
        )
    if len(found) > 1:
        say(
            f"{len(found)} files: {_mb(sum(each.cache_bytes for each in found))}, about "
            f"{_mb(sum(each.output_bytes for each in found))} afterwards, about "
            f"{sum(each.seconds for each in found):.0f} s of one worker"
        )
    say("Nothing was written.")


def _mb(size: int) -> str:
    return f"{size / 1e6:.4g} MB"
