"""What an audit says: findings, and what is known of every output."""

from __future__ import annotations

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
class OutputAudit:
    """What is known of one output. Every row is one query of one query head.

    `eps`, `options` and `names` are what it says was asked for (None if it cannot be read), and
    `covered` the tensors of its input that these names take for the cache. `kept` of `total` keys,
    `rows_over_budget` and `worst_tail_mass` (the largest upper end) are of the layers that make
    sense; without an input they are what it says, with it and without a finding they are true.
    `more_findings` are counted only.
    """

    path: Path
    source: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    more_findings: int = 0
    eps: float | None = None
    options: Options | None = None
    names: str | None = None
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    kept: int = 0
    total: int = 0
    rows_over_budget: int = 0
    worst_tail_mass: float = 0.0
    rows: int = 0
    confirmed_rows: int = 0
    lower_bounds: int = 0
    confirmed_lower_bounds: int = 0
    unchecked: tuple[str, ...] = WITHOUT_INPUT

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

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


@dataclass(frozen=True)
class Audit:
    """The whole answer. `unmatched` are inputs that belong to none of the outputs."""

    outputs: tuple[OutputAudit, ...]
    unmatched: tuple[Path, ...]

    @property
    def holds(self) -> bool:
        """Whether everything that could be checked holds."""
        return not self.unmatched and all(output.holds for output in self.outputs)
