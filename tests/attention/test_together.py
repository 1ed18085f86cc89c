"""Rows computed together with numbers in eight bits: what they claim against long double.

Values that are axes show the weights that a row used. Then half the sum of their distances from the
real shares is the total variation distance, to the rounding of an output in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from levels import each_level
from real_attention import DTYPES, LD, check, real_attention

# Sums in f32, 128 deep on both sides of a quotient, of weights that add up to 1.
SHOWN = LD(260 * 2.0**-24)
KINDS = ("plain", "offset", "clustered", "one far", "small", "large values", "equal")


def made(rng: np.random.Generator, kind: str, n: int, d: int) -> np.ndarray:
    """Return keys (2, n, d)."""
    k = rng.standard_normal((2, n, d))
    if kind == "offset":
        k += 3 * rng.standard_normal(d)
    elif kind == "clustered":
        k = np.repeat(k[:, : -(-n // 8)], 8, axis=1)[:, :n] + 0.01 * k
    elif kind == "one far":
        k[:, n // 2] *= 12
    elif kind == "small":
        k *= 1e-36
    elif kind == "equal":
        k[:] = k[:, :1]
    return k


def cases(rng: np.random.Generator, kind: str, m: int, n: int, d: int, name: str) -> Iterator[Any]:
    """Yield queries (4, m, d), keys, options and the scale."""
    k = made(rng, kind, n, d).astype(DTYPES[name])
    for sigma in (0.1, 1.0, 4.0, 12.0):
        wide = sigma * rng.standard_normal((4, m, d))
        scale = float(d) ** -0.5 * (1e36 if kind == "small" else 1.0)
        lengths = rng.integers(0, n + 1, (4, m))
        sinks = rng.choice([-np.inf, -2.0, 3.0, 50.0, 1e9], 4)
        mask = rng.random((4, m, n)) < rng.choice([0.1, 0.8])
        for sight in ({"causal": True}, {"lengths": lengths}, {"mask": mask, "sinks": sinks}):
            yield wide.astype(DTYPES[name]), k, sight, scale


def judge(rng: np.random.Generator, kind: str, m: int, n: int, d: int, name: str) -> float:
    """Check all cases; return the largest part of a distance that is true."""
    tight = 0.0
    axes = np.broadcast_to(np.eye(n, dtype=np.float32), (2, n, n))
    for q, k, sight, scale in cases(rng, kind, m, n, d, name):
        v = rng.standard_normal((2, n, 24)) * rng.choice([1e-3, 1.0, 30.0], (2, n, 1))
        v = (v * (1e33 if kind == "large values" and name != "float16" else 1.0)).astype(k.dtype)
        eps = rng.choice([0.0, 1e-3, 3e-3, 0.01, 0.05, 0.5, 0.999], q.shape[:-1])
        sinks = sight.pop("sinks", None)
        real = real_attention(q, k, v, sight, scale, sinks)
        options: dict[str, Any] = {**sight, "scale": scale, "sinks": sinks}
        check(ck.attention(q, k, v, eps, **options), real, eps)
        wide = q.astype(np.float64)
        found = ck.attention(wide, k, axes, eps, **options)
        off = np.asarray(found.out).astype(LD) - real.weights
        away = (np.abs(off).sum(axis=-1) + np.abs(off.sum(axis=-1))) / 2
        claimed = found.tail_mass_upper.astype(LD)
        short = (found.rung == ck.Rung.DENSE) & (claimed > 0)
        assert (~short | (away <= claimed + SHOWN)).all()
        if short.any():
            tight = max(tight, float((away[short] / claimed[short]).max()))
    return tight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_distances_and_outputs(kind: str, name: str) -> None:
    rng = np.random.default_rng([KINDS.index(kind), len(name)])
    m, n, d = (
        int(rng.choice([16, 40, 70])),
        int(rng.choice([3, 129, 300])),
        int(rng.choice([8, 33])),
    )
    for _ in each_level():
        judge(rng, kind, m, n, d, name)


@pytest.mark.heavy
def test_many_distances_and_outputs() -> None:
    rows, tight = 0, 0.0
    for seed in range(60):
        rng = np.random.default_rng([5, seed])
        m, n, d = (int(rng.choice(of)) for of in ((16, 65, 260), (1, 60, 400), (1, 17, 64, 200)))
        name = ["float32", "float16", "bfloat16"][seed % 3]
        for _ in each_level():
            tight = max(tight, judge(rng, KINDS[seed % len(KINDS)], m, n, d, name))
            rows += 2 * 12 * 4 * m
    assert rows > 300_000
    assert tight > 0.1


@pytest.mark.parametrize("down", [True, False])
def test_weights_that_round_by_most(down: bool) -> None:
    """Half of the weights round up by nearly a 256th and half down, so a claim is nearly true.

    If all round up, the sum that an output is divided by is that of rounded weights.
    """
    n, m = 512, 16
    k = np.zeros((n, 1), np.float32)
    k[:] = np.log(0.5 + 1 / 512 + 1e-5)
    if down:
        k[0::2] = np.log(0.5 + 1 / 512 - 1e-5)
    k[0] = 0
    v = np.eye(n, dtype=np.float32)
    real = real_attention(np.ones((m, 1)), k, v, {}, 1.0)
    for level in each_level():
        found = ck.attention(np.ones((m, 1)), k, v, 0.01, scale=1.0)
        check(found, real, 0.01)
        claimed = found.tail_mass_upper.astype(LD)
        off = np.asarray(found.out).astype(LD) - real.weights
        away = (np.abs(off).sum(axis=-1) + np.abs(off.sum(axis=-1))) / 2
        assert (away <= claimed + SHOWN).all()
        assert (claimed <= 0.0021).all()
        assert level != "amx" or not down or (away > 0.9 * claimed).all()


def test_scores_that_lose_most() -> None:
    """Products of second pieces that all have one sign for half of the keys, and the other else.

    Just below and above the middle of two bf16 the pieces are 1 and 2^-8, or 1 + 2^-7 and -2^-8.
    """
    n, m, d = 256, 16, 64
    middle = 1 + 2.0**-8
    q = np.full((m, d), middle * (1 - 1e-6), np.float32)
    k = np.full((n, d), middle * (1 - 1e-6), np.float32)
    k[1::2] = middle * (1 + 1e-6)
    v = np.eye(n, dtype=np.float32)
    scale = 600.0 / d
    real = real_attention(q, k, v, {}, scale)
    for level in each_level():
        found = ck.attention(q.astype(np.float64), k, v, 0.05, scale=scale)
        claimed = found.tail_mass_upper.astype(LD)
        away = np.abs(np.asarray(found.out).astype(LD) - real.weights).sum(axis=-1) / 2
        assert (away <= claimed + SHOWN).all()
        assert (claimed <= 0.02).all()
        assert level != "amx" or (away > 0.25 * claimed).all()


@pytest.mark.parametrize("up", [-1, 1])
def test_sums_of_weights_whose_scores_lose_most(up: int) -> None:
    """All scores lose the same, so that the sum of weights does, be it of either piece."""
    n, m, d = 64, 16, 64
    k = np.full((n, d), (1 + 2.0**-8) * (1 + up * 1e-6), np.float32)
    # The last would lose a third more if pieces were cut off, not rounded.
    for part in (2.0**-8 - 1e-6, 2.0**-8 + 1e-6, 2.0**-7 - 2.0**-22):
        q = np.full((m, d), 1 + part, np.float32)
        v = np.eye(n, dtype=np.float32)
        real = real_attention(q, k, v, {}, 1000.0 / d)
        for _ in each_level():
            found = ck.attention(q, k, v, 0.1, scale=1000.0 / d)
            check(found, real, 0.1)
            assert (found.tail_mass_upper > 0.02).all()
            # All keys are kept.
            assert (found.log_mass_lower.astype(LD) <= real.log_mass).all()
            assert (real.log_mass <= found.log_mass_upper.astype(LD)).all()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_numbers_that_round_to_infinity(name: str) -> None:
    """The largest float32 are above the largest bfloat16."""
    rng = np.random.default_rng(3)
    largest = np.finfo(DTYPES["float32"]).max if name == "float32" else 3.3895e38
    q = rng.standard_normal((20, 8)) / largest
    k, v = rng.standard_normal((2, 60, 8))
    k[::7] = np.sign(k[::7]) * largest
    v[::5] = np.sign(v[::5]) * (largest if name == "float32" else 1e38)
    q, k, v = (x.astype(DTYPES[name]) for x in (q, k, v))
    real = real_attention(q, k, v, {}, 1.0)
    for _ in each_level():
        for eps in (0.0, 0.3):
            check(ck.attention(q.astype(np.float64), k, v, eps, scale=1.0), real, eps)


def test_values_that_are_no_numbers() -> None:
    """Every NaN of a row's own is an error at every level, and others change nothing."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((n, 16)).astype(np.float32) for n in (16, 300, 300))
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000):
        bad = v.copy()
        bad.view(np.uint32)[5, 0] = bits
        hidden = np.arange(300) != 5
        answers = set()
        for _ in each_level():
            with pytest.raises(ck.CertkError, match=r"v\[5, 0\] is not finite"):
                ck.attention(q, k, bad, 0.1)
            found = ck.attention(q, k, bad, 0.1, mask=hidden)
            assert np.isfinite(np.asarray(found.out)).all()
            answers.add(found.tail_mass_upper.tobytes() + found.k.tobytes())
            # Rows that see nothing of its block are what they are without it.
            late = ck.attention(q, k, bad, 0.1, mask=np.arange(300) >= 128)
            assert (late.tail_mass_upper > 0).all()
            assert (late.k == 172).all()
        assert len(answers) == 1


def test_certificates_of_large_values_are_the_same_at_all_levels() -> None:
    rng = np.random.default_rng(5)
    q, k = (rng.standard_normal((64, 16)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((64, 4)).astype(np.float32)
    wide = np.where(np.arange(64)[:, None] % 2, 3e38, -3e38).astype(np.float32)
    one = v.copy()
    one[63, 0] = np.finfo(np.float32).max
    for values, options in (
        (one, {"mask": np.arange(64) != 63}),
        (one, {}),
        (one, {"causal": True}),
        (np.broadcast_to(wide, v.shape), {}),
    ):
        answers = set()
        for _ in each_level():
            found = ck.attention(q.astype(np.float64), k, values, 0.1, **options)
            check(found, real_attention(q, k, values, options), 0.1)
            answers.add(found.tail_mass_upper.tobytes() + found.k.tobytes())
        assert len(answers) == 1


def test_scores_that_float32_does_not_know() -> None:
    """Their weights would be off by more than the budget: such rows are computed in float64."""
    rng = np.random.default_rng(6)
    q = (1 + rng.random((16, 2))).astype(np.float32)
    k = (1 + rng.integers(0, 4, (32, 2)) * 2.0**-23).astype(np.float32)
    for scale in (1e4, 1e6, 1e8):
        real = real_attention(q, k, np.eye(32), {}, scale)
        found = ck.attention(
            q.astype(np.float64), k, np.eye(32, dtype=np.float32), 0.1, scale=scale
        )
        away = np.abs(np.asarray(found.out).astype(LD) - real.weights).sum(axis=-1) / 2
        assert (away <= found.tail_mass_upper.astype(LD) + LD(2e-3)).all()


def test_the_largest_keys_are_behind_one_that_is_hidden() -> None:
    """Errors of scores go by the largest key that some row sees, wherever it is."""
    rng, n = np.random.default_rng(7), 40
    q = (1 + rng.random((16, 2))).astype(np.float32)
    k = (1 + rng.integers(0, 4, (n, 2)) * 2.0**-23).astype(np.float32)
    k[:20] = 0
    v = np.where(np.arange(n)[:, None] % 2, 1, -1).astype(np.float32)
    mask = np.arange(n) % 20 != 3
    for scale in (1e3, 1e4, 1e5, 1e6):
        real = real_attention(q, k, v, {"mask": mask}, scale)
        for _ in each_level():
            found = ck.attention(q.astype(np.float64), k, v, 0.1, scale=scale, mask=mask)
            check(found, real, 0.1)
