"""The second paper's setting in `certk reproduce`, beside definitions written out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from certk_rs.errors import CertkError
from certk_rs.reproduce import Settings, self_attention
from certk_rs.reproduce.self_attention import Attention, measure, spectral_norm


@pytest.mark.parametrize("sharp", [0.5, 3.0, 20.0])
def test_the_error_of_a_window_is_that_of_the_two_matrices(sharp: float) -> None:
    scores = sharp * np.random.default_rng(1).standard_normal((90, 90))
    dense = np.exp(scores.astype(np.longdouble))
    dense /= dense.sum(axis=1, keepdims=True)
    attention = Attention(scores)
    for k in (1, 2, 9, 89, 90):
        few = np.zeros_like(dense)
        for row, shares in zip(few, dense, strict=True):
            best = sorted(range(90), key=lambda i: -shares[i])[:k]
            row[best] = shares[best]
        tail = float(1 - few.sum(axis=1).mean())
        few /= few.sum(axis=1, keepdims=True)
        change = (few - dense).astype(np.float64)
        norm, lost = attention.errors(k)
        assert norm == pytest.approx(np.linalg.svd(change)[1][0] / 90, rel=1e-3, abs=1e-9)
        assert lost == pytest.approx(tail, rel=1e-9, abs=1e-15)


def test_a_spectral_norm_approaches_from_below() -> None:
    rng = np.random.default_rng(2)
    for matrix in (rng.standard_normal((60, 80)), np.outer(np.ones(50), rng.random(50)), np.eye(9)):
        real = np.linalg.svd(matrix)[1][0]
        assert real * (1 - 5e-3) <= spectral_norm(matrix) <= real * (1 + 1e-12)


def test_a_norm_that_two_attentions_cannot_differ_by_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_attention, "spectral_norm", lambda _: 100.0)
    with pytest.raises(CertkError, match="the spectral norm of a difference is broken"):
        Attention(np.zeros((20, 20))).errors(3)


def test_two_seeds_agree_within_their_intervals() -> None:
    """Twice the usual two standard errors each way, of three draws: the intervals overlap."""
    one, other = (measure(Settings(Path("x"), brief=True, seed=seed), lambda _: None)
                  for seed in (3, 4))  # fmt: skip
    pairs = [
        (a, b, what)
        for part, names in {
            "slopes": ("norm", "tail"), "rows": ("norm", "tail"), "equal": ("tail_more",),
            "collapse": ("ineffective", "mass", "participation", "k"),
        }.items()
        for a, b in zip(one[part], other[part], strict=True)
        for what in names
    ]  # fmt: skip
    far = [abs(a[what] - b[what]) > a[f"{what}_error"] + b[f"{what}_error"] for a, b, what in pairs]
    assert np.mean(far) < 0.15
    # The same inputs for all: wider windows are never worse in what they drop.
    for scale in self_attention.SCALES:
        at = {(r["window"], r["n"]): r["tail"] for r in one["rows"] if r["scale"] == scale}
        for n in (64, 128, 256):
            lost = [at[f"k = n^{c:g}", n] for c in self_attention.EXPONENTS]
            assert lost == sorted(lost, reverse=True)
            assert at["k = 1", n] == max(lost[0], at["k = 1", n])
    sizes = {(row["window"], row["n"]): row["k"] for row in one["rows"]}
    assert sizes["k = 1", 256] == 1
    assert sizes["k = n^0.5", 128] == math.ceil(math.sqrt(128))
