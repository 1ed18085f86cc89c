"""Certified attention and search: `python benches/bench_attention.py [A1 A2 A3 A4 A5 A6 P P2]`.

Everything is a ratio of medians, ours and a peer's, taken in turn in one process, on one thread
each (P2: two). Each result is checked once against float64 before it is timed: the output may be
off by what its certificate allows. Beside each time stands what must be read at least, by the speed
at which torch reads memory here. Exit code 1 when a check fails; a missed target is only marked.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

import certk_rs as ck
from harness import table
from harness.clock import LEAST_REPEAT, seconds
from harness.table import Tell

EPS = 0.01
EXAMPLE = Path(__file__).resolve().parents[1] / "python/certk_rs/_data/minilm_small.safetensors"
DIM = 128
LONG = 131_072
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECTIONS = {
    "A1": "one query, float32, with an index / the best torch",
    "A2": "one query, bfloat16, with an index / the best torch",
    "A3": "nothing can be dropped: one query, and a group of four / the best torch",
    "A4": "keys scored exactly / the fewest that the budget allows; searches for the mass",
    "A5": "building an index / one copy of the keys, both per key",
    "A6": "a group of four queries / the best torch, and / one query of ours",
    "P": "prefill, 512 queries over 8192 keys / torch SDPA",
    "P2": "the same on two threads",
}


class CheckFailedError(Exception):
    """A result was wrong."""


@dataclass(frozen=True)
class Case:
    """One comparison."""

    section: str
    sigma: float
    rows: int = 1
    n: int = LONG
    dtype: str = "float32"
    index: bool = True
    causal: bool = False
    threads: int = 1
    target: float | None = None

    @property
    def calls(self) -> int:
        """Calls a reading, each with its own queries: rows differ in how much they keep."""
        return {1: 8, 4: 3}.get(self.rows, 1)


CASES = (
    Case("A1", 4.0, target=1 / 5),
    Case("A1", 5.0, target=1 / 7),
    Case("A1", 2.5, target=0.6),
    Case("A1", 4.0, index=False),
    Case("A2", 4.0, dtype="bfloat16", target=1 / 3.5),
    Case("A2", 5.0, dtype="bfloat16", target=1 / 4),
    Case("A2", 2.5, dtype="bfloat16", target=0.7),
    Case("A3", 1.0, target=1.05),
    Case("A3", 1.0, index=False, target=1.05),
    Case("A3", 1.0, rows=4, target=1.1),
    Case("A3", 1.0, rows=4, index=False, target=1.1),
    Case("A6", 4.0, rows=4, target=1 / 3),
    Case("P", 1.0, rows=512, n=8192, index=False, target=1.1),
    Case("P", 1.0, rows=512, n=8192, target=1.1),
    Case("P", 1.0, rows=512, n=8192, index=False, causal=True),
    Case("P", 4.0, rows=512, n=8192, target=1.0),
    Case("P", 5.0, rows=512, n=8192, target=1.0),
    Case("P", 8.0, rows=512, n=8192, target=1.0),
    Case("P2", 1.0, rows=512, n=8192, index=False, threads=2, target=1.1),
)


def contest(works: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each work, in an order drawn anew each time; the first time is not counted."""
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    gc.disable()
    try:
        for repetition in range(-1, max(repeat, LEAST_REPEAT)):
            for at in rng.permutation(len(names)):
                spent = seconds(works[names[at]], 1)
                if repetition >= 0:
                    times[names[at]].append(spent)
    finally:
        gc.enable()
    return times


def ratio(times: dict[str, list[float]], ours: str, peer: str) -> tuple[float, float]:
    """Of the medians, and of the minima."""
    one, other = times[ours], times[peer]
    return statistics.median(one) / statistics.median(other), min(one) / min(other)


class Data:
    """Gaussian keys, values and queries of a case, and what works on them."""

    def __init__(self, case: Case, seed: int) -> None:
        """Scores have the standard deviation sigma."""
        generator = torch.Generator().manual_seed(seed)
        dtype = DTYPES[case.dtype]

        def normal(rows: int) -> torch.Tensor:
            return torch.randn(rows, DIM, generator=generator)

        self.case = case
        # Scores have the deviation that the case says in every row, not on average.
        q = normal(case.calls * case.rows)
        q *= case.sigma * math.sqrt(DIM) / q.norm(dim=-1, keepdim=True)
        self.q = q.to(dtype).reshape(case.calls, case.rows, DIM)
        self.k, self.v = normal(case.n).to(dtype), normal(case.n).to(dtype)
        self.index = self.build() if case.index else None
        shape = (case.rows, case.n)
        hidden = torch.ones(shape, dtype=torch.bool).tril(case.n - case.rows)
        self.mask = hidden if case.causal else None

    def build(self) -> ck.KeyIndex:
        """An index of the keys."""
        return ck.KeyIndex.build(self.k, threads=1)

    def ours(self, rows: int | None = None) -> list[ck.AttentionResult]:
        """Certified attention."""
        case, index = self.case, self.index
        works = partial(ck.attention, index=index, causal=case.causal, threads=case.threads)
        return [works(q[:rows], self.k, self.v, EPS) for q in self.q]

    def sdpa(self) -> None:
        """Return torch's call for it."""
        k, v = self.k[None, None], self.v[None, None]
        for q in self.q:
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(q[None, None], k, v, attn_mask=self.mask)

    def explicit(self) -> None:
        """Product, softmax, product."""
        for q in self.q:
            scores = (q @ self.k.mT) * DIM**-0.5
            if self.mask is not None:
                scores = scores.masked_fill(~self.mask, -math.inf)
            torch.softmax(scores, -1) @ self.v

    def check(self) -> tuple[float, float]:
        """Our results against float64: k / n, and how many keys were scored, of all."""
        shares = [self.check_one(q, found) for q, found in zip(self.q, self.ours(), strict=True)]
        kept, scored = zip(*shares, strict=True)
        return statistics.fmean(kept), statistics.fmean(scored)

    def check_one(self, q: torch.Tensor, found: ck.AttentionResult) -> tuple[float, float]:
        """One result."""
        scores = (q.double() @ self.k.double().mT) * DIM**-0.5
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf)
        real = (torch.softmax(scores, -1) @ self.v.double()).numpy()
        off = np.linalg.norm(found.out.double().numpy() - real, axis=-1)
        # The reference is f64: far finer than what it judges.
        if not (off <= found.error_bound).all() or not (found.tail_mass_upper <= EPS).all():
            raise CheckFailedError(f"{self.case}: off by {off.max():.2e}")
        return float(found.k.mean()) / self.case.n, float(found.scored.mean()) / self.case.n

    def bytes_needed(self, kept: float) -> float:
        """Return the bytes that are read at least: codes if there are any, kept keys and values."""
        row = DIM * self.k.element_size()
        some = 1 - (1 - kept) ** self.case.rows
        codes = self.case.n * (DIM + 2) if self.index is not None and kept < 0.6 else 0
        return codes + 2 * some * row * self.case.n


def stream() -> float:
    """Bytes a second that torch reads when it sums a long row, the best of some."""
    row = torch.ones(1 << 26)
    return 4 * row.numel() / min(seconds(row.sum, 1) for _ in range(7))


def line(label: str, name: str, found: tuple[float, float], target: float | None, rest: str) -> str:
    """One line of the table."""
    mark = "" if target is None else ("ok" if found[0] <= target else "MISS")
    goal = "" if target is None else f"{target:.2f}"
    return f"{label:34} {name:10} {found[0]:7.3f} {found[1]:7.3f} {goal:>6} {mark:4} {rest}"


def compared(case: Case, repeat: int, speed: float) -> Iterator[str]:
    """Lines of one case."""
    torch.set_num_threads(case.threads)
    data = Data(case, 1)
    kept, scored = data.check()
    works: dict[str, Callable[[], object]] = {"ours": data.ours, "sdpa": data.sdpa}
    if case.rows <= 4 and case.dtype == "float32":
        works["explicit"] = data.explicit
    if case.section == "A6":
        works["one query"] = lambda: data.ours(1)
    times = contest(works, repeat)
    dense = [name for name in ("sdpa", "explicit") if name in times]
    best = min(dense, key=lambda name: statistics.median(times[name]))
    label = f"{case.section} {case.dtype} m {case.rows} n {case.n} sigma {case.sigma:g}"
    label += " causal" * case.causal + " no index" * (not case.index)
    least = data.bytes_needed(kept) / speed * 1e3
    spent = statistics.median(times["ours"]) * 1e3 / case.calls
    rest = f"{spent:8.2f} ms, memory alone {least:6.2f} ms; k/n {kept:.3f}, scored {scored:.3f}"
    yield line(label, best, ratio(times, "ours", best), case.target, rest)
    if case.section == "A6":
        yield line(label, "one query", ratio(times, "ours", "one query"), 2.0, "")


def built(dtype: str, target: float, repeat: int) -> str:
    """A5."""
    torch.set_num_threads(1)
    data = Data(Case("A5", 1.0, dtype=dtype), 1)
    to = torch.empty_like(data.k)
    times = contest({"ours": data.build, "copy": lambda: to.copy_(data.k)}, repeat)
    spent = statistics.median(times["ours"]) / LONG * 1e9
    label = f"A5 {dtype} n {LONG}"
    return line(label, "copy_", ratio(times, "ours", "copy"), target, f"{spent:8.1f} ns a key")


def searched() -> Iterator[str]:
    """A4, on real keys; where CERTK_DATA names their folder, on 128 windows of 512 side by side."""
    folder = os.environ.get("CERTK_DATA")
    path = Path(folder) / "minilm_n65536.safetensors" if folder else EXAMPLE
    stored = {name: array.astype(np.float32) for name, array in load_file(path).items()}
    for layer in range(sum(name.endswith(".key") for name in stored)):
        ours, cells = [], []
        queries, keys = (stored[f"layers.{layer}.{part}"] for part in ("query", "key"))
        dim = keys.shape[-1]
        heads = [part.reshape(-1, *part.shape[-2:]) for part in (queries, keys)]
        for q, k in zip(*heads, strict=True):
            index = ck.KeyIndex.build(k)
            found = index.search(q, EPS)
            weights = np.exp(q.astype(np.float64) @ k.T.astype(np.float64) * dim**-0.5)
            weights = -np.sort(-weights / weights.sum(-1, keepdims=True))
            fewest = (np.cumsum(weights, -1) < 1 - EPS).sum(-1) + 1
            ours.append(found.scored / fewest)
            some = slice(None, None, max(1, len(q) // 8))
            cells.append(index.search(q[some], EPS, over="cells").scored / fewest[some])
        scored, peer = np.concatenate(ours), np.concatenate(cells)
        label = f"A4 layer {layer} n {keys.shape[-2]}"
        rest = f"mean (target 1.06) and worst (1.1); over cells {peer.mean():.2f}, {peer.max():.2f}"
        yield f"{label:34} {'fewest':10} {scored.mean():7.3f} {scored.max():7.3f} {'':11} {rest}"


def measure(wanted: set[str], repeat: int, tell: Tell) -> bool:
    """The table; whether all checks held."""
    torch.set_num_threads(1)
    speed = stream()
    tell(f"memory: reads {speed / 1e9:.1f} GB/s on one thread")
    tell("\nRatios of medians and of minima, ours / peer's; times are ours, a call\n")
    tell(f"{'':34} {'peer':10} {'ratio':>7} {'of min':>7} {'target':>6}")
    sound = True
    for case in CASES:
        if case.section not in wanted:
            continue
        try:
            for text in compared(case, repeat, speed):
                tell(text)
        except CheckFailedError as error:
            sound = False
            tell(f"CHECK FAILED: {error}")
    if "A4" in wanted:
        for text in searched():
            tell(text)
    if "A5" in wanted:
        for dtype, target in (("float32", 4.0), ("bfloat16", 6.5)):
            tell(built(dtype, target, repeat))
    return sound


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "attention", 15, measure))
