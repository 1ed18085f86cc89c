"""A cache for long decoding: memory set aside ahead, and an index kept beside keys and values.

Each step appends its codes to the layer's `certk_rs.KvIndex`, so that certified attention reads few
keys and values and builds nothing anew. Keys and values themselves may be in files.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..errors import CertkError
from ..sparse_attention import Weights, need_weights
from .indexed_layer import IndexedLayer
from .layers_of_config import layers_of, state_bytes
from .session import read_session, write_session

# A step of more queries is one of prefill: it reads all keys.
_FEW = 16


class CertkCache(Cache):  # type: ignore[misc]
    """A cache that grows like a `DynamicCache`, with an index of each layer's keys and values.

    These carry it to certified attention, which then reads few of them in decoding (prefill is
    answered without). Any other attention implementation reads it as a plain cache.
    """

    def __init__(
        self,
        reserve: int = 1024,
        *,
        config: Any = None,
        weights: Weights = "codes",
        threads: int | None = None,
        offload: str | os.PathLike[str] | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            reserve: For how many tokens memory is set aside at first; it doubles when full.
            config: The model's `config`. Layers of full attention then have an index, all others
                (sliding windows, convolutions, recurrent states) are those of `DynamicCache` with
                this config. None: every layer is one of full attention, and windowed ones hold all
                keys of the text.
            weights: "codes" keeps codes of keys and values, so that weights may come from codes; of
                values without codes (float64, not finite) it keeps none. "exact" keeps codes of
                keys alone, for half the memory: a row then has exact weights, or few of them.
            threads: Number of threads that build and extend an index; None for all available.
            offload: A directory on a disk. Keys and values are then in files there, without names,
                and only their codes in memory. Results are the same, bit for bit.

        Raises:
            CertkError: A reserve below 1; other weights; no such directory; a system that maps no
                files so; no config, or one that this transformers has no cache for.
        """
        if type(reserve) is not int or reserve < 1:
            raise CertkError(f"reserve is {reserve!r}; pass a whole number >= 1")
        need_weights(weights)
        how = (reserve, threads, None if offload is None else _directory(offload), weights)
        made = None if config is None else layers_of(config, how)
        if made:
            super().__init__(layers=made)
        else:
            super().__init__(layer_class_to_replicate=partial(IndexedLayer, *how))
        # The layer whose keys a step of prefill has read, all of them.
        self._read: int | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write keys, values, indexes and balls to a safetensors file at exactly `path`.

        Written aside, then renamed over what was there: whoever is killed meanwhile leaves the old
        file. Caches that were loaded from it keep it, too.

        Raises:
            CertkError: Keys and values that cannot be side by side: of two dtypes; layers of other
                kinds than full attention; files of the cache that somebody has written to.
            OSError: The file cannot be written.
        """
        for index, layer in enumerate(self.layers):
            if type(layer) is not IndexedLayer:
                raise CertkError(
                    f"layer {index} is a {type(layer).__name__}: a session holds layers of full "
                    "attention alone; pickle this cache instead"
                )
        write_session(Path(path), self.layers)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        reserve: int = 1024,
        *,
        weights: Weights = "codes",
        threads: int | None = None,
        offload: str | os.PathLike[str] | None = None,
        check: bool = True,
    ) -> CertkCache:
        """Read what `save` wrote; nothing is built anew that is in the file.

        Args:
            path: The file.
            reserve: As for a new cache; so are weights and threads.
            weights: See `reserve`. Codes of values that the file lacks are made at the next step.
            threads: See `reserve`.
            offload: A directory. Keys and values are then mapped where they are, for as many caches
                as want them, and not written to; what a cache appends is in files there. The file
                may be replaced meanwhile, but not written to or cut off.
            check: Compare keys and values with their SHA-256, which reads all of them. Everything
                else always is.

        Raises:
            CertkError: The file is cut off, damaged or no saved cache.
            OSError: The file cannot be read.
        """
        cache = cls(reserve, weights=weights, threads=threads, offload=offload)
        cache.layers.extend(read_session(Path(path), cache.layer_class_to_replicate.args, check))
        return cache

    @property
    def index_bytes(self) -> int:
        """Bytes of all indices."""
        return sum(layer.index_bytes for layer in self._indexed())

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of all files that are this cache's own."""
        return sum(layer.offloaded_bytes for layer in self._indexed())

    @property
    def nbytes(self) -> int:
        """Bytes in memory: keys, values and states, room that is set aside ahead, and indices.

        Keys and values in files are not among them, whether the cache's own (`offloaded_bytes`) or
        a session's.
        """
        indexed = sum(layer.held_bytes + layer.index_bytes for layer in self._indexed())
        return indexed + sum(map(state_bytes, self.layers))

    @property
    def whole_nbytes(self) -> int:
        """Bytes of keys, values and states alone: what a `DynamicCache` of this text would hold."""
        pairs = [each for layer in self._indexed() for each in (layer.keys, layer.values)]
        own: int = sum(each.nbytes for each in pairs if each is not None)
        return own + sum(map(state_bytes, self.layers))

    def _indexed(self) -> list[IndexedLayer]:
        return [layer for layer in self.layers if isinstance(layer, IndexedLayer)]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer; one that was read before lets go of its pages."""
        if self._read is not None and self._read != layer_idx:
            self.layers[self._read].let_go()
        if self.layer_class_to_replicate is None and layer_idx >= len(self.layers):
            raise CertkError(
                f"layer {layer_idx} has keys, and the config of this cache {len(self.layers)} "
                "layers: make it with the config of this model"
            )
        found: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        read = key_states.shape[-2] > _FEW and isinstance(self.layers[layer_idx], IndexedLayer)
        self._read = layer_idx if read else None
        return found


def _asks_for_states(name: str) -> Any:
    """Make a method of `Cache` that only layers beside full attention know."""

    def method(self: CertkCache, *args: Any, **kwargs: Any) -> Any:
        if self.layer_class_to_replicate is not None:
            raise CertkError(
                f"the model keeps more than keys and values ({name}), for which this cache has no "
                "layers: make it by CertkCache(config=model.config)"
            )
        return getattr(Cache, name)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, getattr(Cache, name).__doc__
    return method


for _name in (
    *("has_previous_state", "get_conv_state", "update_conv_state"),
    *("get_recurrent_state", "update_recurrent_state", "update_indexer"),
):
    # Before transformers 5 there are none.
    if hasattr(Cache, _name):
        setattr(CertkCache, _name, _asks_for_states(_name))


def _directory(offload: str | os.PathLike[str]) -> Path:
    if os.name == "nt":
        raise CertkError("offload maps files as Linux and macOS do; leave it out on Windows")
    directory = Path(offload)
    if not directory.is_dir():
        raise CertkError(f"offload is {os.fspath(offload)!r}, which is no directory: make it first")
    return directory.absolute()
