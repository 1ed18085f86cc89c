"""What an audit says: findings, and what is known of every output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..cache_format import Options

# Findings beyond these are only counted, or an output of nonsense would fill the memory with them.
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
    """What nobody can tell of such an output without its input."""
    known: tuple[str, ...] = _OF_NONE if options.proof == "none" else WITHOUT_INPUT
    radius = ("whether budgets and values keep outputs within out_tol",)
    guard = ("whether the guard bounds what was dropped",)
    known += radius if options.out_tol is not None else ()
    return known + (guard if options.guard != "none" else ())


def recomputed(options: Options | None, rows: int, bounds: int) -> str:
    """In words, what an input confirms at a level of proof."""
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
    """One thing that does not hold, and where: a tensor or a part of the file, with the place.

    Both may hold foreign text, such as names of tensors, as it stands in the file.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class Notes:
    """Findings, of which those beyond many are only counted."""

    findings: list[Finding] = field(default_factory=list)
    more_findings: int = 0

    @property
    def found(self) -> int:
        """How many things do not hold."""
        return len(self.findings) + self.more_findings

    def add(self, where: str, what: str) -> None:
        """Note something that does not hold."""
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(where, what))
        else:
            self.more_findings += 1

    def take(self, other: Notes) -> None:
        """Note all that another has."""
        for finding in other.findings:
            self.add(finding.where, finding.what)
        self.more_findings += other.more_findings


@dataclass(frozen=True)
class Sampled:
    """Which rows were looked at where only some were: so many of all, drawn from a seed."""

    rows: int
    of: int
    seed: int


@dataclass
class OutputAudit(Notes):
    """What is known of one output. Every row is one query of one query head.

    `eps` (None if it is not the same everywhere), `budgets`, `options` and `names` are what it says
    was asked for (None if it cannot be read), and `covered` the tensors of its input that these
    names take for the cache. `kept` of `total` keys, `rows_over_budget` and `worst_tail_mass` (the
    largest upper end) are of the rows of layers that make sense that a promise is made for; without
    an input they are what it says, with it and without a finding they are true, and None where the
    level of proof does not tell. `rows` are those that something is recorded of, or promised for;
    `held_out` rows are of queries that were set aside, of which `violations` lose more than eps (or
    may, to within 2^-20), and `left_out` rows are those that coverage leaves out. `more_findings`
    are counted only. `sampled` says that only some rows were looked at: then nothing is confirmed.
    `error` says why it could not be judged at all: a file that the system refuses, or too little
    memory. `warnings` are no findings, but worth a look: a file that has the name of another input.
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
        """Whether nothing was found by an audit that looks at everything."""
        return not self.findings and self.sampled is None and self.error is None


@dataclass(frozen=True)
class Audit:
    """The whole answer.

    `unmatched` are inputs that belong to none of the outputs, `not_reached` outputs behind the
    first that does not hold, where the audit was told to stop there.
    """

    outputs: tuple[OutputAudit, ...]
    unmatched: tuple[Path, ...]
    not_reached: tuple[Path, ...] = ()

    @property
    def found(self) -> bool:
        """Whether anything does not hold."""
        return bool(self.unmatched) or any(output.findings for output in self.outputs)

    @property
    def not_judged(self) -> tuple[Path, ...]:
        """Outputs that an error kept from being judged; their `error` says which."""
        return tuple(output.path for output in self.outputs if output.error is not None)

    @property
    def holds(self) -> bool:
        """Whether everything that could be checked was, and holds."""
        whole = not self.not_reached and not self.unmatched
        return whole and all(output.holds for output in self.outputs)
