"""S1 to S4 and P: batches of long rows against peers that do less, or find k by sorting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness import ort, peers, rows
from harness.clock import Bind, Entrant
from harness.machine import cores
from harness.report import Entry, Line, Note, compare, mean

from .settings import EPS, FLAT, MIDDLING, PEAKED, SLOW, Settings, checked, ours, share

SECTIONS = {
    "S1": "select / torch.softmax(out=), which selects nothing; one thread unless said",
    "S2": "select / torch softmax + sort + cumsum (top-p)",
    "S3": "select / torch.topk told k",
    "S4": "select / numpy.argpartition told k",
    "P": "select / other peers on flat and peaked Gaussian rows and on real ones; TopK and "
    "numpy.partition are told k",
}
TARGETS = {"S1": 1.0, "S2": 1 / 50, "S3": 1 / 10, "S4": 1 / 2}
MEAN = 0.8
LENGTHS = (4096, 32768, 131072, 1 << 20)
SIGMAS = (1.0, 3.0, 5.0)


@dataclass(frozen=True, eq=False)
class Case:
    """Rows with a name; the targets are for Gaussian and real ones. `plain`: P runs on it too."""

    label: str
    scores: rows.F32
    has_target: bool = True
    plain: bool = False


def cases(settings: Settings) -> Iterator[Case]:
    """All rows, made when their turn comes."""
    rng = np.random.default_rng(7)
    for n in settings.lengths(*LENGTHS):
        many = rows.count(n, settings.scores)
        for sigma in SIGMAS:
            made = rows.gaussian(rng, many, n, sigma)
            yield Case(f"Gaussian, sigma {sigma:g}", made, plain=sigma in (FLAT, PEAKED))
        if n in (4096, 131072):
            yield Case("Laplace, scale 1.5", rows.laplace(rng, many, n), has_target=False)
            yield Case("Student t, nu 3", rows.student(rng, many, n), has_target=False)
    for queries in (8, 32):
        yield Case(f"real, {queries} joined", rows.real_joined(queries), plain=queries == 32)
    long = rows.real_long()
    if long is not None and settings.lengths(long.shape[1]):
        yield Case("real keys, 64 queries", long[:: max(long.size // settings.scores, 1)])


def measure(case: Case, settings: Settings) -> Iterator[Line]:
    """All wanted comparisons of one case, in one contest."""
    scores = case.scores
    many, n = scores.shape
    sel = checked(scores)
    peers.check_peers(scores, sel.k, EPS)
    k = round(float(sel.k.mean()))
    entrants = {"select": Entrant.of("select", scores, ours())}

    def enter(section: str, bind: Bind, name: str = "", most: int | None = None) -> None:
        if settings.wants(section):
            name = name or section
            entrants[name] = Entrant.of(name, scores, bind, most)

    enter("S1", peers.softmax_out())
    enter("S2", peers.top_p(EPS), most=SLOW)
    enter("S3", peers.topk(k), most=MIDDLING)
    enter("S4", peers.argpartition(k), most=MIDDLING)
    if case.plain:
        enter("P", peers.softmax, "torch.softmax")
        enter("P", peers.scipy_softmax, "scipy softmax", MIDDLING)
        enter("P", peers.warper(EPS), "TopPLogitsWarper", SLOW)
        enter("P", peers.partition(k), "numpy.partition", MIDDLING)
        if ort.HERE:
            enter("P", ort.topk(k), "ORT TopK", MIDDLING)
    times = settings.contest(entrants.values())
    for name, entrant in entrants.items():
        if name != "select":
            section = name if name in SECTIONS else "P"
            yield compare(
                section,
                case.label
                if section == name
                else f"{name}, {case.label.removeprefix('Gaussian, ')}",
                times,
                "select",
                name,
                target=TARGETS.get(section) if case.has_target else None,
                n=n,
                rows=many,
                peer_rows=entrant.take,
                kept=share(sel, n),
            )


def two_threads(case: Case, settings: Settings) -> Line:
    """`select` and `torch.softmax(out=)` on two threads each."""
    many, n = case.scores.shape
    entrants = [
        Entrant.of("select", case.scores, ours(threads=2)),
        Entrant.of("peer", case.scores, peers.softmax_out()),
    ]
    times = settings.contest(entrants, threads=2)
    label = f"{case.label}, 2 threads"
    return compare("S1", label, times, "select", "peer", n=n, rows=many, peer_rows=many)


def run(settings: Settings) -> Iterator[Entry]:
    """Case by case; the table is put in order by section."""
    if not settings.wants(*SECTIONS):
        return
    judged: list[Line] = []
    threaded: list[Line] = []
    for case in cases(settings):
        if not case.plain and not settings.wants("S1", "S2", "S3", "S4"):
            continue
        for line in measure(case, settings):
            if line.section == "S1" and line.target is not None:
                judged.append(line)
            yield line
        if case.plain and settings.wants("S1") and cores() > 1:
            threaded.append(two_threads(case, settings))
    if settings.wants("P"):
        yield Note("P", "torch.softmax allocates its result here; ORT is ONNX Runtime.")
        if not ort.HERE:
            yield Note("P", ort.MISSING)
    if settings.wants("S1"):
        yield mean("S1", "mean of the above", judged, MEAN)
        yield from threaded
        if cores() < 2:
            yield Note("S1", "Two threads are left out: one processor.")
        yield Note(
            "S1",
            "'joined': the rows of examples/data have n = 512; the scores of several queries of "
            "one head are put end to end. Heavy tails (Laplace, Student) have no "
            "target and are no part of the mean.",
        )
