"""What the auditor has found, as text and as data."""

from __future__ import annotations

from typing import Any

from ..audit import Audit, OutputAudit
from .terminal import fail, round_up, say

_SHOWN_FINDINGS = 20


def show_audit(report: Audit) -> None:
    """One line for everything that does not hold, and one for the verdict on each output."""
    for output in report.outputs:
        for finding in output.findings[:_SHOWN_FINDINGS]:
            say(f"{output.path}: {finding}")
        if output.found > _SHOWN_FINDINGS:
            say(f"{output.path}: ... and {output.found - _SHOWN_FINDINGS} more")
        if not output.holds:
            say(f"{output.path}: DOES NOT HOLD")
            continue
        say(f"{output.path}: {_covered(output)}")
        if output.unchecked:
            say(
                f"{output.path}: is what its certificate says, byte for byte; not known without "
                f"--against: {'; '.join(output.unchecked)}; it says: {_asked_and_kept(output)}"
            )
        else:
            say(
                f"{output.path}: holds: {output.confirmed_rows} tail masses and "
                f"{output.confirmed_lower_bounds} lower bounds recomputed from {output.source}; "
                f"{_asked_and_kept(output)}"
            )
    for path in report.unmatched:
        say(f"{path}: given with --against, but it is the input of no output here")


def _covered(output: OutputAudit) -> str:
    some, all_of_them = len(output.covered), len(output.covered) + len(output.not_covered)
    text = f"covers {some} of the {all_of_them} tensors of its input (names {output.names!r})"
    if not output.not_covered:
        return text
    shown = ", ".join(map(repr, output.not_covered[:3])) + ", ..." * (len(output.not_covered) > 3)
    return f"{text}, not covered: {shown}"


def _asked_and_kept(output: OutputAudit) -> str:
    options = vars(output.options) if output.options is not None else {}
    asked = [f"eps = {output.eps!r}", *(f"{name} = {value}" for name, value in options.items())]
    return (
        f"{', '.join(asked)}: kept {output.kept} of {output.total} keys, {output.rows_over_budget} "
        f"of {output.rows} rows over eps, worst tail mass {round_up(output.worst_tail_mass)}"
    )


def audit_json(report: Audit) -> dict[str, Any]:
    """The same as data."""
    return {
        "holds": report.holds,
        "outputs": [_output_json(output) for output in report.outputs],
        "unmatched_inputs": [str(path) for path in report.unmatched],
    }


def _output_json(output: OutputAudit) -> dict[str, Any]:
    return {
        "output": str(output.path),
        "input": None if output.source is None else str(output.source),
        "holds": output.holds,
        "findings": [{"where": item.where, "what": item.what} for item in output.findings],
        "more_findings": output.more_findings,
        "eps": output.eps,
        "options": None if output.options is None else vars(output.options),
        "names": output.names,
        "covered": list(output.covered),
        "not_covered": list(output.not_covered),
        "kept": output.kept,
        "total": output.total,
        "rows_over_budget": output.rows_over_budget,
        "worst_tail_mass": output.worst_tail_mass,
        "not_checked": list(output.unchecked),
        "tail_masses": output.rows,
        "tail_masses_confirmed": output.confirmed_rows,
        "lower_bounds": output.lower_bounds,
        "lower_bounds_confirmed": output.confirmed_lower_bounds,
    }


def verdict(report: Audit) -> int:
    """Say on stderr what does not hold; the exit code."""
    if report.holds:
        return 0
    bad = sum(not output.holds for output in report.outputs)
    where = next((f"{o.path}: {o.findings[0]}" for o in report.outputs if not o.holds), None)
    lone = f"{len(report.unmatched)} inputs without an output" if report.unmatched else ""
    first = f" (first: {where})" if where else ""
    what = f"{bad} of {len(report.outputs)} outputs do not hold{first}" if bad else ""
    return fail("failed: " + "; ".join(filter(None, (what, lone))), 1)
