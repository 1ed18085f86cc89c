"""`compare` on the int8 and int4 caches of ONNX Runtime's GroupQueryAttention.

Its own output, in float32, lies within the proven error of real attention over the original.
"""

from __future__ import annotations

import numpy as np
import pytest

import certk_rs as ck
from harness import ort
from ort_attention import Run, attend, inputs_of, recorded, recorded_inputs
from real_attention import CLOSE, LD, real_attention

MODES = [(kind, bits) for kind in ("PER_CHANNEL", "PER_TENSOR") for bits in (8, 4)]


def lengths(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(x.astype(LD)).sum(axis=-1))


def float32_error(q: np.ndarray, cache: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Bound what the operator loses to float32: its distance from real attention over `cache`.

    Let u = 2^-24 and S = scale |q| max |k|. A product of three numbers is off by 3 u, and their sum
    by d u, in any order; with the scale's, scores are off by at most r = (d + 8) u S. Weights are
    exponentials of differences from the largest score so far, and are scaled down each time that it
    rises: at most as often as keys reach all earlier ones but for 2 r. The differences lose 4 u S
    in all. An exponential is taken to be within 16 units in the last place; it and its product lose
    33 u. If weights change by e^(+-s), outputs move by at most s times the longest value. Sums,
    products and the quotient are the rest. Nothing underflows.
    """
    k, v = cache
    (n, d), u = k.shape[-2:], 2.0**-24
    size = d**-0.5 * lengths(q) * lengths(k).max(axis=-1, keepdims=True)
    scores = d**-0.5 * q.astype(LD) @ k.astype(LD).swapaxes(-1, -2)
    near = 2 * (d + 8) * u * size[..., None]
    rises = (scores >= np.maximum.accumulate(scores, axis=-1) - near).sum(axis=-1)
    weights = (d + 12) * size + 33 * (1 + rises)
    return (weights + 2 * n + 2 * rises + 10) * u * 1.001 * lengths(v).max(axis=-1, keepdims=True)


def check(run: Run, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> ck.Comparison:
    found = ck.compare(q, (k, v), run.cache)
    one, two = (real_attention(q, *pair, {}) for pair in ((k, v), run.cache))
    distance = np.abs(one.weights - two.weights).sum(axis=-1) / 2
    assert (found.tv_lower <= distance + CLOSE).all()
    assert (found.tv_upper >= distance - CLOSE).all()
    lost = float32_error(q, run.cache)
    away = lengths(run.out - one.out)
    assert (away <= found.error_upper + lost).all()
    # Its codes are what it computes with, and float32 loses little beside them.
    assert (lengths(run.out - two.out) <= lost).all()
    assert np.median(away) > 4 * np.median(lost)
    return found


def test_a_recorded_case() -> None:
    found = check(recorded(), *recorded_inputs())
    assert 3e-4 < found.tv_lower.min() < found.worst < 3e-3


@pytest.mark.heavy
@pytest.mark.skipif(not ort.HERE, reason=ort.MISSING)
class TestThePackage:
    @pytest.mark.parametrize("tiled", [True, False])
    @pytest.mark.parametrize(("kind", "bits"), MODES)
    def test_real_layers(
        self, kind: str, bits: int, tiled: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ORT_GQA_DISABLE_FLASH_ATTENTION", str(int(not tiled)))
        for layer in range(6):
            inputs = inputs_of(layer)
            check(attend(*inputs, kind, bits), *inputs)

    def test_the_recorded_case_is_what_it_makes(self) -> None:
        made, old = attend(*recorded_inputs(), "PER_CHANNEL", 8), recorded()
        for name in ("key_codes", "value_codes", "key_scale", "value_scale"):
            assert (getattr(made, name) == getattr(old, name)).all()
        lost = float32_error(recorded_inputs()[0], old.cache)
        assert (lengths(made.out - old.out) <= 2 * lost).all()
