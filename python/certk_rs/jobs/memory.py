"""How much memory this process has had."""

from __future__ import annotations

import sys


def peak_memory() -> int:
    """Bytes that were resident at most; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
