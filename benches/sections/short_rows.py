"""S5 and S7: many short rows, and the price of one call."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import certk_rs as ck
from harness import peers, rows
from harness.clock import Bind, Entrant
from harness.report import Entry, compare

from .settings import EPS, FLAT, PEAKED, Settings, checked, ours, share

SECTIONS = {
    "S5": "select / torch.softmax(out=) on many short rows",
    "S7": "one row of n = 64 from Python: a call of ours / one of a peer; ns per call",
}
MANY = 2.0
CALL = 2.0
LENGTHS = (64, 128, 256, 512)
WITH_TARGET = (128, 256, 512)


def many(settings: Settings) -> Iterator[Entry]:
    """S5. Half as many scores as elsewhere, since every row costs the oracle time too."""
    rng = np.random.default_rng(5)
    batches: list[tuple[str, rows.F32]] = []
    for n in LENGTHS:
        for sigma in (1.0, 3.0, 5.0):
            made = rows.gaussian(rng, rows.count(n, settings.scores // 2), n, sigma)
            batches.append((f"Gaussian, sigma {sigma:g}", made))
    batches.append(("real", rows.real()))
    for label, scores in batches:
        count, n = scores.shape
        sel = checked(scores)
        entrants = [
            Entrant.of("select", scores, ours()),
            Entrant.of("peer", scores, peers.softmax_out()),
        ]
        yield compare(
            "S5",
            label,
            settings.contest(entrants),
            "select",
            "peer",
            target=MANY if n in WITH_TARGET else None,
            n=n,
            rows=count,
            peer_rows=count,
            kept=share(sel, n),
        )


def one(settings: Settings, sigma: float) -> Iterator[Entry]:
    """S7: a call's fixed cost, against calls of the same kind."""
    scores = rows.gaussian(np.random.default_rng(6), 1, 64, sigma)
    sel = checked(scores)
    k = int(sel.k[0])
    against: dict[str, tuple[Bind, float | None]] = {
        "numpy.argpartition": (peers.argpartition(k), CALL),
        "torch.topk": (peers.topk(k), None),
        "torch.softmax": (peers.softmax, None),
    }
    keep, mask = sel.row(0).astype(np.int64), sel.to_mask()
    also: dict[str, Bind] = {
        "select and its row(0)": lambda placed: lambda: ck.select(placed, EPS, threads=1).row(0),
        "certify, Selection": lambda placed: lambda: ck.certify(placed, sel, eps=EPS),
        "certify, mask": lambda placed: lambda: ck.certify(placed, mask, eps=EPS),
        "certify, indices": lambda placed: lambda: ck.certify(placed, [keep], eps=EPS),
    }
    entrants = [Entrant("select", scores, ours(), 1, 1)]
    entrants += [Entrant(name, scores, bind, 1, 1) for name, (bind, _) in against.items()]
    entrants += [Entrant(name, scores, bind, 1, 1) for name, bind in also.items()]
    times = settings.contest(entrants)
    lines = [("select", name, name, target) for name, (_, target) in against.items()]
    lines += [(name, "numpy.argpartition", name, None) for name in also]
    for mine, peer, label, target in lines:
        yield compare(
            "S7", f"{label}, sigma {sigma:g}", times, mine, peer, target=target, n=64, rows=1,
            peer_rows=1, kept=share(sel, 64),
        )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """S5 and S7."""
    if settings.wants("S5"):
        yield from many(settings)
    if settings.wants("S7"):
        for sigma in (FLAT, PEAKED):
            yield from one(settings, sigma)
