"""Experiment: what the identity TV = 1 - exp(-KL) gains over inequalities that hold in general."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import bounds, selection
from .._display.page import Table, legend_below, panels, plain_ticks, svg, table_of
from .settings import (
    Settings,
    Tell,
    bars,
    described,
    mean,
    real_heads,
    require_at_most,
    standard_error,
)

NAME = "identity"
TITLE = "The identity of a truncated softmax, beside Pinsker and Bretagnolle-Huber"
ABOUT = (
    "For a softmax P and what is left of it when a tail of mass tau is dropped, the total "
    "variation distance is tau, and 1 - exp(-KL) is the same number (Theorem 4.3 of the first "
    "paper). Inequalities that hold for any two distributions say less: Pinsker sqrt(KL / 2), "
    "Bretagnolle-Huber sqrt(1 - exp(-KL)). Whoever holds a budget eps against one of these keeps "
    "the keys that a smaller budget needs. The rules are functions of tau, and have no error bars; "
    "intervals of the shares kept are two standard errors over heads."
)
NEEDS: tuple[str, ...] = ()
EPS = (0.1, 0.03, 0.01, 0.003)
FORMS = {
    "identity": bounds.tail_mass_from_kl,
    "Pinsker": bounds.pinsker,
    "Bretagnolle-Huber": bounds.bretagnolle_huber,
}
# Rounding goes upward; what a budget allows is lowered by more than that.
DOWN = 1 - 1e-12


def budget(form: str, eps: float) -> float:
    """The largest tail mass, but for rounding, for which a form says at most eps."""
    if form == "identity":
        return eps
    square = eps * eps
    allowed = -np.expm1(-2.0 * square) if form == "Pinsker" else square
    return float(allowed) * DOWN


def said(tau: Any) -> dict[str, NDArray[np.float64]]:
    """What each form says of tail masses, by way of their divergence."""
    kl = bounds.kl_from_tail_mass(tau)
    return {form: np.asarray(rule(kl)) for form, rule in FORMS.items()}


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """The forms over tau, and the keys that they keep on real rows."""
    grid = np.logspace(-5, -0.01, 81)
    curves = said(grid)
    for form, bound in curves.items():
        require_at_most(f"the tail mass under {form}", grid, bound)
    heads = real_heads(settings.data, 4 if settings.brief else 16)
    rows: list[dict[str, Any]] = []
    for i, eps in enumerate(EPS):
        for form in FORMS:
            kept = []
            for head in heads:
                found = selection.select(head.scores, budget(form, eps))
                require_at_most(f"the budget under {form}", said(found.tail_mass_upper)[form], eps)
                kept.append(mean(found.k / head.visible))
            rows.append(
                {
                    "form": form,
                    "eps": eps,
                    "mass": budget(form, eps),
                    "kept": mean(kept),
                    "kept_error": 2 * standard_error(kept),
                }
            )
        tell((i + 1) / len(EPS))
    at = {row["form"]: row for row in rows if row["eps"] == 0.01}
    shares = [f"{at[form]['kept']:.3f} ({form})" for form in FORMS]
    seen = (
        f"At eps = 0.01 the forms allow tail masses of {at['identity']['mass']:.2g}, "
        f"{at['Pinsker']['mass']:.2g} (Pinsker) and {at['Bretagnolle-Huber']['mass']:.2g} "
        f"(Bretagnolle-Huber), so that real rows keep {', '.join(shares)} of their keys."
    )
    return {
        "seen": seen,
        "about": described(settings, prefixes=False),
        "curves": {"tau": grid.tolist()} | {form: y.tolist() for form, y in curves.items()},
        "rows": rows,
    }


def plots(data: dict[str, Any]) -> list[str]:
    """The forms, and what they keep."""
    figure, axes = panels(1, 2, figsize=(9.5, 4.0))
    styles = {"identity": "k-", "Pinsker": "C0-", "Bretagnolle-Huber": "C1-"}
    for form, style in styles.items():
        axes[0].plot(data["curves"]["tau"], data["curves"][form], style, label=form)
        some = [row for row in data["rows"] if row["form"] == form]
        bars(axes[1], EPS, some, "kept", color=style[:-1], label=form)
    axes[0].set(
        xscale="log", yscale="log", xlabel="tail mass, the distance itself", ylim=(1e-5, 2),
        ylabel="what is said of it", title="three forms of one divergence",
    )  # fmt: skip
    axes[1].set(
        xscale="log", xlabel="eps, held against each form", ylabel="mean k/n of real rows",
        ylim=(0, 1.02), title="keys kept",
    )  # fmt: skip
    plain_ticks(axes[1].xaxis, EPS)
    legend_below(figure, *axes[0].get_legend_handles_labels(), ncols=3)
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """A row per form and budget."""
    return [
        table_of(
            "form | eps | tail mass allowed | k/n | interval, +-",
            "{form} | {eps:g} | {mass:.4g} | {kept:.4f} | {kept_error:.4f}",
            data["rows"],
        )
    ]
