"""Compare the identity TV = 1 - exp(-KL) with inequalities that hold for any distributions."""

from __future__ import annotations

from typing import Any

import numpy as np

from certk_rs import bounds, select

from .common import (
    Array,
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

NAME = "identity"
ABOUT = (
    "When a tail of mass tau is dropped, the total variation distance is tau, and so is "
    "1 - exp(-KL). Pinsker says sqrt(KL / 2) and Bretagnolle-Huber sqrt(1 - exp(-KL)): a budget "
    "eps against one of these needs the keys of a smaller budget."
)
EPS = (0.1, 0.03, 0.01, 0.003)
FORMS = {
    "identity": bounds.tail_mass_from_kl,
    "Pinsker": bounds.pinsker,
    "Bretagnolle-Huber": bounds.bretagnolle_huber,
}
# Rounding goes upward; a budget is lowered by more than that.
DOWN = 1 - 1e-12


def budget(form: str, eps: float) -> float:
    """Return the largest tail mass, but for rounding, for which a form says at most eps."""
    if form == "identity":
        return eps
    return DOWN * float(-np.expm1(-2.0 * eps**2) if form == "Pinsker" else eps**2)


def said(tau: Any) -> dict[str, Array]:
    """Return the bound of each form on tail masses, by way of their divergence."""
    kl = bounds.kl_from_tail_mass(tau)
    return {form: np.asarray(rule(kl)) for form, rule in FORMS.items()}


def run(settings: Settings) -> dict[str, Any]:
    """Check the forms over tau, and count the keys that they keep on real rows."""
    grid = np.logspace(-5, -0.01, 81)
    for form, bound in said(grid).items():
        require_at_most(f"the tail mass under {form}", grid, bound)
    off = float(np.max(said(grid)["identity"] / grid - 1))
    heads = real_heads(2 if settings.quick else 16)
    rows = []
    for eps in EPS:
        for form in FORMS:
            kept = []
            for head in heads:
                found = select(head.scores, budget(form, eps))
                require_at_most(f"the budget under {form}", said(found.tail_mass_upper)[form], eps)
                kept.append(mean(found.k / len(head.keys)))
            share = {"k/n": mean(kept), "k/n_error": interval(kept)}
            rows.append({"form": form, "eps": eps, "mass": budget(form, eps), **share})
    return {"rows": rows, "off": off}


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge the identity and its gain at eps = 0.01."""
    at = {row["form"]: row["k/n"] for row in data["rows"] if row["eps"] == 0.01}
    shares = ", ".join(f"{share:.3f} by {form}" for form, share in at.items())
    return [
        Verdict(
            "A: the tail mass is 1 - exp(-KL)",
            f"within {data['off']:.1e} relative, never below",
            0 <= data["off"] <= 1e-9,
        ),
        Verdict(
            "A: general inequalities need more keys",
            f"at eps = 0.01 real rows keep {shares} of the keys",
            at["identity"] < min(at["Pinsker"], at["Bretagnolle-Huber"]),
        ),
    ]


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per form and budget."""
    heads = "form | eps | tail mass allowed | k/n | +-"
    cells = "{form} | {eps:g} | {mass:.4g} | {k/n:.4f} | {k/n_error:.4f}"
    return [table_of("keys kept", heads, cells, data["rows"])]


def draw(data: dict[str, Any]) -> Any:
    """Draw the share of keys kept against eps."""
    figure, axis = panels(1)
    lines(axis, data["rows"], "form", "eps", "k/n", "keys kept on real rows")
    return legend(figure, axis)
