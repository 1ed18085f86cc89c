"""Estimates for `certk prune --dry-run`: cost and savings, measured on a few heads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .._files.layers import Layer
from .._files.output import guard_bytes, proof_bytes
from .._files.safetensors import ITEMSIZE
from .sets import LayerRecord
from .steps import units_to_try
from .task import FileTask
from .units import Unit, run_unit

# The layers of a file that are tried: the first, the last, and one between.
_LAYERS = 3


@dataclass(frozen=True)
class Estimate:
    """Cost and savings of pruning one input, as far as some heads of it tell.

    `scores` are the products of a query with a key that have to be judged; `seconds` what one
    worker needs; `memory` what one unit of work needs at a time, in bytes.
    """

    name: str
    source: str
    input_bytes: int
    cache_bytes: int
    output_bytes: int
    kept_share: float
    scores: int
    seconds: float
    memory: int
    warnings: tuple[str, ...]


def estimate(task: FileTask, threads: int | None) -> Estimate:
    """Try one kv head (or, by layer, one layer) of some layers.

    With a size for a target the share that is kept is known, and only the time is measured. By
    token the sets of the layers tried, one each, stand for the one of all layers.

    Raises `CertkError` or `OSError` for what is wrong with the data that is read.
    """
    tried = units_to_try(task, _some(task.layers))
    kept = total = scores = 0
    begun = time.monotonic()
    for unit in tried:
        for found in run_unit(unit, threads).answers:
            if isinstance(found, LayerRecord):
                layer = found.layer
                kept += int(found.sizes.sum())
                total += layer.n * len(found.sizes)
                scores += layer.n * layer.m * _heads(unit, layer)
    # A trial takes as long again.
    spent = (time.monotonic() - begun) * (2 if task.request.holdout else 1)
    every = sum(layer.n * layer.m * layer.heads for layer in task.layers)
    share = kept / total if total else 1.0
    if task.options.size is not None:
        share = min(1.0, task.options.size / max(1, task.total))
    proof = proof_bytes(task.layers, task.options, "F32")[task.options.proof]
    guard = 0 if task.options.guard == "none" else guard_bytes(task.layers, share)
    indices = 4 * share * sum(layer.n * layer.kv_heads for layer in task.layers)
    return Estimate(
        task.source.name,
        str(task.source.location),
        task.input_bytes,
        task.cache_bytes,
        int(share * task.cache_bytes + indices + proof + guard + 600 * len(task.tensors)),
        share,
        every,
        spent * every / scores if scores else spent,
        max(_memory(task, layer) for layer in task.layers),
        task.warnings,
    )


def _some(layers: Sequence[Layer]) -> list[Layer]:
    last = len(layers) - 1
    return [layers[i] for i in sorted({0, last // 2, last})][:_LAYERS]


def _heads(unit: Unit, layer: Layer) -> int:
    if unit.heads is None:
        return layer.heads
    return (unit.heads[1] - unit.heads[0]) * (layer.heads // layer.kv_heads)


def _memory(task: FileTask, layer: Layer) -> int:
    """Return the bytes of a unit: keys and queries, rows that are solved for, results of rows.

    A bound of what was measured, rounded up: see docs/prune.md.
    """
    together = 1 if task.options.granularity == "head" else layer.kv_heads
    heads = together * (layer.heads // layer.kv_heads)
    keys = together * layer.n * layer.d * ITEMSIZE[layer.dtypes["key"]]
    queries = heads * layer.m * layer.d * ITEMSIZE[layer.dtypes["query"]]
    rows = heads * layer.m
    return keys * 2 + queries * 2 + 64 * rows + 16 * min(rows, 2048) * layer.n
