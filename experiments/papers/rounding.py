"""Show the effect of rounding on common nucleus (top-p) code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import TopPLogitsWarper

from certk_rs import certify, select

from .common import (
    Array,
    Settings,
    Table,
    Verdict,
    legend,
    lines,
    mean,
    panels,
    real_heads,
    table_of,
)

NAME = "rounding"
ABOUT = (
    "Softmax, sort, cumulative sum, cut at p = 1 - eps, judged by certificates that hold in exact "
    "arithmetic of the very scores that the code was given. Known reports: FlashInfer#2202, "
    "Megatron-LM#7182, transformers#18984."
)
EPS = (1e-2, 1e-3)
OURS = "certk_rs.select"
Keep = Callable[[Array, float], Array]


def run(settings: Settings) -> dict[str, Any]:
    """Judge each code on each kind of row."""
    kinds: list[tuple[str, Array]] = []
    for n in (512,) if settings.quick else (512, 4096, 32768):
        count = 4 if settings.quick else max(8, min(128, (1 << 18) // n))
        rng = settings.random(7, n)
        for sigma in (1.0, 3.0):
            kinds.append((f"Gaussian, sigma {sigma:g}", rng.standard_normal((count, n)) * sigma))
        kinds.append(("Laplace", rng.laplace(size=(count, n)) * 1.5))
    kinds.append(("real", np.concatenate([head.scores for head in real_heads(2)])))
    rows = [
        {"rows": kind, "n": scores.shape[1], "eps": eps, "code": code}
        | judge(scores.astype(dtype), keep, eps)
        for kind, scores in kinds
        for eps in EPS
        for code, (dtype, keep) in codes().items()
    ]
    return {"rows": rows}


def judge(given: Array, keep: Keep, eps: float) -> dict[str, float]:
    """Return the shares of rows that lose more than eps (proven), and that keep too many keys."""
    found = certify(given, keep(given, eps), independent=given.shape[1] <= 4096)
    best = select(given, eps, prove_minimal=True)
    broken = found.tail_mass_lower > eps
    return {
        "broken": mean(broken),
        "too_many": mean(~broken & (found.k > best.k)),
        "extra": mean(found.k / best.k - 1),
        "worst": float(found.tail_mass_lower.max()),
    }


def codes() -> dict[str, tuple[Any, Keep]]:
    """Return codes by name: the dtype they are given, and the mask (rows, n) that they keep."""

    def nucleus(kind: torch.dtype) -> Keep:
        def keep(scores: Array, eps: float) -> Array:
            weights = torch.from_numpy(scores.astype(np.float32)).to(kind).softmax(-1)
            ordered, places = weights.sort(dim=-1, descending=True)
            kept = torch.ones_like(ordered, dtype=torch.bool)
            kept[..., 1:] = ordered.cumsum(-1)[..., :-1] < 1 - eps
            return np.asarray(torch.zeros_like(kept).scatter_(-1, places, kept).numpy())

        return keep

    def warped(scores: Array, eps: float) -> Array:
        found = TopPLogitsWarper(top_p=1 - eps)(None, torch.from_numpy(scores.copy()))
        return np.asarray(torch.isfinite(found).numpy())

    return {
        "NumPy float32": (np.float32, lambda scores, eps: _numpy(scores, eps, np.float32)),
        "NumPy float16": (np.float16, lambda scores, eps: _numpy(scores, eps, np.float16)),
        "torch float32": (np.float32, nucleus(torch.float32)),
        "torch bfloat16": (np.float32, nucleus(torch.bfloat16)),
        "torch float16": (np.float32, nucleus(torch.float16)),
        "transformers TopPLogitsWarper": (np.float32, warped),
        OURS: (np.float32, lambda scores, eps: select(scores, eps).to_mask()),
    }


def _numpy(scores: Array, eps: float, dtype: Any) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)).astype(dtype)
    weights /= weights.sum(axis=-1, keepdims=True, dtype=dtype)
    order = np.argsort(-weights, axis=-1, kind="stable")
    ordered = np.take_along_axis(weights, order, -1)
    kept = np.ones(scores.shape, bool)
    kept[..., 1:] = np.cumsum(ordered, axis=-1, dtype=dtype)[..., :-1] < dtype(1 - eps)
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, kept, -1)
    return mask


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge the common code by its worst case, and ours by its worst."""
    others = [row for row in data["rows"] if row["code"] != OURS]
    ours = [row for row in data["rows"] if row["code"] == OURS]
    worst = max(others, key=lambda row: row["broken"])
    lost = max(row["worst"] / row["eps"] for row in others)
    broken = max(row["broken"] for row in ours)
    return [
        Verdict(
            "common top-p code keeps the mass that it promises",
            f"worst: {worst['code']} on {worst['rows']} rows of n = {worst['n']}, of which "
            f"{100 * worst['broken']:.0f} % lose more than eps = {worst['eps']:g}; the largest "
            f"loss is {lost:.3g} eps",
            worst["broken"] == 0,
        ),
        Verdict(
            "ours: no row of select loses more than eps",
            f"{100 * broken:.0f} % lose more, and at most "
            f"{100 * max(row['extra'] for row in ours):.2g} % more keys are kept than needed",
            broken == 0,
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per code, kind of rows and budget."""
    heads = "code | rows | n | eps | lose more | keep more | keys in excess | worst loss"
    cells = "{code} | {rows} | {n} | {eps:g} | {broken:.3f} | {too_many:.3f} | {extra:.4f}"
    return [table_of("shares of rows", heads, cells + " | {worst:.3g}", data["rows"])]


def draw(data: dict[str, Any]) -> Any:
    """Draw the broken promises and needless keys of each code against n, over all rows."""
    figure, axes = panels(2, sharey=True)
    for axis, what in zip(axes, ("broken", "too_many"), strict=True):
        each: dict[tuple[str, int], list[float]] = {}
        for row in data["rows"]:
            each.setdefault((row["code"], row["n"]), []).append(row[what])
        rows = [{"code": c, "n": n, "share": mean(x)} for (c, n), x in sorted(each.items())]
        lines(axis, rows, "code", "n", "share", what.replace("_", " "))
    return legend(figure, axes[0])
