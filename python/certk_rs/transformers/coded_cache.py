"""A cache of codes, which answers any later query from memory, with a proof of what was lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from ..errors import CertkError
from ..guard import others
from .coded_layer import Beyond, CodedLayer
from .guarded import OnBreach, Rows
from .masked_layer import Watch


class CodedCache(Cache):  # type: ignore[misc]
    """Codes of all keys and values of a text, and exact rows of some or of none.

    Made by `encode_cache`, `prune_cache(rest="codes")`, or `from_cache` of an output of
    `certk prune --rest codes`. It grows as a `DynamicCache` does, by codes alone unless it recalls,
    and goes with certified attention (`use`), whose eps is what each call aims at; `Recorder` says
    what each has proven. Positions are those of the text.
    """

    def __init__(self, layers: list[CodedLayer]) -> None:
        """Take over layers; users call `encode_cache` or `prune_cache`."""
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes in memory: codes, what is known of them, exact rows, and a source in memory."""
        sources = {id(layer.source): layer.source for layer in self.layers}
        held: int = sum(getattr(source, "nbytes", 0) for source in sources.values())
        own: int = sum(layer.nbytes for layer in self.layers)
        return held + own

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the keys and values that it stands for."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    @property
    def kept_fraction(self) -> float:
        """Share of keys whose rows are kept exactly, over layers and heads."""
        kept: int = sum(layer.exact for layer in self.layers)
        keys: int = sum(math.prod(layer.keys.shape[:-1]) for layer in self.layers)
        return kept / max(1, keys)

    @property
    def recalled(self) -> int:
        """Exact keys that were read for calls of which codes proved too little."""
        return sum(layer.recalled for layer in self.layers)

    def __repr__(self) -> str:
        return (
            f"CodedCache({len(self.layers)} layers, {self.get_seq_length()} tokens, "
            f"{self.nbytes} bytes for {self.whole_nbytes})"
        )


def encode_cache(
    cache: Cache,
    *,
    key_bits: int | None = None,
    value_bits: int = 8,
    kept: Sequence[Sequence[NDArray[np.int64]]] | None = None,
    threads: int | None = None,
) -> CodedCache:
    """Encode the keys and values of a cache in memory; it is not changed, and may be let go.

    Args:
        cache: Layers of full attention with keys and values (batch, kv_heads, n, d) of float32,
            float16 or bfloat16; a `DynamicCache` or the like.
        key_bits: Bits of an entry of a key: 8, 12 or 16. 16 prove .01 for nearly every query, 12
            prove .05, at three quarters of the bytes (docs/transformers.md has what was measured).
            None: 16 for float32, else 12.
        value_bits: Bits of an entry of a value: 8, or 4 for long texts.
        kept: Of each layer, for each batch row and kv head, positions whose rows stay exact; None
            for none but those without a code.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: Bad input; the message names the layer.
    """
    return coded(cache, kept, "report", None, key_bits, value_bits, threads)


def coded(
    cache: Cache,
    kept: Sequence[Sequence[NDArray[np.int64]]] | None,
    on_breach: OnBreach,
    source: Rows | None,
    key_bits: int | None,
    value_bits: int,
    threads: int | None,
) -> CodedCache:
    """Encode as `encode_cache` does; `source` has the exact rows of the one sequence, if any."""
    if isinstance(cache, CodedCache) or not isinstance(cache, Cache) or not cache.layers:
        raise CertkError(f"cache is a {type(cache).__name__}; pass one that holds keys and values")
    if kept is not None and len(kept) != len(cache.layers):
        raise CertkError(f"kept has {len(kept)} entries for {len(cache.layers)} layers")
    layers, watch = [], Watch()
    for at, layer in enumerate(cache.layers):
        keys, values = whole_rows(layer, at)
        heads = keys.shape[0] * keys.shape[1]
        chosen = [np.empty(0, np.int64)] * heads if kept is None else list(kept[at])
        if len(chosen) != heads:
            raise CertkError(f"layer {at}: kept has {len(chosen)} lists for {heads} heads")
        how: dict[str, Any] = {"key_bits": key_bits, "value_bits": value_bits, "threads": threads}
        beyond = Beyond(at, on_breach, source)
        try:
            for each in chosen:
                others(np.asarray(each), keys.shape[2])
            layers.append(CodedLayer.encode(keys, values, chosen, watch, beyond, **how))
        except CertkError as error:
            raise CertkError(f"layer {at}: {error}") from None
    return CodedCache(layers)


def whole_rows(layer: Any, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all keys and values of a layer of full attention."""
    if hasattr(layer, "guarded"):
        raise CertkError(f"layer {at} of the cache is pruned: give the whole cache")
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        raise CertkError(f"layer {at} of the cache holds no keys; run the model first")
    n = int(layer.get_seq_length())
    if getattr(layer, "is_sliding", False) or n > keys.shape[-2]:
        raise CertkError(
            f"layer {at} of the cache has a sliding window: it cannot be pruned, since its keys "
            "would lose their positions"
        )
    return keys[:, :, :n], values[:, :, :n]
