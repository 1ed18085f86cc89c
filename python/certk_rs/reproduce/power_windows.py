"""Experiment 5: windows of size n^C, on simulated Gaussian queries and keys and on real keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import selection, windows
from .._display.page import Table, legend_below, legend_beside, panels, plain_ticks, svg, table_of
from . import self_attention
from .settings import (
    Settings,
    Tell,
    bars,
    described,
    mean,
    prefix_limit,
    real_heads,
    standard_error,
)

NAME = "power-windows"
TITLE = "Windows of size n^C: what grows, what collapses, what fails"
ABOUT = (
    "First our own setting: queries and keys are Gaussian vectors, so scores are about normal with "
    "standard deviation R; R is fixed, or grows like sqrt(ln n). One spike needs one key, and at "
    "fixed R the keys needed are a fixed share of n. Intervals are two standard errors over draws "
    "of the keys, and over heads for real keys. Then the second paper's: self-attention of "
    "Gaussian inputs X with a weight matrix W, scores X W X^T, R the norm of W, d = 64, and its "
    "metric, the spectral norm of the difference of the dense and the windowed attention matrix, "
    "over n. Of arXiv 2404.02690 we have a summary (of one version) and not the full text; its "
    "first version has another title, other authors and other theorems than the later ones. Its "
    "table of LLaMA-3-8B on LongBench is not run here."
)
NEEDS: tuple[str, ...] = ()
EPS = 0.01
D = 64
# Of keys and values, each with some queries.
DRAWS = 8
# Of each head of the real context.
QUERIES = 8
# Standard deviation of the scores as a function of n.
SCALES: dict[str, Callable[[int], float]] = {
    "R = 2": lambda n: 2.0,
    "R = 0.5 sqrt(2 ln n)": lambda n: 0.5 * math.sqrt(2 * math.log(n)),
    "R = 0.8 sqrt(2 ln n)": lambda n: 0.8 * math.sqrt(2 * math.log(n)),
    "R = 1.5 sqrt(2 ln n)": lambda n: 1.5 * math.sqrt(2 * math.log(n)),
}
# Windows of the second part, on scores of R = 0.8 sqrt(2 ln n).
ERRORS: dict[str, Callable[[int], int]] = {
    "k = ln ln n": lambda n: max(1, math.ceil(math.log(math.log(n)))),
    "k = 4 ln n": lambda n: math.ceil(4 * math.log(n)),
    "k = n^0.5": lambda n: math.ceil(n**0.5),
    "k = n^0.7": lambda n: math.ceil(n**0.7),
}


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """All parts."""
    top = 12 if settings.brief else 16
    lengths = [1 << b for b in range(7, top + 1)]
    grown: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    for i, n in enumerate(lengths):
        drawn = [_drawn(settings, n, draw) for draw in range(DRAWS)]
        grown += [{"model": name, "n": n, **_summed(drawn, name)} for name in SCALES]
        lost += [{"window": name, "n": n, **_summed(drawn, name)} for name in ERRORS]
        tell(0.4 * (i + 1) / len(lengths))
    fits = {name: _fit([row for row in grown if row["model"] == name]) for name in SCALES}
    real = _real(settings)
    theirs = self_attention.measure(settings, lambda share: tell(0.4 + 0.6 * share))
    few = [row["tail"] for row in lost if row["window"] == "k = ln ln n"]
    many = [row["tail"] for row in lost if row["window"] == "k = n^0.7"]
    frozen = fits["R = 1.5 sqrt(2 ln n)"]
    spread = [row["participation"] for row in grown if row["model"] == "R = 1.5 sqrt(2 ln n)"]
    first, last = fits["R = 2"], fits["R = 0.8 sqrt(2 ln n)"]
    seen = (
        f"At fixed R the keys needed grow like n^{first['C']:.2f}, at R = 0.8 sqrt(2 ln n) like "
        f"n^{last['C']:.2f}; at 1.5 sqrt(2 ln n) like n^{frozen['C']:.2f}, where 1 / sum P^2 stays "
        f"between {min(spread):.1f} and {max(spread):.1f} keys. k = ln ln n drops {few[0]:.2f} of "
        f"the mass at n = {lengths[0]} and {few[-1]:.2f} at {lengths[-1]}; k = n^0.7 drops "
        f"{many[0]:.3f} and {many[-1]:.3f}. On prefixes of real contexts the exponent is "
        f"{real['fit']['C']:.2f} (95 % interval of the fit {real['fit']['C_low']:.2f} to "
        f"{real['fit']['C_high']:.2f}; single heads {real['low']:.2f} to {real['high']:.2f}), over "
        f"at most {real['rows'][-1]['n']} keys. {self_attention.seen(theirs)}"
    )
    return {
        "seen": seen,
        "about": described(settings, prefixes=True),
        "grown": grown,
        "lost": lost,
        "fits": fits,
        "theirs": theirs,
        "notes": self_attention.notes(theirs),
        "real": real,
    }


def _drawn(settings: Settings, n: int, draw: int) -> dict[str, dict[str, float]]:
    """Means over the rows of one draw of keys and values, for each model and each window."""
    rows = max(16, min(512, (1 << 20) // n)) // DRAWS
    rng = settings.random(5, n, draw)
    queries = rng.standard_normal((rows, D))
    keys = rng.standard_normal((n, D))
    values = rng.standard_normal((n, D))
    unit = queries @ keys.T / math.sqrt(D)
    found: dict[str, dict[str, float]] = {}
    for name, scale in SCALES.items():
        scores = unit * scale(n)
        found[name] = {
            "k": mean(selection.select(scores, EPS).k),
            "effective": mean(windows.effective_entries(scores, EPS)),
            "participation": mean(windows.participation(scores)),
        }
    scores = unit * SCALES["R = 0.8 sqrt(2 ln n)"](n)
    return found | {name: _errors(scores, values, window(n)) for name, window in ERRORS.items()}


def _summed(drawn: list[dict[str, dict[str, float]]], name: str) -> dict[str, float]:
    """Means over draws, with two standard errors: rows of one draw share keys, and are alike."""
    found = {}
    for what in drawn[0][name]:
        values = [each[name][what] for each in drawn]
        found[what], found[f"{what}_error"] = mean(values), 2 * standard_error(values)
    return found


def _fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = windows.fit([row["n"] for row in rows], [row["k"] for row in rows])
    return {
        "alpha": float(found.alpha),
        "C": float(found.C),
        "C_low": float(found.C_interval[0]),
        "C_high": float(found.C_interval[1]),
    }


def _errors(scores: NDArray[Any], values: NDArray[Any], k: int) -> dict[str, float]:
    """Tail mass and L2 error of the output that a window of the k best keys leaves, in the mean."""
    k = min(k, scores.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    kept = np.zeros_like(weights)
    best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    np.put_along_axis(kept, best, np.take_along_axis(weights, best, 1), 1)
    mass = kept.sum(axis=1, keepdims=True)
    change = np.linalg.norm(weights @ values - kept @ values / mass, axis=1)
    return {
        "k": float(k),
        "tail": mean(1 - mass),
        "error": mean(change),
    }


def _real(settings: Settings) -> dict[str, Any]:
    """K against n for prefixes of a real context; the fit and its scatter over heads."""
    n = prefix_limit(settings.data, QUERIES)
    lengths = [size for size in (32, 64, 128, 256, 512, 1024, 4096, 16384, 65536) if size <= n]
    rows, each = [], []
    for size in lengths:
        heads = real_heads(settings.data, QUERIES, size)
        k = [mean(selection.select(head.scores, EPS).k) for head in heads]
        each.append(k)
        rows.append({"n": size, "k": mean(k), "k_error": 2 * standard_error(k)})
    slopes = [float(windows.fit(lengths, k).C) for k in np.transpose(each)]
    fit = _fit(rows) | {"heads": len(slopes), "head_error": standard_error(slopes)}
    return {"rows": rows, "fit": fit, "low": min(slopes), "high": max(slopes)}


def plots(data: dict[str, Any]) -> list[str]:
    """Growth, and errors."""
    drawn = []
    figure, axes = panels(1, 2, figsize=(9.5, 4.4))
    for name in SCALES:
        rows = [row for row in data["grown"] if row["model"] == name]
        n = [row["n"] for row in rows]
        label = f"{name}: k grows like n^{data['fits'][name]['C']:.2f}"
        bars(axes[0], n, rows, "k", label=label)
        bars(axes[1], n, rows, "participation", label=name)
    real = data["real"]["rows"]
    label = f"real keys: k grows like n^{data['real']['fit']['C']:.2f}"
    lengths = [row["n"] for row in real]
    bars(axes[0], lengths, real, "k", label=label, color="black", ls="--", marker="s")
    axes[0].set(title=f"keys needed at eps = {EPS:g}", ylabel="mean k")
    axes[1].set(title="keys that share the mass", ylabel="mean of 1 / sum P^2")
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="n")
    low = min(real[0]["n"], data["grown"][0]["n"])
    plain_ticks(axes[0].xaxis, _powers(low, data["grown"][-1]["n"]))
    plain_ticks(axes[1].xaxis, _powers(data["grown"][0]["n"], data["grown"][-1]["n"]))
    legend_below(figure, *axes[0].get_legend_handles_labels(), ncols=2)
    drawn.append(svg(figure))
    figure, axis = panels(figsize=(7.5, 3.8))
    for name in ERRORS:
        rows = [row for row in data["lost"] if row["window"] == name]
        bars(axis, [row["n"] for row in rows], rows, "tail", label=name)
    axis.set(
        title="mass that windows of k keys drop, R = 0.8 sqrt(2 ln n)", xscale="log",
        yscale="log", xlabel="n", ylabel="mean dropped mass", ylim=(0.01, 1),
    )  # fmt: skip
    plain_ticks(axis.xaxis, _powers(data["lost"][0]["n"], data["lost"][-1]["n"]))
    plain_ticks(axis.yaxis, (0.01, 0.03, 0.1, 0.3, 1))
    legend_beside(axis)
    drawn.append(svg(figure))
    return drawn + self_attention.plots(data["theirs"])


def _powers(low: int, high: int) -> list[int]:
    """Every third power of two from `low`, a power of two, to `high`."""
    return [low << i for i in range(0, (high // low).bit_length(), 3)]


def tables(data: dict[str, Any]) -> list[Table]:
    """Growth, fits, errors."""
    laws = {**data["fits"], "real keys": data["real"]["fit"]}
    fits = table_of(
        "model | alpha | C | 95 % interval",
        "{model} | {alpha:.3f} | {C:.3f} | {C_low:.3f} to {C_high:.3f}",
        [{"model": name, **fit} for name, fit in laws.items()],
    )
    grown = table_of(
        "model | n | mean k | effective entries | participation",
        "{model} | {n} | {k:.1f} | {effective:.2f} | {participation:.2f}",
        data["grown"],
    )
    lost = table_of(
        "window | n | k | dropped mass | L2 error",
        "{window} | {n} | {k:.0f} | {tail:.4g} | {error:.4g}",
        data["lost"],
    )
    return [fits, grown, lost, *self_attention.tables(data["theirs"])]
