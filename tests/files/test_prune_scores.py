"""The scores of prune jobs against exact arithmetic: products, radii, and masses at every size.

The oracle shares no code with the library: entries become integers (in units of 2^-149, of which
every float32 and less is a multiple), products and norms are integers, weights are Arb balls.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import CertkError, _native, prune
from cli_fixtures import as_float64, read_output, safetensors_bytes, tensor

U = Fraction(1, 1 << 53)
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LARGEST = {"F32": 3e38, "F16": 6e4, "BF16": 3e38}
SMALLEST = {"F32": 2.0**-149, "F16": 2.0**-24, "BF16": 2.0**-133}

# heads, kv heads, m, n, d: either side of a tile, a panel, a block, and of the entries of a panel.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 1, 3, 33, 15),
    (2, 2, 5, 31, 17),
    (4, 2, 9, 65, 3),
    (1, 1, 4, 257, 16),
    (3, 1, 2, 40, 128),
    (2, 2, 6, 20, 129),
    (1, 1, 13, 15, 300),
]


def vectors(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Vectors that are hard to multiply."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(shape)
    largest, smallest = LARGEST[dtype], SMALLEST[dtype]
    if kind == "plain":
        return normal
    if kind == "huge":
        return largest * np.sign(normal) * rng.uniform(0.9, 1.0, shape)
    if kind == "subnormal":
        return smallest * np.round(3 * normal)
    if kind == "every size":
        exponents = rng.uniform(math.log(smallest), math.log(largest), shape)
        return np.sign(normal) * np.exp(exponents)
    if kind == "cancelling":
        # Neighbours that nearly cancel wherever the query is constant.
        signs = np.where(np.arange(shape[-1]) % 2, -1.0, 1.0)
        noisy = signs * (largest / 64) * (1 + 0.001 * normal)
        return noisy if seed % 2 else np.full(shape, 1.5)
    assert kind == "one coordinate"
    found = 1e-3 * normal
    found[..., shape[-1] // 2] = largest * rng.uniform(0.2, 0.9, shape[:-1])
    return found


def stored(array: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """As `_native` takes it, and as float64."""
    given = tensor(array, dtype)
    kind = "<f4" if dtype == "F32" else "<u2"
    return np.frombuffer(given[2], kind).reshape(array.shape), as_float64(given)


def integers(array: np.ndarray) -> Any:
    """Entries in units of 2^-149, as Python's integers."""
    scaled = [int(math.ldexp(x, 149)) for x in array.ravel().tolist()]
    assert all(math.ldexp(x, 149) == i for x, i in zip(array.ravel().tolist(), scaled, strict=True))
    return np.array(scaled, object).reshape(array.shape)


def products(
    query: np.ndarray, q_dtype: str, key: np.ndarray, k_dtype: str, offset: int | None, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((*query.shape[:2], key.shape[1]))
    lent = (query, NAMES[q_dtype]), (key, NAMES[k_dtype])
    reach = _native.products(*lent, offset, out, threads)
    return out, reach.reshape(query.shape[:2])


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize(
    "kind", ["plain", "huge", "subnormal", "every size", "cancelling", "one coordinate"]
)
@pytest.mark.parametrize("offset", [None, 2])
def test_products_and_reach_against_integers(dtype: str, kind: str, offset: int | None) -> None:
    q_dtype = "F32" if dtype == "BF16" else dtype  # mixed types, too
    for seed, (heads, kv_heads, m, n, d) in enumerate(SHAPES):
        q, q_real = stored(vectors(kind, q_dtype, (heads, m, d), 2 * seed), q_dtype)
        k, k_real = stored(vectors(kind, dtype, (kv_heads, n, d), 2 * seed + 1), dtype)
        out, reach = products(q, q_dtype, k, dtype, offset, 1)
        assert np.isfinite(out).all()
        q_whole, k_whole = integers(q_real), integers(k_real)
        q_squares, k_squares = (q_whole**2).sum(axis=-1), (k_whole**2).sum(axis=-1)
        gamma = d * U / (1 - d * U)
        for head in range(heads):
            kv_head = head * kv_heads // heads
            real = q_whole[head] @ k_whole[kv_head].T
            visible = n if offset is None else min(m + offset, n)
            longest = max(k_squares[kv_head][:visible])
            for row in range(m):
                seen = n if offset is None else min(row + offset + 1, n)
                for j in range(seen):
                    got = Fraction(out[head, row, j])
                    error = abs(got - Fraction(real[row, j], 1 << 298))
                    size = Fraction(q_squares[head, row] * k_squares[kv_head][j], 1 << 596)
                    assert error**2 <= gamma**2 * size
                # No less than the norms, and no more than two norms, each rounded up by 2^-30.
                size = Fraction(q_squares[head, row] * longest, 1 << 596)
                assert (
                    size
                    <= Fraction(reach[head, row]) ** 2
                    <= size * (1 + Fraction(1, 1 << 30)) ** 4
                )


def test_products_have_the_same_bits_for_any_threads_and_level() -> None:
    heads, kv_heads, m, n, d = 4, 2, 7, 700, 140
    for dtype in NAMES:
        q, _ = stored(vectors("plain", dtype, (heads, m, d), 1), dtype)
        k, _ = stored(vectors("plain", dtype, (kv_heads, n, d), 2), dtype)
        found = set()
        try:
            for level in ("portable", _native.simd_level(), None):
                _native.set_simd_level(level)
                for threads in (1, 2, 5):
                    out, reach = products(q, dtype, k, dtype, None, threads)
                    found.add((out.tobytes(), reach.tobytes()))
                out, _ = products(q, dtype, k, dtype, n - m, 2)
                seen = np.tril(np.ones((m, n), bool), n - m)
                want = np.frombuffer(next(iter(found))[0]).reshape(out.shape)
                assert (out == want)[:, seen].all()
        finally:
            _native.set_simd_level(None)
        assert len(found) == 1


def test_keys_that_no_query_sees_do_not_widen_radii() -> None:
    q, _ = stored(np.ones((1, 2, 4)), "F32")
    keys = np.ones((1, 300, 4))
    keys[0, 2:] = 1e30
    k, _ = stored(keys, "F32")
    assert (products(q, "F32", k, "F32", 0, 1)[1] < 4.001).all()
    assert (products(q, "F32", k, "F32", None, 1)[1] > 1e30).all()
    assert (products(q, "F32", k, "F32", -5, 1)[1] == 0).all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k = np.ones((3, 2, 4), "f4"), np.ones((2, 5, 4), "f4")

    def refused(words: str, *arguments: Any) -> None:
        with pytest.raises(CertkError, match=words):
            _native.products(*arguments)

    out = np.zeros((3, 2, 5))
    refused("queries", (q, "float32"), (k, "float32"), None, out, None)
    refused("queries", (q, "float32"), (k[:1, :, :3], "float32"), None, out, None)
    refused("places", (q, "float32"), (k[:1], "float32"), None, out[:, :, :4].copy(), None)
    refused(
        "out must be contiguous", (q, "float32"), (k[:1], "float32"), None, out[:, :, ::2], None
    )
    refused("threads", (q, "float32"), (k[:1], "float32"), None, out, 0)
    refused("float64", (q, "float32"), (k[:1].astype("f8"), "float64"), None, out, None)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("granularity", ["head", "layer"])
@pytest.mark.parametrize("offset", [None, 29])
@pytest.mark.parametrize("kind", ["plain", "one coordinate", "cancelling"])
def test_recorded_masses_hold_in_arb(
    tmp_path: Path, dtype: str, granularity: str, offset: int | None, kind: str
) -> None:
    flint = pytest.importorskip("flint")
    heads, kv_heads, m, n, d, eps = 2, 1, 5, 35, 130, 0.07
    given = {
        f"layers.0.{role}": tensor(vectors(kind, dtype, (h, rows, d), seed), dtype)
        for seed, (role, h, rows) in enumerate(
            [("query", heads, m), ("key", kv_heads, n), ("value", kv_heads, n)]
        )
    }
    query = integers(as_float64(given["layers.0.query"]))
    key = integers(as_float64(given["layers.0.key"]))[0]
    real = np.einsum("hmd,nd->hmn", query, key)
    # Scores of a few nats, whatever the vectors are.
    spread = max(float(Fraction(int(real.max() - real.min()), 1 << 298)), 1e-300)
    scale = float(f"{6 / spread:.3e}")
    metadata = {"scale": repr(scale)}
    if offset is not None:
        metadata["causal_offset"] = str(offset)
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(given, metadata))
    prune(path, tmp_path / "out", eps, granularity=granularity, proof="full")
    output = read_output(tmp_path / "out" / "x.safetensors")
    kept = set(output["layers.0.indices"].tolist())
    before, flint.ctx.prec = flint.ctx.prec, 200
    try:
        for head, row in np.ndindex(heads, m):
            seen = n if offset is None else min(row + offset + 1, n)
            terms = []
            for j in range(seen):
                exact = Fraction(scale) * Fraction(int(real[head, row, j]), 1 << 298)
                terms.append((flint.arb(exact.numerator) / exact.denominator).exp())
            tail = sum((t for j, t in enumerate(terms) if j not in kept), flint.arb(0))
            mass = tail / sum(terms, flint.arb(0))
            upper = float(output["layers.0.tail_mass_upper"][head, row])
            assert flint.arb(float(output["layers.0.tail_mass_lower"][head, row])) <= mass
            assert mass <= flint.arb(upper)
            assert upper <= eps
    finally:
        flint.ctx.prec = before
