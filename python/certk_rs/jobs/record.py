"""The tensors of an output that say what was chosen for a layer, from what was chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.certificate import Options
from .._files.output import index_type
from ..cache_format import Layer
from .chosen import Chosen


def chosen_tensors(layer: Layer, chosen: Chosen, options: Options) -> dict[str, NDArray[Any]]:
    """By name, all but the kept rows: docs/files.md says what each is."""
    tensors: dict[str, NDArray[Any]] = {"indices": np.concatenate(chosen.indices)}
    if options.granularity == "head":
        tensors["indptr"] = _starts(chosen.indices)
    if options.block_size > 1:
        blocks = [np.unique(indices // options.block_size) for indices in chosen.indices]
        tensors["blocks"] = np.concatenate(blocks)
        if options.granularity == "head":
            tensors["block_indptr"] = _starts(blocks)
    for name in ("indices", "blocks"):
        if name in tensors:
            tensors[name] = tensors[name].astype(index_type(layer))
    if options.coverage < 1:
        tensors["left_out"] = chosen.left_out
    if options.proof != "none":
        tensors["lower_bound"] = chosen.lower_bounds
        tensors["lower_bound_rows"] = chosen.weight_rows
        tensors["lower_bound_weights"] = chosen.weights
    if options.proof == "full":
        assert chosen.upper is not None
        assert chosen.lower is not None
        tensors |= {"tail_mass_upper": chosen.upper, "tail_mass_lower": chosen.lower}
    elif options.proof == "compact":
        tensors["worst_tail_mass"] = chosen.worst
    return {f"layers.{layer.index}.{name}": array for name, array in tensors.items()}


def _starts(groups: tuple[NDArray[np.int64], ...] | list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, groups)], dtype=np.int64)
