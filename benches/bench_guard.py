"""Proofs by codes for queries that nobody knew: `python benches/bench_guard.py [T C S A]`.

T: for later queries of real rows, and of Gaussian ones, the guard's upper end of the dropped mass
over the truth, and the keys it would fetch over the fewest. The long rows need CERTK_DATA (n =
65536: 128 windows of 512 tokens side by side); those of the repository have n = 512.

C: the same of balls around several dropped keys each, which would take fewer bytes: neighbours in
the text, or keys that lie together. Computed here, in float64; certk_rs has no such guard.

S: a step of decoding over kept keys with a guard, over 1.3 times the step without plus reading the
guard's bytes once, as fast as torch adds up as many. Every result is checked before it is timed.

A: attention from codes alone, with no exact row: the share of all queries that is proven to be
within a budget, and how far outputs are off, of real and of Gaussian rows.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import certk_rs as ck
from certk_rs._files.cache import Cache
from certk_rs._files.values import widen
from certk_rs.guard import Guard
from harness import table
from harness.clock import in_turn
from harness.levels import BEST, SECOND, beside, named
from harness.rows import EXAMPLES
from harness.table import Run
from harness.verify import CheckFailedError

SECTIONS = {
    "T": "the guard's bound over the truth, and keys fetched over the fewest",
    "C": "the bound of balls around several keys each, over the truth, real rows",
    "S": "a step with a guard over 1.3 x the step without and reading its bytes",
    "A": "attention from codes alone: what is proven of all queries, and the truth",
}
EPS = 0.05
TIGHT, FETCHED, STEP = 1.3, 1.3, 1.0
# Bits of keys, the budget, and the share of queries that is to be proven to be within it.
PROVEN = ((12, 0.05, 1.0), (12, 0.01, 0.0), (16, 0.01, 0.99))


def heads() -> list[tuple[str, Any, Any, Any, float]]:
    """Return name, queries, keys and values (float64) and scale of each layer's first head."""
    found = []
    paths = [EXAMPLES / "minilm_small.safetensors"]
    if folder := os.environ.get("CERTK_DATA"):
        paths.append(Path(folder) / "minilm_n65536.safetensors")
    for path in paths:
        with Cache(path) as cache:
            for layer in cache.layers:
                q, k, v = (
                    widen(cache.read(layer, role)[0], layer.dtypes[role])
                    for role in ("query", "key", "value")
                )
                found.append((f"layer {layer.index}", q, k, v, cache.scales[layer.index]))
    return found


def tightness(name: str, q: Any, k: Any, _: Any, scale: float) -> str:
    """T: a keep-set for the first half of the queries, judged by the second."""
    listed, later = np.array_split(q, 2)
    kept = np.zeros(len(k), bool)
    kept[ck.keep_set(listed @ k.T * scale, EPS).indices] = True
    dropped = np.flatnonzero(~kept)
    scores = later @ k.T * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    true = weights[:, dropped].sum(axis=1)
    held = np.log(weights[:, kept].sum(axis=1)) + np.log(
        np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
    )
    held += scores.max(axis=1)
    keys = k[dropped].astype(np.float32)
    index = ck.KeyIndex.build(keys)
    found = index.recall(later.astype(np.float32), (held - 1e-9, held + 1e-9), EPS, scale=scale)
    if not (found.lost_upper >= true * (1 - 1e-9)).all() or (found.tail_mass_upper > EPS).any():
        raise CheckFailedError("a guard that proves what is not so")
    rest = np.sort(weights[:, dropped], axis=1).cumsum(axis=1)
    fewest = int(np.count_nonzero(rest > EPS))
    ratio = found.lost_upper / true
    mark = "ok" if np.quantile(ratio, 0.9) <= TIGHT else "MISS"
    fetched = int(found.k.sum()) / fewest if fewest else 1.0
    return (
        f"{name:10} n {len(k):6}  kept {kept.mean():.3f}  over eps {(true > EPS).mean():.2f}  "
        f"bound/truth {np.median(ratio):.3f}, 90 % {np.quantile(ratio, 0.9):.3f} {mark}  "
        f"fetched/fewest {fetched:.3f} {'ok' if fetched <= FETCHED else 'MISS'}"
    )


def halved(k: Any, most: int) -> list[Any]:
    """Keys in groups that lie together: halved along their widest direction, again and again."""
    groups = [np.arange(len(k))]
    while max(map(len, groups)) > most:
        parts = []
        for group in groups:
            if len(group) <= most:
                parts.append(group)
                continue
            away = k[group] - k[group].mean(axis=0)
            widest = np.linalg.svd(away[:2048], full_matrices=False)[2][0]
            order = group[np.argsort(away @ widest)]
            parts += [order[: len(order) // 2], order[len(order) // 2 :]]
        groups = parts
    return groups


def balls(name: str, q: Any, k: Any, _: Any, scale: float, most: int) -> str:
    """C: two thirds of the keys, those that the first half of the queries gives least."""
    listed, later = np.array_split(q, 2)
    scores = listed @ k.T * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    gone = np.sort(np.argsort(weights.mean(axis=0))[: 2 * len(k) // 3])
    scores = later @ k[gone].T * scale
    top = scores.max(axis=1)
    true = np.exp(scores - top[:, None]).sum(axis=1)
    length = np.sqrt(np.square(later).sum(axis=1)) * scale
    said = [f"{name:10} n {len(k):6}  {most:2} keys a ball"]
    runs = [np.arange(at, min(at + most, len(gone))) for at in range(0, len(gone), most)]
    for kind, groups in (("neighbours", runs), ("together", halved(k[gone], most))):
        upper = np.zeros(len(later))
        for group in groups:
            centre = k[gone[group]].mean(axis=0)
            radius = np.sqrt(np.square(k[gone[group]] - centre).sum(axis=1).max())
            upper += len(group) * np.exp(later @ centre * scale - top + length * radius)
        ratio = upper / true
        said.append(f"{kind} {np.median(ratio):.3g}, 90 % {np.quantile(ratio, 0.9):.3g}")
    return "  ".join(said)


def step(n: int, share: float, dtype: torch.dtype, threads: int, repeat: int, spread: float) -> str:
    """S: eight kv heads, four queries each, d = 128; scores have the standard deviation spread."""
    torch.set_num_threads(threads)
    kv_heads, heads, d = 8, 32, 128
    rng = torch.Generator().manual_seed(n)
    k, v = torch.randn(2, kv_heads, n, d, generator=rng).to(dtype)
    # Queries that look at what is kept: no breach.
    q = (spread * torch.randn(heads, 1, d, generator=rng)).to(dtype)
    count = int(share * n)
    scores = (q.float().reshape(kv_heads, -1, d) @ k.float().transpose(1, 2)).amax(1)
    kept = [np.sort(row.topk(count).indices.numpy()) for row in scores]
    guard = Guard.build(k, v, kept, threads=threads)
    at = [torch.from_numpy(each) for each in kept]
    here, values = (torch.stack([x[g, at[g]] for g in range(kv_heads)]) for x in (k, v))
    size = guard._index.nbytes
    codes = torch.zeros(size // 4, dtype=torch.float32)

    def plain() -> Any:
        return ck.attention(q, here, values, 0.0, threads=threads)

    def guarded() -> Any:
        found = plain()
        ends = found.log_mass_lower, found.log_mass_upper
        return guard.judge(q, ends, 0.9, threads=threads)

    def reading() -> Any:
        return codes.sum()

    judged = guarded()
    every = (q.double().reshape(kv_heads, -1, d) @ k.double().transpose(1, 2)) * d**-0.5
    weights = torch.softmax(every, -1)
    for g in range(kv_heads):
        gone = 1 - weights[g][:, at[g]].sum(-1).numpy()
        if (gone > judged.lost[g * 4 : g * 4 + 4, 0] * (1 + 1e-9)).any():
            raise CheckFailedError("a guard that proves what is not so")
    works = {"plain": plain, "guarded": guarded, "reading": reading}
    again = beside(works, "plain", "guarded")
    if SECOND and not np.array_equal(again[named("guarded")]().lost, judged.lost):
        raise CheckFailedError(f"{BEST} and {SECOND} differ")
    times = in_turn(again, repeat)
    spent = {name: times.median(name) for name in works}
    ratio = spent["guarded"] / (1.3 * spent["plain"] + spent["reading"])
    below = times.lower("guarded", "plain") or math.nan
    return (
        f"n {n:6}  kept {share:.2f}  sigma {spread:g}  {str(dtype).removeprefix('torch.'):8}  "
        f"{threads} threads  "
        f"{ratio:.3f} {'ok' if ratio <= STEP else 'MISS'}  plain {spent['plain']:.3f} ms  guarded "
        f"{spent['guarded']:.3f} ms  reading {spent['reading']:.3f} ms  "
        f"guarded/plain {spent['guarded'] / spent['plain']:.3f}, at {SECOND} {below:.3f}  "
        f"{size / (n * kv_heads - count * kv_heads):.1f} bytes a dropped key"
    )


def gaussian(n: int, spread: float) -> tuple[str, Any, Any, Any, float]:
    """Return 64 random rows whose scores have this standard deviation, d = 128."""
    rng = np.random.default_rng(n)
    k, v = rng.standard_normal((2, n, 128))
    return f"sigma {spread:g}", spread * rng.standard_normal((64, 128)), k, v, 128**-0.5


def alone(name: str, q: Any, k: Any, v: Any, scale: float) -> str:
    """A: all queries, by 12 and 16 bits of keys and 8 of values."""
    q, k, v = (x.astype(np.float32)[None] for x in (q, k, v))
    said = [f"{name:10} n {k.shape[1]:6}"]
    scores = q[0].astype(np.float64) @ k[0].astype(np.float64).T * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    real = weights @ v[0].astype(np.float64) / weights.sum(axis=1, keepdims=True)
    size = np.sqrt(np.square(v).sum(axis=-1).mean())
    for bits, eps, share in PROVEN:
        index = ck.KvIndex.build(k, v, bits=bits)
        kept = ck.KeptRows(k[0, index.bare[0]], v[0, index.bare[0]], index.bare)
        found = index.attention(q, eps, kept=kept, scale=scale)
        off = np.sqrt(np.square(found.out[0] - real).sum(axis=-1))
        if not (off <= found.error_bound[0]).all():
            raise CheckFailedError("an output that is farther off than is proven")
        within = (found.tail_mass_upper <= eps).mean()
        said.append(
            f"{bits} bits <= {eps:g}: {within:.3f} {'ok' if within >= share else 'MISS'}, worst "
            f"{found.tail_mass_upper.max():.3g}, off by {np.median(off) / size:.2g} x rms"
        )
    return "  ".join(said)


def measure(run: Run) -> None:
    """Tell the table."""
    run.tell("")
    if "T" in run.wanted:
        rest = [gaussian(run.pick(16_384, 1024), spread) for spread in (1.0, 4.0)]
        for head in heads() + rest:
            run.tell(tightness(*head))
    if "C" in run.wanted:
        for most in run.pick((2, 8, 64), (64,)):
            for head in heads():
                run.tell(balls(*head, most))
    if "A" in run.wanted:
        for head in heads():
            run.tell(alone(*head))
        for spread in run.pick((1.0, 2.5, 4.0), (2.5,)):
            run.tell(alone(*gaussian(run.pick(16_384, 1024), spread)))
    if "S" in run.wanted:
        full = ((16_384, 0.1), (65_536, 0.1), (65_536, 0.4))
        for threads in run.pick((1, 2), (1,)):
            for n, share in run.pick(full, ((1024, 0.1),)):
                for dtype in (torch.float32, torch.bfloat16):
                    for spread in (1.0, 4.0):
                        run.tell(step(n, share, dtype, threads, run.repeat, spread))


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "guard", 11, measure))
