"""`certk plan`: what to expect of sparsifying Gaussian scores, before anything is pruned."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from .options import Option
from .terminal import print_json, print_table, print_text, say

if TYPE_CHECKING:
    from ..gaussian import Plan

OPTIONS = {
    "n": Option(metavar="N", help="Keys of a row."),
    "sigma": Option(
        metavar="SIGMA", help="Standard deviation of the scores, in natural-log units."
    ),
    "eps": Option(metavar="EPS", help="Tail mass that a row may lose, 0 < eps < 1."),
    "seed": Option(metavar="N", min=0, help="Seed of the simulated rows."),
}
# What follows from the fields of a plan.
_DERIVED = ("scored_ratio", "speedup", "worthwhile", "advice", "reason")


def plan(
    n: int,
    sigma: float,
    eps: float,
    seed: int = 0,
    threads: int | None = None,
    as_json: bool = False,
) -> int:
    """Tell how many keys rows of normal scores need.

    And whether to sparsify. These are expectations of a model, no certificate: `certk select` finds
    what a real row needs.
    """
    from ..gaussian import plan as plan_rows

    found = plan_rows(n, sigma, eps, seed=seed, threads=threads)
    if as_json:
        print_json(asdict(found) | {name: getattr(found, name) for name in _DERIVED})
    else:
        _show(found)
    return 0


def _show(plan: Plan) -> None:
    rule = (
        "rule for long rows",
        f"{plan.asymptotic_k:.6g}",
        f"{plan.asymptotic_fraction:.4g}",
        f"above mean {plan.threshold:+.3g} sigma",
    )
    how = f"simulated, standard error {plan.k_standard_error:.2g}" if plan.rows else "exact"
    mean = ("expected for this n", f"{plan.k:.6g}", f"{plan.scored_ratio:.4g}", how)
    say(f"n = {plan.n}, sigma = {plan.sigma:g}, eps = {plan.eps}")
    print_table(("", "k", "k / n", "how"), [rule, mean], left=(0, 3))
    if plan.frozen:
        print_text(
            f"Frozen: sigma is past sqrt(2 ln n) = {plan.freezing_sigma:.4g}; rows rest on few "
            "entries, and the rule for long rows is too low."
        )
    print_text(
        f"Keys read: {plan.speedup:.3g}x fewer (as many times faster only if time goes with the "
        "keys read and choosing them is free)."
    )
    print_text(f"Advice: {plan.advice}. {plan.reason[0].upper()}{plan.reason[1:]}.")
