"""Attention over heads of different lengths: as that over each head alone, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from levels import each_level

DTYPES = ["float16", "float32", "float64"]


class Case:
    """Rows of heads of these lengths in one array, with rows of nobody between them."""

    def __init__(self, counts: Any, m: int, *, group: int = 2, d: int = 20, dtype: str = "float32"):
        rng = np.random.default_rng(len(str(counts)) + m)
        self.counts = np.array(counts)
        self.starts = np.zeros_like(self.counts)
        gaps = rng.integers(0, 3, self.counts.size)
        self.starts.reshape(-1)[:] = np.cumsum(self.counts.ravel() + gaps) - self.counts.ravel()
        total = int((self.starts + self.counts).max(initial=0))
        self.k, self.v = (rng.standard_normal((total, x)).astype(dtype) for x in (d, d + 3))
        used = np.zeros(total, bool)
        for start, count in zip(self.starts.ravel(), self.counts.ravel(), strict=True):
            used[start : start + count] = True
        self.k[~used] = self.v[~used] = np.nan
        shape = (*self.counts.shape[:-1], self.counts.shape[-1] * group, m, d)
        self.q = 2 * rng.standard_normal(shape).astype(dtype)
        self.group = group

    def found(self, eps: float, **how: Any) -> ck.AttentionResult:
        k, v = (ck.RaggedRows(rows, self.starts, self.counts) for rows in (self.k, self.v))
        return ck.attention(self.q, k, v, eps, **how)

    def alone(self, eps: float, **how: Any) -> dict[str, Any]:
        """The same, each kv head by itself; `how` may depend on its length and place."""
        parts: dict[str, list[Any]] = {}
        flat = self.q.reshape(-1, self.group, *self.q.shape[-2:])
        for head, (start, count) in enumerate(
            zip(self.starts.ravel(), self.counts.ravel(), strict=True)
        ):
            k, v = (rows[None, start : start + count] for rows in (self.k, self.v))
            own = {name: of(head, count) if callable(of) else of for name, of in how.items()}
            one = ck.attention(flat[head], k, v, eps, **own)
            for name in ("out", "k", "tail_mass_upper", "error_bound", "log_mass_upper"):
                parts.setdefault(name, []).append(getattr(one, name))
        shape = self.q.shape[:-1]
        return {
            name: np.stack(each).reshape(*shape, *each[0].shape[2:]) for name, each in parts.items()
        }

    def same(self, eps: float, how: dict[str, Any], alone: dict[str, Any] | None = None) -> None:
        found = self.found(eps, **how)
        for name, wanted in self.alone(eps, **(how if alone is None else alone)).items():
            if name == "error_bound":  # sums are taken to be as long as those of the longest head
                assert (found.error_bound >= wanted).all()
                assert np.allclose(found.error_bound, wanted, rtol=1e-6, atol=1e-12)
            else:
                assert np.array_equal(getattr(found, name), wanted), name


COUNTS = [[5, 0, 1], [16, 700, 33], [[1, 300], [2000, 17]], [[0, 0], [0, 0]], [3000]]


@pytest.mark.parametrize("eps", [0.0, 0.05])
@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_each_head_is_answered_as_if_alone(counts: Any, m: int, eps: float) -> None:
    for dtype in DTYPES:
        case = Case(counts, m, dtype=dtype)
        for _ in each_level():
            case.same(eps, {})
            case.same(eps, {"causal": True})
            case.same(eps, {"even_if_slower": True, "weights": "exact", "threads": 2})


def test_lengths_masks_and_sinks() -> None:
    case = Case([[9, 300, 0], [40, 41, 512]], 2, group=1)
    rng = np.random.default_rng(5)
    batch, longest = case.q.shape[:-1], int(case.counts.max())
    lengths = rng.integers(0, longest + 1, batch)

    def own(head: int, count: int) -> Any:
        return np.minimum(lengths.reshape(-1, 1, batch[-1])[head], count)

    case.same(0.02, {"lengths": lengths}, {"lengths": own})
    mask = rng.random((*batch, longest)) < 0.6
    flat = mask.reshape(-1, 1, batch[-1], longest)
    case.same(0.02, {"mask": mask}, {"mask": lambda head, count: flat[head, ..., :count]})
    sinks = rng.standard_normal(batch[:-1]).astype(np.float64)
    case.same(0.02, {"sinks": sinks}, {"sinks": lambda head, _: sinks.reshape(-1, 1)[head]})


def test_a_budget_on_the_output() -> None:
    case = Case([50, 1000], 2)
    found = case.found(None, out_tol=0.05)  # type: ignore[arg-type]
    assert (found.error_bound <= 0.05).all()


def test_rows_that_do_not_fit_are_refused() -> None:
    case = Case([5, 7], 1)
    k, v = (ck.RaggedRows(rows, case.starts, case.counts) for rows in (case.k, case.v))
    rows, starts, counts = case.k, case.starts, case.counts

    def refuses(match: str, *pair: Any, q: Any = None, **how: Any) -> None:
        with pytest.raises(ck.CertkError, match=match):
            ck.attention(case.q if q is None else q, *pair, 0.1, **how)

    refuses("pass two", k, case.v)
    refuses("pass two", case.k, v)
    for wrong in (ck.RaggedRows(rows, starts + 1, counts), ck.RaggedRows(rows, starts, counts - 1)):
        refuses("other starts or counts", wrong, v)
    for starts_, counts_ in ((starts + 100, counts), (starts, counts + 100), (starts[:1], counts)):
        pair = [ck.RaggedRows(x, starts_, counts_) for x in (rows, case.v)]
        refuses("fit a buffer|pass \\(N, d\\)", *pair)
    for starts_ in (starts - 100, starts.astype(float), np.full(2, 2**62)):
        pair = [ck.RaggedRows(x, starts_, counts) for x in (rows, case.v)]
        refuses("below 0|pass integers|fit a buffer", *pair)
    refuses("pass \\(N, d\\)", ck.RaggedRows(rows[0], starts, counts), v)
    refuses("must be those of the keys", k, v, q=case.q[:3])
    refuses("index and ball", k, v, index=ck.KeyIndex.build(case.q[0]))
    refuses("index and ball", k, v, ball=ck.ValueBall(case.q))
    refuses("mask", k, v, mask=np.ones((4, 1, 9), bool))
    refuses("lengths", k, v, lengths=8)
    bad = case.k.copy()
    bad[case.starts[1] + 2, 3] = np.nan
    refuses("k\\[1, 2, 3\\]", ck.RaggedRows(bad, starts, counts), v)
