"""The native search for a keep set of queries, with what it needs not be given."""

from __future__ import annotations

from typing import Any

import numpy as np

from certk_rs import _native

Block = tuple[np.ndarray, np.ndarray, float]


def native_keep_set(blocks: list[Block], eps: Any, **more: Any) -> Any:
    """Call it with queries (heads, m, d), keys (kv heads, n, d) and a scale per block."""
    options = {
        "counted": None, "given": None, "slack": 2.0**-31, "roundings": 16, "causal_offset": None,
        "max_keep": None, "keep_first": 0, "keep_last": 0, "block_size": 1, "threads": None, **more,
    }  # fmt: skip

    def stored(array: np.ndarray) -> tuple[np.ndarray, str]:
        name = array.dtype.name
        return (array if name == "float32" else array.view(np.uint16), name)

    given = [(stored(q), stored(k), scale) for q, k, scale in blocks]
    return _native.keep_set_of_queries(given, eps, *options.values())
