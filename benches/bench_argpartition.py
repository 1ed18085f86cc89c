"""Batch selection of float32 rows against `numpy.argpartition` that is told the right k.

    python benches/bench_argpartition.py [--repeat 9] [--json]

Both run on one thread, in turn, in one process; the table shows medians in ns per score and their
ratio (select / argpartition; below 1 is faster). The peer gets k for free, so it does less: it
neither finds k nor proves a tail mass. Every result is checked before it is timed. Exit 1 when a
ratio is above 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import certk_rs as ck

EPS = 0.01
LENGTHS = (4096, 32768, 131072, 1 << 20)
SIGMAS = (1.0, 3.0, 5.0)
SCORES = 1 << 21


def timed(work: Callable[[], Any]) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def check(rows: np.ndarray, sel: ck.Selection) -> None:
    """Every row holds its k largest scores, and the float64 tail mass is within eps."""
    for i, row in enumerate(rows):
        kept = sel.row(i)
        rest = np.delete(row, kept)
        if rest.size and row[kept].min() < rest.max():
            raise SystemExit(f"row {i}: not the top {sel.k[i]}")
        weights = np.exp(row.astype(np.float64) - row.max())
        tail = np.exp(rest.astype(np.float64) - row.max()).sum() / weights.sum()
        if not tail <= sel.tail_mass_upper[i] <= EPS:
            raise SystemExit(f"row {i}: tail mass {tail} against {sel.tail_mass_upper[i]}")


def measure(n: int, sigma: float, repeat: int) -> dict[str, Any]:
    """Medians for one shape, alternating the two."""
    rng = np.random.default_rng(n)
    rows = (rng.standard_normal((max(SCORES // n, 2), n)) * sigma).astype(np.float32)
    sel = ck.select(rows, EPS, threads=1)
    check(rows, sel)
    at = [n - int(k) for k in sel.k]

    def ours() -> None:
        ck.select(rows, EPS, threads=1)

    def peer() -> None:
        for row, place in zip(rows, at, strict=True):
            np.argpartition(row, min(place, n - 1))

    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(repeat):
        times["ours"].append(timed(ours))
        times["peer"].append(timed(peer))
    one, two = (statistics.median(times[name]) / rows.size * 1e9 for name in ("ours", "peer"))
    kept = float(sel.k.mean() / n)
    return {"n": n, "sigma": sigma, "kept": kept, "select": one, "peer": two, "ratio": one / two}


def main() -> int:
    """Print the table; 1 when the peer wins anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9, help="runs of each, at least 7")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    if not options.json:
        print(f"level {ck.simd_level()}, eps {EPS}, one thread, ns per score")
        print(f"{'n':>8} {'sigma':>6} {'kept':>6} {'select':>8} {'argpart.':>8} {'ratio':>6}")
    worst = 0.0
    for n in LENGTHS:
        for sigma in SIGMAS:
            line = measure(n, sigma, max(options.repeat, 7))
            worst = max(worst, line["ratio"])
            text = "{n:8d} {sigma:6.1f} {kept:6.3f} {select:8.3f} {peer:8.3f} {ratio:6.3f}"
            print(json.dumps(line) if options.json else text.format(**line))
    return 0 if worst <= 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
