"""Pruning the cache of a prompt for its last queries, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import transformers
from transformers import DynamicCache

from ..errors import CertkError
from .caches import PRUNE_OPTIONS, PrunedCache, prune_cache
from .capture import observe
from .capture_file import Attended
from .coded_cache import CodedCache
from .indexed_layer import IndexedLayer
from .layers_of_config import layers_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .caches import PruneOptions


@overload
def prune_prompt(
    model: Any,
    ids: Mapping[str, Any] | torch.Tensor,
    eps: float,
    window: int = 64,
    *,
    rest: Literal["drop", "file"] = "drop",
    **options: Unpack[PruneOptions],
) -> PrunedCache: ...
@overload
def prune_prompt(
    model: Any,
    ids: Mapping[str, Any] | torch.Tensor,
    eps: float,
    window: int = 64,
    *,
    rest: Literal["codes"],
    **options: Unpack[PruneOptions],
) -> CodedCache: ...
def prune_prompt(
    model: Any,
    ids: Mapping[str, Any] | torch.Tensor,
    eps: float,
    window: int = 64,
    *,
    rest: Any = "drop",
    **options: Unpack[PruneOptions],
) -> PrunedCache | CodedCache:
    """Run a model over a prompt, and prune its cache for the last queries of the prompt.

    Does as `capture` and `prune_cache`, without a file: every query of the window loses at most eps
    of its attention mass in every head. The model runs densely, without what lies above its base
    model (a language model's head). Keys and values of all layers are held meanwhile.

    Args:
        model: A `transformers.PreTrainedModel` on the CPU, of which every layer has full attention.
        ids: The prompt, (1, n) token ids, or what the model is called with, as from a tokenizer:
            one sequence, without padding. To go on, `generate` gets ids of the prompt and at least
            one token more.
        eps: Budget of dropped mass, 0 <= eps < 1.
        window: For how many of the last queries of each layer, at least 1.
        rest: As in `prune_cache`.
        options: All options of `prune_cache` but scale and causal, which the model says. For texts
            that go on, pass `keep_last=64` or so (docs/transformers.md).

    Raises:
        CertkError: As `capture` and `prune_cache`.
    """
    if unknown := options.keys() - PRUNE_OPTIONS:
        raise TypeError(f"prune_prompt() got an unexpected keyword argument {min(unknown)!r}")
    if type(window) is not int or window < 1:
        raise CertkError(f"window is {window!r}; pass a whole number >= 1")
    if isinstance(model, transformers.PreTrainedModel):
        for index, layer in enumerate(layers_of(model.config, (1, None, None, "exact"))):
            if type(layer) is not IndexedLayer:
                raise CertkError(
                    f"layer {index} of {type(model).__name__} has a cache of another kind, "
                    f"{type(layer).__name__}: pruned caches are for models of full attention alone"
                )
    seen: dict[int, Attended] = {}

    def keep(call: Attended) -> None:
        # A copy of the queries does not hold on to all the others.
        seen[call.layer] = replace(call, query=call.query[:, :, -window:].clone())

    layers = observe(model, ids, keep)
    if layers != list(range(len(layers))):
        raise CertkError(
            f"the layers {layers} have attention of transformers' AttentionInterface: a pruned "
            "cache needs it in all layers from 0 on"
        )
    scale, causal = seen[0].scale, seen[0].offset is not None
    for layer in layers:
        told = seen[layer].scale, seen[layer].offset is not None
        if told != (scale, causal):
            raise CertkError(
                f"layer {layer} has (scale, causal) {told}, layer 0 {(scale, causal)}: a pruned "
                "cache has one for all"
            )
    cache, queries = DynamicCache(), []
    for layer in layers:
        call = seen.pop(layer)
        cache.update(call.key, call.value, layer)
        queries.append(call.query)
    pruned: PrunedCache | CodedCache = prune_cache(
        cache, queries, eps, rest=rest, scale=scale, causal=causal, **options
    )
    return pruned
