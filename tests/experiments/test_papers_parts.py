"""The parts that experiments of the papers compute by, beside definitions written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("torch")

import delta_k_search
import dynamic_window
import gap_certificates
import mc_search
from cells import balls, clustered, consecutive
from papers import bert_table, gap_rules, key_search, page_bounds
from papers.common import EXAMPLE, heads_of, medians
from papers.self_attention import Attention, spectral_norm

from certk_rs import bounds, certify, select, windows


def slow(
    q: np.ndarray, keys: np.ndarray, cells: list[list[int]], scale: float, eps: float, gap: bool
) -> tuple[int, int]:
    """Return the keys scored and kept, by Python's own sums, cell after cell."""
    s = [scale * math.fsum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    n, bounds, odds = len(keys), [], eps / (1 - eps)
    for cell in cells:
        centre = [math.fsum(keys[i][j] for i in cell) / len(cell) for j in range(len(q))]
        radius = max(math.dist(keys[i], centre) for i in cell)
        product = math.fsum(a * b for a, b in zip(q, centre, strict=True))
        bounds.append(scale * product + abs(scale) * math.hypot(*q) * radius * (1 + 1e-9))
    order = sorted(range(len(cells)), key=lambda c: -bounds[c])
    for j in range(1, len(cells) + 1):
        known = sorted((s[i] for c in order[:j] for i in cells[c]), reverse=True)
        closed = order[j:]
        above = max((bounds[c] for c in closed), default=-math.inf)
        may = math.fsum(len(cells[c]) * math.exp(bounds[c]) for c in closed)
        for k in range(1, len(known) + 1):
            following = max([above, *known[k : k + 1]])
            if not gap:
                head = math.fsum(map(math.exp, known[:k]))
                proven = may + math.fsum(map(math.exp, known[k:])) <= odds * head
            elif k < n:
                proven = known[k - 1] - following >= math.log((n - k) * (1 - eps) / (k * eps))
            else:
                proven = True
            if proven:
                return len(known), k
    raise AssertionError("all cells open prove everything")


@pytest.mark.parametrize("search", [mc_search.mc_search, delta_k_search.delta_k_search])
@pytest.mark.parametrize("sharp", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("clusters", [False, True])
def test_searches_over_balls(clusters: bool, sharp: float, search: mc_search.Search) -> None:
    """Keys scored and kept are those of the definitions, and the kept ones are exact search's."""
    gap = search is delta_k_search.delta_k_search
    rng = np.random.default_rng([int(10 * sharp), gap])
    keys = rng.standard_normal((67, 5)) + 3 * rng.standard_normal((4, 5))[rng.integers(4, size=67)]
    queries, scale, eps = sharp * rng.standard_normal((6, 5)), 0.4, 0.05
    labels = clustered(keys, 8, rng) if clusters else consecutive(67, 8)
    cells = balls(keys, labels)
    members = [np.flatnonzero(labels == c).tolist() for c in np.unique(labels)]
    if clusters:
        assert len(members) > 1
        assert max(map(len, members)) < 67
    for q, scores in zip(queries, scale * queries @ keys.T, strict=True):
        found = search(scores, cells.upper(q, scale), cells, eps)
        sizes = len(found.scored), len(found.kept)
        assert sizes == slow(q, keys, members, scale, eps, gap)
        assert len(set(found.scored.tolist())) == sizes[0]
        exact = select(scores, eps, prove_minimal=True)
        assert certify(scores, found.kept).tail_mass_upper <= eps * (1 + 1e-12)
        assert sizes[1] >= exact.k
        if len(found.scored) == len(keys) and not gap:
            assert sizes[1] == exact.k
        upper = cells.upper(q, scale)
        upper[2] = cells.largest(scores)[2] - 1.0
        with pytest.raises(SystemExit, match="the bound of a cell is broken in 1 of"):
            search(scores, upper, cells, eps)


@pytest.mark.parametrize("sharp", [0.5, 3.0, 20.0])
def test_the_error_of_a_window_is_that_of_the_two_matrices(sharp: float) -> None:
    scores = sharp * np.random.default_rng(1).standard_normal((90, 90))
    dense = np.exp(scores.astype(np.longdouble))
    dense /= dense.sum(axis=1, keepdims=True)
    attention = Attention(scores)
    for k in (1, 2, 9, 89, 90):
        few = np.zeros_like(dense)
        for row, shares in zip(few, dense, strict=True):
            best = np.argsort(-shares, kind="stable")[:k]
            row[best] = shares[best]
        tail = float(1 - few.sum(axis=1).mean())
        few /= few.sum(axis=1, keepdims=True)
        norm, lost = attention.errors(k)
        change = (few - dense).astype(np.float64)
        assert norm == pytest.approx(np.linalg.svd(change)[1][0] / 90, rel=1e-3, abs=1e-9)
        assert lost == pytest.approx(tail, rel=1e-9, abs=1e-15)


def test_a_spectral_norm_approaches_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    for matrix in (rng.standard_normal((60, 80)), np.outer(np.ones(50), rng.random(50)), np.eye(9)):
        real = np.linalg.svd(matrix)[1][0]
        assert real * (1 - 5e-3) <= spectral_norm(matrix) <= real * (1 + 1e-12)
    monkeypatch.setattr("papers.self_attention.spectral_norm", lambda _: 100.0)
    with pytest.raises(SystemExit, match="the spectral norm of a difference is broken"):
        Attention(np.zeros((20, 20))).errors(3)


@pytest.mark.parametrize("n", [130, 128 + 15, 144])
def test_blocks_cover_every_key(n: int) -> None:
    """The heavy keys are in the last block, which may be short: their mass counts."""
    last = n - (n - 1) // 16 * 16
    row = np.random.default_rng(n).standard_normal(n)
    row[-last:] = 20.0
    weights = np.exp(row - 20.0)
    kept, lost = gap_rules.blocks(row, 0.01)
    assert kept == last
    assert lost == pytest.approx(weights[:-last].sum() / weights.sum(), rel=1e-9)
    assert gap_rules.blocks(np.zeros(n), 0.5)[0] >= n / 2
    assert gap_rules.blocks(np.zeros(n), 0.0) == (n, 0.0)


def test_counts_of_a_head_are_true() -> None:
    """The smallest k and the Gaussian rule, by sums and quantiles of others."""
    from scipy.stats import norm

    head = heads_of(EXAMPLE, 4)[17]
    scores = head.queries @ head.keys.T / math.sqrt(head.keys.shape[1])
    weights = np.sort(np.exp(scores - scores.max(1, keepdims=True)).astype(np.longdouble), axis=1)
    least = (np.cumsum(weights, 1) > 0.01 * weights.sum(1, keepdims=True)).sum(1)
    rule = scores.shape[1] * norm.sf(scores.std(1) + norm.ppf(0.01))
    found = bert_table._measured(head)
    assert found["k"] == least.mean()
    assert found["gaussian"] == pytest.approx(rule.mean(), rel=1e-9)


def test_broken_promises_of_searches_are_seen() -> None:
    scores = np.random.default_rng(0).standard_normal(50) * 3
    order = np.argsort(-scores)
    k = int(select(scores, 0.1, prove_minimal=True).k)
    for eps in (0.1, None):
        assert not key_search.wrong(scores, order[:k], eps, k)
        assert key_search.wrong(scores, order[: k - 1], eps, k)
        assert key_search.wrong(scores, order[1 : k + 1], eps, k)


def test_times_are_medians_of_works_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter([0.0, 1.0, 1.0, 3.0, 3.0, 4.0, 4.0, 104.0, 104.0, 109.0, 109.0, 111.0])
    monkeypatch.setattr("papers.common.time.thread_time", lambda: next(clock))
    works = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    assert medians(works, 3) == {"a": 1.0, "b": 2.0}
    assert order == ["a", "b"] * 3


def test_windows_of_the_second_paper_are_those_of_the_library() -> None:
    rng = np.random.default_rng(3)
    shares = dynamic_window.attention(4 * rng.standard_normal((40, 40)))
    policy = windows.WindowPolicy(1.5, 0.6)
    for n in (1, 2, 40, 1000):
        assert dynamic_window.size(n, 1.5, 0.6) == policy.size(n)
    k = dynamic_window.size(40, 1.5, 0.6)
    few = dynamic_window.windowed(shares, k)
    assert ((few > 0).sum(axis=1) == k).all()
    dropped = certify(np.log(shares), few > 0)
    np.testing.assert_allclose(np.abs(few - shares).sum(axis=1) / 2, dropped.tail_mass_upper)
    expected = np.linalg.svd(few - shares)[1][0] / 40
    assert dynamic_window.error(shares, few) == pytest.approx(expected)
    assert Attention(np.log(shares)).errors(k)[0] == pytest.approx(expected, rel=1e-3)
    found = windows.effective(np.log(shares), 0.01)
    np.testing.assert_array_equal(dynamic_window.effective(shares, 0.01), found.count)
    wq, wk = rng.standard_normal((2, 6, 3))
    assert dynamic_window.scale_r(0.5, wq, wk) == pytest.approx(float(windows.scale_r(0.5, wq, wk)))
    alpha = dynamic_window.equal_alpha([10, 20], 0.5, 4)
    assert alpha * (10 * 10**0.5 + 20 * 20**0.5) == pytest.approx(4 * 30)


@pytest.mark.parametrize("sharp", [0.5, 3.0, 20.0])
def test_no_window_has_an_error_beyond_the_root_of_2_over_n(sharp: float) -> None:
    """Keys are chosen at random, and the bound is met where it can be: one row, one wrong key."""
    rng = np.random.default_rng(4)
    shares = dynamic_window.attention(sharp * rng.standard_normal((50, 50)))
    kept = rng.random((50, 50)) < 0.2
    kept[:, 0] = True
    few = shares * kept
    few /= few.sum(axis=1, keepdims=True)
    assert 0 < dynamic_window.error(shares, few) <= np.sqrt(2 / 50)
    first = np.eye(50)[[0] * 50]
    expected = dynamic_window.error(shares, first), 1 - shares[:, 0].mean()
    assert Attention(np.log(shares)).first() == pytest.approx(expected, rel=1e-3)
    ones, others = np.eye(8)[[0] * 8], np.eye(8)[[1] * 8]
    assert dynamic_window.error(ones, others) == pytest.approx(np.sqrt(2 / 8))


def test_gap_certificates_are_those_of_the_library() -> None:
    rng = np.random.default_rng(5)
    for sharp in (0.3, 2.0, 6.0):
        scores = sharp * rng.standard_normal(48)
        for k in (1, 5, 47, 48):
            ours = gap_certificates.single_gap(scores, k)
            assert ours == pytest.approx(float(bounds.single_gap(scores, k)), rel=1e-12)
            cuts = [c for c in (2, 9, 30) if c != k]
            several = gap_certificates.multi_gap(scores, k, cuts)
            library = float(bounds.multi_gap(scores, k, None if k == 48 else cuts))
            assert several == pytest.approx(library, rel=1e-12)
            assert several <= ours * (1 + 1e-12)
        k = gap_certificates.smallest_k(scores, 0.1)
        assert k == bounds.smallest_k(scores, 0.1, "single_gap")
        sizes = np.array([16, 16, 16])
        parts, kept = scores.reshape(3, 16), np.array([True, False, True])
        ends = parts.max(axis=1), parts.min(axis=1)
        block = gap_certificates.blockwise(sizes, *ends, kept)
        assert block == pytest.approx(float(bounds.blockwise(sizes, *ends, kept)), rel=1e-12)


def test_pages_are_those_of_quest() -> None:
    """The best pages by sums of Python, under a budget of bytes, and the mass that they hold."""
    head = heads_of(EXAMPLE, 2)[5]
    n, d = head.keys.shape
    found = page_bounds.picked(head, 0.5, 2)
    # 2 extremes of d entries for each page of 16 keys, and keys and values of the pages read.
    pages = (n * 2 * d - n // 16 * 2 * d * 2) // (16 * 2 * d * 2)
    assert found[page_bounds.PAGES]["kept"] == 16 * pages / n
    assert found[page_bounds.CODES]["kept"] == (n * 2 * d - n * (d + 4)) // (4 * d) / n
    lost = []
    for q, s in zip(head.queries, head.scores, strict=True):
        bound = []
        for at in range(0, n, 16):
            page = head.keys[at : at + 16]
            ends = zip(q, page.min(axis=0), page.max(axis=0), strict=True)
            bound.append(math.fsum(max(x * low, x * high) for x, low, high in ends))
        best = sorted(range(n // 16), key=lambda i: -bound[i])[:pages]
        held = math.fsum(math.exp(s[16 * i + j]) for i in best for j in range(16))
        lost.append(1 - held / math.fsum(map(math.exp, s)))
    assert found[page_bounds.PAGES]["lost"] == pytest.approx(np.mean(lost), rel=1e-9)
    assert page_bounds.CODES not in page_bounds.picked(head, 0.25, 2)
