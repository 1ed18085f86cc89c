"""Compare certified attention with plain attention: time, and error of the output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from certk_rs import KeyIndex, attention
from certk_rs.sparse_attention import ValueBall

from .common import (
    Array,
    Rows,
    Settings,
    Table,
    Verdict,
    legend,
    lines,
    mean,
    medians,
    panels,
    real_heads,
    table_of,
)

NAME = "certified-attention"
ABOUT = (
    "One query attends to n keys with eps = 0.01 in float32 on one thread; an index of the keys "
    "and a ball around the values are made beforehand, and the proven error bound is part of the "
    "work. Gaussian keys have d = 128 and scores of standard deviation sigma. The measured error "
    "is the distance from attention in float64, over the mean norm of a value. Times are medians "
    "of the time that one thread computes, against scaled_dot_product_attention of torch; "
    "machines differ."
)
EPS, D, QUERIES = 0.01, 128, 4
SIGMAS = (1.0, 2.5, 4.0, 5.0)


def run(settings: Settings) -> dict[str, Any]:
    """Attend to Gaussian keys at every length and sharpness, and to real keys."""
    repeat = 1 if settings.quick else 5
    rng = settings.random(9)
    rows: Rows = []
    for n in (256,) if settings.quick else (2048, 8192, 32768):
        keys, values = (rng.standard_normal((n, D), dtype=np.float32) for _ in range(2))
        queries = rng.standard_normal((QUERIES, D), dtype=np.float32)
        queries *= math.sqrt(D) / np.linalg.norm(queries, axis=1, keepdims=True)
        for sigma in SIGMAS:
            about = {"kind": f"sigma = {sigma:g}", "n": n}
            rows.append(about | measured(sigma * queries, keys, values, D**-0.5, repeat))
    found: Rows = []
    for head in real_heads(QUERIES):
        q, k, v = (x.astype(np.float32) for x in (head.queries, head.keys, head.values))
        found.append(measured(q, k, v, head.scale, 1))
    total = {name: sum(x[name] for x in found) for name in ("wrong", "rows")}
    means = {name: mean([x[name] for x in found]) for name in found[0]}
    rows.append({"kind": "real", "n": len(head.keys)} | means | total)
    return {"rows": [{k: x for k, x in row.items() if k != "time"} for row in rows]} | {
        "timing": [row["time"] for row in rows]
    }


def measured(q: Array, k: Array, v: Array, scale: float, repeat: int) -> dict[str, Any]:
    """Return the kept share, the errors and the time of one query at a time."""
    index, ball = KeyIndex.build(k, threads=1), ValueBall(v, threads=1)

    def ours() -> list[Any]:
        options: dict[str, Any] = {"index": index, "ball": ball, "scale": scale, "threads": 1}
        found = [attention(row[None], k, v, EPS, **options) for row in q]
        return [(each, each.error_bound) for each in found]

    # With an axis for heads: torch is several times slower without.
    keys, values = (torch.from_numpy(np.ascontiguousarray(x))[None, None] for x in (k, v))
    rows = [torch.from_numpy(np.ascontiguousarray(row[None, None, None])) for row in q]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def plain() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for row in rows:
            sdpa(row, keys, values, scale=scale)
        torch.set_num_threads(threads)

    scores = q.astype(float) @ k.T.astype(float) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    real = weights @ v.astype(float) / weights.sum(axis=1, keepdims=True)
    found = [each for each, _ in ours()]
    out, bound = (np.concatenate([np.atleast_1d(x) for x in part]) for part in (
        [each.out.reshape(1, -1) for each in found],
        [each.error_bound.reshape(-1) for each in found],
    ))  # fmt: skip
    error = np.linalg.norm(out - real, axis=1)
    # Values of zero have no scale, and errors of zero.
    size = mean(np.linalg.norm(v, axis=1)) or 1.0
    plain()
    works: dict[str, Callable[[], object]] = {"ours": ours, "plain": plain}
    spent = medians(works, repeat)
    return {
        "kept": mean([each.k for each in found]) / len(k),
        "scored": mean([each.scored for each in found]) / len(k),
        "error": mean(error) / size,
        "bound": mean(bound) / size,
        "wrong": int((error > bound).sum()),
        "rows": len(q),
        "time": spent["ours"] / spent["plain"],
    }


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge the bounds, and the time at the greatest n."""
    rows: Rows = [row | {"time": t} for row, t in zip(data["rows"], data["timing"], strict=True)]
    wrong, judged = sum(row["wrong"] for row in rows), sum(row["rows"] for row in rows)
    loose = float(np.median([row["bound"] / row["error"] for row in rows]))
    made = [row for row in rows if row["kind"] != "real"]
    n = made[-1]["n"]
    last = [row for row in made if row["n"] == n]
    told = ", ".join(f"{r['time']:.2f} ({r['kind']}, {r['kept']:.3f} kept)" for r in last)
    return [
        Verdict(
            "ours: no output is further from float64 than its bound",
            f"{wrong} of {judged} are; the bound is {loose:.1f} times the error, in the median",
            wrong == 0,
        ),
        Verdict(
            f"ours: at n = {n} certified attention is faster than SDPA of torch",
            f"time over that of SDPA: {told}; {rows[-1]['time']:.1f} at {rows[-1]['n']} real keys",
            max(row["time"] for row in last) < 1,
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per kind of scores and length."""
    rows = [row | {"time": t} for row, t in zip(data["rows"], data["timing"], strict=True)]
    heads = "scores | n | kept | scored | error | bound | beyond bound | time / SDPA"
    cells = "{kind} | {n} | {kept:.3f} | {scored:.3f} | {error:.2e} | {bound:.2e}"
    return [table_of("", heads, cells + " | {wrong} of {rows} | {time:.2f}", rows)]


def draw(data: dict[str, Any]) -> Any:
    """Draw time, and error with its bound, against n."""
    figure, axes = panels(2)
    rows = [row | {"time": t} for row, t in zip(data["rows"], data["timing"], strict=True)]
    lines(axes[0], rows, "kind", "n", "time", "time / time of SDPA", "xy")
    lines(axes[1], rows, "kind", "n", "error", "error, and its bound (dotted)", "xy")
    axes[1].set_prop_cycle(None)
    lines(axes[1], rows, "kind", "n", "bound", "error, and its bound (dotted)", "xy", ls=":")
    return legend(figure, axes[0])
