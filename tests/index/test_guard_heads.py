"""Guards of unlike kv heads, several query heads each: nothing of one head is said of another.

Keys, values, sets and budgets of the heads differ by orders of magnitude, so that what is taken
from the wrong head is wrong by as much. The truth is computed in float64, whose rounding is far
below what tells the heads apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError
from certk_rs.guard import Guard, others

D, D_V, N, M = 16, 5, 60, 7


@dataclass
class Heads:
    """kv heads with what is kept of each, and queries of `group` heads for each of them."""

    keys: np.ndarray
    values: np.ndarray
    kept: list[np.ndarray]
    queries: np.ndarray

    @property
    def group(self) -> int:
        return len(self.queries) // len(self.keys)

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Scores (m, n), values and kept positions of the keys of a query head, and the others."""
        kv = head // self.group
        scores = self.queries[head].astype(float) @ self.keys[kv].T.astype(float) * D**-0.5
        return scores, self.values[kv].astype(float), self.kept[kv], others(self.kept[kv], N)


def unlike(seed: int, kv: int, group: int) -> Heads:
    rng = np.random.default_rng(seed)
    order = rng.permutation(kv)
    keys = rng.standard_normal((kv, N, D)) * 4.0 ** -order[:, None, None]
    values = rng.standard_normal((kv, N, D_V)) * 30.0 ** order[:, None, None]
    values += rng.choice([-20.0, 0.0, 300.0], (kv, 1, 1))
    kept = [np.sort(rng.choice(N, int(rng.integers(5, N - 5)), replace=False)) for _ in range(kv)]
    queries = (
        2 * rng.standard_normal((kv * group, M, D)) * 4.0 ** order.repeat(group)[:, None, None]
    )
    return Heads(*(x.astype(np.float32) for x in (keys, values)), kept, queries.astype(np.float32))


def cases() -> Iterator[Heads]:
    for seed in range(12):
        kv, group = [(2, 1), (2, 3), (3, 2), (4, 1)][seed % 4]
        yield unlike(seed, kv, group)


def log_mass(scores: np.ndarray) -> np.ndarray:
    top = scores.max(axis=-1)
    return np.asarray(np.log(np.exp(scores - top[:, None]).sum(axis=-1)) + top)


@pytest.mark.parametrize("back", [False, True])
def test_what_is_said_of_a_head_is_true_of_it(back: bool) -> None:
    tight = 0
    for at, case in enumerate(cases()):
        rng = np.random.default_rng([at, back])
        heads, kv = len(case.queries), len(case.keys)
        guard = Guard.build(case.keys, case.values, case.kept)
        # Of some heads a few dropped keys have come back, and of each another number.
        there = [np.empty(0, np.int64)] * kv
        if back:
            there = [
                np.sort(rng.choice(gone, g + 1, replace=False))
                for g, gone in enumerate(guard.positions)
            ]
        eps = (10.0 ** -rng.uniform(0.3, 6, (kv, 1))).repeat(case.group, 0).repeat(M, 1)
        beside, share, real = np.empty((heads, M)), np.empty((heads, M)), []
        for head in range(heads):
            scores, values, kept, gone = case.of(head)
            here = np.union1d(kept, there[head // case.group])
            gone = np.setdiff1d(gone, here)
            weights = np.exp(scores - log_mass(scores)[:, None])
            beside[head], share[head] = log_mass(scores[:, here]), weights[:, gone].sum(axis=-1)
            average = weights[:, here] @ values[here] / weights[:, here].sum(axis=-1, keepdims=True)
            real.append((scores, values, gone, average, weights @ values))
        ends = beside - 1e-9, beside + 1e-9
        judged = guard.judge(case.queries, ends, eps, there=there)
        assert (share <= judged.lost * (1 + 1e-9) + 1e-12).all()
        assert (judged.left <= eps).all()
        out = np.stack([average for _, _, _, average, _ in real])
        moved = guard.moved(out, judged.lost)
        spare = np.minimum(guard.spare(out, 0.1 * moved), judged.lost)
        for head, (scores, values, gone, average, every) in enumerate(real):
            group = head // case.group
            assert np.isin(judged.back[group], gone).all()
            away = np.sqrt(np.square(average - every).sum(axis=-1))
            size = 1e-9 * np.abs(case.values[group]).max()
            assert (away <= moved[head] + size).all()
            tight += int((moved[head] <= 20 * away + size).sum())
            # Without what comes back, each of the head's queries keeps to its budget.
            left = np.setdiff1d(gone, judged.back[group])
            weights = np.exp(scores - log_mass(scores)[:, None])
            assert (weights[:, left].sum(axis=-1) <= judged.left[head] * (1 + 1e-9) + 1e-12).all()
            # A loss that is spared moves the output by no more than was asked for.
            assert (guard.moved(out, spare)[head] <= 0.1 * moved[head] * (1 + 1e-9) + size).all()
            # Nor where a dropped key comes back that then outweighs all others.
            came = np.broadcast_to(values[gone[:1]], out.shape)
            assert (guard.moved(came, spare)[head] <= 0.1 * moved[head] * (1 + 1e-9) + size).all()
    assert tight > 100, "bounds are so wide that nothing was tried"


@pytest.mark.parametrize("kept", [[-1], [3, N], [0.5], [[1]]])
def test_what_is_kept_must_be_positions(kept: list[Any]) -> None:
    with pytest.raises(CertkError, match=r"kept h(as|olds)"):
        others(np.array(kept), N)
