"""Shapes of key, value and query: those that do not fit, and those that look transposed.

Caches of (heads, rows, d) and of (rows, heads, d) hold the same numbers, and often both readings
fit. Signs of (rows, heads, d) are:

* more kv heads than keys: models have few kv heads, and caches worth pruning many keys;
* as many query heads as keys, but another number of queries, if the queries fit transposed. Those
  are the queries of a whole prompt, with rows in the place of heads. It may be so of the queries
  alone.

Both can be right as they stand (a prompt of a few tokens), so they are doubts, which an explicit
layout settles.
"""

from __future__ import annotations

from collections.abc import Mapping

HEAD_MAJOR = "hnd"
ROW_MAJOR = "nhd"
LAYOUTS = (HEAD_MAJOR, ROW_MAJOR)
"""Orders of axes in storage: (heads, rows, d), or (rows, heads, d)."""

MAX_N = (1 << 32) - 1

AXES = {HEAD_MAJOR: "(heads, rows, d)", ROW_MAJOR: "(rows, heads, d)"}

Shape = tuple[int, ...]
Complaint = tuple[str, str]
"""The role of a tensor, and the rest of a sentence about its name, type and shape."""


def head_major(shape: Shape, layout: str) -> Shape:
    """Return the last three axes of a stored tensor as (heads, rows, d)."""
    outer, inner, d = shape[-3:]
    return (outer, inner, d) if layout == HEAD_MAJOR else (inner, outer, d)


def misfit(shapes: Mapping[str, Shape], layout: str) -> Complaint | None:
    """Return the first misfit of tensors of three axes in this layout; None if all fit."""
    key, value, query = (head_major(shapes[role], layout) for role in ("key", "value", "query"))
    (kv_heads, n, d), (heads, _, _) = key, query
    if value != key:
        return "value", _not_as_key(key, value)
    if query[2] != d:
        return "query", f"must have the d of the key, which is {d}"
    if heads % kv_heads:
        return "query", f"has {heads} heads, not a multiple of the {kv_heads} kv heads of the key"
    if n > MAX_N:
        return "key", f"has more than {MAX_N} keys, the most that are counted"
    return None


def transposition(shapes: Mapping[str, Shape]) -> Complaint | None:
    """Return the sign that tensors read as (heads, rows, d) are transposed; None without one."""
    (kv_heads, n, _), (heads, m, _) = shapes["key"], shapes["query"]
    if kv_heads > n:
        return "key", (
            f"would have more kv heads ({kv_heads}) than keys ({n}), so it looks transposed: give "
            "--layout nhd if it is (rows, heads, d), or --layout hnd if it is right as it is"
        )
    if m and heads == n != m:
        said = f"would have as many heads as there are keys ({n}), so it looks transposed"
        if misfit(shapes, ROW_MAJOR) is None:
            return "query", (
                f"{said}: give --layout nhd if the tensors are (rows, heads, d), or --layout hnd "
                "if they are right as they are"
            )
        if misfit(_with_query_swapped(shapes), HEAD_MAJOR) is None:
            return "query", (
                f"{said}, it alone: store it as (heads, rows, d) like the key, or give --layout "
                "hnd if it is right as it is"
            )
    return None


def with_remedy(complaint: Complaint, shapes: Mapping[str, Shape], layout: str) -> Complaint:
    """Add the other layout, or a transposed tensor, to a complaint of `misfit` if that fits."""
    role, what = complaint
    other = ROW_MAJOR if layout == HEAD_MAJOR else HEAD_MAJOR
    if misfit(shapes, other) is None:
        return role, (
            f"{what} as {AXES[layout]}: all shapes fit as {AXES[other]}, so they look transposed: "
            f"give --layout {other} if they are"
        )
    if role == "query" and misfit(_with_query_swapped(shapes), layout) is None:
        return role, f"{what}: it alone looks transposed; store it as {AXES[layout]} like the key"
    return complaint


def _with_query_swapped(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    outer, inner, d = shapes["query"]
    return {**shapes, "query": (inner, outer, d)}


def _not_as_key(key: Shape, value: Shape) -> str:
    kv_heads, n, d = key
    said = f"must have the kv heads, n and d of the key: {kv_heads}, {n}, {d}"
    if value == (n, kv_heads, d):
        return f"{said}: one of the two is transposed; store both in the same order of axes"
    if value == (kv_heads, d, n):
        return f"{said}: one of the two has its vectors as columns; store them as rows of length d"
    return said
