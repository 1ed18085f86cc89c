"""Compare the page bounds of Quest with codes of keys, at equal bytes read, on real rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from certk_rs import KeyIndex

from .common import (
    Array,
    Head,
    Rows,
    Settings,
    Table,
    Verdict,
    legend,
    lines,
    mean,
    panels,
    real_heads,
    require_at_most,
    summed,
    table_of,
)

NAME = "page-bounds"
ABOUT = (
    "Quest (arXiv 2406.10774) keeps the least and the greatest entry of each channel for every "
    "page of 16 keys and reads the pages with the largest bound on a score. An index of codes "
    "(d + 4 bytes a key) picks single keys. Both read keys and values of what they pick, under one "
    "budget of bytes, as a share of a cache with entries of 2 or 4 bytes. The mass that is lost is "
    "that of the keys not picked, and its proven bound is what page bounds or codes say of them. "
    "Rows are those of a small encoder (n = 512, d = 32); Quest is made for long contexts."
)
PAGE = 16
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
PAGES, CODES, BEST = "pages (Quest)", "codes", "best keys, as many as pages hold"


def run(settings: Settings) -> dict[str, Any]:
    """Pick by each method at every budget and width of entries."""
    heads = real_heads(2 if settings.quick else 16)
    rows: Rows = []
    for width in (2, 4):
        for share in SHARES:
            found = [picked(head, share, width) for head in heads]
            rows += [
                {"width": width, "share": share, "method": method}
                | summed([each[method] for each in found])
                for method in found[0]
            ]
    return {"rows": rows}


def picked(head: Head, share: float, width: int) -> dict[str, dict[str, float]]:
    """Return, by method, the share of keys picked, the mass lost and its bound; means over rows.

    A method whose summaries alone exceed the budget is left out.
    """
    n, d = head.keys.shape
    row = 2 * d * width
    whole = share * n * row
    scores, found = head.scores, {}
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    sums = weights.sum(axis=1, keepdims=True)
    weights /= sums
    pages = int((whole - n // PAGE * 2 * d * width) // (PAGE * row))
    if pages > 0:
        kept, others = by_pages(head, pages)
        # Equation 4.4 of the first paper: dropped pages by their bounds, kept keys exactly.
        may = (PAGE * np.exp(others - scores.max(axis=1, keepdims=True)) / sums).sum(axis=1)
        found[PAGES] = told(weights, kept, may / (may + (weights * kept).sum(axis=1)))
        order = np.argsort(-scores, axis=1, kind="stable")[:, : PAGE * pages]
        best = np.zeros(scores.shape, bool)
        np.put_along_axis(best, order, True, axis=1)
        found[BEST] = told(weights, best, (weights * ~best).sum(axis=1))
    keys = int((whole - n * (d + 4)) // row)
    if keys > 0:
        index = KeyIndex.build(head.keys.astype(np.float32), threads=1)
        result = index.search(
            head.queries.astype(np.float32), None, scale=head.scale, rule="top_k", k=keys,
            max_scored=keys, threads=1,
        )  # fmt: skip
        found[CODES] = told(weights, result.to_mask(), result.tail_mass_upper)
    return found


def by_pages(head: Head, count: int) -> tuple[Array, Array]:
    """Return the keys of the best pages of each query, and the bounds of the other pages.

    Returns:
        Booleans (m, n), and bounds on scores (m, pages), -inf where a page is picked.
    """
    pages = head.keys.reshape(-1, PAGE, head.keys.shape[1])
    query = head.scale * head.queries[:, None]
    bound = np.maximum(query * pages.min(axis=1), query * pages.max(axis=1)).sum(axis=2)
    largest = head.scores.reshape(len(bound), -1, PAGE).max(axis=2)
    require_at_most("the bound of a page", largest, bound)
    order = np.argsort(-bound, axis=1, kind="stable")[:, :count]
    chosen = np.zeros(bound.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return np.repeat(chosen, PAGE, axis=1), np.where(chosen, -np.inf, bound)


def told(weights: Array, kept: Array, bound: Array) -> dict[str, float]:
    """Return means over rows."""
    lost = (weights * ~kept).sum(axis=1)
    require_at_most("the bound of a lost mass", lost - 1e-9, bound)
    return {"kept": mean(kept), "lost": mean(lost), "bound": mean(bound)}


def verdicts(data: dict[str, Any]) -> list[Verdict]:
    """Judge who loses less for each width of entries, and what is proven."""
    at = {(row["width"], row["share"], row["method"]): row for row in data["rows"]}
    judged = []
    for width, what in ((2, "half precision"), (4, "float32")):
        pairs = [
            (share, at[width, share, PAGES]["lost"], at[width, share, CODES]["lost"])
            for share in SHARES
            if (width, share, CODES) in at
        ]
        told = "; ".join(f"{share:g}: {codes:.3f}, {pages:.3f}" for share, pages, codes in pairs)
        judged.append(
            Verdict(
                f"ours: codes lose less mass than pages at equal bytes of a cache in {what}",
                f"mass lost by codes and by pages, by share of the bytes: {told}",
                all(codes <= pages for _, pages, codes in pairs),
            )
        )
    pages, codes = at[4, 0.5, PAGES], at[4, 0.5, CODES]
    judged.append(
        Verdict(
            "ours: codes prove what is lost, page bounds do not",
            f"at half of a float32 cache codes lose {codes['lost']:.3f} and prove "
            f"{codes['bound']:.3f}; pages lose {pages['lost']:.3f} and prove {pages['bound']:.3f}",
            codes["bound"] - codes["lost"] < 0.02 and pages["bound"] - pages["lost"] > 0.02,
        )
    )
    return judged


def tables(data: dict[str, Any]) -> list[Table]:
    """Return one row per width, budget and method."""
    heads = "bytes an entry | share of bytes | method | keys picked | mass lost | +- | proven bound"
    cells = "{width} | {share:g} | {method} | {kept:.3f} | {lost:.4f} | {lost_error:.4f}"
    return [table_of("mean mass lost", heads, cells + " | {bound:.4f}", data["rows"])]


def draw(data: dict[str, Any]) -> Any:
    """Draw the mass lost against the budget, for each width."""
    figure, axes = panels(2, sharey=True)
    for axis, width in zip(axes, (2, 4), strict=True):
        rows = [row for row in data["rows"] if row["width"] == width]
        lines(axis, rows, "method", "share", "lost", f"{width} bytes an entry", "y")
        axis.set(xlabel="share of the cache's bytes that is read", ylabel="mass lost")
    return legend(figure, axes[0])
