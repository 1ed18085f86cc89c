"""C and K: judging a set that is given, and one set for many rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

import certk_rs as ck
from harness import peers, rows
from harness.clock import LEAST_REPEAT, Entrant, Work
from harness.report import Entry, Line, Note, compare
from harness.verify import check_certificate, check_keep_set

from .settings import EPS, FLAT, PEAKED, Settings, checked, ours, share

SECTIONS = {
    "C": "certify ('ours') / select of the same rows ('peer')",
    "K": "keep_set at eps 0.05 / exp of every score of the same rows, into an output that exists; "
    "'gap': keys above the least number that is proven to be needed / that number",
}
TARGET = 1.0
LENGTHS = (512, 4096, 131072, 1 << 20)
SHARED_EPS = 0.05
QUICK = 1 << 17  # the longest row of a quick run
ALIKE = 0.9


def judged(settings: Settings, label: str, scores: rows.F32) -> Iterator[Entry]:
    """C on one batch: a selection, and the same set as a mask."""
    many, n = scores.shape
    sel = checked(scores)
    mask = sel.to_mask()
    for keep in (sel, mask):
        check_certificate(scores, sel, ck.certify(scores, keep, eps=EPS, threads=1))

    def of_selection(placed: rows.Array) -> Work:
        return lambda: ck.certify(placed, sel, eps=EPS, threads=1)

    def of_mask(placed: rows.Array) -> Work:
        return lambda: ck.certify(placed, mask, eps=EPS, threads=1)

    entrants = [
        Entrant.of("select", scores, ours()),
        Entrant.of("of a Selection", scores, of_selection),
        Entrant.of("of a boolean mask", scores, of_mask),
    ]
    times = settings.contest(entrants)
    for entrant, target in zip(entrants[1:], (TARGET, None), strict=True):
        yield compare(
            "C", f"{entrant.name}, {label}", times, entrant.name, "select", target=target, n=n,
            rows=many, peer_rows=many, kept=share(sel, n),
        )  # fmt: skip


def shared(settings: Settings, label: str, scores: rows.F32) -> Iterator[Entry]:
    """K on one batch: rows of queries that share their keys."""
    many, n = scores.shape
    found = ck.keep_set(scores, SHARED_EPS, threads=1)
    check_keep_set(scores, found, SHARED_EPS)

    def bind(placed: rows.Array) -> Work:
        return lambda: ck.keep_set(placed, SHARED_EPS, threads=1)

    entrants = [
        Entrant.of("keep_set", scores, bind),
        Entrant.of("torch.exp", scores, peers.torch_exp()),
        Entrant.of("numpy.exp", scores, peers.numpy_exp()),
    ]
    times = settings.contest(entrants)
    yield Line(
        "K", f"{label}: gap", found.k / found.lower_bound - 1, n=n, rows=many, kept=found.k / n,
    )  # fmt: skip
    for entrant in entrants[1:]:
        yield compare(
            "K", f"{label}: {entrant.name}", times, "keep_set", entrant.name, n=n, rows=many,
            peer_rows=many, kept=found.k / n,
        )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """C and K."""
    if settings.wants("C"):
        for n in settings.lengths(*LENGTHS):
            many = rows.count(n, settings.scores // 2)
            for sigma in (FLAT, 3.0, PEAKED):
                made = rows.gaussian(np.random.default_rng(n), many, n, sigma)
                yield from judged(settings, f"sigma {sigma:g}", made)
        yield from judged(settings, "real", rows.real())
    if settings.wants("K"):
        rng = np.random.default_rng(15)
        yield from shared(settings, "real head", rows.real()[:32])
        for many, n in ((128, 4096), (32, 32768)):
            if n <= settings.longest:
                yield from shared(settings, "q.k, d = 32", rows.products(rng, many, n))
        # Seconds each: no more readings than must be.
        few = replace(settings, repeat=LEAST_REPEAT)
        n, counts = (32768, (64, 256, 512)) if settings.longest > QUICK else (1024, (64, 256))
        for many in counts:
            for sigma in (4.0, 5.0):
                made = rows.gaussian(rng, many, n, sigma)
                yield from shared(few, f"independent {sigma:g}", made)
            yield from shared(few, "one mean, q.k", rows.products(rng, many, n, 128, 4.0, ALIKE))
        yield Note(
            "K",
            "'independent': Gaussian rows of this sigma. 'q.k': queries and keys are Gaussian; "
            f"with 'one mean', two rows have a correlation of {ALIKE}.",
        )
