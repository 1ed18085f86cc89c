"""Pruning the cache of a prompt for its last queries, in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import DynamicCache

from ..errors import CertkError
from .caches import PrunedCache, prune_cache
from .capture import observe
from .capture_file import causal_offset_of
from .guarded import OnBreach, Rows
from .indexed_layer import IndexedLayer
from .layers_of_config import layers_of
from .masks import Visibility


def prune_prompt(
    model: Any,
    ids: Mapping[str, Any] | torch.Tensor,
    eps: float,
    window: int = 64,
    *,
    keep_first: int = 0,
    keep_last: int = 0,
    compact: bool = False,
    guard: Literal["none", "codes"] = "none",
    on_breach: OnBreach = "report",
    promote: bool = False,
    most_promoted: int | None = None,
    out_tol: float | None = None,
    source: Rows | str | os.PathLike[str] | None = None,
    threads: int | None = None,
) -> PrunedCache:
    """Run a model over a prompt, and prune its cache for the last queries of the prompt.

    What `capture` and `prune_cache` do, without a file: every query of the window loses at most eps
    of its attention mass in every head. The model runs densely, and what lies above its base model
    (a language model's head) does not run. Keys and values of all layers are held meanwhile.

    Args:
        model: A `transformers.PreTrainedModel` on the CPU, of which every layer has full attention.
        ids: The prompt, (1, n) token ids, or what the model is called with, as from a tokenizer:
            one sequence, without padding. To go on, `generate` gets ids of the prompt and at least
            one token more.
        eps: Budget of dropped mass, 0 <= eps < 1.
        window: For how many of the last queries of each layer, at least 1.
        keep_first: As in `prune_cache`, and so are all others.
        keep_last: See `keep_first`; 64 or so for texts that go on (docs/transformers.md).
        compact: See `keep_first`.
        guard: See `keep_first`.
        on_breach: See `keep_first`.
        promote: See `keep_first`.
        most_promoted: See `keep_first`.
        out_tol: See `keep_first`.
        source: See `keep_first`.
        threads: See `keep_first`.

    Raises:
        CertkError: As `capture` and `prune_cache`.
    """
    if type(window) is not int or window < 1:
        raise CertkError(f"window is {window!r}; pass a whole number >= 1")
    if isinstance(model, transformers.PreTrainedModel):
        for index, layer in enumerate(layers_of(model.config, 1, threads, None)):
            if type(layer) is not IndexedLayer:
                raise CertkError(
                    f"layer {index} of {type(model).__name__} has a cache of another kind, "
                    f"{type(layer).__name__}: pruned caches are for models of full attention alone"
                )
    seen = _Seen(window)
    observe(model, ids, seen)
    cache, queries = seen.whole()
    return prune_cache(
        cache,
        queries,
        eps,
        scale=seen.scale,
        causal=seen.causal,
        keep_first=keep_first,
        keep_last=keep_last,
        compact=compact,
        guard=guard,
        on_breach=on_breach,
        promote=promote,
        most_promoted=most_promoted,
        out_tol=out_tol,
        source=source,
        threads=threads,
    )


class _Seen:
    """Keeps keys, values and the last queries of each layer of a forward pass."""

    scale: float | None = None
    causal: bool = True

    def __init__(self, window: int) -> None:
        self._window = window
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def add(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Visibility,
        scale: float | None,
    ) -> None:
        """See `Observer`."""
        own = getattr(module, "layer_idx", None)
        layer = own if isinstance(own, int) else len(self._layers)
        if layer in self._layers:
            raise CertkError(
                f"layer {layer} attends twice: a pruned cache has one attention per layer; pass "
                "the decoder alone"
            )
        if query.shape[0] != 1:
            raise CertkError(f"ids: a batch of {query.shape[0]}; prune one sequence at a time")
        causal = causal_offset_of(layer, rows) is not None
        if self._layers and (scale, causal) != (self.scale, self.causal):
            raise CertkError(
                f"layer {layer} has (scale, causal) {(scale, causal)}, the layers before "
                f"{(self.scale, self.causal)}: a pruned cache has one for all"
            )
        self.scale, self.causal = scale, causal
        # A copy, which does not hold on to all the others.
        self._layers[layer] = (query[:, :, -self._window :].clone(), key, value)

    def whole(self) -> tuple[DynamicCache, list[torch.Tensor]]:
        """The cache of all layers, and the queries."""
        if sorted(self._layers) != list(range(len(self._layers))) or not self._layers:
            raise CertkError(
                f"the layers {sorted(self._layers)} have attention of transformers' "
                "AttentionInterface: a pruned cache needs it in all layers from 0 on"
            )
        cache, queries = DynamicCache(), []
        for layer in range(len(self._layers)):
            query, key, value = self._layers.pop(layer)
            cache.update(key, value, layer)
            queries.append(query)
        return cache, queries
