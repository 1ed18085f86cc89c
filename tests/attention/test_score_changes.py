"""Soft caps and biases at the ends of the number formats, where scores may look like masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from real_attention import check, real_attention

N, D = 64, 16


def rows(m: int, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(m)
    q, k = rng.standard_normal((1, m, D)), rng.standard_normal((1, N, D))
    # An output of 0 is far from all values.
    return [x.astype(dtype) for x in (q, k, 100 + rng.standard_normal((1, N, D)))]


@pytest.mark.parametrize("m", [1, 4, 32])
@pytest.mark.parametrize("eps", [0.0, 0.01])
@pytest.mark.parametrize("size", [1e37, -1e37, 1e39, -1e39, 1e300, -1e300, -1.7e308])
@pytest.mark.parametrize("kind", ["all", "one", "all but one"])
def test_biases_that_float32_does_not_hold(m: int, eps: float, size: float, kind: str) -> None:
    bias = np.full((1, m, N), 0.0 if kind == "one" else size)
    if kind != "all":
        bias[..., 5] = size if kind == "one" else 0.0
    q, k, v = rows(m)
    found = ck.attention(q, k, v, eps, bias=bias)
    check(found, real_attention(q, k, v, {"bias": bias}), eps)
    dropped = found.k < N
    assert (found.tail_mass_upper[dropped] > 0).all()


@pytest.mark.parametrize("m", [1, 32])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_overflow_with_their_bias_are_refused(m: int, sign: int) -> None:
    q, k, v = rows(m, np.float64)
    q[...], k[...] = 0.0, 0.0
    q[..., 0], k[..., 0] = sign * 1e154, 1e154
    for eps in (0.0, 0.01):
        with pytest.raises(ck.CertkError, match=r"bias\[0, 0, 0\] is -?inf: added to a score"):
            ck.attention(q, k, v, eps, scale=0.9, bias=np.full((1, m, N), sign * 1.7e308))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"soft_cap": 0.0}, "soft_cap is 0: pass a number from 1e-30 to 1e30"),
        ({"soft_cap": np.nan}, "soft_cap is NaN"),
        ({"bias": np.zeros((3, 4))}, r"bias has shape \(3, 4\), which does not broadcast"),
        ({"bias": np.zeros(N, np.int64)}, "bias has dtype int64; convert it"),
        ({"bias": np.where(np.arange(N) == 7, np.nan, 0)}, r"bias\[0, 0, 7\] is NaN: pass finite"),
        ({"bias": np.where(np.arange(N) == 7, np.inf, 0)}, r"bias\[0, 0, 7\] is inf"),
    ],
)
def test_what_is_no_cap_and_no_bias_is_refused(option: dict[str, Any], says: str) -> None:
    q, k, v = rows(4)
    with pytest.raises(ck.CertkError, match=says):
        ck.attention(q, k, v, 0.1, **option)
    with pytest.raises(ck.CertkError, match=says):
        ck.KvIndex.build(k, v).attention(q, 0.1, **option)


def test_biases_of_keys_that_are_not_seen_may_be_anything() -> None:
    q, k, v = rows(4)
    bias = np.where(np.arange(N) < 9, np.nan, 0.5)
    for sight in ({"mask": np.arange(N) >= 9}, {"lengths": 0}):
        for index in (None, ck.KvIndex.build(k, v)):
            found = ck.attention(q, k, v, 0.1, bias=bias, index=index, **sight)
            real = real_attention(q, k, v, {"bias": np.nan_to_num(bias), **sight})
            check(found, real, 0.1)
    hidden = ck.attention(q, k, v, 0.1, bias=np.full(N, -np.inf, np.float16))
    assert not hidden.out.any()
    assert not hidden.k.any()
