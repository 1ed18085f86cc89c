"""Certified top-k and top-p selection of attention scores.

`select` keeps the fewest keys of each row whose dropped softmax mass is proven to be within a
budget, `certify` proves what a given set drops, `keep_set` finds one set for many rows, and a
`KeyIndex` finds such sets for queries without scoring most keys. `attention` averages values over
such sets and bounds the error of its output. A certificate is a statement about real-number
arithmetic on exactly the stored numbers: rounding is inside, not on top. `prune`, `verify` and
`analyze` do for saved KV caches what the commands of these names do. Importing this package loads
NumPy and nothing else.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from . import bounds, gaussian, montecarlo, windows
from ._native import __version__, simd_level
from .errors import CertkError
from .keepset import keep_set, keep_set_of_queries
from .key_index import KeyIndex
from .results import (
    AttentionResult,
    Certificate,
    KeepSet,
    RecallResult,
    Rung,
    SearchResult,
    Selection,
    Status,
)
from .selection import certify, select
from .sparse_attention import ValueBall, attention

if TYPE_CHECKING:
    from .analyzing import analyze
    from .pruning import prune
    from .verifying import verify

__all__ = [
    "AttentionResult",
    "Certificate",
    "CertkError",
    "KeepSet",
    "KeyIndex",
    "RecallResult",
    "Rung",
    "SearchResult",
    "Selection",
    "Status",
    "ValueBall",
    "__version__",
    "analyze",
    "attention",
    "bounds",
    "certify",
    "gaussian",
    "keep_set",
    "keep_set_of_queries",
    "montecarlo",
    "prune",
    "select",
    "simd_level",
    "verify",
    "windows",
]

# Jobs need more modules than a call of `select` should wait for; these come when they are named.
_LAZY = {"analyze": ".analyzing", "prune": ".pruning", "verify": ".verifying"}

if not TYPE_CHECKING:  # or every misspelt name would be an Any

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(_import_module(_LAZY[name], __name__), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
