"""S6: the same rows on two threads and on one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from harness import rows
from harness.clock import Entrant
from harness.machine import cores
from harness.report import Entry, Note, compare

from .settings import FLAT, PEAKED, Settings, checked, ours, share

SECTIONS = {"S6": "select on two threads ('ours') / on one ('peer'), Gaussian rows"}
TARGET = 0.55
SHAPES = ((4096, 512), (512, 4096), (64, 32768), (1, 1 << 20))
WITH_TARGET = ((64, 32768), (1, 1 << 20))


def run(settings: Settings) -> Iterator[Entry]:
    """S6."""
    if not settings.wants("S6"):
        return
    if cores() < 2:
        yield Note("S6", "Left out: one processor.")
        return
    rng = np.random.default_rng(8)
    for shape, sigma in product(SHAPES, (FLAT, 3.0, PEAKED)):
        many, n = shape
        if n > settings.longest:
            continue
        scores = rows.gaussian(rng, many, n, sigma)
        sel = checked(scores)
        entrants = [Entrant.of(str(t), scores, ours(threads=t)) for t in (1, 2)]
        yield compare(
            "S6",
            f"{many} row{'s' if many > 1 else ''}, sigma {sigma:g}",
            settings.contest(entrants),
            "2",
            "1",
            target=TARGET if shape in WITH_TARGET else None,
            n=n,
            rows=many,
            peer_rows=many,
            kept=share(sel, n),
        )
