"""Reports of audits: findings, facts about every output, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .._files.certificate import Options
from .._files.masses import Budgets

# Further findings are only counted, so that an output of nonsense does not fill the memory.
MOST_FINDINGS = 10_000

WITHOUT_INPUT = (
    "whether the kept rows are those of the input",
    "whether the tail masses are true",
    "whether the lower bounds are true",
)
_OF_NONE = (
    "whether the kept rows are those of the input",
    "whether the promised rows are within their budgets, of which nothing is recorded",
)


def unknown_without_input(options: Options) -> tuple[str, ...]:
    """Return the questions that remain open without the input."""
    known: tuple[str, ...] = _OF_NONE if options.proof == "none" else WITHOUT_INPUT
    radius = ("whether budgets and values keep outputs within out_tol",)
    known += radius if options.out_tol is not None else ()
    return known + unknown_by_a_sample(options)


def unknown_by_a_sample(options: Options) -> tuple[str, ...]:
    """Return the questions about what is not of rows, which a sample of rows leaves open."""
    return {
        "file": ("whether the guard bounds what was dropped",),
        "codes": ("whether the codes are true of all keys and values",),
    }.get(options.rest, ())


def recomputed(options: Options | None, rows: int, bounds: int) -> str:
    """Return in words what an input confirms at a level of proof."""
    proof = "full" if options is None else options.proof
    return {
        "full": f"{rows} tail masses and {bounds} lower bounds recomputed",
        "compact": f"{rows} tail masses (of which only the worst of each head is recorded) and "
        f"{bounds} lower bounds recomputed",
        "none": f"{rows} tail masses (of which none is recorded, nor a lower bound) recomputed and "
        "found within what was asked",
    }[proof]


@dataclass(frozen=True)
class Finding:
    """A statement that does not hold, and its place: a tensor or a part of the file.

    Both may contain text of the file, such as names of tensors, unescaped.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class Notes:
    """Findings; those beyond `MOST_FINDINGS` are only counted."""

    findings: list[Finding] = field(default_factory=list)
    more_findings: int = 0

    @property
    def found(self) -> int:
        """The number of findings."""
        return len(self.findings) + self.more_findings

    def add(self, where: str, what: str) -> None:
        """Add a finding."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(where, what))
        else:
            self.more_findings += 1

    def take(self, other: Notes) -> None:
        """Add all findings of another."""
        for finding in other.findings:
            self.add(finding.where, finding.what)
        self.more_findings += other.more_findings


@dataclass(frozen=True)
class Sampled:
    """A sample of rows: so many of all, drawn from a seed."""

    rows: int
    of: int
    seed: int


@dataclass
class OutputAudit(Notes):
    """The facts about one output. A row is one query of one query head.

    Counts and masses are of layers that make sense. Without the input they are what the output
    states. With the input, and without a finding, they are true.

    Attributes:
        path: The output.
        source: The input that it was made of, if that was given and found.
        eps: The budget of all groups; None if they differ, or cannot be read.
        budgets: The budgets of all groups; None if they cannot be read.
        bound_eps: The budgets that the lower bounds refer to.
        options: The options of the job.
        names: The pattern of the input's tensor names.
        covered: The tensors of the input that these names take for the cache.
        not_covered: The other tensors of the input.
        kept: Kept keys.
        total: All keys.
        rows_over_budget: Promised rows over their budget; None if the level of proof does not tell.
        worst_tail_mass: The largest upper end of a promised row; None as above.
        rows: Rows with a record or a promise.
        confirmed_rows: Rows of which that was confirmed.
        lower_bounds: Recorded lower bounds.
        confirmed_lower_bounds: Those that were proved again.
        held_out: Rows of queries that were set aside.
        violations: Held-out rows that lose more than eps, or may, to within 2^-20.
        left_out: Rows that coverage leaves out.
        sampled: The sample; nothing is confirmed then. None if all rows were looked at.
        unchecked: The questions that remain open.
        error: The reason why it could not be judged: a refusal of the system, or too little memory.
        warnings: No findings, but worth a look: a file that has the name of another input.
    """

    path: Path = field(default_factory=Path)
    source: Path | None = None
    eps: float | None = None
    budgets: Mapping[int, tuple[float, ...]] | None = None
    bound_eps: Mapping[int, tuple[float, ...]] | None = None
    options: Options | None = None
    names: str | None = None
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    kept: int = 0
    total: int = 0
    rows_over_budget: int | None = 0
    worst_tail_mass: float | None = 0.0
    rows: int = 0
    confirmed_rows: int = 0
    lower_bounds: int = 0
    confirmed_lower_bounds: int = 0
    held_out: int = 0
    violations: int | None = None
    left_out: int = 0
    sampled: Sampled | None = None
    unchecked: tuple[str, ...] = WITHOUT_INPUT
    error: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """True if an audit of everything found nothing."""
        return not self.findings and self.sampled is None and self.error is None


@dataclass(frozen=True)
class Audit:
    """The answer of an audit.

    Attributes:
        outputs: The facts about every output.
        unmatched: Inputs of none of the outputs.
        not_reached: Outputs behind the first that does not hold, if the audit stopped there.
    """

    outputs: tuple[OutputAudit, ...]
    unmatched: tuple[Path, ...]
    not_reached: tuple[Path, ...] = ()

    @property
    def found(self) -> bool:
        """True if anything does not hold."""
        return bool(self.unmatched) or any(output.findings for output in self.outputs)

    @property
    def not_judged(self) -> tuple[Path, ...]:
        """Outputs that could not be judged because of their `error`."""
        return tuple(output.path for output in self.outputs if output.error is not None)

    @property
    def holds(self) -> bool:
        """True if everything was checked and holds."""
        whole = not self.not_reached and not self.unmatched
        return whole and all(output.holds for output in self.outputs)


def audit_json(report: Audit) -> dict[str, Any]:
    """Return an audit as plain values, as `certk verify --json` prints it."""
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
