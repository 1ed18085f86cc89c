"""Long rows against every dense way: `python benches/bench_long.py [decode groups prefill]`.

Ratios of medians on one thread, ours and a peer's taken in turn. Decoding has four kv heads, so
that caches are not warm, and its peer is the fastest of scaled_dot_product_attention with the
queries of a group as rows, the same with `enable_gqa`, and softmax(q K^T) V. The peer of prefill is
this package where nothing may be dropped, which takes about as long as torch. Each output is
compared first: it may be off by what its certificate allows. Exit code 1 when that fails.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

import certk_rs as ck
from harness import table
from harness.table import Tell

EPS = 0.01
HEADS = 4
SECTIONS = {
    "decode": "one query a kv head, with an index",
    "groups": "groups of four and eight queries a kv head, with an index",
    "prefill": "as many queries as keys, or 2048 of them, with an index, and without",
}
# Spreads of scores at which about these shares of the keys are kept.
SPREADS = {0.02: 5.2, 0.07: 4.2, 0.25: 3.05, 0.9: 1.6}
DECODE = {0.02: 0.12, 0.07: 0.25, 0.25: 0.55, 0.9: 1.05}
GROUPS = {0.02: 0.25, 0.07: 0.45, 0.25: 1.0, 0.9: 1.05}
PREFILL = {
    (4096, 64): {8.3: 0.35, 5.6: 0.55, 4.4: 0.9, 1.0: 1.0},
    (8192, 128): {7.8: 0.25, 5.3: 0.4, 4.3: 0.7, 1.0: 1.0},
}

Works = dict[str, Callable[[], Any]]


class CheckFailedError(Exception):
    """A result was wrong."""


@dataclass(frozen=True)
class Data:
    """Gaussian keys and values, and queries of one length."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def of(heads: int, queries: int, n: int, d: int, sigma: float, dtype: torch.dtype) -> Data:
        """Queries (heads, queries, d), keys and values (heads, n, d)."""
        made = torch.Generator().manual_seed(7)
        k, v = (torch.randn(heads, n, d, generator=made) for _ in range(2))
        q = torch.randn(heads, queries, d, generator=made)
        q *= sigma * math.sqrt(d) / q.norm(dim=-1, keepdim=True)
        return Data(q.to(dtype), k.to(dtype), v.to(dtype))


def readings(works: Works, repeat: int) -> dict[str, list[float]]:
    """Seconds of each, in turn."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeat):
        for name, work in works.items():
            start = perf_counter()
            work()
            found[name].append(perf_counter() - start)
    return found


def check(one: Any, other: Any) -> None:
    """Outputs of one softmax, each within its own bound, are no farther apart than both."""
    first, second = (torch.as_tensor(made.out).double() for made in (one, other))
    apart = (first - second).norm(dim=-1)
    allowed = sum(torch.as_tensor(made.error_bound) for made in (one, other))
    if not (apart <= allowed).all() or not (np.asarray(one.tail_mass_upper) <= EPS).all():
        raise CheckFailedError(f"off by {apart.max():.2e}")


def line(label: str, ratio: float, goal: float, rest: str) -> str:
    """One ratio."""
    return f"{label:52}{ratio:7.2f}{goal:6.2f} {'ok' if ratio <= goal else 'MISS':5}{rest}"


def decoding(group: int, goals: dict[float, float], repeat: int) -> Iterator[str]:
    """One step for all heads."""
    for dtype in (torch.float32, torch.bfloat16):
        for n in (16_384, 65_536):
            for d in (64, 128):
                for share, goal in goals.items():
                    data = Data.of(HEADS, group, n, d, SPREADS[share], dtype)
                    yield step(data, group, goal, repeat)


def step(data: Data, group: int, goal: float, repeat: int) -> str:
    """Ours against the best dense way."""
    q, k, v = (x[None] for x in (data.q, data.k, data.v))
    n, d = k.shape[-2:]
    scale = 1 / math.sqrt(d)
    index = ck.KeyIndex.build(k, threads=1)
    each = q.reshape(1, HEADS * group, 1, d)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    peers: Works = {
        "rows": lambda: sdpa(q, k, v),
        "gqa": lambda: sdpa(each, k, v, enable_gqa=True),
        "matmul": lambda: torch.softmax((q @ k.transpose(-1, -2)) * scale, -1) @ v,
    }

    def ours() -> Any:
        return ck.attention(each, k, v, EPS, index=index, threads=1)

    found = ours()
    check(found, ck.attention(each, k, v, 0.0, threads=1))
    times = readings({"ours": ours, **peers}, repeat)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    best = min(peers, key=lambda name: medians[name])
    kept = float(np.asarray(found.k).mean()) / n
    label = f"{str(data.k.dtype)[6:]} n {n} d {d}, {group} a head, k/n {kept:.3f} / {best}"
    return line(label, medians["ours"] / medians[best], goal, f"{medians['ours'] * 1e3:9.2f} ms")


def prefilling(repeat: int) -> Iterator[str]:
    """Many queries of one head."""
    for (n, d), goals in PREFILL.items():
        for causal in (False, True):
            for sigma, goal in goals.items():
                data = Data.of(1, n if causal else 2048, n, d, sigma, torch.float32)
                yield from fill(data, causal=causal, goal=goal, repeat=repeat)


def fill(data: Data, *, causal: bool, goal: float, repeat: int) -> Iterator[str]:
    """Ours, with an index and without, against ours with nothing dropped."""
    given = (data.q, data.k, data.v)
    n, d = data.k.shape[-2:]
    index = ck.KeyIndex.build(data.k, threads=1)
    works: Works = {
        "dense": lambda: ck.attention(*given, 0.0, causal=causal, threads=1),
        "index": lambda: ck.attention(*given, EPS, index=index, causal=causal, threads=1),
        "none": lambda: ck.attention(*given, EPS, causal=causal, threads=1),
    }
    made = {name: work() for name, work in works.items()}
    for name in ("index", "none"):
        check(made[name], made["dense"])
    times = readings(works, repeat)
    dense = statistics.median(times["dense"])
    pairs = float(np.asarray(made["dense"].k).sum())
    kept = float(np.asarray(made["index"].k).sum()) / pairs
    for name, what in (("index", "with an index"), ("none", "without")):
        label = f"n {n} d {d}{' causal' if causal else ''}, k/n {kept:.3f}, {what}"
        ratio = statistics.median(times[name]) / dense
        yield line(label, ratio, goal, f"{dense * ratio * 1e9 / pairs:9.2f} ns a pair")


def body(sections: set[str], repeat: int, tell: Tell) -> bool:
    """All lines of the sections."""
    torch.set_num_threads(1)
    tell(f"\n{'':52}{'ratio':>7}{'goal':>6}")
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "decode": lambda: decoding(1, DECODE, repeat),
        "groups": lambda: (text for size in (4, 8) for text in decoding(size, GROUPS, repeat)),
        "prefill": lambda: prefilling(repeat),
    }
    for name, part in parts.items():
        if name in sections:
            try:
                for text in part():
                    tell(text)
            except CheckFailedError as wrong:
                tell(f"{name}: WRONG, {wrong}")
                return False
    return True


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "long", 7, body))
