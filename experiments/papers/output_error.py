"""Compare the exact error of the output with each bound on it, on real values."""

from __future__ import annotations

from typing import Any

import numpy as np

from certk_rs import bounds, select

from .common import (
    Array,
    Head,
    Settings,
    Table,
    Verdict,
    interval,
    legend,
    lines,
    mean,
    panels,
    real_heads,
    require_at_most,
    table_of,
)

NAME = "output-error"
ABOUT = (
    "Euclidean norm of the change in the output of attention, in units of the mean norm of a "
    "value: exactly, and by each bound. Norm (2 C tau, C the longest value) and chi_square are as "
    "the first paper writes them; diameter and variance never exceed them."
)
EPS = (0.1, 0.03, 0.01, 0.003, 0.001)
# Fields of `bounds.output_error`, each at least the exact error.
BOUNDS = ("diameter", "ball", "spectral", "variance", "norm", "chi_square")
FORMS = ("exact", *BOUNDS)


def run(settings: Settings) -> dict[str, Any]:
    """Evaluate every bound on every row."""
    found: dict[tuple[float, str], list[float]] = {}
    ratios: dict[str, list[float]] = {form: [] for form in BOUNDS}
    for head in real_heads(2 if settings.quick else 16):
        size = float(np.linalg.norm(head.values, axis=1).mean())
        for eps in EPS[:1] if settings.quick else EPS:
            kept = select(head.scores, eps)
            error = bounds.output_error(head.scores, head.values, kept)
            real = _moved(head, kept.to_mask())
            means = {}
            for form in FORMS:
                # No bound can resolve a rounding of the values.
                require_at_most(f"the {form} form", real - 1e-12 * size, getattr(error, form))
                means[form] = mean(getattr(error, form)) / size
                found.setdefault((eps, form), []).append(means[form])
            for form in BOUNDS:
                ratios[form].append(means[form] / max(means["exact"], 1e-300))
    rows = [
        {"eps": eps, "form": form, "error": mean(x), "error_error": interval(x)}
        for (eps, form), x in found.items()
    ]
    return {"rows": rows, "ratios": {form: float(np.median(x)) for form, x in ratios.items()}}


def _moved(head: Head, kept: Array) -> Array:
    """Return the distance that truncation moves the output of each row, in float64."""
    weights = np.exp(head.scores - head.scores.max(axis=1, keepdims=True))
    few = weights * kept
    change = weights @ head.values / weights.sum(1, keepdims=True)
    change -= few @ head.values / few.sum(1, keepdims=True)
    return np.asarray(np.linalg.norm(change, axis=1))


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge the bounds and their order."""
    ratio = data["ratios"]
    told = ", ".join(f"{form} {ratio[form]:.1f}" for form in BOUNDS)
    return [
        Verdict(
            "A: the error of the output is within 2 C tau and within the chi-square form",
            f"times the exact error, in the median: {told}; no row breaks a bound",
            min(ratio.values()) >= 1,
        ),
        Verdict(
            "ours: the diameter is within 2 C tau, the variance form within chi-square",
            f"{ratio['diameter']:.1f} and {ratio['norm']:.1f}, {ratio['variance']:.1f} and "
            f"{ratio['chi_square']:.1f}",
            ratio["diameter"] <= ratio["norm"] and ratio["variance"] <= ratio["chi_square"],
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per form and budget."""
    heads, cells = "eps | form | error | +-", "{eps:g} | {form} | {error:.5f} | {error_error:.5f}"
    return [table_of("error / mean norm of a value", heads, cells, data["rows"])]


def draw(data: dict[str, Any]) -> Any:
    """Draw mean errors against eps."""
    figure, axis = panels(1)
    lines(axis, data["rows"], "form", "eps", "error", "change of the output", "xy")
    return legend(figure, axis)
