"""The instruction-set levels that there are; a processor may lack some."""

from __future__ import annotations

LEVELS = ("portable", "avx2", "avx512", "neon")
