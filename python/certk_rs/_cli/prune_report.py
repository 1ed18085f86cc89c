"""The text of `certk prune`: a line for every file, and one for the job."""

from __future__ import annotations

from .._jobs.plan import Plan
from .._jobs.results import Failure, FileOutcome, FileReport, JobResult, totals
from .._jobs.steps import Estimate
from .terminal import complain, round_up, say, warn


class Shown:
    """Prints a line for every file as soon as its outcome is known."""

    def __init__(self, plan: Plan, as_json: bool) -> None:
        self._plan, self._as_json = plan, as_json
        # Hot sets are not made to keep rows within eps: nothing is amiss.
        self._hot = any(task.options.hot for task in plan.tasks)
        self._told = {warning for task in plan.tasks for warning in task.warnings}
        self._ended = 0

    def tell(self, outcome: FileOutcome) -> None:
        """Print the line of one input, and its warnings."""
        self._ended += 1
        if isinstance(outcome, Failure):
            complain(f"error: {outcome.message}")
            return
        line = f"{outcome.target}: exists, skipped"
        if isinstance(outcome, FileReport):
            line = f"{_kept(outcome)}; {_lost(outcome)}; {_bytes(outcome)}"
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
            say(line)

    def how_far(self) -> str:
        """Return how far it came, and how to go on."""
        every = len(self._plan.tasks) + len(self._plan.failures)
        return (
            f"interrupted: {self._ended} of {every} files are finished; the same command with "
            "--resume goes on"
        )


def _kept(report: FileReport) -> str:
    count = report.count
    share = f"{100 * count.kept / count.total:.1f} %"
    if (
        report.worst_at_least is None and count.lower_bound is not None
    ):  # or the bounds are those of another budget
        share += f"; at least {count.lower_bound} are needed"
    return f"{report.target}: kept {count.kept} of {count.total} keys ({share})"


def _lost(report: FileReport) -> str:
    every = totals(report.layers)
    if not every["rows"]:
        return "no query was judged"
    parts = [f"worst tail mass {round_up(every['worst_tail_mass'])} of {every['rows']} rows"]
    if report.worst_at_least is not None:
        parts.append(f"no less than {report.worst_at_least:.6g} is possible with so many keys")
    if over := every["rows_over_budget"]:
        parts.append(f"{over} rows over eps")
    if left_out := every["rows_left_out"]:
        parts.append(f"{left_out} rows left out")
    if queries := every["held_out_queries"]:
        parts.append(f"{every['held_out_violations']} of {queries} queries of the trial lost more")
    alone = "of the kept rows alone: " if report.rest == "codes" else ""
    return alone + ", ".join(parts)


def _bytes(report: FileReport) -> str:
    name = "its guard" if report.rest == "file" else "codes"
    rest = f", {_mb(report.rest_bytes)} are {name}" if report.rest_bytes else ""
    return (
        f"{_mb(report.cache_bytes)} of keys and values are {_mb(report.output_bytes)} "
        f"({100 * report.saved:.1f} % saved{rest})"
    )


def show_summary(result: JobResult) -> None:
    """Print a line for the whole job, where it was more than one file."""
    for report in result.outputs:
        _show_holdout(report)
    every = len(result.outputs) + len(result.failures) + len(result.skipped)
    if every < 2:
        return
    before = sum(report.cache_bytes for report in result.outputs)
    after = sum(report.output_bytes for report in result.outputs)
    parts = [f"{len(result.outputs)} of {every} files pruned"]
    if result.resumed:
        parts.append(f"{result.resumed} of them by an earlier run")
    if result.skipped:
        parts.append(f"{len(result.skipped)} skipped")
    if result.failures:
        parts.append(f"{len(result.failures)} failed")
    if before:
        parts.append(
            f"{_mb(before)} of keys and values are {_mb(after)} "
            f"({100 * (1 - after / before):.1f} % saved)"
        )
    say(f"{', '.join(parts)}; {result.seconds:.1f} s, {result.peak_memory / 1e6:.0f} MB of memory")


def _show_holdout(report: FileReport) -> None:
    sets = [one for layer in report.layers for one in layer.sets if one.held_out.queries]
    if not sets:
        return
    worst = max(sets, key=lambda one: one.held_out.high)
    every = totals(report.layers)
    rate = every["held_out_violations"] / every["held_out_queries"]
    say(
        f"{report.target}: in the trial, {100 * rate:.1f} % of the queries that sets were made "
        "without lost more than their budget (mean over sets); in the worst set "
        f"{worst.held_out.violations} of {worst.held_out.queries}, a probability of at most "
        f"{100 * worst.held_out.high:.1f} % with 97.5 % confidence; the sets that were written are "
        "made for all queries"
    )


def show_estimates(found: list[Estimate]) -> None:
    """Print what jobs would cost and save."""
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
