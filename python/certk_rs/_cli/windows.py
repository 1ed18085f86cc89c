"""`certk windows`: which window a cache needs, and what windows lose at equal compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AT_LEAST_ONE, NUMBER, AsJson, Caches, Job, Names, Quiet, Threads
from .terminal import print_json, print_table, print_text, progress_bar, say

if TYPE_CHECKING:
    from .._jobs.adaptive_k import AdaptiveK
    from .._jobs.window_recipe import CacheRecipe, WindowRecipe

# Of `jobs.prefixes`, which a question for help does not wait for.
_SHORTEST = 16
# Lengths that a terminal of 80 columns has room for: the others are the first to go.
_SHOWN = 3


def windows(
    caches: Caches,
    eps: Annotated[
        float,
        typer.Option(
            parser=NUMBER, metavar="EPS", help="Tail mass that a row may lose, 0 < eps < 1."
        ),
    ] = 0.01,
    shortest: Annotated[
        int,
        typer.Option(
            parser=AT_LEAST_ONE,
            metavar="N",
            help="The longest length is halved down to this one.",
        ),
    ] = _SHORTEST,
    names: Names = None,
    threads: Threads = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> Job:
    """Fit a window k = alpha n^C to caches, and tell what it loses.

    That is compared at equal compute with a fixed k and with certified sets.
    """

    def job() -> int:
        from .._jobs.window_recipe import recipe_json, window_recipes

        with progress_bar(quiet) as progress:
            found = window_recipes(
                caches, eps, names, shortest=shortest, progress=progress, threads=threads
            )
        if as_json:
            print_json({"command": "windows", "caches": [recipe_json(cache) for cache in found]})
        else:
            _show(found)
        return 0

    return job


def _show(found: Sequence[CacheRecipe]) -> None:
    from .._jobs.adaptive_k import SHARE
    from .._jobs.prefixes import STANDS_FOR, some_of

    for cache in found:
        recipes = [*cache.layers, cache.all]
        say(f"{cache.path}: at eps = {cache.eps:g}")
        lengths = [each.n for each in cache.all.lengths]
        last = some_of(lengths, _SHOWN)
        say("Keys that rows need, and the law k = alpha n^C fitted to them:")
        heads = ("layer", *(f"n = {n}" for n in lengths), "alpha", "C", "95 % interval")
        going = sorted(range(1, len(lengths) + 1), key=lambda i: lengths[i - 1] in last)
        laws = [_law(recipe, lengths) for recipe in recipes]
        print_table(heads, laws, must=False, drop=going)
        say("What is lost where as many keys are kept in all:")
        heads = ("layer", "kept", "lost", "longest", "worst", "over", "L2 error")
        rows = [cells for recipe in recipes for cells in _losses(recipe)]
        print_table(heads, rows, must=False, left=(1,))
        say("The Gaussian rule at the longest length, certified:")
        heads = ("layer", "rows", "sigma", "needed", "rule", "holds", "factor", "k/n", "holds")
        adaptive = [(_name(r), r.adaptive) for r in cache.layers if r.adaptive is not None]
        print_table(heads, [_adaptive(name, rule) for name, rule in adaptive], must=False)
        print_text("In this cache every query sees its own prefix." if cache.causal else STANDS_FOR)
    print_text(
        "Lost: the dropped mass in the mean, and that of the longest rows; worst: of any row "
        "(proven upper ends); over: rows that are not proven to be within eps; L2 error: of the "
        "attention output, in the mean. The fixed k and alpha n^C keep the true best keys of a "
        "row, and alpha is scaled to equal compute. All: one k, one law for all layers. The "
        "interval takes heads and lengths for independent, which they are not."
    )
    print_text(
        "Rule: k/n from each head's sigma, fitted to every other row and judged on those between "
        f"(rows); factor: what k takes to hold in {SHARE:.0%} of the rows it is fitted to (in all, "
        "where they are fewer than 100); then the share kept with it, and where that holds."
    )


def _name(recipe: WindowRecipe) -> str:
    return "all" if recipe.layer is None else str(recipe.layer)


def _law(recipe: WindowRecipe, shown: Sequence[int]) -> list[str]:
    k = {each.n: f"{each.k:.1f}" for each in recipe.lengths}
    low, high = recipe.fit.C_interval
    return [
        _name(recipe),
        *(k.get(n, "") for n in shown),
        f"{recipe.fit.alpha:.3g}",
        f"{recipe.fit.C:.3f}",
        f"{low:.3f} to {high:.3f}",
    ]


def _losses(recipe: WindowRecipe) -> list[list[str]]:
    laws = ("k = {:.1f}", f"{{:.3g}} n^{recipe.fit.C:.2f}")
    chosen = [
        *(law.format(loss.alpha) for law, loss in zip(laws, recipe.losses, strict=False)),
        "certified",
    ]
    return [
        [
            _name(recipe) if i == 0 else "",
            k,
            f"{loss.mean_mass:.4f}",
            f"{loss.longest_mass:.4f}",
            # A bound, so rounded up.
            f"{math.ceil(loss.worst_mass * 1e4) / 1e4:.4f}",
            f"{loss.over:.1%}",
            f"{loss.error:.4f}",
        ]
        for i, (loss, k) in enumerate(zip(recipe.losses, chosen, strict=True))
    ]


def _adaptive(name: str, rule: AdaptiveK) -> list[str]:
    return [
        name,
        str(rule.rows),
        f"{rule.sigma:.2f}",
        f"{rule.needed:.3f}",
        f"{rule.kept:.3f}",
        f"{rule.holds:.1%}",
        f"{rule.factor:.3g}",
        f"{rule.kept_with_factor:.3f}",
        f"{rule.holds_with_factor:.1%}",
    ]
