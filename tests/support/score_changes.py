"""Random soft caps and biases of scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from real_attention import DTYPES


def made_changes(rng: np.random.Generator, rows: tuple[int, ...], n: int) -> dict[str, Any]:
    """Options that change scores: none of them half of the time."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.25:
        changes["soft_cap"] = float(rng.choice([0.3, 5.0, 50.0, 1e3]))
    if rng.random() < 0.35:
        shape = [(*rows, n), (*rows[:-1], 1, n), (n,), (rows[-1], 1)][int(rng.integers(4))]
        kind = int(rng.integers(4))
        if kind == 0:
            bias = rng.choice([0.1, 3.0, 30.0]) * rng.standard_normal(shape)
        elif kind == 1:
            # Keys far away weigh little, as with ALiBi.
            bias = rng.choice([0.01, 1.0]) * np.broadcast_to(np.arange(shape[-1]), shape)
        elif kind == 2:
            # Most are as good as hidden.
            bias = rng.choice([0.0, 1.0, -200.0, -1e4, -6e4], shape)
        else:
            bias = np.where(rng.random(shape) < 0.6, rng.standard_normal(shape), -np.inf)
        changes["bias"] = bias.astype(DTYPES[str(rng.choice(list(DTYPES)))])
    return changes
