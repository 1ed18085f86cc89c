"""Experiment 7: what rounding does to common nucleus code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import selection
from .._display.page import Table, legend_below, panels, plain_ticks, svg, table_of
from .settings import Settings, Tell, described, mean, real_heads

NAME = "rounding"
TITLE = "What rounding does to common nucleus code"
ABOUT = (
    "Softmax, sort, cumulative sum, cut at p = 1 - eps: how often that keeps less mass than it "
    "promises, or more keys than are needed, judged by certificates that hold in exact arithmetic "
    "of the very scores that the code was given (known reports: FlashInfer#2202, Megatron-LM#7182, "
    "transformers#18984). Shares are of exactly the rows named, without intervals: another draw of "
    "Gaussian rows moves them a little."
)
NEEDS: tuple[str, ...] = ()
EPS = (1e-2, 1e-3)
Array = NDArray[Any]


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Each code on each kind of row."""
    lengths = (512, 4096) if settings.brief else (512, 4096, 32768, 131072)
    codes = _codes()
    kinds: list[tuple[str, Array]] = []
    for n in lengths:
        count = max(4, min(256, (1 << 19) // n))
        rng = settings.random(7, n)
        for sigma in (1.0, 3.0):
            kinds.append((f"Gaussian, sigma {sigma:g}", rng.standard_normal((count, n)) * sigma))
        kinds.append(("Laplace", rng.laplace(size=(count, n)) * 1.5))
    real = np.concatenate([head.scores for head in real_heads(settings.data, 8)])
    kinds.append(("real", real))
    rows = []
    for i, (kind, scores) in enumerate(kinds):
        for eps in EPS:
            for code, (dtype, keep_of) in codes.items():
                rows.append({"rows": kind, "n": scores.shape[1], "eps": eps, "code": code}
                            | _judge(scores, dtype, keep_of, eps))  # fmt: skip
        tell((i + 1) / len(kinds))
    worst = max((row for row in rows if row["code"] != OURS), key=lambda row: row["broken"])
    ours = max(row["broken"] for row in rows if row["code"] == OURS)
    more = max(row["too_many"] for row in rows if row["code"] == OURS)
    extra = max(row["extra"] for row in rows if row["code"] == OURS)
    lost = max(row["worst"] / row["eps"] for row in rows if row["code"] != OURS)
    seen = (
        f"The worst case is {worst['code']} on {worst['rows']} rows of n = {worst['n']}: "
        f"{100 * worst['broken']:.0f} % of them keep less mass than promised at eps = "
        f"{worst['eps']:g}; over all, up to {lost:.3g} times eps is lost. "
        f"Of ours {100 * ours:.0f} % keep less than promised, and up to {100 * more:.0f} % of a "
        f"kind keep more keys than prove_minimal, by {100 * extra:.2g} % in the mean at most."
    )
    return {"seen": seen, "about": described(settings, prefixes=False), "rows": rows}


OURS = "certk_rs.select"


def _judge(
    scores: Array, dtype: Any, keep_of: Callable[[Array, float], Array], eps: float
) -> dict[str, float]:
    """Shares of rows that lose more than eps (proven), and that keep more keys than needed."""
    given = scores.astype(dtype)
    # A code may keep what is masked, which is nothing.
    keep = keep_of(given, eps) & np.isfinite(given)
    found = selection.certify(given, keep, independent=given.shape[1] <= 4096)
    best = selection.select(given, eps, prove_minimal=True)
    broken = found.tail_mass_lower > eps
    return {
        "broken": mean(broken),
        "too_many": mean(~broken & (found.k > best.k)),
        "extra": mean(found.k / best.k - 1),
        "worst": float(found.tail_mass_lower.max()),
    }


def _codes() -> dict[str, tuple[Any, Callable[[Array, float], Array]]]:
    """Codes by name: the dtype they are given, and how they get a mask (rows, n) from scores."""
    codes: dict[str, tuple[Any, Callable[[Array, float], Array]]] = {
        "NumPy float32": (np.float32, lambda scores, eps: _numpy(scores, eps, np.float32)),
        "NumPy float16": (np.float16, lambda scores, eps: _numpy(scores, eps, np.float16)),
    }
    try:
        import torch
    except ImportError:
        pass
    else:

        def nucleus(kind: Any) -> Callable[[Array, float], Array]:
            def keep(scores: Array, eps: float) -> Array:
                weights = torch.from_numpy(scores.astype(np.float32)).to(kind).softmax(-1)
                ordered, places = weights.sort(dim=-1, descending=True)
                kept = torch.ones_like(ordered, dtype=torch.bool)
                kept[..., 1:] = ordered.cumsum(-1)[..., :-1] < 1 - eps
                mask = torch.zeros_like(kept).scatter_(-1, places, kept)
                return np.asarray(mask.numpy())

            return keep

        codes["torch float32"] = (np.float32, nucleus(torch.float32))
        codes["torch bfloat16"] = (np.float32, nucleus(torch.bfloat16))
        codes["torch float16"] = (np.float16, nucleus(torch.float16))
        codes |= _warper()
    codes[OURS] = (np.float32, lambda scores, eps: selection.select(scores, eps).to_mask())
    return codes


def _warper() -> dict[str, tuple[Any, Callable[[Array, float], Array]]]:
    try:
        import torch
        from transformers import TopPLogitsWarper
    except ImportError:
        return {}

    def keep(scores: Array, eps: float) -> Array:
        warped = TopPLogitsWarper(top_p=1 - eps)(None, torch.from_numpy(scores.copy()))
        return np.asarray(torch.isfinite(warped).numpy())

    return {"transformers TopPLogitsWarper": (np.float32, keep)}


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


def plots(data: dict[str, Any]) -> list[str]:
    """Broken promises and needless keys per code and n."""
    codes = list(dict.fromkeys(row["code"] for row in data["rows"]))
    figure, axes = panels(1, 2, figsize=(9.5, 4.4), sharey=True)
    lengths = sorted({row["n"] for row in data["rows"]})
    for code in codes:
        ours = {"color": "black", "lw": 2.5} if code == OURS else {}
        for axis, what in zip(axes, ("broken", "too_many"), strict=True):
            share = [
                100 * mean([r[what] for r in data["rows"] if r["code"] == code and r["n"] == n])
                for n in lengths
            ]
            axis.plot(lengths, share, "o-", ms=4, label=code, **ours)
    axes[0].set(title="keep less mass than promised", ylabel="rows (%)", ylim=(-3, 103))
    axes[1].set(title="keep more keys than needed")
    for axis in axes:
        axis.set(xscale="log", xlabel="n")
        plain_ticks(axis.xaxis, lengths)
    legend_below(figure, *axes[0].get_legend_handles_labels(), ncols=3)
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """All of it."""
    heads = "code | rows | n | eps | lose more | keep more | keys in excess | worst loss"
    cells = (
        "{code} | {rows} | {n} | {eps:g} | {broken:.3f} | {too_many:.3f} | "
        "{extra:.4f} | {worst:.3g}"
    )
    return [table_of(heads, cells, data["rows"])]
