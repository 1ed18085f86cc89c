"""G1 and G2: the time per score as rows grow, ours and that of the peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness import peers, rows
from harness.clock import Entrant, Times
from harness.levels import named
from harness.report import Entry, Line, Note, compare

from .settings import EPS, MIDDLING, PEAKED, SLOW, Settings, checked, ours, share

SECTIONS = {
    "G1": "select f32 at n ('ours') / at n = 4096, plus what numpy.max of the same row takes more "
    "at n than at 4096 ('peer'), Gaussian rows",
    "G2": "the same rows, all that the growth plot shows: select f32 / each",
}
TARGET = 1.3
SHORT = (64, 256, 1024)
LONG = tuple(4096 * 4**i for i in range(7))
BATCH = 1 << 20
MIDDLE = 3.0  # the sigma that the plot shows
LONGEST_TOP_P = 1 << 22

OURS = "select f32"
# Names in the figure and in the table, in the order of the table.
HALF, DOUBLE = "select f16", "select f64"
SOFTMAX, PARTITION, TOP_P = "torch.softmax(out=)", "numpy.argpartition", "torch top-p"
MAX = "numpy.max"


@dataclass(frozen=True, eq=False)
class Measured:
    """A contest at one length; `peer_rows` says on how many of the rows each was timed."""

    n: int
    rows: int
    kept: float
    times: Times
    peer_rows: dict[str, int]
    kind: str = ""  # of rows that the plot does not show


def measure(settings: Settings, n: int, sigma: float) -> Measured:
    """A contest at one length; with only G1 wanted, between select and max alone."""
    scores = rows.gaussian(np.random.default_rng(n), rows.count(n, BATCH), n, sigma)
    sel = checked(scores)
    k = round(float(sel.k.mean()))
    entrants = [
        Entrant.of(OURS, scores, ours()),
        Entrant.of(MAX, scores, peers.numpy_max),
    ]
    if settings.wants("G2"):
        for name, dtype in ((HALF, np.float16), (DOUBLE, np.float64)):
            stored = scores.astype(dtype)
            checked(stored)
            entrants.append(Entrant.of(name, stored, ours()))
        entrants.append(Entrant.of(SOFTMAX, scores, peers.softmax_out()))
        entrants.append(Entrant.of(PARTITION, scores, peers.argpartition(k), MIDDLING))
        if n <= LONGEST_TOP_P:
            entrants.append(Entrant.of(TOP_P, scores, peers.top_p(EPS), SLOW))
    taken = {entrant.name: entrant.take for entrant in entrants}
    kind = "" if sigma == MIDDLE else f", sigma {sigma:g}"
    return Measured(n, len(scores), share(sel, n), settings.contest(entrants), taken, kind)


def grown(at: Measured, base: Measured) -> Line:
    """The line of G1. What plain max pays more for reading is no fault of ours, so it is added."""
    memory = max(at.times.median(MAX) - base.times.median(MAX), 0.0)
    time, peer = (each.times.median(OURS) for each in (at, base))
    lower = None
    if named(OURS) in at.times.readings:
        lower = at.times.median(named(OURS)) / (base.times.median(named(OURS)) + memory)
    return Line(
        "G1", f"max {at.times.median(MAX):.3f} ns{at.kind}", time / (peer + memory), TARGET, at.n,
        at.rows, base.rows, at.kept, time, peer + memory, lower=lower,
    )  # fmt: skip


def band(measured: Sequence[Measured]) -> Line:
    """The worst of all lengths against the cheapest, by the same rule; without a target."""
    cheapest = min(measured, key=lambda at: at.times.median(OURS))
    worst = max((grown(at, cheapest) for at in measured), key=lambda line: line.ratio)
    return replace(worst, label=f"worst / n = {cheapest.n}{cheapest.kind}", target=None)


def all_series(at: Measured) -> Iterator[Line]:
    """The lines of G2 at one length."""
    for name, taken in at.peer_rows.items():
        if name != OURS:
            yield compare(
                "G2", f"{name}{at.kind}", at.times, OURS, name, n=at.n, rows=at.rows,
                peer_rows=taken, kept=at.kept,
            )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """G1 and G2, length by length."""
    if not settings.wants(*SECTIONS):
        return
    lengths = (SHORT if settings.wants("G2") else ()) + LONG
    for sigma in (MIDDLE, PEAKED):
        measured: list[Measured] = []
        for n in settings.lengths(*lengths):
            at = measure(settings, n, sigma)
            if n in LONG and settings.wants("G1"):
                measured.append(at)
                yield grown(at, measured[0])
            if settings.wants("G2"):
                yield from all_series(at)
        if settings.wants("G1"):
            yield band(measured)
    if settings.wants("G1"):
        yield Note(
            "G1",
            f"Batches of {BATCH} scores, or one row where that is longer, so that short rows come "
            "from a cache and the longest from DRAM. Every score must be read at least once; the "
            "difference that this makes to numpy.max is granted, once, and everything else that "
            "grows counts.",
        )
    if settings.wants("G2"):
        yield Note(
            "G2", f"torch top-p stops at n = {LONGEST_TOP_P}, where one row takes half a second."
        )
