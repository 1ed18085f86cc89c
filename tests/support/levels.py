"""The instruction-set levels that there are; a processor may lack some."""

from __future__ import annotations

from collections.abc import Iterator

import certk_rs as ck
from certk_rs import _native

LEVELS = ("portable", "avx2", "avx512", "amx", "neon")


def each_level() -> Iterator[str]:
    """Yield every level that this processor has, while it is in force in this process."""
    try:
        for level in LEVELS:
            try:
                _native.set_simd_level(level)
            except ck.CertkError:
                continue
            yield level
    finally:
        _native.set_simd_level(None)
