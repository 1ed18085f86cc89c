"""A and M: rows that are hostile to a selector, and rows that are masked, ragged or strided."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import certk_rs as ck
from harness import rows
from harness.clock import Bind, Entrant, Work
from harness.report import Entry, Note, compare
from harness.verify import check_selection

from .settings import EPS, FLAT, PEAKED, Settings, checked, ours, share

SECTIONS = {
    "A": "select on hostile rows ('ours') / on Gaussian rows of sigma 3 of the same n ('peer')",
    "M": "select with a mask, lengths, causality or strides ('ours', ns per visible score) / on "
    "plain rows of the same n ('peer')",
}
TARGET = 3.0
LENGTHS = (512, 4096, 131072)
BATCH = 1 << 19
N = 4096
SQUARE = 1024


def hostile(settings: Settings, n: int) -> Iterator[Entry]:
    """A at one length: all kinds of rows in one contest."""
    rng = np.random.default_rng(n)
    many = rows.count(n, min(BATCH, settings.scores), 2)
    plain = rows.gaussian(rng, many, n)
    checked(plain)
    entrants = [Entrant.of("plain", plain, ours())]
    kept = {}
    for name, make in rows.HOSTILE.items():
        scores = make(rng, many, n)
        kept[name] = share(checked(scores), n)
        entrants.append(Entrant.of(name, scores, ours()))
    shown = rng.random((many, n)) < 0.01
    shown[:, 0] = True
    name = "99 % masked by mask="
    sel = ck.select(plain, EPS, mask=shown, threads=1)
    check_selection(np.where(shown, plain, -np.inf), sel, EPS)
    kept[name] = share(sel, n)
    entrants.append(Entrant.of(name, plain, ours(mask=shown)))
    times = settings.contest(entrants)
    for name, part in kept.items():
        yield compare(
            "A", name, times, name, "plain", target=TARGET, n=n, rows=many, peer_rows=many,
            kept=part,
        )  # fmt: skip


def _with(name: str, scores: rows.F32, shown: rows.Array, bind: Bind) -> Entrant:
    """An entrant that is charged for the scores it can see, after the oracle has agreed."""
    sel = bind(scores)()
    if not isinstance(sel, ck.Selection):
        raise TypeError(f"{name} returns {type(sel).__name__}")
    check_selection(np.where(shown, scores, -np.inf), sel, EPS)
    return Entrant(name, scores, bind, len(scores), int(shown.sum()))


def masked(settings: Settings, many: int, n: int, sigma: float) -> Iterator[Entry]:
    """Masks, lengths and ragged rows, about half of the scores visible."""
    rng = np.random.default_rng(11)
    scores = rows.gaussian(rng, many, n, sigma)
    everything = np.ones_like(scores, dtype=np.bool_)
    half = rng.random((many, n)) < 0.5
    lengths = rng.integers(1, n + 1, many)
    prefix = np.arange(n) < lengths[:, None]
    infinite = np.where(half, np.float32(0.0), np.float32(-np.inf))
    lowest = np.where(half, np.float32(0.0), np.finfo(np.float32).min)
    entrants = [
        _with("plain", scores, everything, ours()),
        _with("mask=, bool, half", scores, half, ours(mask=half)),
        _with("mask=, one for all rows", scores, half[0] & everything, ours(mask=half[0])),
        _with("mask=, additive, -inf", scores, half, ours(mask=infinite)),
        _with("mask=, additive, lowest", scores, half, ours(mask=lowest)),
        _with("lengths=, uniform", scores, prefix, ours(lengths=lengths)),
    ]
    yield from compared(settings, entrants, n, sigma)


def ragged(settings: Settings, many: int, n: int, sigma: float) -> Iterator[Entry]:
    """One flat buffer of rows of n / 2 to 3 n / 2 scores."""
    rng = np.random.default_rng(12)
    lengths = rng.integers(n // 2, n + n // 2, many)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    flat = rows.gaussian(rng, 1, int(indptr[-1]), sigma)
    padded = np.full((many, int(lengths.max())), -np.inf, dtype=np.float32)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = flat[0]
    check_selection(padded, ck.select(flat[0], EPS, indptr=indptr, threads=1), EPS)
    plain = rows.gaussian(rng, many, n, sigma)
    checked(plain)

    def bind(placed: rows.Array) -> Work:
        return lambda: ck.select(placed[0], EPS, indptr=indptr, threads=1)

    entrants = [
        Entrant.of("plain", plain, ours()),
        Entrant("indptr=, ragged", flat, bind, 1, flat.size),
    ]
    yield from compared(settings, entrants, n, sigma)


def causal(settings: Settings, n: int, sigma: float) -> Iterator[Entry]:
    """A square of which the lower triangle is visible."""
    scores = rows.gaussian(np.random.default_rng(13), n, n, sigma)
    everything = np.ones_like(scores, dtype=np.bool_)
    entrants = [
        _with("plain", scores, everything, ours()),
        _with("causal_offset=0, square", scores, np.tril(everything), ours(causal_offset=0)),
    ]
    yield from compared(settings, entrants, n, sigma)


def strided(settings: Settings, many: int, n: int, sigma: float) -> Iterator[Entry]:
    """Rows that lie apart in memory, and rows that must be copied since their scores lie apart."""
    rng = np.random.default_rng(14)
    scores = rows.gaussian(rng, many, n, sigma)
    wide = np.concatenate([scores, rows.gaussian(rng, many, 272, sigma)], axis=1)
    across = np.ascontiguousarray(scores.T)

    def apart(placed: rows.Array) -> Work:
        return lambda: ck.select(placed[:, :n], EPS, threads=1)

    def turned(placed: rows.Array) -> Work:
        return lambda: ck.select(placed.T, EPS, threads=1)

    for bind, array in ((apart, wide), (turned, across)):
        sel = bind(array)()
        assert isinstance(sel, ck.Selection)
        check_selection(scores, sel, EPS)
    entrants = [
        Entrant.of("plain", scores, ours()),
        Entrant("row stride n + 272", wide, apart, many, scores.size),
        Entrant("transposed, copied", across, turned, n, scores.size),
    ]
    yield from compared(settings, entrants, n, sigma)


def compared(settings: Settings, entrants: list[Entrant], n: int, sigma: float) -> Iterator[Entry]:
    """Every entrant against the first; reported without a target."""
    times = settings.contest(entrants)
    plain = entrants[0]
    for entrant in entrants[1:]:
        yield compare(
            "M", f"{entrant.name}, sigma {sigma:g}", times, entrant.name, plain.name, n=n,
            rows=plain.take, peer_rows=plain.take,
        )  # fmt: skip


def run(settings: Settings) -> Iterator[Entry]:
    """A and M."""
    if settings.wants("A"):
        for n in settings.lengths(*LENGTHS):
            yield from hostile(settings, n)
        yield Note("A", "Masked scores are charged like visible ones: the row costs what it costs.")
    if settings.wants("M"):
        many = rows.count(N, settings.scores // 2)
        for sigma in (FLAT, PEAKED):
            yield from masked(settings, many, N, sigma)
            yield from ragged(settings, many, N, sigma)
            yield from causal(settings, SQUARE, sigma)
            yield from strided(settings, many, N, sigma)
