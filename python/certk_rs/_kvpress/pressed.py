"""What is proven of a layer whose keys a press has chosen from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class PressedLayer:
    """What is proven of one layer after a prompt."""

    layer: int
    n: int
    """Keys before."""
    kept: NDArray[np.int64]
    """(batch, kv_heads): how many keys each kv head keeps; of a `CertkPress`, how many it needs,
    before `compact` fills any up."""
    tail_mass_upper: NDArray[np.float64]
    """(batch, heads, m): what each of the last m queries loses at most; less if filled up."""
