"""The layers of a cache as a model's config wants them: those of full attention with an index.

Sliding windows, convolutions, recurrent states and layers without a cache are as the `DynamicCache`
of transformers makes them. Some layers have a recurrent state beside keys and values; these get an
index, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import DynamicLayer

from ..errors import CertkError
from ..sparse_attention import Weights
from .indexed_layer import IndexedLayer

# Before transformers 5 models of other layers than attention have caches of their own.
_LINEAR: Any = getattr(cache_utils, "LinearAttentionLayer", None)
_BOTH: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
# What its DynamicCache then knows; every other type would get keys and values that grow.
_KNOWN = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


How = tuple[int, int | None, Path | None, Weights]
"""Arguments of an `IndexedLayer`."""


def layers_of(config: Any, how: How) -> list[Any]:
    """Return the layers of a config, in order.

    Raises:
        CertkError: No config, or one whose layers this transformers has no cache for.
    """
    if not hasattr(config, "get_text_config"):
        raise CertkError(f"config is a {type(config).__name__}; pass model.config")
    text = config.get_text_config(decoder=True)
    unknown = set(getattr(text, "layer_types", None) or ()) - _KNOWN
    if unknown and _LINEAR is None:
        raise CertkError(
            f"config has layers of {', '.join(sorted(unknown))}: transformers "
            f"{transformers.__version__} has a cache for them in the model alone; install 5 or "
            "newer"
        )
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, ValueError, AttributeError) as error:
        raise CertkError(
            f"transformers {transformers.__version__} makes no cache of this "
            f"{type(config).__name__}: {error!r}"
        ) from error

    def ours(layer: Any) -> Any:
        if type(layer) is DynamicLayer:
            return IndexedLayer(*how)
        if _BOTH is not None and type(layer) is _BOTH:
            return IndexedHybridLayer(layer.number_of_states, how)
        return layer

    return [ours(layer) for layer in layers]


def state_bytes(layer: Any) -> int:
    """Bytes of a layer's tensors, but for the keys and values of a layer with an index."""
    own = ("keys", "values", "_shown") if isinstance(layer, IndexedLayer) else ()
    found = 0
    for name, value in vars(layer).items():
        each = value.values() if isinstance(value, dict) else (value,)
        if name not in own:
            found += sum(part.nbytes for part in each if isinstance(part, torch.Tensor))
    return found


if _LINEAR is not None:

    class IndexedHybridLayer(_LINEAR, IndexedLayer):  # type: ignore[misc]
        """Keys and values with an index, beside the states of a convolution and a recurrence."""

        # Keys and values grow.
        is_compileable = False

        def __init__(self, states: int, how: How) -> None:
            IndexedLayer.__init__(self, *how)
            _LINEAR.__init__(self, number_of_states=states)

        def reset(self) -> None:
            """Forget all."""
            _LINEAR.reset(self)
            IndexedLayer.reset(self)

        def reorder_cache(self, beam_idx: Any) -> None:
            """Give each entry of the batch the states and rows of another one."""
            _LINEAR.reorder_cache(self, beam_idx)
            IndexedLayer.reorder_cache(self, beam_idx)

        def crop(self, tokens_to_remove: int) -> None:
            """Take the last tokens away, given as a negative number."""
            _LINEAR.crop(self, tokens_to_remove)
            IndexedLayer.crop(self, tokens_to_remove)
