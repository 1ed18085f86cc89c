"""T: a tail mass from a few drawn keys, against scoring every key."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

import certk_rs as ck
from harness import rows
from harness.clock import Entrant, Work
from harness.report import Entry, compare
from harness.verify import check_tail

from .settings import Settings

SECTIONS = {
    "T": "montecarlo.tail_mass, 256 draws, upper bounds given / exp(K q) and its sum, d = 128",
}
LONG = 1_000_000
LENGTHS = (1 << 17, LONG)
TARGET = 0.1
WIDTH = 0.1  # of the tail
WIDE, KEPT, DRAWS, DELTA = 128, 2000, 256, 1e-6


def estimated(settings: Settings, n: int) -> Iterator[Entry]:
    """One row of n keys whose bounds are up to 0.2 nats above the scores."""
    rng = np.random.default_rng(n)
    keys = rng.standard_normal((n, WIDE), dtype=np.float32)
    query = (2 / WIDE**0.5 * rng.standard_normal(WIDE)).astype(np.float32)
    scores = keys @ query
    upper = scores + 0.2 * rng.random(n, dtype=np.float32) + np.float32(1e-3)
    kept = np.argpartition(-scores, KEPT)[:KEPT]

    def estimate(bounds: rows.Array) -> ck.montecarlo.TailEstimate:
        return ck.montecarlo.tail_mass(
            None, kept, delta=DELTA, draws=DRAWS, seed=1, upper_bounds=bounds,
            score=lambda i: keys[i] @ query, threads=1,
        )  # fmt: skip

    check_tail(scores, kept, estimate(upper), WIDTH)

    def ours(placed: rows.Array) -> Work:
        return lambda: estimate(placed[0])

    def by_torch(_: rows.Array) -> Work:
        lent, vector = torch.from_numpy(keys), torch.from_numpy(query)

        def work() -> object:
            exact = lent @ vector
            return exact.sub_(exact.max()).exp_().sum()

        return work

    def by_numpy(_: rows.Array) -> Work:
        def work() -> object:
            exact = keys @ query
            exact -= exact.max()
            return np.exp(exact, out=exact).sum()

        return work

    row = upper.reshape(1, n)
    entrants = [
        Entrant.of("tail_mass", row, ours),
        Entrant.of("torch", row, by_torch),
        Entrant.of("numpy", row, by_numpy),
    ]
    times = settings.contest(entrants)
    for entrant in entrants[1:]:
        yield compare(
            "T", entrant.name, times, "tail_mass", entrant.name,
            target=TARGET if n == LONG else None, n=n, rows=1, peer_rows=1, kept=KEPT / n,
        )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """T."""
    for n in settings.lengths(*LENGTHS):
        yield from estimated(settings, n)
