"""The real rows that tests may ask for.

`CERTK_DATA=DIR` adds the larger real caches in DIR (minilm_n512.safetensors,
minilm_n65536.safetensors), which are not in the repository; without it those tests are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL_CACHE = ROOT / "examples" / "data" / "minilm_small.safetensors"

Cache = dict[str, np.ndarray]


def read_cache(path: Path) -> Cache:
    """Tensors of a float16 cache file as float32 (exact)."""
    from safetensors.numpy import load_file

    return {name: tensor.astype(np.float32) for name, tensor in load_file(path).items()}


@pytest.fixture(scope="session")
def small_cache() -> Cache:
    """The small real cache of examples/data: `layers.{i}.query|key|value` as float32."""
    return read_cache(SMALL_CACHE)


def _large(name: str) -> Cache:
    folder = os.environ.get("CERTK_DATA")
    if not folder:
        pytest.skip(f"{name}.safetensors is not in the repository: set CERTK_DATA=DIR")
    path = Path(folder) / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"CERTK_DATA holds no {path.name}")
    return read_cache(path)


@pytest.fixture(scope="session")
def cache_512() -> Cache:
    """All heads and rows at n = 512 (only with CERTK_DATA)."""
    return _large("minilm_n512")


@pytest.fixture(scope="session")
def cache_65536() -> Cache:
    """64 queries against 65536 keys of four heads (only with CERTK_DATA)."""
    return _large("minilm_n65536")
