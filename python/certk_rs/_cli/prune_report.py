"""What a prune job has done, as text."""

from __future__ import annotations

from .._jobs.results import Failure, FileOutcome, FileReport, JobResult, Skipped, totals
from .terminal import round_up, say


def said_of(outcome: FileOutcome) -> str:
    """What became of one input, in a line."""
    if isinstance(outcome, Failure):
        return f"{outcome.source}: failed"
    if isinstance(outcome, Skipped):
        return f"{outcome.target}: exists, skipped"
    return "; ".join((_kept(outcome), _lost(outcome), _bytes(outcome)))


def _kept(report: FileReport) -> str:
    count = report.count
    share = f"{100 * count.kept / count.total:.1f} %"
    if report.worst_at_least is None:  # or the bounds are those of another budget
        share += f"; at least {count.lower_bound} are needed"
    return f"{report.target}: kept {count.kept} of {count.total} keys ({share})"


def _lost(report: FileReport) -> str:
    every = totals(report.layers)
    parts = [f"worst tail mass {round_up(every['worst_tail_mass'])} of {every['rows']} rows"]
    if report.worst_at_least is not None:
        parts.append(f"no less than {report.worst_at_least:.6g} is possible with so many keys")
    if over := every["rows_over_budget"]:
        parts.append(f"{over} rows over eps")
    if left_out := every["rows_left_out"]:
        parts.append(f"{left_out} rows left out")
    if queries := every["held_out_queries"]:
        parts.append(f"{every['held_out_violations']} of {queries} queries of the trial lost more")
    return ", ".join(parts)


def _bytes(report: FileReport) -> str:
    guard = f", {report.guard_bytes / 1e6:.4g} MB are its guard" if report.guard_bytes else ""
    return (
        f"{report.cache_bytes / 1e6:.4g} MB of keys and values are {report.output_bytes / 1e6:.4g} "
        f"MB ({100 * report.saved:.1f} % saved{guard})"
    )


def show_summary(result: JobResult) -> None:
    """A line for the whole job, where it was more than one file."""
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
            f"{before / 1e6:.4g} MB of keys and values are {after / 1e6:.4g} MB "
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
