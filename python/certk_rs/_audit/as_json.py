"""What an audit says, as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..cache_format import Budgets
from .report import Audit, OutputAudit


def audit_json(report: Audit) -> dict[str, Any]:
    """All of it; what `certk verify --json` prints."""
    return {
        "holds": report.holds,
        "outputs": [_output_json(output) for output in report.outputs],
        "unmatched_inputs": [str(path) for path in report.unmatched],
        "not_reached": [str(path) for path in report.not_reached],
    }


def _output_json(output: OutputAudit) -> dict[str, Any]:
    return {
        "output": str(output.path),
        "input": None if output.source is None else str(output.source),
        "holds": output.holds,
        "findings": [{"where": item.where, "what": item.what} for item in output.findings],
        "more_findings": output.more_findings,
        "error": output.error,
        "warnings": list(output.warnings),
        "sampled": None if output.sampled is None else asdict(output.sampled),
        "eps": output.eps,
        "budgets": _budgets_json(output.budgets),
        "bound_eps": _budgets_json(output.bound_eps),
        "options": None if output.options is None else vars(output.options),
        "names": output.names,
        "covered": list(output.covered),
        "not_covered": list(output.not_covered),
        "kept": output.kept,
        "total": output.total,
        "rows_over_budget": output.rows_over_budget,
        "worst_tail_mass": output.worst_tail_mass,
        "held_out_rows": output.held_out,
        "held_out_over_budget": output.violations,
        "left_out_rows": output.left_out,
        "not_checked": list(output.unchecked),
        "tail_masses": output.rows,
        "tail_masses_confirmed": output.confirmed_rows,
        "lower_bounds": output.lower_bounds,
        "lower_bounds_confirmed": output.confirmed_lower_bounds,
    }


def _budgets_json(budgets: Budgets | None) -> dict[str, list[float]] | None:
    return None if budgets is None else {str(i): list(groups) for i, groups in budgets.items()}
