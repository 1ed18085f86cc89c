"""Experiment 4: the error of the output, exact against each bound, on real values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import bounds, selection
from .._display.page import Table, legend_beside, panels, plain_ticks, svg
from ..errors import CertkError
from .settings import (
    Head,
    Settings,
    Tell,
    bars,
    described,
    mean,
    real_heads,
    require_at_most,
    standard_error,
)

NAME = "output-error"
TITLE = "Output error: exact against its bounds"
ABOUT = (
    "The Euclidean norm of what truncation changes in the output of attention, exactly, and as "
    "each bound has it: diameter of the values, ball around them, spectral and variance form, and "
    "two as the first paper writes them: 2 C tau with C the longest value (norm), and sqrt(chi2) "
    "sqrt(Var_P V) (chi_square), which the diameter and our variance form never exceed. "
    "Intervals are two standard errors over heads."
)
NEEDS: tuple[str, ...] = ()
EPS = (0.1, 0.03, 0.01, 0.003, 0.001)
# The fields of `bounds.output_error` that are shown, each at least the exact error: a further bound
# is one more name.
BOUNDS = ("diameter", "ball", "spectral", "variance", "norm", "chi_square")
FORMS = ("exact", *BOUNDS)


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Every bound on every row."""
    heads = real_heads(settings.data, 4 if settings.brief else 16)
    rows: list[dict[str, Any]] = []
    for i, head in enumerate(heads):
        for eps in EPS:
            found = selection.select(head.scores, eps)
            error = bounds.output_error(head.scores, head.values, found)
            size = float(np.linalg.norm(head.values, axis=1).mean())
            real = _moved(head, found.to_mask())
            for form in FORMS:
                # What no bound can resolve is a rounding of the values.
                require_at_most(f"the {form} form", real - 1e-12 * size, getattr(error, form))
            forms = {form: mean(getattr(error, form)) for form in FORMS}
            rows.append({"layer": head.layer, "head": head.head, "eps": eps, "size": size} | forms)
        tell((i + 1) / len(heads))
    moved = [r for r in rows if r["exact"] > 0]
    if not moved:
        raise CertkError(
            f"{settings.data}: dropping keys changes no output, as if its values were all equal: "
            "give a cache of real values"
        )
    ratio = {form: float(np.median([r[form] / r["exact"] for r in moved])) for form in BOUNDS}
    best = min(ratio, key=lambda form: ratio[form])
    relative = mean([r["exact"] / r["size"] for r in rows if r["eps"] == 0.01])
    seen = (
        f"At eps = 0.01 the output moves by {relative:.4f} of the mean norm of a value. In the "
        "median the bounds are "
        + ", ".join(f"{ratio[form]:.1f} ({form})" for form in BOUNDS)
        + f" times the exact error; the {best} form is the tightest."
    )
    return {"seen": seen, "about": described(settings, prefixes=False), "rows": rows}


def _moved(head: Head, kept: NDArray[np.bool_]) -> NDArray[np.float64]:
    """How far truncation moves the output of each row, by products in float64."""
    weights = np.exp(head.scores - head.scores.max(axis=1, keepdims=True))
    few = weights * kept
    full = weights @ head.values / weights.sum(axis=1, keepdims=True)
    return np.asarray(
        np.linalg.norm(full - few @ head.values / few.sum(axis=1, keepdims=True), axis=1)
    )


def plots(data: dict[str, Any]) -> list[str]:
    """Mean error against eps."""
    figure, axis = panels(figsize=(7.5, 3.8))
    for form in FORMS:
        rows = []
        for eps in EPS:
            moved = [r[form] / r["size"] for r in data["rows"] if r["eps"] == eps]
            rows.append({"moved": mean(moved), "moved_error": 2 * standard_error(moved)})
        label = form if form == "exact" else f"{form} bound"
        colour = {"color": "black"} if form == "exact" else {}
        bars(axis, EPS, rows, "moved", label=label, **colour)
    axis.set(
        xscale="log", yscale="log", xlabel="eps, the mass that may be dropped",
        ylabel="mean error / mean norm of a value", title="what truncation changes in the output",
    )  # fmt: skip
    plain_ticks(axis.xaxis, EPS)
    legend_beside(axis)
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """A row per head and budget."""
    rows = [
        (f"{r['layer']} {r['head']}", f"{r['eps']:g}", *(f"{r[form]:.5f}" for form in FORMS))
        for r in data["rows"]
    ]
    return [Table(("layer head", "eps", *FORMS), rows)]
