"""Warnings about inputs that can be pruned all the same, a line each."""

from __future__ import annotations

from collections.abc import Sequence

from .layers import Layer
from .safetensors import quote


def remarks(
    layers: Sequence[Layer], causal_offset: int | None, others: Sequence[str], pattern: str
) -> list[str]:
    """List tensors left out, queries without keys, unseen keys, and more kv heads than keys."""
    found = []
    if others:
        shown = ", ".join(map(quote, others[:3])) + ", ..." * (len(others) > 3)
        found.append(
            f"{len(others)} tensors that are not named like {pattern} are left out: {shown}"
        )
    said: dict[str, list[int]] = {}
    for layer in layers:
        for remark in _of_layer(layer, causal_offset):
            said.setdefault(remark, []).append(layer.index)
    return found + [f"{in_layers(where)}: {remark}" for remark, where in said.items()]


def in_layers(layers: Sequence[int]) -> str:
    """Format rising numbers of layers in a few words: "layers 0-3, 7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], layer]
        else:
            runs.append([layer])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:8]) + ", ..." * (len(runs) > 8)
    return f"layer{'s' * (len(layers) > 1)} {shown}"


def _of_layer(layer: Layer, causal_offset: int | None) -> list[str]:
    found = []
    blind, unseen = layer.blind(causal_offset), layer.n - layer.visible(causal_offset)
    if blind:
        found.append(
            f"causal_offset {causal_offset} leaves {blind} of {layer.m} queries without any key"
        )
    if unseen:
        found.append(
            f"causal_offset {causal_offset} hides the last {unseen} of {layer.n} keys from every "
            f"query, so none of them is kept; if the queries end with the keys, it is n - m = "
            f"{layer.n - layer.m}"
        )
    if layer.kv_heads > layer.n:
        found.append(
            f"there are more kv heads ({layer.kv_heads}) than keys ({layer.n}), read as "
            f"{layer.layout}: make sure that they are not transposed"
        )
    return found
