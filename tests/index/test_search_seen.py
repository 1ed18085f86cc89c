"""Searches of rows that see a part of the keys: what is said is true of that part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs.errors import CertkError

Array = np.ndarray
EPS = 0.03


def seen_by(shape: tuple[int, ...], n: int, options: dict[str, Any]) -> Array:
    """Compute anew the keys that each row sees: (..., m, n)."""
    position = np.arange(n)
    m = shape[-1]
    seen = np.ones((*shape, n), bool)
    if options.get("causal"):
        seen &= position <= np.arange(m)[:, None] + n - m
    if "lengths" in options:
        seen &= position < np.broadcast_to(options["lengths"], shape)[..., None]
    if "mask" in options:
        seen &= options["mask"]
    return seen


@pytest.mark.parametrize("over", ["codes", "cells", "both"])
@pytest.mark.parametrize("rule", ["mass", "gap", "top_k"])
def test_rows_of_groups_see_what_attention_sees(rule: Any, over: Any) -> None:
    rng = np.random.default_rng(3)
    kv, heads, m, n, d = 2, 4, 5, 150, 16
    keys = rng.standard_normal((kv, n, d), dtype=np.float32)
    q = 3 * rng.standard_normal((heads, m, d), dtype=np.float32)
    index = ck.KeyIndex.build(keys)
    scores = np.einsum("hmd,hnd->hmn", q, keys.repeat(heads // kv, 0), dtype=np.float64) / 4
    mask = rng.random((heads, m, n)) < 0.5
    mask[1, 2] = False
    sights: list[dict[str, Any]] = [
        {"causal": True},
        {"lengths": rng.integers(0, n, (heads, m))},
        {"lengths": 40},
        {"mask": mask},
        {"mask": mask[0, 0]},
        {"causal": True, "lengths": rng.integers(0, n, (heads, m)), "mask": mask},
    ]
    for sight in sights:
        seen = seen_by((heads, m), n, sight)
        k = 7 if rule == "top_k" else None
        found = index.search(q, EPS, rule=rule, over=over, k=k, **sight)
        flags = found.to_mask()
        assert not (flags & ~seen).any()
        for row in np.ndindex(heads, m):
            if not seen[row].any():
                assert found.status[row] == ck.Status.EMPTY
                assert found.k[row] == 0
                continue
            weights = np.where(seen[row], np.exp(scores[row] - scores[row][seen[row]].max()), 0.0)
            tail = weights[~flags[row]].sum() / weights.sum()
            low, high = found.tail_mass_lower[row], found.tail_mass_upper[row]
            assert low * (1 - 1e-9) - 1e-15 <= tail <= high * (1 + 1e-9) + 1e-15
            if rule != "top_k":
                assert high <= EPS
            else:
                visible = np.flatnonzero(seen[row])
                best = visible[np.argsort(-scores[row][visible], kind="stable")[:7]]
                assert set(best.tolist()) == set(found.row(row).tolist())


def test_a_search_keeps_what_attention_keeps() -> None:
    """One row of attention over an index is one of a search: what they count is the same."""
    rng = np.random.default_rng(4)
    n, d = 4000, 32
    keys = rng.standard_normal((n, d), dtype=np.float32)
    q = 4 * rng.standard_normal((1, d), dtype=np.float32)
    index = ck.KeyIndex.build(keys)
    mask = rng.random((1, n)) < 0.7
    found = index.search(q, EPS, mask=mask, lengths=[3500])
    attended = ck.attention(
        q, keys, keys, EPS, index=index, mask=mask, lengths=[3500], even_if_slower=True
    )
    assert attended.tail_mass_upper[0] <= EPS
    # A search drops again what it has scored.
    assert found.k[0] <= attended.k[0] <= mask[0, :3500].sum()


def test_what_rows_see_is_judged() -> None:
    rng = np.random.default_rng(5)
    index = ck.KeyIndex.build(rng.standard_normal((6, 4), dtype=np.float32))
    q = rng.standard_normal((2, 4), dtype=np.float32)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"lengths": 7}, "lengths"),
        ({"lengths": [1, -1]}, "lengths"),
        ({"lengths": [1, 2, 3]}, "lengths"),
        ({"mask": np.ones((2, 5), bool)}, "mask"),
        ({"mask": np.ones((2, 6), np.float32)}, "mask has dtype"),
        ({"causal": 1}, "causal"),
    ]
    for options, names in bad:
        with pytest.raises(CertkError, match=names):
            index.search(q, 0.1, **options)
