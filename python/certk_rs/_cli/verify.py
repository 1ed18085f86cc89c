"""`certk verify`: what prune has written, checked by the auditor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import Argument, Option, read_share
from .terminal import fail, print_json, progress_bar, round_up, say

if TYPE_CHECKING:
    from .._files.masses import Budgets
    from ..audit import Audit, OutputAudit

_SHOWN_FINDINGS = 20
SAMPLED = 3
"""The exit code where nothing was found in a sample: it does not say that anything holds."""
OPTIONS = {
    "outputs": Argument(metavar="OUT...", help="Outputs, or directories of them."),
    "against": Option(metavar="CACHE", help="An input, or a directory of them; may be repeated."),
    "threads": Option("--jobs", metavar="N", min=1, help="Threads; default: one a processor."),
    "sample": Option(
        metavar="F|N",
        parser=read_share,
        help="Recompute only a share F of the rows of every output, or N of them, for a quick "
        "look. It can find what does not hold and confirms nothing (exit code 3).",
    ),
    "fail_fast": Option("--fail-fast", help="Stop at the first output that does not hold."),
}


def verify(
    outputs: list[str],
    against: list[str] | None = None,
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    threads: int | None = None,
    sample: int | float | None = None,
    fail_fast: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Check what prune has written.

    Without inputs: that every byte is what the certificate says. With --against, also that what the
    certificate says is true: everything is recomputed. Exit code 1 if anything does not hold. An
    output that was pruned with --names needs the same here, if its spelling is not a known one,
    and one that was pruned with --layout, if its shapes fit both orders of axes.
    """
    from .._jobs.verify import verify as verify_outputs

    with progress_bar(quiet) as progress:
        report = verify_outputs(
            outputs,
            against,
            names=names,
            layout=layout,
            recursive=recursive,
            threads=threads,
            sample=sample,
            fail_fast=fail_fast,
            on_output=None if as_json else show_output,
            progress=progress,
        )
    if as_json:
        print_json(report.to_json())
    else:
        show_rest(report)
    return verdict(report)


def show_output(output: OutputAudit) -> None:
    """Print a line for everything that does not hold of one output, and one for the verdict."""
    for finding in output.findings[:_SHOWN_FINDINGS]:
        say(f"{output.path}: {finding}")
    if output.found > _SHOWN_FINDINGS:
        say(f"{output.path}: ... and {output.found - _SHOWN_FINDINGS} more")
    for warning in output.warnings:
        say(f"{output.path}: warning: {warning}")
    if output.findings:
        say(f"{output.path}: DOES NOT HOLD")
        return
    if output.error is not None:
        say(f"{output.path}: could not be judged: {output.error}")
        return
    say(f"{output.path}: {_covered(output)}")
    say(f"{output.path}: {_verdict(output)}{_asked_and_kept(output)}")


def show_rest(report: Audit) -> None:
    """Print what is to be said when all outputs are done."""
    for path in report.unmatched:
        say(f"{path}: given with --against, but it is the input of no output here")
    if report.not_reached:
        say(f"{len(report.not_reached)} outputs were not looked at (--fail-fast)")


def _verdict(output: OutputAudit) -> str:
    if output.sampled is not None:
        return (
            f"sampled, not verified: nothing was found in {output.sampled.rows} of "
            f"{output.sampled.of} rows of {output.source}, nor in the bytes of the output; lower "
            "bounds, guards, codes and all other rows were not looked at; it says: "
        )
    if output.unchecked:
        return (
            "is what its certificate says, byte for byte; not known without --against: "
            f"{'; '.join(output.unchecked)}; it says: "
        )
    from ..audit import recomputed

    rows, bounds = output.confirmed_rows, output.confirmed_lower_bounds
    return f"holds: {recomputed(output.options, rows, bounds)} from {output.source}; "


def _covered(output: OutputAudit) -> str:
    some, all_of_them = len(output.covered), len(output.covered) + len(output.not_covered)
    text = f"covers {some} of the {all_of_them} tensors of its input (names {output.names!r})"
    if not output.not_covered:
        return text
    shown = ", ".join(map(repr, output.not_covered[:3])) + ", ..." * (len(output.not_covered) > 3)
    return f"{text}, not covered: {shown}"


def _asked_and_kept(output: OutputAudit) -> str:
    options = vars(output.options) if output.options is not None else {}
    asked = [_budget_text("eps", output.budgets)]
    if output.bound_eps is not None and options.get("proof") != "none":
        asked.append(_budget_text("lower bounds for", output.bound_eps))
    asked += [f"{name} = {value}" for name, value in options.items()]
    over, worst = output.rows_over_budget, output.worst_tail_mass
    told = "an unknown number of" if over is None else str(over)
    text = f"{', '.join(asked)}: kept {output.kept} of {output.total} keys, "
    if not output.rows:
        return f"{text}no query was judged"
    text += (
        f"{told} of {output.rows} rows over eps, "
        f"worst tail mass {'not recorded' if worst is None else round_up(worst)}"
    )
    if output.held_out:
        lost = "not recorded" if output.violations is None else f"{output.violations} over eps"
        text += f"; {output.held_out} rows held out, {lost}"
    if output.left_out:
        text += f"; {output.left_out} rows left out, for which nothing is promised"
    return text


def _budget_text(name: str, budgets: Budgets | None) -> str:
    every = {budget for groups in (budgets or {}).values() for budget in groups}
    if len(every) > 1:
        return f"{name} = {min(every)!r} to {max(every)!r}"
    return f"{name} = {every.pop() if every else None!r}"


def verdict(report: Audit) -> int:
    """Say on stderr what does not hold; return the exit code."""
    if report.holds:
        return 0
    count = len(report.outputs) + len(report.not_reached)
    bad = [f"{o.path}: {o.findings[0]}" for o in report.outputs if o.findings]
    lost = [f"{o.path}: {o.error}" for o in report.outputs if o.error is not None]
    said = []
    if bad:
        said.append(f"{len(bad)} of {count} outputs do not hold (first: {bad[0]})")
    if lost:
        said.append(f"{len(lost)} of {count} outputs could not be judged (first: {lost[0]})")
    if report.unmatched:
        said.append(f"{len(report.unmatched)} inputs without an output")
    if not said:
        return fail("sampled, not verified: nothing was found in the rows looked at", SAMPLED)
    if lost and not bad:
        return fail(f"error: {'; '.join(said)}", 2, "io")
    return fail(f"failed: {'; '.join(said)}", 1)
