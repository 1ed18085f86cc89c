"""Certified top-k and top-p selection of attention scores.

`select` keeps the fewest keys of each row whose dropped softmax mass is proven to be within a
budget, `certify` proves what a given set drops, `keep_set` finds one set for many rows, and a
`KeyIndex` finds such sets for queries without scoring most keys. `attention` averages values over
such sets and bounds the error of its output, `compare` bounds what another cache changes. A
certificate is a statement about real-number arithmetic on exactly the stored numbers: rounding is
inside, not on top. `prune`, `verify`, `gate` and `analyze` do for saved KV caches what the commands
of these names do. Importing this package loads no other: a name is imported when it is first used,
and needs NumPy and the standard library.
"""

TYPE_CHECKING = False  # a checker takes it for True; `typing` would be imported for nothing else
if TYPE_CHECKING:
    from . import bounds, gaussian, montecarlo, windows
    from ._jobs.analyze import analyze
    from ._jobs.gate import gate
    from ._jobs.prune import prune
    from ._jobs.verify import verify
    from ._native import __version__, simd_level
    from .comparison import compare
    from .errors import CertkError
    from .keepset import keep_set, keep_set_of_queries
    from .kept_rows import KeptRows
    from .key_index import KeyIndex
    from .kv_index import KvIndex
    from .paged_rows import PagedRows
    from .ragged_rows import RaggedRows
    from .results import (
        AttentionResult,
        Certificate,
        Comparison,
        KeepSet,
        RecallResult,
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
    "Comparison",
    "KeepSet",
    "KeptRows",
    "KeyIndex",
    "KvIndex",
    "PagedRows",
    "RaggedRows",
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
    "compare",
    "gate",
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

# Modules, and the names of each. The command line answers --version and each TAB from this package,
# and should not wait for NumPy to do so.
_MODULES = ("bounds", "gaussian", "montecarlo", "windows")
_NAMES = {
    "_jobs.analyze": ("analyze",),
    "_jobs.gate": ("gate",),
    "_jobs.prune": ("prune",),
    "_jobs.verify": ("verify",),
    "_native": ("__version__", "simd_level"),
    "comparison": ("compare",),
    "errors": ("CertkError",),
    "keepset": ("keep_set", "keep_set_of_queries"),
    "kept_rows": ("KeptRows",),
    "key_index": ("KeyIndex",),
    "kv_index": ("KvIndex",),
    "paged_rows": ("PagedRows",),
    "ragged_rows": ("RaggedRows",),
    "results": (
        *("AttentionResult", "Certificate", "Comparison", "KeepSet", "RecallResult", "Rung"),
        *("SearchResult", "Selection", "Status"),
    ),
    "selection": ("certify", "select"),
    "sparse_attention": ("ValueBall", "attention"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # or every misspelt name would be an Any

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
