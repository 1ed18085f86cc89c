"""Progress of a job, and the memory that its process has had."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (label, done so far, total); totals are bytes or steps, and may grow."""


def peak_memory() -> int:
    """Return the bytes that were resident at most; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
