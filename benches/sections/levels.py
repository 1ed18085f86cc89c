"""S8: other dtypes against f32, and other instruction-set levels against the best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

import certk_rs as ck
from certk_rs import _native
from harness import rows
from harness.clock import Bind, Entrant, Work
from harness.report import Entry, Note, compare

from .settings import EPS, Settings, checked, ours, share

SECTIONS = {"S8": "select on another dtype / on f32, and at a forced level / at avx512; sigma 3"}
DTYPES: dict[str, tuple[Any, float]] = {
    "f16": (np.float16, 1.2),
    "bf16": (ml_dtypes.bfloat16, 1.2),
    "f64": (np.float64, 2.5),
}
BEST = "avx512"
# The portable code compiled without FMA is right and slow, and has no target.
LEVELS: dict[str, float | None] = {"avx2": 2.0, "portable": 4.0, "portable-nofma": None}
LENGTHS = (512, 4096, 131072)


@contextmanager
def level(name: str | None) -> Iterator[None]:
    """The process at a forced level; automatic choice afterwards."""
    _native.set_simd_level(name)
    try:
        yield
    finally:
        _native.set_simd_level(None)


def runs_here(name: str) -> bool:
    """Return True if this CPU and this build have the level."""
    try:
        with level(name):
            return True
    except ck.CertkError:
        return False


def ours_at(name: str) -> Bind:
    """`select` at a forced level."""

    def bind(scores: rows.Array) -> Work:
        def work() -> ck.Selection:
            with level(name):
                return ck.select(scores, EPS, threads=1)

        return work

    return bind


def dtypes(settings: Settings, scores: rows.F32) -> Iterator[Entry]:
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
            "S8", f"{name} / f32", times, name, "f32", target=target, n=n, rows=many,
            peer_rows=many, kept=kept[name],
        )  # fmt: skip


def levels(settings: Settings, scores: rows.F32) -> Iterator[Entry]:
    """The same f32 scores at each level that runs here; each is checked by the oracle."""
    many, n = scores.shape
    names = [name for name in (BEST, *LEVELS) if runs_here(name)]
    for name in names:
        with level(name):
            sel = checked(scores)
    times = settings.contest([Entrant.of(name, scores, ours_at(name)) for name in names])
    for name in names[1:]:
        yield compare(
            "S8", f"{name} / {BEST}", times, name, BEST, target=LEVELS[name], n=n, rows=many,
            peer_rows=many, kept=share(sel, n),
        )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """S8."""
    if not settings.wants("S8"):
        return
    rng = np.random.default_rng(9)
    batches = [
        rows.gaussian(rng, rows.count(n, settings.scores // 4), n)
        for n in settings.lengths(*LENGTHS)
    ]
    for scores in batches:
        yield from dtypes(settings, scores)
    if not runs_here(BEST):
        yield Note("S8", f"The levels are left out: this CPU has no {BEST} to compare with.")
        return
    for scores in batches:
        yield from levels(settings, scores)
    missing = [name for name in LEVELS if not runs_here(name)]
    if missing:
        yield Note("S8", f"This CPU does not run: {', '.join(missing)}.")
