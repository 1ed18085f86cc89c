"""Presses for kvpress that prove what they drop, and a proof of what other presses drop.

`CertkPress` keeps what a budget of attention mass needs, or, told a `compression_ratio` as the
others are, what loses least at that size. `CertkScorerPress` gives scores to those presses of
kvpress that hold another (AdaKV, Chunk, Decoding and so on). `CertifiedPress` goes around any press
and proves what its choice has lost. See docs/kvpress.md.

Importing this needs kvpress (0.5.5), which needs transformers before 5.3.
"""

from __future__ import annotations

from .errors import pip_install as _pip_install

try:
    from ._kvpress.certified import CertifiedPress
    from ._kvpress.press import CertkPress
    from ._kvpress.pressed import PressedLayer
    from ._kvpress.scorer import CertkScorerPress
except ModuleNotFoundError as _error:
    if _error.name not in ("torch", "kvpress", "transformers"):
        raise
    raise ImportError(
        f"certk_rs.kvpress needs {_error.name}, which is not installed: {_pip_install('kvpress')}",
        name=_error.name,
    ) from _error

__all__ = ["CertifiedPress", "CertkPress", "CertkScorerPress", "PressedLayer"]
