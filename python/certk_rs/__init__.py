"""Certified top-k and top-p selection of attention scores.

`select` keeps the fewest keys of each row whose dropped softmax mass is proven to be within a
budget, `certify` proves what a given set drops, `keep_set` finds one set for many rows, and a
`KeyIndex` finds such sets for queries without scoring most keys. `attention` averages values over
such sets and bounds the error of its output. A certificate is a statement about real-number
arithmetic on exactly the stored numbers: rounding is inside, not on top. Importing this package
loads NumPy and nothing else.
"""

from . import bounds, gaussian, montecarlo, windows
from ._native import __version__, simd_level
from .errors import CertkError
from .keepset import keep_set
from .key_index import KeyIndex
from .results import (
    AttentionResult,
    Certificate,
    KeepSet,
    Rung,
    SearchResult,
    Selection,
    Status,
)
from .selection import certify, select
from .sparse_attention import ValueBall, attention

__all__ = [
    "AttentionResult",
    "Certificate",
    "CertkError",
    "KeepSet",
    "KeyIndex",
    "Rung",
    "SearchResult",
    "Selection",
    "Status",
    "ValueBall",
    "__version__",
    "attention",
    "bounds",
    "certify",
    "gaussian",
    "keep_set",
    "montecarlo",
    "select",
    "simd_level",
    "windows",
]
