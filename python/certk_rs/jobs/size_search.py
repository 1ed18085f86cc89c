"""The smallest budget for which all keep-sets of a file together have no more than so many keys.

The worst tail mass of a file is least where all groups have the same budget: were it larger in one
of them than in the others, that one alone would decide. So one number is sought, by a grid that is
narrowed three times. What is found beside it is a budget at which the proven lower bounds add up to
more keys than there may be: no distribution of so many keys has a worst tail mass below that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .chosen import Probe

_FIRST = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4, 1e-6, 1e-9)
_REFINED = 5
_ROUNDS = 4
_CLOSE = 1.01
_MOST = 1 - 2.0**-24


class SizeSearch:
    """Asks for probes and is told what they found; then `eps` and `bound_eps` are the answer.

    `eps` may be `_MOST` where not even that suffices (forced keys), and `bound_eps` 0, below which
    no mass is.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._round = 0
        self.eps = _MOST
        self.bound_eps = 0.0

    def probes(self) -> tuple[float, ...] | None:
        """The budgets to try next; None when it is known."""
        if self._round == 0:
            return _FIRST
        if self._round >= _ROUNDS or self.eps <= max(self.bound_eps, 1e-12) * _CLOSE:
            return None
        low = max(self.bound_eps, self.eps * 1e-3, 1e-12)
        inner = np.geomspace(low, self.eps, _REFINED + 2)[1:-1]
        return tuple(float(eps) for eps in inner[::-1])

    def tell(self, probes: tuple[float, ...], found: Sequence[Probe], shared: bool) -> None:
        """What all layers keep at these budgets; `shared`: they have the same set."""
        self._round += 1
        layers = found[:1] if shared else found
        kept = sum(probe.kept.sum(axis=1) for probe in layers)
        needed = sum(probe.lower_bounds.sum(axis=1) for probe in layers)
        for eps, have, need in zip(probes, kept, needed, strict=True):
            if have <= self._size:
                self.eps = min(self.eps, eps)
            if need > self._size:
                self.bound_eps = max(self.bound_eps, eps)
