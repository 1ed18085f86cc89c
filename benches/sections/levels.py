"""S8: other dtypes against f32, and other instruction-set levels against the best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from harness import rows
from harness.clock import Entrant
from harness.levels import level, named, runs_here
from harness.report import Entry, Note, compare

from .settings import FLAT, PEAKED, Settings, checked, ours, share

SECTIONS = {"S8": "select on another dtype / on f32, and at a forced level / at avx512"}
DTYPES: dict[str, tuple[Any, float]] = {
    "f16": (np.float16, 1.2),
    "bf16": (ml_dtypes.bfloat16, 1.2),
    "f64": (np.float64, 2.5),
}
BEST = "avx512"
# The portable code compiled without FMA is right and slow, and has no target.
LEVELS: dict[str, float | None] = {"avx2": 2.0, "portable": 4.0, "portable-nofma": None}
LENGTHS = (512, 4096, 131072)


def dtypes(settings: Settings, kind: str, scores: rows.F32) -> Iterator[Entry]:
    """The same scores rounded to each dtype."""
    many, n = scores.shape
    entrants = [Entrant.of("f32", scores, ours())]
    checked(scores)
    kept = {}
    for name, (dtype, _) in DTYPES.items():
        stored = scores.astype(dtype)
        kept[name] = share(checked(stored), n)
        entrants.append(Entrant.of(name, stored, ours()))
    times = settings.contest(entrants)
    for name, (_, target) in DTYPES.items():
        yield compare(
            "S8", f"{name} / f32, {kind}", times, name, "f32", target=target, n=n, rows=many,
            peer_rows=many, kept=kept[name],
        )  # fmt: skip


def levels(settings: Settings, kind: str, scores: rows.F32) -> Iterator[Entry]:
    """The same f32 scores at each level that runs here; each is checked by the oracle."""
    many, n = scores.shape
    names = [name for name in (BEST, *LEVELS) if runs_here(name)]
    for name in names:
        with level(name):
            sel = checked(scores)
    plain = Entrant.of("select", scores, ours())
    times = settings.contest([plain.at(name) for name in names])
    for name in names[1:]:
        yield compare(
            "S8", f"{name}, {kind}", times, named("select", name), named("select", BEST),
            target=LEVELS[name], n=n, rows=many, peer_rows=many, kept=share(sel, n),
        )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """S8."""
    if not settings.wants("S8"):
        return
    rng = np.random.default_rng(9)
    batches = [
        (f"sigma {sigma:g}", rows.gaussian(rng, rows.count(n, settings.scores // 4), n, sigma))
        for n in settings.lengths(*LENGTHS)
        for sigma in (FLAT, PEAKED)
    ]
    for batch in batches:
        yield from dtypes(settings, *batch)
    if not runs_here(BEST):
        yield Note("S8", f"The levels are left out: this CPU has no {BEST} to compare with.")
        return
    for batch in batches:
        yield from levels(settings, *batch)
    missing = [name for name in LEVELS if not runs_here(name)]
    if missing:
        yield Note("S8", f"This CPU does not run: {', '.join(missing)}.")
