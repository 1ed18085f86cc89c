"""C and K: judging a set that is given, and one set for many rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import certk_rs as ck
from harness import peers, rows
from harness.clock import Entrant, Work
from harness.report import Entry, compare
from harness.verify import check_certificate, check_keep_set

from .settings import EPS, Settings, checked, ours, share

SECTIONS = {
    "C": "certify ('ours') / select of the same rows ('peer'), Gaussian rows of sigma 3",
    "K": "keep_set at eps 0.05 / exp of every score of the same rows, into an output that exists",
}
TARGET = 1.0
LENGTHS = (512, 4096, 131072, 1 << 20)
SHARED_EPS = 0.05


def judged(settings: Settings, n: int) -> Iterator[Entry]:
    """C at one length: a selection, and the same set as a mask."""
    scores = rows.gaussian(np.random.default_rng(n), rows.count(n, settings.scores // 2), n)
    many = len(scores)
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
            "C", entrant.name, times, entrant.name, "select", target=target, n=n, rows=many,
            peer_rows=many, kept=share(sel, n),
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
    for entrant in entrants[1:]:
        yield compare(
            "K", f"{label}: {entrant.name}", times, "keep_set", entrant.name, n=n, rows=many,
            peer_rows=many, kept=found.k / n,
        )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """C and K."""
    if settings.wants("C"):
        for n in settings.lengths(*LENGTHS):
            yield from judged(settings, n)
    if settings.wants("K"):
        rng = np.random.default_rng(15)
        yield from shared(settings, "real head", rows.real()[:32])
        for many, n in ((128, 4096), (32, 32768)):
            if n <= settings.longest:
                yield from shared(settings, "q.k, d = 32", rows.products(rng, many, n))
