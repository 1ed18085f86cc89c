"""Certified attention and search: `python benches/bench_attention.py [decode groups prefill ...]`.

Ratios of medians on one thread, ours and a peer's taken in turn in one process. Decoding has four
kv heads, so that caches are not warm. Its peer is the fastest of scaled_dot_product_attention with
the queries of a group as rows, the same with `enable_gqa`, and softmax(q K^T) V. Float64 checks
each output first: it may be off by what its certificate allows. Exit code 1 when it fails.

Beside the peer, ONNX Runtime's GroupQueryAttention over keys and values in int8: its ratio, and how
far its outputs are off at most, relative to their norm. It proves nothing.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

import certk_rs as ck
from harness import ort, table
from harness.clock import in_turn
from harness.levels import beside
from harness.rows import EXAMPLES
from harness.table import Run, ratio_line
from harness.verify import CheckFailedError

EPS = 0.01
HEADS = 4
SECTIONS = {
    "decode": "one query a kv head, by codes of keys and values / the fastest dense way of torch",
    "groups": "the same for groups of four and eight queries a kv head, independent and alike",
    "prefill": "as many queries as keys, or 2048 / scaled_dot_product_attention",
    "search": "keys scored exactly / the fewest that the budget allows, real and Gaussian keys",
    "build": "building an index / one copy of the keys",
}
# Spreads of scores at which about these shares of the keys are kept.
SPREADS = {0.02: 5.2, 0.07: 4.2, 0.25: 3.05, 0.45: 2.5, 1.0: 0.5}
DECODE = {0.02: 0.12, 0.07: 0.25, 0.25: 0.4, 0.45: 0.4, 1.0: 0.35}
GROUPS = {0.02: 0.25, 0.07: 0.45, 0.25: 0.45, 0.45: 0.45, 1.0: 0.45}
SIGMAS = (8.0, 5.0, 3.0, 1.0)
ALIKE = 0.9
# How far int8 may be off; otherwise it is not the same work.
CODED = 0.2
PREFILL = {
    torch.float32: {(4096, 64): 0.7, (8192, 128): 0.6},
    torch.bfloat16: {(4096, 64): 1.0, (8192, 128): 1.0},
}
BUILD = {torch.float32: 4.0, torch.bfloat16: 6.5}

sdpa = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Data:
    """Gaussian keys and values, and queries of one length."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def of(
        heads: int, queries: int, n: int, d: int, sigma: float, dtype: torch.dtype,
        alike: float = 0.0,
    ) -> Data:  # fmt: skip
        """Return queries (heads, queries, d) of a correlation, keys and values (heads, n, d)."""
        made = torch.Generator().manual_seed(7)
        k, v = (torch.randn(heads, n, d, generator=made) for _ in range(2))
        q = torch.randn(heads, queries, d, generator=made) * (1 - alike) ** 0.5
        if alike:
            q += torch.randn(heads, 1, d, generator=made) * alike**0.5
        q *= sigma * math.sqrt(d) / q.norm(dim=-1, keepdim=True)
        return Data(q.to(dtype), k.to(dtype), v.to(dtype))

    def exact(self, causal: bool = False) -> torch.Tensor:
        """Return the output in float64."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        n, d = k.shape[-2:]
        exact = []
        for start in range(0, q.shape[1], 512):
            scores = q[:, start : start + 512] @ k.mT * d**-0.5
            if causal:
                last = start + torch.arange(scores.shape[1])[:, None]
                scores = scores.masked_fill(torch.arange(n) > last, -math.inf)
            exact.append(scores.softmax(-1) @ v)
        return torch.cat(exact, 1)

    def check(self, found: Any, causal: bool = False) -> float:
        """Return k over the keys that rows see, after float64 has agreed with the output."""
        real, n = self.exact(causal), self.k.shape[1]
        off = (torch.as_tensor(found.out).double().reshape(real.shape) - real).norm(dim=-1)
        bound = np.reshape(found.error_bound, off.shape)
        if not (off.numpy() <= bound).all() or not (np.asarray(found.tail_mass_upper) <= EPS).all():
            raise CheckFailedError(f"q {tuple(self.q.shape)}, n {n}: off by {off.max():.2e}")
        return float(np.asarray(found.k).mean()) / ((n + 1) / 2 if causal else n)


def decoding(run: Run, group: int, goals: dict[float, float], alike: float = 0.0) -> Iterator[str]:
    """Time one step for all heads, at every dtype, length and spread."""
    if not ort.HERE:
        yield ort.MISSING
    for dtype in (torch.float32, torch.bfloat16):
        # Of rows that are alike, the longest and widest.
        for n in run.pick((16_384, 65_536), (1024,))[-1 if alike else 0 :]:
            for d in run.pick((64, 128), (64,))[-1 if alike else 0 :]:
                for share, goal in goals.items():
                    data = Data.of(HEADS, group, n, d, SPREADS[share], dtype, alike)
                    yield step(run, data, goal, " alike" if alike else "")


def step(run: Run, data: Data, goal: float, kind: str) -> str:
    """Compare ours with the best dense way."""
    q, k, v = (x[None] for x in (data.q, data.k, data.v))
    group, n, d = q.shape[-2], *k.shape[-2:]
    index = ck.KvIndex.build(k, v, threads=1)
    keys_alone = ck.KeyIndex.build(k, threads=1)
    each = q.reshape(1, HEADS * group, 1, d)
    peers: dict[str, Callable[[], Any]] = {
        "rows": lambda: sdpa(q, k, v),
        "gqa": lambda: sdpa(each, k, v, enable_gqa=True),
        "matmul": lambda: torch.softmax((q @ k.mT) * d**-0.5, -1) @ v,
    }
    works = peers | {
        "ours": lambda: ck.attention(each, k, v, EPS, index=index, threads=1),
        "keys alone": lambda: ck.attention(each, k, v, EPS, index=keys_alone, threads=1),
        "no index": lambda: ck.attention(each, k, v, EPS, threads=1),
    }
    works = beside(works, "ours")
    kept = {name: data.check(works[name]()) for name in works if name not in peers}["keys alone"]
    if ort.HERE:
        works["int8"] = ort.int8_attention(*(x.float().numpy() for x in (data.q, data.k, data.v)))
        real = data.exact().numpy()
        off = np.linalg.norm(works["int8"]() - real, axis=-1) / np.linalg.norm(real, axis=-1)
        far = off.max()
        if not far <= CODED:
            raise CheckFailedError(f"ONNX Runtime, n {n}: off by {far:.2g}")
    exact = float(np.asarray(works["ours"]().scored).mean()) / n
    times = in_turn(works, run.repeat)
    best = min(peers, key=times.median)
    label = f"{str(k.dtype)[6:]} n {n} d {d}, {group} a head{kind}, k/n {kept:.3f}"
    without, alone = (times.ratio(name, best)[0] for name in ("no index", "keys alone"))
    rest = f"{times.median('ours'):9.2f} ms, exact {exact:.3f}, keys alone {alone:.3f}, "
    rest += f"without an index {without:.3f}"
    if ort.HERE:
        rest += f", int8 {times.ratio('ours', 'int8')[0]:.3f} (off {far:.3f})"
    return ratio_line(label, times, "ours", best, goal, rest)


def prefilling(run: Run) -> Iterator[str]:
    """Time many queries of one head."""
    for dtype, shapes in PREFILL.items():
        for (n, d), goal in run.pick(shapes, {(512, 64): 1.0}).items():
            for causal in (False, True):
                for sigma, alike in (*((sigma, 0.0) for sigma in SIGMAS), (5.0, ALIKE)):
                    queries = n if causal else min(n, 2048)
                    data = Data.of(1, queries, n, d, sigma, dtype, alike)
                    kind = f"sigma {sigma:g}{' alike' if alike else ''}"
                    yield fill(run, data, causal=causal, kind=kind, goal=goal)


def fill(run: Run, data: Data, *, causal: bool, kind: str, goal: float) -> str:
    """Compare ours with torch's, and tell where nothing may be dropped."""
    given = (data.q, data.k, data.v)
    n, d = data.k.shape[-2:]
    q, k, v = (x[None] for x in given)
    works: dict[str, Callable[[], Any]] = {
        "ours": lambda: ck.attention(*given, EPS, causal=causal, threads=1),
        "exact": lambda: ck.attention(*given, 0.0, causal=causal, threads=1),
        "sdpa": lambda: sdpa(q, k, v, is_causal=causal),
    }
    works = beside(works, "ours")
    for name in works.keys() - {"sdpa"}:
        data.check(works[name](), causal)
    worst = float(np.asarray(works["ours"]().tail_mass_upper).max())
    times = in_turn(works, run.repeat)
    label = f"{str(k.dtype)[6:]} n {n} d {d}{' causal' if causal else ''}, {kind}"
    rest = f"{times.median('ours'):9.2f} ms, tail mass <= {worst:.4f}, "
    rest += f"eps 0 {times.ratio('exact', 'sdpa')[0]:.3f}"
    return ratio_line(label, times, "ours", "sdpa", goal, rest)


def building(run: Run) -> Iterator[str]:
    """Time an index of the keys of one head, and a copy of them: of one length, and of many."""
    n = run.pick(131_072, 4096)
    for (dtype, target), spread in product(BUILD.items(), (0.0, 1.0)):
        keys = Data.of(1, 1, n, 128, 1.0, dtype).k[0]
        # Around one mean, and of lengths that differ a hundredfold.
        keys = ((keys + spread) * torch.logspace(-spread, spread, n)[:, None]).to(dtype)
        to = torch.empty_like(keys)
        works: dict[str, Callable[[], Any]] = {
            "ours": lambda keys=keys: ck.KeyIndex.build(keys, threads=1),  # type: ignore[misc]
            "copy_": lambda keys=keys, to=to: to.copy_(keys),  # type: ignore[misc]
        }
        times = in_turn(beside(works, "ours"), run.repeat)
        rest = f"{times.median('ours') / n * 1e6:8.1f} ns a key"
        label = f"{str(dtype)[6:]} n {n}, {'unequal' if spread else 'Gaussian'}"
        yield ratio_line(label, times, "ours", "copy_", target, rest)


def scored(name: str, pairs: Iterable[tuple[Any, Any]]) -> str:
    """Count keys of heads, each given as queries and keys."""
    ours = []
    for q, k in pairs:
        index = ck.KeyIndex.build(k)
        scores = q.astype(np.float64) @ k.T.astype(np.float64) * k.shape[1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = -np.sort(-weights / weights.sum(-1, keepdims=True))
        fewest = (np.cumsum(weights, -1) < 1 - EPS).sum(-1) + 1
        ours.append(index.search(q, EPS).scored / fewest)
    each = np.concatenate(ours)
    return f"{name}: mean {each.mean():.3f} (target 1.06), worst {each.max():.3f} (1.1)"


def searching(run: Run) -> Iterator[str]:
    """Count keys of real heads; with CERTK_DATA, of 128 windows of 512 tokens side by side."""
    folder = os.environ.get("CERTK_DATA")
    path = Path(folder) / "minilm_n65536.safetensors" if folder else None
    stored = load_file(path or EXAMPLES / "minilm_small.safetensors")
    for layer in range(sum(name.endswith(".key") for name in stored)):
        queries, keys = (
            stored[f"layers.{layer}.{part}"].astype(np.float32) for part in ("query", "key")
        )
        heads = (part.reshape(-1, *part.shape[-2:]) for part in (queries, keys))
        yield scored(f"layer {layer} n {keys.shape[-2]}", zip(*heads, strict=True))
    n = run.pick(65_536, 512)
    for sigma in (5.0, 1.0):
        data = Data.of(HEADS, 32, n, 128, sigma, torch.float32)
        yield scored(f"sigma {sigma:g} n {n}", zip(data.q.numpy(), data.k.numpy(), strict=True))


def measure(run: Run) -> None:
    """Tell all lines of the sections."""
    torch.set_num_threads(1)
    run.tell(table.HEADER)
    parts: dict[str, Callable[[], Iterator[str]]] = {
        "decode": lambda: decoding(run, 1, DECODE),
        "groups": lambda: (
            text
            for alike in (0.0, ALIKE)
            for size in (4, 8)
            for text in decoding(run, size, GROUPS, alike)
        ),
        "prefill": lambda: prefilling(run),
        "search": lambda: searching(run),
        "build": lambda: building(run),
    }
    for name, part in parts.items():
        if name in run.wanted:
            run.tell(f"{name}: {SECTIONS[name]}")
            for text in part():
                run.tell(text)


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "attention", 7, measure))
