"""The scale of attention where none is given: the float64 nearest d^-1/2, everywhere the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import _native
from certk_rs._files.layers import nearest_rsqrt

# Lengths at which 1 / sqrt(d) in float64 is not the nearest; 128 is among them.
OFF = [d for d in range(1, 1025) if _native.nearest_rsqrt(d) != 1 / math.sqrt(d)]


def by_integers(d: int) -> float:
    """The nearest, by the integer root of 2^(2s + 2) / d with 53 bits and one more."""
    s = 52 if d == 1 else 53 + ((d - 1).bit_length() - 1) // 2
    root = math.isqrt((1 << (2 * s + 2)) // d)
    return math.ldexp((root + 1) // 2, -s)


def test_every_length_to_65536_and_long_ones() -> None:
    assert len(OFF) == 218
    assert 128 in OFF
    rng = np.random.default_rng(0)
    for d in (*range(1, 65537), *rng.integers(1, 2**40, 2000).tolist(), 2**52 - 1, 2**40 + 1):
        assert _native.nearest_rsqrt(d) == by_integers(d), d


def test_the_audits_own_agrees() -> None:
    """It shares no code with the other, and must not differ from it by a unit."""
    for d in (*range(1, 4097), *range(4097, 1 << 20, 4999)):
        assert nearest_rsqrt(d) == _native.nearest_rsqrt(d)


@pytest.mark.parametrize("d", [*OFF[:3], 128, OFF[-1], 64])
def test_no_scale_is_that_scale(d: int) -> None:
    rng = np.random.default_rng(d)
    q = rng.standard_normal((2, 20, d)).astype(np.float32) * 4
    k, v = rng.standard_normal((2, 2, 300, d), dtype=np.float32)
    scale = by_integers(d)
    index = ck.KeyIndex.build(k)

    def bits(scale: float | None) -> list[bytes]:
        plain = ck.attention(q, k, v, 1e-3, scale=scale)
        few = ck.attention(q[:, :1], k, v, 0.05, scale=scale, index=index)
        doubles = ck.attention(q.astype(np.float64), k, v, 1e-3, scale=scale)
        found = index.search(q, 0.01, scale=scale)
        parts = [result.out for result in (plain, few, doubles)]
        parts += [result.tail_mass_upper for result in (plain, few, doubles, found)]
        parts += [found.indices, found.tail_mass_lower]
        return [np.asarray(part).tobytes() for part in parts]

    assert bits(None) == bits(scale)
    if d in OFF:
        assert bits(None) != bits(1 / math.sqrt(d))


@pytest.mark.parametrize("d", [128, 100])
def test_the_gradient_takes_it_too(d: int) -> None:
    torch = pytest.importorskip("torch")
    import certk_rs.torch as ct

    rng = torch.Generator().manual_seed(d)
    q, k, v = (torch.randn(1, 30, d, generator=rng, dtype=torch.float64) for _ in range(3))

    def gradient(scale: float | None) -> bytes:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        ct.attention(*leaves, 1e-6, scale=scale).out.square().sum().backward()
        return b"".join(leaf.grad.numpy().tobytes() for leaf in leaves)

    assert gradient(None) == gradient(by_integers(d))
