"""What one call costs: a single float32 row of 64 scores against `numpy.argpartition(row, 32)`.

    python benches/bench_one_row.py [--repeat 15] [--torch] [--json]

On one thread, in turn, in one process; medians in us per call and their ratio to the peer. Nearly
all of it is the way in and out, so this shows what arguments and results cost, not the search.
Exit 1 when `select` takes more than twice as long as the peer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

import certk_rs as ck

EPS = 0.01
CALLS = 2000
ALLOWED = 2.0
PEER = "numpy.argpartition(row, 32)"


def works() -> dict[str, Callable[[], Any]]:
    """What is timed, by name; those that must keep to the limit begin with "select(row"."""
    row = (3 * np.random.default_rng(0).standard_normal(64)).astype(np.float32)
    batch = row.reshape(1, 64)
    sel = ck.select(row, EPS)
    keep, mask = sel.row(0).astype(np.int64), sel.to_mask()
    weights = np.exp(row.astype(np.float64) - row.max())
    if not 1 - weights[keep].sum() / weights.sum() <= sel.tail_mass_upper <= EPS:
        raise SystemExit("the set does not hold")
    found: dict[str, Callable[[], Any]] = {
        PEER: lambda: np.argpartition(row, 32),
        "select(row, .01)": lambda: ck.select(row, EPS),
        "select(row[None], .01)": lambda: ck.select(batch, EPS),
        "select(row, .01, threads=1)": lambda: ck.select(row, EPS, threads=1),
        "its row(0)": lambda: ck.select(row, EPS).row(0),
        "certify(row, sel, eps=.01)": lambda: ck.certify(row, sel, eps=EPS),
        "certify(row, mask, eps=.01)": lambda: ck.certify(row, mask, eps=EPS),
        "certify(row, indices, eps=.01)": lambda: ck.certify(row, keep, eps=EPS),
    }
    if "torch" in sys.modules:
        tensor = sys.modules["torch"].from_numpy(row.copy())
        found["select of a torch tensor"] = lambda: ck.select(tensor, EPS)
    return found


def main() -> int:
    """Print the table; 1 when a call of select is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15, help="runs of each, at least 7")
    parser.add_argument("--torch", action="store_true", help="also time a torch tensor")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    if options.torch:
        import torch

        torch.set_num_threads(1)
    timed = works()
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(max(options.repeat, 7)):
        for name, work in timed.items():
            times[name].append(timeit.timeit(work, number=CALLS) / CALLS * 1e6)
    peer, worst = statistics.median(times[PEER]), 0.0
    for name, runs in times.items():
        line: dict[str, Any] = {"call": name, "us": statistics.median(runs)}
        line["ratio"] = line["us"] / peer
        if name.startswith("select(row"):
            worst = max(worst, line["ratio"])
        text = "{call:32} {us:7.2f} us {ratio:6.2f}"
        print(json.dumps(line) if options.json else text.format(**line))
    return 0 if worst <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
