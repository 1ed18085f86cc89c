"""A press around another: what its choice has lost, proven."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvpress import BasePress
from kvpress.presses.base_press import is_prefilling
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import DynamicLayer

from .. import _native
from .._arrays import coerce
from ..errors import CertkError
from ..transformers.masked_layer import MaskedLayer
from .noting import Call, Notes, noting
from .press import CertkPress
from .pressed import PressedLayer


@dataclass
class CertifiedPress(BasePress):  # type: ignore[misc]
    """Let another press do what it does, and prove what that loses.

    After a prompt `certificates` has, for every layer, what each of its last `window` queries has
    lost of its attention mass, at most: to the keys that the press has removed from the cache, or
    noted in `module.masked_key_indices`. It is about the queries and keys that attention was given,
    by the real scores of what is stored, rounding included. It holds for any press that chooses
    among keys, of whatever kind: which are left is found out by looking them up.

    Args:
        press: A press of kvpress, or of this module.
        window: How many queries at the end of the prompt; all if there are fewer, or if None.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: A `CertkPress`, which has certificates of its own. While the model runs: a press
            that changes keys or values instead of choosing among them (merging, rotating again,
            quantising), and what `CertkPress` refuses. On leaving: the press has dropped more
            since a layer was certified (KVzip, or DecodingPress while text is generated).
    """

    press: BasePress
    window: int | None = 64
    threads: int | None = None
    certificates: list[PressedLayer] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """One per layer of the last prompt."""

    def __post_init__(self) -> None:
        if not isinstance(self.press, BasePress):
            raise CertkError(f"press is a {type(self.press).__name__}; pass a press of kvpress")
        if isinstance(self.press, CertkPress):
            raise CertkError(
                "press is a CertkPress, which drops keys when all layers have run: see its own "
                "certificates"
            )
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise CertkError(
                f"window is {self.window!r}; pass a number >= 1, or None for all queries"
            )

    @property
    def compression_ratio(self) -> float:
        """That of the press inside."""
        return self.press.compression_ratio  # type: ignore[no-any-return]

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        self.press.compression_ratio = value

    @property
    def worst(self) -> float:
        """What any query of any layer and head has lost at most; 0 before a prompt."""
        most = [each.tail_mass_upper.max(initial=0.0) for each in self.certificates]
        return float(max(most, default=0.0))

    def post_init_from_model(self, model: Any) -> None:
        """As the press inside does."""
        self.press.post_init_from_model(model)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Run the press inside, and certify after each prefill; hooks are removed on leaving."""
        notes = Notes(model)
        self.certificates = []
        seen: list[_Seen] = []

        def after(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> None:
            if is_prefilling(kwargs["cache_position"], kwargs["hidden_states"].shape[1]):
                cache = kwargs.get("past_key_values")
                if notes.modules[module] == min(notes.modules.values()):
                    self.certificates = []
                    seen.clear()
                self._certify(notes, module, cache)
                seen.append(_Seen(module, cache, notes.modules[module]))

        hooks = []
        try:
            # Behind those of the press, which therefore come first.
            with noting(notes, self.window), self.press(model):
                for module in notes.modules:
                    hooks.append(module.register_forward_hook(after, with_kwargs=True))
                yield
            # Behind the end of the press inside, which may drop something there, too.
            for each in seen:
                if each.changed():
                    self.certificates = []
                    raise CertkError(
                        f"layer {each.index}: {type(self.press).__name__} has dropped or changed "
                        "keys since they were certified: what is lost cannot be told"
                    )
        finally:
            for hook in hooks:
                hook.remove()
            notes.noted.clear()

    def _certify(self, notes: Notes, module: nn.Module, cache: Any) -> None:
        index = notes.modules[module]
        call = notes.noted.get(module)
        call = notes.take(module, -1 if call is None else call.n)
        layers = getattr(cache, "layers", [])
        layer = layers[index] if index < len(layers) else None
        if type(layer) not in (DynamicLayer, MaskedLayer):
            raise CertkError(
                f"layer {index}: the cache is a {type(layer or cache).__name__}; run the model "
                "with past_key_values=transformers.DynamicCache()"
            )
        kept = self._kept(f"layer {index}", call, layer)
        masked = getattr(module, "masked_key_indices", None)
        if masked is not None:
            kept[tuple(each.cpu().numpy() for each in masked)] = False
        upper = np.stack([_lost(call, b, kept[b], self.threads) for b in range(call.key.shape[0])])
        self.certificates.append(PressedLayer(index, call.n, kept.sum(axis=-1), upper))

    def _kept(self, place: str, call: Call, layer: Any) -> NDArray[np.bool_]:
        """Which keys (batch, kv_heads, n) are in the cache, by their bits and their values'."""
        batch, kv_heads, n = call.key.shape[:3]
        kept = np.zeros((batch, kv_heads, n), np.bool_)
        for b in range(batch):
            for head in range(kv_heads):
                before = _lines(call.key[b, head], call.value[b, head])
                places: dict[bytes, list[int]] = {}
                for at, line in enumerate(before):
                    places.setdefault(line, []).append(at)
                # Equal pairs are one as well as the other: the first of them.
                for line in _lines(layer.keys[b, head], layer.values[b, head]):
                    if not places.get(line):
                        raise CertkError(
                            f"{place}: {type(self.press).__name__} does not only choose among keys "
                            "and values but changes them: what is lost cannot be certified"
                        )
                    kept[b, head, places[line].pop(0)] = True
        return kept


class _Seen:
    """What the cache of a layer was when it was certified."""

    def __init__(self, module: nn.Module, cache: Any, index: int) -> None:
        self.index = index
        self._module, self._cache = module, cache
        self._length = int(cache.layers[index].keys.shape[2])
        self._before = self._now()

    def _now(self) -> tuple[Any, ...]:
        layer = self._cache.layers[self.index]
        masked = getattr(self._module, "masked_key_indices", None)
        digest = hashlib.sha256()
        for each in (layer.keys, layer.values):
            part = each[:, :, : self._length].detach().cpu().clone()
            if masked is not None:
                # kvpress writes over them.
                part[tuple(each.cpu() for each in masked)] = 0
            digest.update(part.view(torch.uint8).numpy().data)
        for places in masked or ():
            digest.update(places.cpu().numpy().tobytes())
        return type(layer), digest.digest()

    def changed(self) -> bool:
        """Whether it is another now; what was appended since does not count."""
        return self._now() != self._before


def _lines(keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
    """Each key with its value, as bytes."""
    both = [each.detach().cpu().contiguous().view(torch.uint8).numpy() for each in (keys, values)]
    return [line.tobytes() for line in np.concatenate(both, axis=1)]


def _lost(call: Call, b: int, kept: NDArray[np.bool_], threads: int | None) -> NDArray[np.float64]:
    """What each query (heads, m) of a sequence loses at most with `kept` (kv_heads, n) only."""
    query, key = call.query[b], call.key[b]
    heads, m, d = query.shape
    size, n = heads // key.shape[0], key.shape[1]
    scale = _native.nearest_rsqrt(d) if call.scale is None else call.scale
    upper = []
    for head, given in enumerate(kept):
        found = _native.keep_set_of_queries(
            [
                (
                    coerce.as_native_floats("q", query[head * size : (head + 1) * size]),
                    coerce.as_native_floats("k", key[head : head + 1]),
                    float(scale),
                )
            ],
            0.0,
            None,
            given,
            0.0,
            16,
            n - m,
            None,
            0,
            0,
            1,
            threads,
        )
        upper.append(found.tail_mass_upper.reshape(size, m))
    return np.concatenate(upper)
