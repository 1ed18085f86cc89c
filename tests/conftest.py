"""The real rows that tests may ask for.

`CERTK_DATA=DIR` adds the larger real caches in DIR (minilm_n512.safetensors,
minilm_n65536.safetensors), which are not in the repository; without it those tests are skipped.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from real_rows import Cache, read_cache
from repository import EXAMPLE

# A terminal's width, which processes of pytest-xdist are given: a test that needs one sets it.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def small_cache() -> Cache:
    """The small real cache (examples/data/README.md): `layers.{i}.query|key|value` as float32."""
    return read_cache(EXAMPLE)


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
    """64 queries against 65536 keys of four heads, 128 windows side by side (with CERTK_DATA)."""
    return _large("minilm_n65536")
