"""Caches of a real encoder, and the scores in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

Cache = dict[str, np.ndarray]


def read_cache(path: Path) -> Cache:
    """Tensors of a float16 cache file as float32 (exact)."""
    from safetensors.numpy import load_file

    return {name: tensor.astype(np.float32) for name, tensor in load_file(path).items()}


def rows_of(cache: Cache, layer: int, dtype: np.dtype) -> np.ndarray:
    """(rows, n) scores q.k / sqrt(d) of one layer, all heads, computed in float64, stored so."""
    query, key = (cache[f"layers.{layer}.{name}"].astype(np.float64) for name in ("query", "key"))
    scores = query @ np.swapaxes(key, -1, -2) * query.shape[-1] ** -0.5
    return np.ascontiguousarray(scores.reshape(-1, key.shape[-2]).astype(dtype))


def layers(cache: Cache) -> Iterator[int]:
    """The layers of a cache."""
    return iter(range(sum(name.endswith(".key") for name in cache)))
