"""Options of a search together, over indexes that change: what is said, against long double.

Keys lie in clusters, and heads are unlike. An index is searched before and after each append, and
as it comes out of a pickle. The truth is computed from the stored numbers and shares no code with
the library.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certk_rs as ck
from real_attention import rows_seen

LD = np.longdouble
DTYPES: tuple[Any, ...] = (np.float32, np.float16, ml_dtypes.bfloat16)
Rng = np.random.Generator
# Of the truth itself.
CLOSE = LD(1e-13)


def clustered(rng: Rng, heads: tuple[int, ...], n: int, d: int, size: float = 1.0) -> np.ndarray:
    """Keys of which sixteen neighbours lie together, far from all others."""
    centres = 3 * rng.standard_normal((*heads, -(-n // 16), d))
    keys = np.repeat(centres, 16, axis=-2)[..., :n, :]
    return size * (keys + 0.02 * rng.standard_normal(keys.shape))


class Real:
    """Scores and shares of the keys that each row sees."""

    def __init__(self, q: Any, keys: Any, seen: np.ndarray, scale: float | None) -> None:
        q, keys = (np.asarray(x).astype(np.float64).astype(LD) for x in (q, keys))
        if keys.ndim > 2:
            keys = np.repeat(keys, q.shape[-3] // keys.shape[-3], axis=-3)
        factor = LD(float(q.shape[-1]) ** -0.5 if scale is None else scale)
        self.seen = np.broadcast_to(seen, (*q.shape[:-1], keys.shape[-2]))
        self.scores = np.where(self.seen, q @ np.swapaxes(keys, -1, -2) * factor, -np.inf)
        top = self.scores.max(axis=-1, keepdims=True, initial=-np.inf)
        self.top = np.where(np.isfinite(top), top, 0)
        weights = np.exp(self.scores - self.top)
        total = weights.sum(axis=-1, keepdims=True)
        self.shares = weights / np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            self.log_mass = (np.log(total) + self.top)[..., 0]
        # Products of d entries and a difference of scores round.
        size = np.abs(q).sum(axis=-1) * np.abs(keys).max(initial=0) * abs(factor)
        self.close = CLOSE + size * LD(2.0**-60)

    def judge(self, found: ck.SearchResult, eps: Any, rule: str, k: int | None) -> None:
        """Everything that a search says."""
        kept, close = found.to_mask(), self.close
        assert not (kept & ~self.seen).any()
        tail = np.where(kept, 0, self.shares).sum(axis=-1)
        assert (tail <= found.tail_mass_upper.astype(LD) * (1 + close) + LD(1e-280)).all()
        some = kept.any(axis=-1)
        assert (found.tail_mass_lower.astype(LD) <= tail * (1 + close) + LD(1e-280))[some].all()
        count = self.seen.sum(axis=-1)
        eps = np.broadcast_to(eps, count.shape)
        assert (found.status[count == 0] == ck.Status.EMPTY).all()
        held = found.status == ck.Status.CERTIFIED
        assert (found.tail_mass_upper <= eps)[held].all()
        if rule == "top_k":
            assert k is not None
            assert (found.k == np.minimum(k, count)).all()
            worst = np.where(kept, self.scores, np.inf).min(axis=-1)
            best = np.where(kept, -np.inf, self.scores).max(axis=-1, initial=-np.inf)
            assert (best <= worst + close * (1 + np.abs(self.top[..., 0])))[count > 0].all()
        else:
            assert held[count > 0].all()
        # Where it is said that no smaller set will do, none does.
        shares = -np.sort(-self.shares, axis=-1)
        before = np.concatenate([np.zeros((*count.shape, 1)), np.cumsum(shares, axis=-1)], axis=-1)
        fewer = np.take_along_axis(before, np.maximum(found.k - 1, 0)[..., None], -1)[..., 0]
        assert (1 - fewer > eps * (1 - close) - close)[found.minimal & (count > 0)].all()


def sights(rng: Rng, rows: tuple[int, ...], n: int) -> dict[str, Any]:
    """Return random visibilities of rows."""
    options: dict[str, Any] = {"causal": bool(rng.random() < 0.4)}
    if rng.random() < 0.5:
        options["lengths"] = rng.integers(0, n + 1, rows if rng.random() < 0.8 else ())
    if rng.random() < 0.5:
        shape = (*rows, n) if rng.random() < 0.8 else (n,)
        options["mask"] = rng.random(shape) < rng.choice([0.2, 0.9])
    return options


def one_history(rng: Rng) -> None:
    """An index that grows, searched in every way between the steps."""
    kv, group, m = int(rng.integers(1, 4)), int(rng.integers(1, 3)), int(rng.integers(1, 6))
    d, dtype = int(rng.choice([4, 16, 20])), DTYPES[int(rng.integers(3))]
    if rng.random() < 0.2:
        kv = group = 1
    heads = () if kv == group == 1 else (kv,)
    rows = (kv * group, m) if heads else (m,)
    parts = []
    for size in rng.choice([0.5, 1.0, 4.0], 4):
        part = clustered(rng, heads, int(rng.choice([1, 16, 40, 75])), d, float(size))
        if rng.random() < 0.3:
            part[..., rng.integers(part.shape[-2]), :] *= 30  # one without a code
        parts.append(part.astype(dtype))
    index = ck.KeyIndex.build(parts[0])
    for step in range(len(parts)):
        if step:
            index.append(parts[step])
        keys = np.concatenate(parts[: step + 1], axis=-2)
        n = keys.shape[-2]
        every = np.broadcast_to(keys if heads else keys[None], (kv, n, d)).astype(np.float64)
        # Along a key, or away from all.
        towards = every[np.arange(kv * group) // group, rng.integers(n, size=(m, kv * group))]
        q = np.where(rng.random((m, kv * group, 1)) < 0.7, towards, -towards[:, ::-1])
        q = np.swapaxes(q, 0, 1).reshape(*rows, d) * rng.choice([0.05, 0.3, 1.0], (*rows, 1))
        q = (q + rng.standard_normal(q.shape) / 5).astype(rng.choice([np.float32, np.float64]))
        eps: Any = rng.choice([0.0, 1e-6, 0.03, 0.4], rows)
        scale = None if rng.random() < 0.7 else float(rng.choice([0.1, -0.3]))
        for rule in ("mass", "gap", "top_k"):
            options = sights(rng, rows, n) | {"scale": scale}
            real = Real(q, keys, rows_seen(rows, n, options), scale)
            k = int(rng.choice([1, 3, 20])) if rule == "top_k" else None
            found = index.search(q, eps, rule=rule, k=k, **options)
            real.judge(found, eps, rule, k)
            cut = index.search(
                q, eps, rule=rule, k=k, max_scored=int(rng.choice([0, 5, 40])), **options
            )
            kept = np.where(cut.to_mask(), 0, real.shares).sum(axis=-1)
            assert (kept <= cut.tail_mass_upper * (1 + real.close) + 1e-280).all()
            bare = {name: value for name, value in options.items() if name != "causal"}
            low, high = index.log_mass(q, **bare)
            mass = Real(q, keys, rows_seen(rows, n, bare), scale).log_mass
            off = real.close * (1 + np.abs(np.where(np.isfinite(mass), mass, 0)))
            assert ((low <= mass + off) & (mass - off <= high)).all()
        if rng.random() < 0.3:
            index = pickle.loads(pickle.dumps(index))
        if rng.random() < 0.3:
            index = copy.copy(index)


@pytest.mark.parametrize("seed", range(60))
def test_an_index_that_grows_is_searched_between_the_steps(seed: int) -> None:
    one_history(np.random.default_rng([5, seed]))


@pytest.mark.heavy
def test_many_indexes_that_grow() -> None:
    for seed in range(3000):
        one_history(np.random.default_rng([6, seed]))


def test_each_row_has_its_own_budget_and_what_is_beside_it() -> None:
    """Rows of one head, four at a time and alone, whose budgets and neighbours differ by much."""
    rng, n, d = np.random.default_rng(10), 300, 16
    keys = rng.standard_normal((2, n, d)).astype(np.float32)
    keys[1] *= 0.3
    # Two of each head are left without a code: of these nothing is known but how large they are.
    keys[:, [7, 200]] *= 20
    index = ck.KeyIndex.build(keys)
    q = (3 * rng.standard_normal((4, 5, d))).astype(np.float32)
    eps = rng.choice([1e-9, 1e-3, 0.1, 0.6], (4, 5))
    real = Real(q, keys, np.ones((4, 5, n), bool), None)
    real.judge(index.search(q, eps), eps, "mass", None)
    beside = real.log_mass.astype(np.float64) + rng.uniform(-9, 9, (4, 5))
    for wide in (0.0, 0.5):
        found = index.recall(q, (beside - 1e-9 - wide, beside + 1e-9 + wide), eps)
        assert (found.tail_mass_upper <= eps).all()
        weight = np.exp(beside.astype(LD) - real.log_mass)
        back = np.zeros((4, 5, n), bool)
        flat = back.reshape(-1, n)
        flat[np.repeat(np.arange(20), np.diff(found.indptr)), found.indices] = True
        left = np.where(back, 0, real.shares).sum(axis=-1) / (1 + weight)
        assert (left <= found.tail_mass_upper * (1 + 1e-8)).all()
        assert (found.tail_mass_lower <= left * (1 + 1e-8) + 1e-280).all()
        assert (1 / (1 + weight) <= found.lost_upper * (1 + 1e-8)).all()


def test_a_search_keeps_what_attention_keeps() -> None:
    """One row of attention over an index is one of a search: what they count is the same."""
    rng = np.random.default_rng(4)
    n, d = 4000, 32
    keys = rng.standard_normal((n, d), dtype=np.float32)
    q = 4 * rng.standard_normal((1, d), dtype=np.float32)
    index = ck.KeyIndex.build(keys)
    mask = rng.random((1, n)) < 0.7
    found = index.search(q, 0.03, mask=mask, lengths=[3500])
    attended = ck.attention(
        q, keys, keys, 0.03, index=index, mask=mask, lengths=[3500], even_if_slower=True
    )
    assert attended.tail_mass_upper[0] <= 0.03
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
        with pytest.raises(ck.CertkError, match=names):
            index.search(q, 0.1, **options)
