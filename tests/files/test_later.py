"""Losses of later queries as analyze and the demo tell them, against a calculation of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import keep_set
from certk_rs._files.cache import Cache
from certk_rs._files.location import locate
from certk_rs._jobs.later import Later, later, later_in_all
from cli_fixtures import safetensors_bytes, said, tensor, write_cache
from repository import EXAMPLE


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(("eps", "bits"), [(0.05, 12), (0.01, 16)])
def test_losses_are_those_of_the_later_half(
    dtype: str, eps: float, bits: int, tmp_path: Path
) -> None:
    n, m, d = 48, 9, 16
    path = tmp_path / "x.safetensors"
    tensors = write_cache(path, dtype=dtype, n=n, m=m, d=d, kv_heads=2, heads=4, layers=1)
    with Cache(locate(path)) as cache:
        [layer] = cache.layers
        found = [each for [each] in later(cache, layer, (eps,), 1)]
    query, key, value = (
        tensors[f"layers.0.{role}"].reshape(-1, rows, d)
        for role, rows in (("query", m), ("key", n), ("value", n))
    )
    assert len(found) == 2
    for head, each in enumerate(found):
        scores = np.einsum("hmd,nd->hmn", query[2 * head : 2 * head + 2], key[head]) * d**-0.5
        kept = keep_set(scores[:, :5].reshape(-1, n), eps).indices
        weights = softmax(scores[:, 5:])
        lost = 1 - weights[..., kept].sum(axis=-1)
        assert (each.eps, each.key_bits, each.rows) == (eps, bits, 8)
        assert each.over == (lost > eps).sum()
        assert abs(each.lost - lost.max()) < 1e-9
        out = weights @ value[head]
        some = weights[..., kept] / weights[..., kept].sum(axis=-1, keepdims=True)
        away = np.linalg.norm(some @ value[head][kept] - out, axis=-1)
        assert abs(each.moved - (away / np.linalg.norm(out, axis=-1)).max()) < 1e-9
        size = 4 if dtype == "F32" else 2
        assert each.cache_bytes == 2 * n * d * size
        assert each.kept_bytes == 2 * len(kept) * d * size
        assert each.proven <= eps
        assert each.unproven == 0
        assert each.moved_by_codes is not None
        assert each.moved_by_codes < 0.05
    # In all: sums, and the largest.
    with Cache(locate(path)) as cache:
        [every] = later_in_all(cache, (eps,), None)
    assert every.rows == 16
    assert every.lost == max(each.lost for each in found)
    assert every.over == sum(each.over for each in found)


def test_causal_rows_see_their_own_keys(tmp_path: Path) -> None:
    """Keys behind a row are of another scale: seen, they would decide it."""
    rng, n, m, d = np.random.default_rng(1), 24, 8, 8
    arrays: dict[str, Any] = {
        role: rng.standard_normal((1, rows, d)) for role, rows in (("key", n), ("query", m))
    }
    arrays["value"] = rng.standard_normal((1, n, d))
    tensors = {f"layers.0.{name}": tensor(array, "F32") for name, array in arrays.items()}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensors, {"causal_offset": "16"}))
    with Cache(locate(path)) as cache:
        [[found]] = later(cache, cache.layers[0], (0.05,), 1)
    q, k = (arrays[role][0].astype(np.float32).astype(float) for role in ("query", "key"))
    scores = (q @ k.T) * d**-0.5
    scores[np.arange(n) > np.arange(m)[:, None] + 16] = -np.inf
    kept = keep_set(scores[:4], 0.05).indices
    lost = 1 - softmax(scores[4:])[:, kept].sum(axis=-1)
    assert abs(found.lost - lost.max()) < 1e-9


def test_what_there_is_nothing_to_say_of(tmp_path: Path) -> None:
    one = tmp_path / "one.safetensors"
    write_cache(one, m=1)
    with Cache(locate(one)) as cache:
        assert later_in_all(cache, (0.05,), None) == ()
    # Scores beyond float32: codes prove nothing.
    huge = np.full((1, 1, 4, 8), 3e38, np.float32)
    huge[0, 0, 1] *= -1
    tensors = {f"layers.0.{role}": tensor(huge, "F32") for role in ("query", "key", "value")}
    vast = tmp_path / "vast.safetensors"
    vast.write_bytes(safetensors_bytes(tensors, {}))
    with Cache(locate(vast)) as cache:
        [found] = later_in_all(cache, (0.05,), None)
    assert (found.proven, found.unproven, found.moved_by_codes) == (1.0, found.rows, None)
    code, _, errors = said("demo", "--data", vast)
    assert code == 2
    assert "scores are so large" in errors


def test_heads_join_by_sums_and_by_the_largest() -> None:
    one = Later(0.1, 12, 2, 100, 10, 20, 1, 0.5, 0.1, 0.2, 0, 0.3)
    two = Later(0.1, 12, 3, 50, 40, 5, 2, 0.4, 0.7, 0.9, 3, 0.2)
    assert one.joined(two) == Later(0.1, 12, 5, 150, 50, 25, 3, 0.5, 0.7, 0.9, 3, 0.3)
    assert (
        one.joined(Later(0.1, 12, 3, 50, 40, 5, 2, 0.4, 0.7, 0.9, 3, None)).moved_by_codes is None
    )


def test_the_demo_and_analyze_say_it() -> None:
    code, text, _ = said("demo")
    assert code == 0
    assert "kept rows" in text
    assert "codes, 12 and 8 bits" in text
    code, text, _ = said("analyze", EXAMPLE, "-v")
    assert "Later half of the queries, eps = 0.05" in text
