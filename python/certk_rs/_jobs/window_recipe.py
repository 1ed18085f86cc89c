"""Which window a cache needs: k = alpha n^C fitted to it, and what windows lose at equal compute.

The recipe of arXiv 2404.02690 on inputs of one's own. For rows of several lengths (`prefixes.py`)
certified selection finds the fewest keys that are proven to be enough; a power of n is fitted to
them; and three ways to choose k are compared that keep as many keys in all, over all rows and
lengths: the same k for every row, alpha n^C, and what each row needs. The first two keep the true
best k keys of a row, which a real method would first have to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import selection, windows
from ..cache_format import Cache, Layer, Names, widen
from ..errors import CertkError
from .adaptive_k import AdaptiveK, adaptive_k, best
from .budgets import SMALLEST_EPS
from .inputs import expand
from .prefixes import SHORTEST, Prefix, prefixes, rows_of_heads, scores_of
from .progress import Progress, counting

# Scores of a head that are looked at at each length: each is judged some ten times.
SCORES = 1 << 21
FIXED, POWER, CERTIFIED = "fixed k", "alpha n^C", "certified"
RULES = (FIXED, POWER, CERTIFIED)


@dataclass(frozen=True)
class Length:
    """The rows of one length. `keys` and `k` are means over rows and heads."""

    n: int
    rows: int
    keys: float
    """Visible keys; below n where the cache is causal."""
    k: float
    """The fewest keys that are proven to be within the budget."""


@dataclass(frozen=True)
class Loss:
    """What a way to choose k loses. Means are over all rows of all lengths."""

    rule: str
    """One of `RULES`."""
    kept: int
    """Keys kept in all rows together: the same for all rules, but that no row keeps more than it
    sees, or none."""
    alpha: float | None
    """Of n^C, scaled so that as many keys are kept; for a fixed k that k; None for "certified"."""
    mean_mass: float
    """Dropped mass; these three of the proven upper ends."""
    longest_mass: float
    """The mean at the longest length alone: most rows are shorter, and may fit into a window."""
    worst_mass: float
    over: float
    """Share of the rows that are not proven to be within the budget."""
    error: float
    """L2 distance of the attention output to that with all keys, in the units of the values."""


@dataclass(frozen=True)
class WindowRecipe:
    """One layer, or all of them together: then one k and one law serve all layers and heads."""

    layer: int | None
    heads: int
    lengths: tuple[Length, ...]
    fit: windows.WindowFit
    """The law of the certified k; its points are the heads at each length."""
    losses: tuple[Loss, ...]
    """In the order of `RULES`."""
    adaptive: AdaptiveK | None
    """The Gaussian rule at the longest length; None for all layers together."""


@dataclass(frozen=True)
class CacheRecipe:
    """One file."""

    path: Path
    eps: float
    causal: bool
    layers: tuple[WindowRecipe, ...]
    all: WindowRecipe
    head_lengths: tuple[tuple[int, int, tuple[Length, ...]], ...]
    """(layer, head, its lengths) of every query head."""


@dataclass(frozen=True, eq=False)
class _Needed:
    """What the rows of one head need at one length, (rows,) each."""

    layer: int
    head: int
    n: int
    lengths: NDArray[np.int64]
    k: NDArray[np.int64]


def window_recipes(
    caches: Sequence[Path],
    eps: float,
    names: str | None = None,
    *,
    shortest: int = SHORTEST,
    progress: Progress | None = None,
    threads: int | None = None,
) -> list[CacheRecipe]:
    """Fit and compare windows on caches, or directories of them.

    Args:
        caches: Files, and directories that stand for the `.safetensors` files in them.
        eps: Budget of dropped mass, 1e-300 <= eps < 1.
        names: Pattern of the tensor names, None to find out.
        shortest: The least length, >= 1.
        progress: Told about the heads that are done.
        threads: Passed on; nothing depends on it.

    Raises:
        CertkError: For whatever is wrong with the arguments or the files, also fewer than three
            lengths.
    """
    if not SMALLEST_EPS <= eps < 1:
        raise CertkError(f"eps is {eps!r}: give a number from {SMALLEST_EPS} to below 1")
    if shortest < 1:
        raise CertkError(f"shortest is {shortest}: give a length of at least 1")
    if names is not None:
        Names(names)
    paths = [source.location.path for source in expand(caches)]
    total = 0
    for path in paths:
        with Cache(path, names) as cache:
            for layer in cache.layers:
                _prefixes(cache, layer, shortest)
                # For what rows need, for the rule, and for what windows lose.
                total += 3 * layer.heads
    step = counting(progress, total)
    return [_cache(path, names, eps, shortest, step, threads) for path in paths]


def equal_sizes(n: NDArray[np.int64], exponent: float, total: int) -> tuple[NDArray[Any], float]:
    """Sizes alpha n^C, rounded, that are `total` keys in all, and that alpha.

    Args:
        n: Visible keys of each row, (rows,), >= 1.
        exponent: C; 0 is a fixed k.
        total: From rows to the sum of n.

    Returns:
        Integers (rows,) from 1 to n, and alpha. Where sizes lie between two integers both occur,
        spread evenly over rows in their order.
    """
    lengths, which, counts = np.unique(n, return_inverse=True, return_counts=True)
    # Relative to the longest, so that no power leaves the range of floats.
    powers = exponent * np.log(lengths / lengths[-1])
    ends = np.log(lengths) - powers
    low, high = float(np.min(-powers)), float(np.max(ends))

    def sizes(log_alpha: float) -> NDArray[np.float64]:
        return np.asarray(np.exp(np.clip(powers + log_alpha, 0.0, np.log(lengths))))

    for _ in range(200):
        middle = (low + high) / 2
        if float(counts @ sizes(middle)) < total:
            low = middle
        else:
            high = middle
    summed = np.cumsum(sizes(high)[which])
    found = np.diff(np.floor(summed + 0.5).astype(np.int64), prepend=0)
    found = np.clip(found, 1, n)
    # What rounding has left over, a key or two.
    for change, able in ((1, found < n), (-1, found > 1)):
        rest = change * (total - int(found.sum()))
        if rest > 0:
            found[np.flatnonzero(able)[:rest]] += change
    return found, float(np.exp(high) * float(lengths[-1]) ** -exponent)


def _prefixes(cache: Cache, layer: Layer, shortest: int) -> list[Prefix]:
    found = prefixes(layer, cache.causal_offset, shortest, SCORES)
    if len(found) < 3:
        held = ", ".join(str(prefix.n) for prefix in found) or "none"
        causal = cache.causal_offset is not None
        remedy = "of whole texts, not of their last queries" if causal else "longer"
        raise CertkError(
            f"{cache.path}: layer {layer.index} has queries at {len(found)} lengths from "
            f"{shortest} keys on ({held}), and a law alpha n^C needs three: give caches that are "
            f"{remedy}, or a smaller --shortest"
        )
    return found


def _cache(
    path: Path,
    names: str | None,
    eps: float,
    shortest: int,
    step: Callable[[str, int], None],
    threads: int | None,
) -> CacheRecipe:
    label = f"windows of {path.name}"
    groups: dict[int | None, list[_Needed]] = {None: []}
    rules: dict[int, AdaptiveK] = {}
    with Cache(path, names) as cache:
        cache.check_values(lambda _: None)
        for layer in cache.layers:
            parts = _prefixes(cache, layer, shortest)
            groups[layer.index] = own = []
            for head, queries, keys in rows_of_heads(cache, layer):
                for prefix in parts:
                    scores = scores_of(prefix, queries, keys)
                    k = selection.select(scores, eps, threads=threads).k
                    own.append(_Needed(layer.index, head, prefix.n, prefix.lengths, k))
                step(label, 1)
            groups[None] += own
            rules[layer.index] = adaptive_k(_longest(cache, layer, parts[-1]), eps, threads=threads)
            step(label, layer.heads)
        fits = {group: _fit(some) for group, some in groups.items()}
        choices = {group: _choices(some, fits[group].C) for group, some in groups.items()}
        for layer in cache.layers:
            _lose(cache, layer, shortest, eps, choices, threads, lambda: step(label, 1))
        causal = cache.causal_offset is not None
    recipes = {
        group: WindowRecipe(
            layer=group,
            heads=len({(each.layer, each.head) for each in some}),
            lengths=_lengths(some),
            fit=fits[group],
            losses=tuple(
                choice.loss(rule, [each.n == max(one.n for one in some) for each in some])
                for rule, choice in choices[group].items()
            ),
            adaptive=None if group is None else rules[group],
        )
        for group, some in groups.items()
    }
    heads = dict.fromkeys((each.layer, each.head) for each in groups[None])
    return CacheRecipe(
        path,
        eps,
        causal,
        tuple(recipe for group, recipe in recipes.items() if group is not None),
        recipes[None],
        tuple(
            (*head, _lengths([each for each in groups[None] if (each.layer, each.head) == head]))
            for head in heads
        ),
    )


def _longest(cache: Cache, layer: Layer, prefix: Prefix) -> Callable[[], Iterable[NDArray[Any]]]:
    """The scores of each head at the longest length, computed anew whenever they are asked for."""
    return lambda: (
        scores_of(prefix, queries, keys) for _, queries, keys in rows_of_heads(cache, layer)
    )


def _fit(needed: Sequence[_Needed]) -> windows.WindowFit:
    return windows.fit(
        [float(each.lengths.mean()) for each in needed], [float(each.k.mean()) for each in needed]
    )


def _lengths(needed: Sequence[_Needed]) -> tuple[Length, ...]:
    found = []
    for n in sorted({each.n for each in needed}):
        keys = np.concatenate([each.lengths for each in needed if each.n == n])
        k = np.concatenate([each.k for each in needed if each.n == n])
        found.append(Length(n, len(k), float(keys.mean()), float(k.mean())))
    return tuple(found)


@dataclass(eq=False)
class _Choice:
    """The sizes that a rule chooses for the rows of a group, and what has been lost by them."""

    sizes: list[NDArray[np.int64]]
    """An array (rows,) per head and length."""
    alpha: float | None
    done: int = 0
    masses: list[NDArray[np.float64]] = field(default_factory=list)
    holds: list[NDArray[np.bool_]] = field(default_factory=list)
    errors: list[NDArray[np.float64]] = field(default_factory=list)

    def loss(self, rule: str, longest: Sequence[bool]) -> Loss:
        """What was lost; `longest` says which of the arrays are of the longest length."""
        masses = np.concatenate(self.masses)
        last = [mass for mass, is_last in zip(self.masses, longest, strict=True) if is_last]
        return Loss(
            rule=rule,
            kept=sum(int(size.sum()) for size in self.sizes),
            alpha=self.alpha,
            mean_mass=float(masses.mean()),
            longest_mass=float(np.concatenate(last).mean()),
            worst_mass=float(masses.max()),
            over=float(1 - np.concatenate(self.holds).mean()),
            error=float(np.concatenate(self.errors).mean()),
        )


def _choices(needed: Sequence[_Needed], exponent: float) -> dict[str, _Choice]:
    """The three rules, at equal compute."""
    n = np.concatenate([each.lengths for each in needed])
    total = sum(int(each.k.sum()) for each in needed)
    ends = np.cumsum([len(each.k) for each in needed])[:-1]
    found = {}
    for rule, power in ((FIXED, 0.0), (POWER, exponent)):
        sizes, alpha = equal_sizes(n, power, total)
        found[rule] = _Choice(np.split(sizes, ends), alpha)
    return found | {CERTIFIED: _Choice([each.k for each in needed], None)}


def _lose(
    cache: Cache,
    layer: Layer,
    shortest: int,
    eps: float,
    choices: dict[int | None, dict[str, _Choice]],
    threads: int | None,
    step: Callable[[], None],
) -> None:
    """Judge the choices that concern one layer, row by row."""
    group = layer.heads // layer.kv_heads
    stored = cache.read(layer, "value")
    parts = _prefixes(cache, layer, shortest)
    for head, queries, keys in rows_of_heads(cache, layer):
        values = widen(stored[head // group], layer.dtypes["value"])
        for prefix in parts:
            scores = scores_of(prefix, queries, keys)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            whole = weights @ values[: prefix.n] / weights.sum(axis=1, keepdims=True)
            for some in (choices[None], choices[layer.index]):
                for choice in some.values():
                    k = choice.sizes[choice.done]
                    choice.done += 1
                    mask = best(scores, k)
                    proven = selection.certify(scores, mask, eps=eps, threads=threads)
                    kept = weights * mask
                    out = kept @ values[: prefix.n] / kept.sum(axis=1, keepdims=True)
                    choice.masses.append(proven.tail_mass_upper)
                    choice.holds.append(np.asarray(proven.holds))
                    choice.errors.append(np.linalg.norm(out - whole, axis=1))
        step()


def recipe_json(found: CacheRecipe) -> dict[str, Any]:
    """The same as plain numbers, for one JSON object."""
    return {
        "cache": str(found.path),
        "eps": found.eps,
        "causal": found.causal,
        "all": asdict(found.all),
        "layers": [asdict(recipe) for recipe in found.layers],
        "heads": [
            {"layer": layer, "head": head, "lengths": [asdict(each) for each in lengths]}
            for layer, head, lengths in found.head_lengths
        ],
    }
