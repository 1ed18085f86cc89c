"""Fit k = alpha n^C to the keys that a cache needs, and compare windows at equal compute.

`python experiments/window_fit.py CACHE.safetensors` applies the recipe of arXiv 2404.02690 to one
cache. For rows of several lengths `certk_rs.select` finds the fewest keys that are proven to drop
at most eps. A power of n is fitted to their means by head and length. Then three rules choose k,
and all of them keep as many keys in total:

- fixed k: one k for all rows;
- alpha n^C: the fitted exponent, with alpha scaled to the same total;
- certified: the keys that each row needs.

The first two rules keep the true best keys of a row, which a real method would first have to find.

The longest length is halved down to the shortest. In a causal cache, length n stands for the
queries that see more than n/2 and at most n keys. Where every query sees every key, the first n
keys stand for a shorter context, which the model has not seen.

`--exponent C` takes a C of yours for the second rule (the paper's summary advises 1/1000), and
`--keys K` a budget of yours for the first two: K keys a row, in the mean over all rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import certk_rs as ck
from certk_rs import windows
from certk_rs._files.cache import Cache
from certk_rs._files.layers import Layer
from certk_rs._files.values import widen

# Scores of a head that are read at one length, and at least so many queries.
SCORES, QUERIES = 1 << 21, 16
FIXED, POWER, CERTIFIED = "fixed k", "alpha n^C", "certified"

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Head:
    """The rows of one query head at one length."""

    layer: int
    head: int
    n: int
    scores: Floats
    """Natural-log units, (rows, n); -inf where a row does not see a key."""
    lengths: Integers
    """Visible keys of each row, (rows,)."""
    values: Floats
    """(n, d)."""


def prefixes(layer: Layer, causal_offset: int | None, shortest: int) -> list[tuple[int, Integers]]:
    """Return the lengths of a layer, rising, each with the positions of its queries."""
    seen = np.full(layer.m, layer.n)
    if causal_offset is not None:
        seen = np.clip(np.arange(layer.m) + causal_offset + 1, 0, layer.n)
    found, n = [], int(seen.max())
    while n >= shortest:
        queries = np.arange(layer.m)
        if causal_offset is not None:
            queries = queries[(seen > n // 2) & (seen <= n)]
        most = min(len(queries), max(QUERIES, SCORES // n))
        if most:
            found.append((n, queries[np.linspace(0, len(queries) - 1, most).round().astype(int)]))
        n //= 2
    return found[::-1]


def rows_of(cache: Cache, shortest: int) -> Iterator[Head]:
    """Read every query head of a cache at every length."""
    for layer in cache.layers:
        parts = prefixes(layer, cache.causal_offset, shortest)
        if len(parts) < 3:
            raise SystemExit(
                f"{cache.path}: layer {layer.index} has queries at {len(parts)} lengths from "
                f"{shortest} keys on, and a law needs three: give a longer cache, or a smaller "
                "--shortest"
            )
        values = cache.read(layer, "value")
        group = layer.heads // layer.kv_heads
        for head, queries, keys in cache.heads(layer):
            value = widen(values[head // group], layer.dtypes["value"])
            for n, chosen in parts:
                scores = queries[chosen] @ keys[:n].T * cache.scales[layer.index]
                lengths = np.full(len(chosen), n)
                if cache.causal_offset is not None:
                    lengths = np.minimum(chosen + cache.causal_offset + 1, n)
                scores[np.arange(n) >= lengths[:, None]] = -np.inf
                yield Head(layer.index, head, n, scores, lengths, value[:n])


def equal_sizes(n: Integers, exponent: float, total: int) -> tuple[Integers, float]:
    """Return sizes alpha n^C, rounded, that are `total` keys in all, and that alpha.

    Args:
        n: Visible keys of each row, (rows,), >= 1.
        exponent: C; 0 is a fixed k.
        total: From rows to the sum of n.

    Returns:
        Integers (rows,) from 1 to n, and alpha. Where a size lies between two integers both occur,
        spread evenly over rows in their order.
    """
    # Relative to the longest, so that no power leaves the range of floats.
    longest = n.max()
    powers, ends = exponent * np.log(n / longest), np.log(n)
    low, high = float(np.min(-powers)), float(np.max(ends - powers))
    for _ in range(100):
        middle = (low + high) / 2
        few = np.exp(np.clip(powers + middle, 0.0, ends)).sum() < total
        low, high = (middle, high) if few else (low, middle)
    sums = np.cumsum(np.exp(np.clip(powers + high, 0.0, ends)))
    sizes = np.clip(np.diff(np.floor(sums + 0.5).astype(np.int64), prepend=0), 1, n)
    # Rounding leaves a key or two over.
    for change, able in ((1, sizes < n), (-1, sizes > 1)):
        rest = change * (total - int(sizes.sum()))
        if rest > 0:
            sizes[np.flatnonzero(able)[:rest]] += change
    return sizes, float(np.exp(high) * float(longest) ** -exponent)


@dataclass
class Loss:
    """Losses of one rule; means are over all rows of all lengths."""

    rule: str
    alpha: float | None
    kept: int
    mean_mass: float
    """Dropped mass; this and the next two are of proven upper ends."""
    longest_mass: float
    worst_mass: float
    over: float
    """Share of the rows that are not proven to be within eps."""
    error: float
    """L2 distance of the attention output to that with all keys, in the units of the values."""


def loss(rule: str, alpha: float | None, sizes: Integers, heads: list[Head], eps: float) -> Loss:
    """Certify the best `sizes` (rows,) keys of each row."""
    masses, holds, errors, at = [], [], [], 0
    for one in heads:
        k = sizes[at : at + len(one.scores)]
        at += len(k)
        keep = np.zeros(one.scores.shape, bool)
        order = np.argsort(-one.scores, axis=1, kind="stable")
        np.put_along_axis(keep, order, np.arange(one.n) < k[:, None], axis=1)
        proven = ck.certify(one.scores, keep, eps=eps)
        masses.append(proven.tail_mass_upper)
        holds.append(np.asarray(proven.holds))
        weights = np.exp(one.scores - one.scores.max(axis=1, keepdims=True))
        whole, part = (
            w @ one.values / w.sum(axis=1, keepdims=True) for w in (weights, weights * keep)
        )
        errors.append(np.linalg.norm(part - whole, axis=1))
    longest = max(one.n for one in heads)
    return Loss(
        rule=rule,
        alpha=alpha,
        kept=int(sizes.sum()),
        mean_mass=float(np.concatenate(masses).mean()),
        longest_mass=float(
            np.concatenate([m for m, h in zip(masses, heads, strict=True) if h.n == longest]).mean()
        ),
        worst_mass=float(np.concatenate(masses).max()),
        over=float(1 - np.concatenate(holds).mean()),
        error=float(np.concatenate(errors).mean()),
    )


def recipe(
    heads: list[Head], eps: float, exponent: float | None = None, keys: float | None = None
) -> dict[str, Any]:
    """Fit the law of some heads, one for all of them, and compare the three rules.

    Args:
        heads: Rows of several lengths.
        eps: Budget of dropped mass, for certified selection.
        exponent: C of the second rule; None for the fitted one.
        keys: Keys a row of the first two rules, in the mean; None for those of certified selection.

    Raises:
        SystemExit: A number outside its range.
    """
    needed = [ck.select(one.scores, eps).k for one in heads]
    k, n = np.concatenate(needed), np.concatenate([one.lengths for one in heads])
    fit = windows.fit([one.lengths.mean() for one in heads], [each.mean() for each in needed])
    exponent = fit.C if exponent is None else exponent
    if not abs(exponent) <= 10:
        raise SystemExit(f"--exponent {exponent:g}: give a C from -10 to 10")
    if keys is not None and not 1 <= keys <= n.mean():
        raise SystemExit(f"--keys {keys:g}: give 1 to {n.mean():.1f}, the mean length of a row")
    total = int(k.sum()) if keys is None else round(keys * len(n))
    chosen: list[tuple[str, Integers, float | None]] = [
        (FIXED, *equal_sizes(n, 0.0, total)),
        (POWER, *equal_sizes(n, exponent, total)),
        (CERTIFIED, k, None),
    ]
    return {
        "fit": asdict(fit),
        "exponent": exponent,
        "heads": [
            {"layer": one.layer, "head": one.head, "n": one.n, "k": float(each.mean())}
            for one, each in zip(heads, needed, strict=True)
        ],
        "losses": [asdict(loss(rule, alpha, sizes, heads, eps)) for rule, sizes, alpha in chosen],
    }


def measure(
    path: Path,
    eps: float,
    shortest: int = 16,
    exponent: float | None = None,
    keys: float | None = None,
) -> dict[str, Any]:
    """Return the recipe of each layer of a cache, and of all layers together."""
    with Cache(path) as cache:
        heads = list(rows_of(cache, shortest))
    layers = dict.fromkeys(one.layer for one in heads)
    by_layer = {i: [one for one in heads if one.layer == i] for i in layers}
    return {
        "eps": eps,
        "all": recipe(heads, eps, exponent, keys),
        "layers": {i: recipe(some, eps, exponent, keys) for i, some in by_layer.items()},
    }


def show(found: dict[str, Any]) -> None:
    """Print a line per layer and rule."""
    print(
        "layer  C (95 % interval)       kept by          keys  lost    longest worst   over   error"
    )
    for layer, each in ({"all": found["all"]} | found["layers"]).items():
        fit = each["fit"]
        low, high = fit["C_interval"]
        law = f"{fit['C']:.3f} ({low:.3f} to {high:.3f})"
        for one in each["losses"]:
            form = {FIXED: "k = {:.1f}", POWER: f"{{:.3g}} n^{each['exponent']:.3g}"}.get(
                one["rule"]
            )
            kept_by = form.format(one["alpha"]) if form else one["rule"]
            print(
                f"{layer!s:>5}  {law:22}  {kept_by:13} {one['kept']:7}  {one['mean_mass']:.4f}  "
                f"{one['longest_mass']:.4f}  {one['worst_mass']:.4f}  {one['over']:5.1%}  "
                f"{one['error']:.4f}"
            )


def main() -> None:
    """Measure a cache, print the tables, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cache", type=Path, help="a .safetensors file as `certk analyze` takes it")
    parser.add_argument("--eps", type=float, default=0.01, help="dropped mass that a row may lose")
    parser.add_argument("--shortest", type=int, default=16, help="the shortest length")
    parser.add_argument("--exponent", type=float, help="C of the law alpha n^C; default: fitted")
    parser.add_argument(
        "--keys", type=float, help="keys a row of both windows, in the mean; default: as certified"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    options = parser.parse_args()
    found = measure(options.cache, options.eps, options.shortest, options.exponent, options.keys)
    show(found)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
