"""`compare` against exact arithmetic in balls, and against attention in long double.

Left out of the bounds by hand, these are found here: the radius of scores and its d, on either
side, in the distance and in the error; what sums and exponentials lose, in both; masks; the limit
of radii.
Below what any test sees are 2^-490, 2^-960, 2^-1000 and 2^-30: nothing reaches them unless other
terms are far larger. The 64 roundings beside those of sums are seen together with them only, since
NumPy's exp is better than it is taken to be, and its sums are made in pairs.
"""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flint import arb, ctx

import certk_rs as ck
from fresh_process import run_python
from real_attention import DTYPES, LD, real_attention
from real_rows import layers, read_cache
from repository import EXAMPLE

Pair = tuple[np.ndarray, np.ndarray]


def softmax(q: np.ndarray, k: np.ndarray, scale: float) -> list[arb]:
    """The softmax of one row: all products and sums are exact, or their balls are wider."""
    dots = [sum(arb(float(a)) * arb(float(b)) for a, b in zip(q, key, strict=True)) for key in k]
    scores = [arb(scale) * dot for dot in dots]
    weights = [(score - scores[0]).exp() for score in scores]
    total = sum(weights, arb(0))
    return [weight / total for weight in weights]


def holds(found: ck.Comparison, q: np.ndarray, one: Pair, two: Pair, scale: float) -> list[float]:
    """Compare rows (m, d), which see all keys, with exact ones; return the true distances."""
    distances = []
    with ctx.workprec(1500):
        for at, row in enumerate(q):
            p, other = (softmax(row, k, scale) for k, _ in (one, two))
            distance = sum((abs(a - b) for a, b in zip(p, other, strict=True)), arb(0)) / 2
            square = arb(0)
            for j in range(one[1].shape[1]):
                terms = zip(p, one[1][:, j], other, two[1][:, j], strict=True)
                gap = sum((a * arb(float(b)) - c * arb(float(d)) for a, b, c, d in terms), arb(0))
                square += gap * gap
            # Certainly within, not only perhaps.
            assert arb(float(found.tv_lower[at])) <= distance.upper() + arb(2) ** -1200
            assert distance.lower() - arb(2) ** -1200 <= arb(float(found.tv_upper[at]))
            if np.isfinite(found.error_upper[at]):
                assert square.lower() <= arb(float(found.error_upper[at])) ** 2
            distances.append(float(distance.mid()))
    return distances


def made(rng: np.random.Generator, n: int, d: int, d_v: int, dtype: Any = np.float32) -> Any:
    q, k, v = (rng.standard_normal(s).astype(dtype) for s in ((3, d), (n, d), (n, d_v)))
    return q, (k, v), tuple((x * rng.normal(1, 0.01, x.shape)).astype(dtype) for x in (k, v))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
def test_bounds_hold_and_are_tight(dtype: str, n: int, factor: float) -> None:
    rng = np.random.default_rng(n)
    for d, d_v in ((1, 1), (3, 5), (17, 4)):
        q, one, two = made(rng, n, d, d_v, DTYPES[dtype])
        found = ck.compare(q, one, two, scale=factor)
        true = holds(found, q, one, two, factor)
        assert (found.tv_upper - found.tv_lower <= 1e-10).all()
        assert found.tv_upper == pytest.approx(np.array(true), abs=1e-10)


def test_flat_rows_show_what_sums_lose() -> None:
    """Scores next to 0 have no radius, so a lost bit of a weight or of a mean would be seen."""
    rng = np.random.default_rng(1)
    for _ in range(150):
        n, d = int(rng.integers(2, 7)), int(rng.integers(1, 3))
        q, one, two = made(rng, n, d, 3)
        q *= np.float32(1e-4)
        # Values far from 0, whose means differ by little.
        values = (one[1] + np.float32(1000), one[1] + np.float32(1000))
        for pair in ((one, two), ((one[0], values[0]), (two[0], values[1]))):
            found = ck.compare(q, *pair, scale=1.0)
            holds(found, q, *pair, 1.0)
            assert (found.tv_upper - found.tv_lower < 5e-14).all()


@pytest.mark.parametrize("sides", [(1, 1), (1, 0), (0, 1)])
def test_huge_scores_show_what_products_lose(sides: tuple[int, int]) -> None:
    """Products cancel, up to 2^-53 of 1e9: distances are off by far more than sums lose."""
    rng = np.random.default_rng(2)
    for _ in range(25):
        d, n = 33, 6
        q = rng.standard_normal((2, d)).astype(np.float32)
        big = rng.standard_normal((n, d)) * 1e8
        # Orthogonal to the first query but for rounding.
        big -= np.outer(big @ q[0] / (q[0] @ q[0]), q[0])
        small = rng.standard_normal((n, d))
        k, k_other = ((big if side else small).astype(np.float32) for side in sides)
        v = rng.standard_normal((2, n, 2)).astype(np.float32)
        pair = (k, v[0]), (k_other, v[1])
        # The first row has scores about 1, whose terms are about 1e8.
        scale = 1.0 / (1 + float(np.abs(k.astype(np.float64) @ q[0]).max()))
        found = ck.compare(q[:1], *pair, scale=scale)
        holds(found, q[:1], *pair, scale)
        assert found.tv_upper[0] < 1


def test_a_product_that_loses_at_each_entry() -> None:
    """Behind a 1, each of 512 sums is rounded down by almost half a unit: the radius is needed."""
    a, b = (1 + i * 2.0**-23 for i in (717, 716))
    q, k = (np.float32([[1.0, *[x * 2.0**-13] * 512]]) for x in (a, b))
    exact = np.eye(1, 513, dtype=np.float32)
    v = np.float32([[0, 100], [0, -100]])
    pair = (np.concatenate([k, exact]), v), (np.concatenate([exact, exact]), v)
    found = ck.compare(q, *pair, scale=1e4)
    (true,) = holds(found, q, *pair, 1e4)
    # What is computed is off by a quarter of the one radius, and the interval by half of both.
    middle = (found.tv_lower[0] + found.tv_upper[0]) / 2
    assert abs(middle - true) > 0.1 * (found.tv_upper[0] - found.tv_lower[0])


def test_huge_scores_are_told_apart_or_nothing_is_said() -> None:
    rng = np.random.default_rng(3)
    q, one, two = made(rng, 20, 16, 3)
    found = ck.compare(q, one, two, scale=1e4)
    holds(found, q, one, two, 1e4)
    assert (found.tv_upper - found.tv_lower < 1e-8).all()
    for scale in (1e18, 1e300, -1e308):
        found = ck.compare(q, one, two, scale=scale)
        assert (found.tv_lower == 0).all()
        assert (found.tv_upper == 1).all()
        assert (found.error_upper == np.inf).all()
    assert "Infinity" in repr(found)


def test_scores_that_differ_hugely_and_keys_with_an_offset() -> None:
    rng = np.random.default_rng(4)
    q, one, _ = made(rng, 12, 5, 3)
    k = one[0].copy()
    k[3] *= np.float32(500)
    for scale in (1.0, -1.0):
        found = ck.compare(q, one, (k, one[1]), scale=scale)
        holds(found, q, one, (k, one[1]), scale)
    # Softmax does not know of an offset, the second cache rounds it.
    shifted = (one[0] + np.float32(300), one[1])
    found = ck.compare(q, one, shifted)
    true = holds(found, q, one, shifted, 5**-0.5)
    assert 0 < max(true) < 1e-3


def test_equal_caches_are_equal_but_for_rounding() -> None:
    rng = np.random.default_rng(5)
    q, one, _ = made(rng, 700, 64, 8)
    found = ck.compare(q, one, one)
    assert (found.tv_lower == 0).all()
    assert (found.tv_upper <= 1e-12).all()
    assert (found.error_upper <= 1e-11).all()
    # One key has the weight 1 on both sides, and the error is that of its value.
    found = ck.compare(q, (one[0][:1], one[1][:1]), (one[0][1:2], one[1][1:2]))
    assert (found.tv_upper <= 1e-12).all()
    gap = float(np.linalg.norm(one[1][0].astype(np.float64) - one[1][1]))
    assert found.error_upper == pytest.approx(np.full(3, gap), rel=1e-8)


SIGHTS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"lengths": 700},
    {"causal": True, "lengths": np.arange(48).reshape(2, 4, 6) * 40},
    {"mask": np.random.default_rng(0).random((2, 4, 6, 2100)) < 0.3},
    {"mask": np.random.default_rng(1).random(2100) < 0.01, "causal": True, "lengths": 2099},
]


@pytest.mark.parametrize("sight", SIGHTS, ids=lambda sight: "+".join(sight) or "all")
@pytest.mark.parametrize("several", [1, 3])
def test_options_mean_what_they_mean_in_attention(
    sight: dict[str, Any], several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads, over more keys than are summed at once, some rows at a time."""
    monkeypatch.setattr("certk_rs.comparison._SCORES", several * 2100)
    rng = np.random.default_rng(6)
    q = rng.standard_normal((2, 4, 6, 15)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 2, 2100, 15)).astype(np.float32)
    other = tuple(x.astype(ml_dtypes.bfloat16) for x in (k, v))
    real = [real_attention(q, *pair, sight) for pair in ((k, v), other)]
    # What no row of a kv head sees may hold anything.
    for head in np.ndindex(2, 2):
        rows = real[0].seen[head[0], 2 * head[1] : 2 * head[1] + 2]
        for array in (k, v, *other):
            array[head][~rows.any(axis=(0, 1))] = np.nan
    found = ck.compare(q, (k, v), other, **sight)
    distance = np.abs(real[0].weights - real[1].weights).sum(axis=-1) / 2
    error = np.sqrt(np.square(real[0].out - real[1].out).sum(axis=-1))
    close = LD(1e-14)
    assert (found.tv_lower <= distance + close).all()
    assert (found.tv_upper >= distance - close).all()
    assert (found.error_upper >= error * (1 - 1e-12) - close).all()
    assert (found.tv_upper - found.tv_lower < 2e-12).all()
    assert (found.error_upper <= error * (1 + 1e-8) + 1e-10).all()
    blind = ~real[0].seen.any(axis=-1)
    assert not found.tv_upper[blind].any()
    assert not found.error_upper[blind].any()
    again = ck.compare(q, (k, v), other, **sight, threads=1)
    assert (again.tv_upper == found.tv_upper).all()
    assert (again.error_upper == found.error_upper).all()


def test_torch_and_two_axes() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    q, one, _ = made(rng, 9, 4, 2)
    half = tuple(torch.tensor(x).bfloat16() for x in one)
    found = ck.compare(torch.tensor(q), one, half)
    holds(found, q, one, tuple(x.float().numpy() for x in half), 0.5)
    assert found.tv_upper.shape == (3,)


def test_a_host_that_flushes_changes_nothing() -> None:
    pytest.importorskip("torch")
    code = """
import numpy as np, sys, torch
import certk_rs as ck
rng = np.random.default_rng(0)
q, k, v, w = rng.standard_normal((4, 5, 3)).astype(np.float32)
v, w = (x * np.float32(2.0**-140) for x in (v, w))
torch.set_flush_denormal(len(sys.argv) > 1)
found = ck.compare(q, (k, v), (k, w), scale=300.0)
print(found.tv_upper.tobytes().hex(), found.error_upper.tobytes().hex())
"""
    outputs = [run_python(code, *arguments) for arguments in ((), ("flush",))]
    assert outputs[0].returncode == 0, outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout


def test_bad_input_is_named() -> None:
    q, k = np.ones((4, 3, 8), np.float32), np.ones((2, 5, 8), np.float32)
    pair, bad = (k, k), k.copy()
    bad[1, 3, 2] = np.inf
    bad_query = q.copy()
    bad_query[3, 1, 7] = np.nan
    for message, args, options in (
        (r"original\[0\]\[1, 3, 2\] is not finite", (q, (bad, k), pair), {}),
        (r"other\[1\]\[1, 3, 2\] is not finite", (q, pair, (k, bad)), {}),
        (r"q\[3, 1, 7\] is not finite", (bad_query, pair, pair), {}),
        (r"original is a ndarray", (q, k, pair), {}),
        (r"other\[0\] has shape \(2, 4, 8\)", (q, pair, (k[:, 1:], k)), {}),
        (r"v has shape \[2, 4, 8\]", (q, (k, k[:, 1:]), (k, k[:, 1:])), {}),
        (r"q has shape \[3, 3, 8\]", (q[1:], pair, pair), {}),
        (r"q has shape \(8,\)", (q[0, 0], pair, pair), {}),
        (r"other\[1\] has dtype float64", (q, pair, (k, k.astype(np.float64))), {}),
        (r"q has dtype float64", (q.astype(np.float64), pair, pair), {}),
        (r"lengths has 6", (q, pair, pair), {"lengths": 6}),
        (r"lengths has shape", (q, pair, pair), {"lengths": [1, 2]}),
        (r"scale is NaN", (q, pair, pair), {"scale": float("nan")}),
        (r"causal is 1", (q, pair, pair), {"causal": 1}),
        (r"threads is 0", (q, pair, pair), {"threads": 0}),
        (r"mask has shape", (q, pair, pair), {"mask": np.ones((4, 3, 6), bool)}),
    ):
        with pytest.raises(ck.CertkError, match=message):
            ck.compare(*args, **options)


def test_the_result_has_what_results_have() -> None:
    q, one, two = made(np.random.default_rng(8), 9, 4, 2)
    found = ck.compare(q, one, two)
    assert found.worst == found.tv_upper.max() == found.tv_upper[found.worst_row]
    assert f"{found.worst:.4f}"[:5] in repr(found)
    assert found.summary().startswith("Comparison of 3 rows")
    assert list(found.to_pandas()) == ["tv_lower", "tv_upper", "error_upper"]
    with pytest.raises(ValueError, match="read-only"):
        found.tv_upper[0] = 0
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.tv_upper == found.tv_upper).all()
    nothing = ck.compare(q[:0], one, two)
    assert (nothing.worst, nothing.tv_upper.shape) == (0.0, (0,))


def by_group(x: np.ndarray, bits: int, group: int, axis: int) -> np.ndarray:
    """Round to `bits`, with a least and a step for each group along an axis, in float32."""
    moved = np.moveaxis(x.astype(np.float32), axis, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, group)
    least = parts.min(axis=-1, keepdims=True)
    step = (parts.max(axis=-1, keepdims=True) - least) / np.float32(2**bits - 1)
    codes = np.round((parts - least) / np.where(step == 0, 1, step))
    return np.moveaxis((codes * step + least).reshape(moved.shape), -1, axis)


def per_token(x: np.ndarray) -> np.ndarray:
    """int8 with a scale per token."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    return np.round(x / scale) * scale


def q8_0(x: np.ndarray) -> np.ndarray:
    """Blocks of 32 int8 with a float16 scale, as llama.cpp has them: exact in float32."""
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.round(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    return (scale.astype(np.float16).astype(np.float32) * codes).reshape(x.shape)


def fp8(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


# Of each, and between what the largest distance of any row is.
METHODS: dict[str, tuple[Any, Any, float, float]] = {
    "int8 per token": (per_token, per_token, 0.02, 0.03),
    "q8_0": (q8_0, q8_0, 0.02, 0.03),
    "fp8 e4m3": (fp8, fp8, 0.07, 0.1),
    "int4": (
        lambda k: by_group(k, 4, 64, -2),
        lambda v: by_group(v, 4, 32, -1),
        *(0.15, 0.2),
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_real_caches_in_the_formats_of_others(method: str) -> None:
    cache = read_cache(EXAMPLE)
    of_keys, of_values, least, most = METHODS[method]
    worst = []
    for layer in layers(cache):
        q, k, v = (cache[f"layers.{layer}.{name}"][0] for name in ("query", "key", "value"))
        other = of_keys(k), of_values(v)
        found = ck.compare(q, (k, v), other)
        real = [real_attention(q, *pair, {}) for pair in ((k, v), other)]
        distance = np.abs(real[0].weights - real[1].weights).sum(axis=-1) / 2
        error = np.sqrt(np.square(real[0].out - real[1].out).sum(axis=-1))
        assert np.abs(found.tv_upper - distance).max() < 1e-11
        assert np.abs(found.tv_lower - distance).max() < 1e-11
        assert (found.error_upper >= error * (1 - 1e-12)).all()
        assert (found.error_upper <= error * (1 + 1e-8)).all()
        worst.append(found.worst)
    assert least < max(worst) < most


def test_a_quantized_cache_of_transformers() -> None:
    """`QuantizedCache` hands attention the whole cache as it is stored, from the second call on."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    cache = read_cache(EXAMPLE)
    config = transformers.LlamaConfig(num_hidden_layers=1)
    try:
        quantized = transformers.QuantizedCache("fp8", config)
    except (ValueError, TypeError):
        pytest.skip("this version of transformers has no fp8 cache")
    q, k, v = (torch.tensor(cache[f"layers.2.{name}"]) for name in ("query", "key", "value"))
    quantized.update(k[:, :, :-1], v[:, :, :-1], 0)
    other = quantized.update(k[:, :, -1:], v[:, :, -1:], 0)
    found = ck.compare(q, (k, v), other)
    assert found.tv_upper.shape == q.shape[:-1]
    assert 0 < found.tv_lower.min() < found.worst < 0.5
