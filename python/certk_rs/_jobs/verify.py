"""Verifying outputs of prune jobs: `certk verify` as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING
from pathlib import Path
from typing import Any

from .._display.numbers import percent, rounded
from .._display.plain import plain
from .._display.shown import Shown
from .._files.new_file import write_json
from ..audit import Audit, OutputAudit, Progress, audit, audit_json
from ..errors import CertkError
from .inputs import expand

Place = str | os.PathLike[str]


@dataclass(frozen=True)
class Verdict(Audit, Shown):
    """The findings of an audit, with the methods that all results have."""

    def to_json(self) -> dict[str, Any]:
        """Plain values: what `certk verify --json` prints."""
        return audit_json(self)

    def save(self, path: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Write `to_json` as a file of JSON; written aside, then given its name.

        Raises:
            CertkError: The file is there, and `replace` is not set.
            OSError: It cannot be written.
        """
        write_json(path, self.to_json(), replace=replace)

    def summary(self) -> str:
        """Return a few lines: the verdict, what it rests on, and the first findings."""
        bad = [output for output in self.outputs if output.findings]
        said = "NOT JUDGED" if self.not_judged else "nothing was found"
        said = "holds" if self.holds else "DOES NOT HOLD" if self.found else said
        lines = [f"Verdict on {len(self.outputs)} outputs: {said}"]
        kept, total = (sum(getattr(o, name) for o in self.outputs) for name in ("kept", "total"))
        if total:
            lines.append(f"  kept       {kept} of {total} keys ({percent(kept, total)})")
        masses = [o.worst_tail_mass for o in self.outputs]
        known = [mass for mass in masses if mass is not None]
        if known and len(known) == len(masses):
            said = ", they say" if any(o.unchecked for o in self.outputs) else ""
            lines.append(f"  tail mass  at most {rounded(max(known), ROUND_CEILING)}{said}")
        rows = sum(o.confirmed_rows for o in self.outputs)
        bounds = sum(o.confirmed_lower_bounds for o in self.outputs)
        lines.append(f"  recomputed {rows} tail masses and {bounds} lower bounds")
        for what in dict.fromkeys(text for o in self.outputs for text in o.unchecked):
            lines.append(f"  not known  {what}")
        if sampled := sum(o.sampled is not None for o in self.outputs):
            lines.append(f"  sampled    {sampled} outputs: not verified as a whole")
        lines += [plain(f"  {output.path}: {output.findings[0]}") for output in bad[:3]]
        errors = [output for output in self.outputs if output.error is not None]
        lines += [plain(f"  {o.path}: could not be judged: {o.error}") for o in errors[:3]]
        warned = [(o.path, warning) for o in self.outputs for warning in o.warnings]
        lines += [plain(f"  {path}: warning: {warning}") for path, warning in warned[:3]]
        lines += [plain(f"  {path}: is the input of no output here") for path in self.unmatched[:3]]
        if self.not_reached:
            lines.append(f"  not looked at: {len(self.not_reached)} outputs")
        return "\n".join(lines)

    def __repr__(self) -> str:
        bad = sum(bool(output.findings) for output in self.outputs)
        return f"Verdict(holds={self.holds}, {len(self.outputs)} outputs, {bad} with findings)"

    def _columns(self) -> dict[str, Any]:
        return {name: [read(output) for output in self.outputs] for name, read in _COLUMNS.items()}


_COLUMNS: dict[str, Callable[[OutputAudit], Any]] = {
    "output": lambda o: str(o.path),
    "input": lambda o: None if o.source is None else str(o.source),
    "holds": lambda o: o.holds,
    "findings": lambda o: o.found,
    "error": lambda o: o.error,
    "eps": lambda o: o.eps,
    "kept": lambda o: o.kept,
    "total": lambda o: o.total,
    "rows": lambda o: o.rows,
    "rows_confirmed": lambda o: o.confirmed_rows,
    "rows_over_budget": lambda o: o.rows_over_budget,
    "worst_tail_mass": lambda o: o.worst_tail_mass,
    "lower_bounds": lambda o: o.lower_bounds,
    "lower_bounds_confirmed": lambda o: o.confirmed_lower_bounds,
    "held_out_rows": lambda o: o.held_out,
    "left_out_rows": lambda o: o.left_out,
}


def verify(
    outputs: Place | Iterable[Place],
    against: Place | Iterable[Place] | None = None,
    *,
    names: str | None = None,
    layout: str | None = None,
    recursive: bool = False,
    threads: int | None = None,
    sample: int | float | None = None,
    fail_fast: bool = False,
    on_output: Callable[[OutputAudit], None] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Check outputs of prune jobs, with arithmetic that shares no code with the selector.

    Without inputs: that every byte is what the certificate says. With them, also that what the
    certificate says is true: everything is recomputed. docs/files.md says what is checked.

    Args:
        outputs: Output files, directories of them, or glob patterns, one or several.
        against: The inputs they were made of, likewise; matched by the recorded hashes. None: no
            inputs.
        names: Pattern of the inputs' tensor names, None for the spelling that is found in them.
        layout: How the inputs' tensors are stored: "hnd", (heads, rows, d), or "nhd"; None for the
            order that their shapes fit, which is "hnd" where both do.
        recursive: Whether directories within directories are searched.
        threads: How many; None for as many as there are processors.
        sample: Recompute only so many rows of every output (an int), or such a share of them (a
            float in (0, 1]). That can find what does not hold, and never confirms that all does.
        fail_fast: Stop behind the first output that does not hold.
        on_output: Told of every output when it is done, in their order.
        progress: Told (what is being done, done, total).

    Returns:
        A `Verdict`: `holds` is the answer, `outputs` has the findings of each. An output that could
        not be judged, since the system refuses a file or memory, has an `error`.

    Raises:
        CertkError: There is no output, an input cannot be read, or an argument is none.
        OSError: An input is missing, or the system refuses it.
    """
    inputs = _files(() if against is None else against, recursive)
    if sample is not None and not inputs:
        raise CertkError("sample chooses rows to recompute: give against, which has them")
    found = audit(
        _files(outputs, recursive, needed=True),
        inputs,
        progress,
        names,
        threads=threads,
        sample=sample,
        fail_fast=fail_fast,
        each=on_output,
        layout=layout,
    )
    return Verdict(**vars(found))


def _files(given: Place | Iterable[Place], recursive: bool, needed: bool = False) -> list[Path]:
    if isinstance(given, (str, os.PathLike)):
        places = [given]
    elif isinstance(given, Iterable):
        places = list(given)
    else:
        raise CertkError(
            f"outputs and against are paths or lists of paths, not {type(given).__name__}"
        )
    if not places and not needed:
        return []
    sources = expand(places, recursive, same_names=True)
    # Unlike `Path.resolve` this takes loops of links, which are told when they are opened.
    return list(
        {os.path.realpath(path): path for path in (s.location.path for s in sources)}.values()
    )
