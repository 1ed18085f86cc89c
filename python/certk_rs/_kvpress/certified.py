"""A press around another: what its choice has lost, proven."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvpress import (
    BasePress,
    DecodingPress,
    DMSPress,
    FastKVzipPress,
    KVComposePress,
    KVzipPress,
    PrefillDecodingPress,
)
from kvpress.presses.base_press import is_prefilling
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import DynamicLayer

from .. import _native
from .._arrays import coerce
from ..errors import CertkError
from .noting import Call, Notes, fingerprint, noting
from .press import CertkPress
from .pressed import PressedLayer

# They choose when the prompt is over, when its queries are gone.
_LATE = (KVzipPress, FastKVzipPress, KVComposePress)


@dataclass
class CertifiedPress(BasePress):  # type: ignore[misc]
    """Let another press do what it does, and prove what that loses.

    After a prompt `certificates` has, for every layer, what each of its last `window` queries has
    lost of its attention mass, at most: to the keys that the press has removed from the cache, or
    noted in `module.masked_key_indices`. It is about the queries and keys that attention was given,
    by the real scores of what is stored, rounding included. It holds for any press that chooses
    among keys, of whatever kind: which are left is found out by looking them up among copies that
    are made before the press runs. Of pairs with equal keys and values, as many as are left count,
    the last of them, since a query of the window sees only those before it.

    Args:
        press: A press of kvpress, or of this module.
        window: How many queries at the end of the prompt; all if there are fewer, or if None.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: A `CertkPress`, which has certificates of its own; a press that works while text
            is generated (DecodingPress and its kin, PrefillDecodingPress, DMSPress with
            `decoding`), which kvpress's pipeline would not find in here; one that drops keys when
            the prompt is over (KVzip and its kin, FastKVzip, KVCompose); also where another press
            holds one of these. While the model runs: a press that changes keys or values instead
            of choosing among them (merging, rotating again, channels set to 0), and what
            `CertkPress` refuses. On leaving: keys were dropped or changed since a layer was
            certified.
    """

    press: BasePress
    window: int | None = 64
    threads: int | None = None
    certificates: list[PressedLayer] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """One per layer of the last prompt; none after an error."""

    def __post_init__(self) -> None:
        if not isinstance(self.press, BasePress):
            raise CertkError(f"press is a {type(self.press).__name__}; pass a press of kvpress")
        for part in _parts(self.press):
            if (why := _not_certified(part)) is not None:
                where = "is" if part is self.press else f"is a {type(self.press).__name__} around"
                raise CertkError(f"press {where} a {type(part).__name__}, which {why}")
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
        """What any query of any layer and head has lost at most; NaN without certificates."""
        most = [each.tail_mass_upper.max(initial=0.0) for each in self.certificates]
        return float(max(most, default=math.nan))

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
            with noting(notes, self.window, copied=True), self.press(model):
                for module in notes.modules:
                    hooks.append(module.register_forward_hook(after, with_kwargs=True))
                yield
            # Behind the end of the press inside, which may drop something there, too.
            for each in seen:
                if each.changed():
                    raise CertkError(
                        f"layer {each.index}: {type(self.press).__name__} has dropped or changed "
                        "keys since they were certified: what is lost cannot be told"
                    )
        except BaseException:
            self.certificates = []
            raise
        finally:
            for hook in hooks:
                hook.remove()
            notes.noted.clear()

    def compress(self, *_: Any, **__: Any) -> Any:
        """Refuse; another press calls this, which may drop keys that are certified here."""
        raise CertkError(
            "a CertifiedPress goes around all other presses, as `with press(model):`, and not "
            "inside one"
        )

    def _certify(self, notes: Notes, module: nn.Module, cache: Any) -> None:
        index = notes.modules[module]
        call = notes.noted.get(module)
        call = notes.take(module, -1 if call is None else call.n)
        layers = getattr(cache, "layers", [])
        layer = layers[index] if index < len(layers) else None
        if type(layer) is not DynamicLayer:
            raise CertkError(
                f"layer {index}: the cache is a {type(layer or cache).__name__}; run the model "
                "with past_key_values=transformers.DynamicCache()"
            )
        kept = self._kept(f"layer {index}", call, layer, _shown(index, module, layer))
        upper = np.stack([_lost(call, b, kept[b], self.threads) for b in range(call.key.shape[0])])
        self.certificates.append(PressedLayer(index, call.n, kept.sum(axis=-1), upper))

    def _kept(
        self, place: str, call: Call, layer: Any, shown: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which keys (batch, kv_heads, n) are shown in the cache, by their bits and values'."""
        batch, kv_heads, n = call.key.shape[:3]
        kept = np.zeros((batch, kv_heads, n), np.bool_)
        for b in range(batch):
            for head in range(kv_heads):
                places: dict[bytes, list[int]] = {}
                for at, line in enumerate(_lines(call.key[b, head], call.value[b, head])):
                    places.setdefault(line, []).append(at)
                after = _lines(layer.keys[b, head], layer.values[b, head])
                for slot in np.flatnonzero(shown[b, head]):
                    if not places.get(line := after[slot]):
                        raise CertkError(
                            f"{place}: {type(self.press).__name__} does not only choose among keys "
                            "and values but changes them: what is lost cannot be certified"
                        )
                    # The last of equal pairs: a query before it may have lost its own copy.
                    kept[b, head, places[line].pop()] = True
        return kept


def _parts(press: BasePress) -> Iterator[BasePress]:
    """Yield a press and those that it holds."""
    yield press
    for held in vars(press).values():
        for each in held if isinstance(held, list | tuple) else (held,):
            if isinstance(each, BasePress):
                yield from _parts(each)


def _not_certified(press: BasePress) -> str | None:
    """Say what a press does that no certificate can be given for; None if nothing is known."""
    if isinstance(press, CertkPress):
        return "drops keys when all layers have run: see its own certificates"
    decoding = isinstance(press, DMSPress) and press.decoding
    if decoding or isinstance(press, DecodingPress | PrefillDecodingPress):
        return (
            "drops keys while text is generated, where kvpress's pipeline would not run it in a "
            "CertifiedPress: pass the press for the prompt alone"
        )
    if isinstance(press, _LATE):
        return "drops keys when the prompt is over: what is lost cannot be told"
    return None


def _shown(index: int, module: nn.Module, layer: Any) -> NDArray[np.bool_]:
    """Which slots of the cache (batch, kv_heads, slots) `masked_key_indices` leaves visible."""
    shown = np.ones(layer.keys.shape[:3], np.bool_)
    masked: Any = getattr(module, "masked_key_indices", None)
    if masked is None:
        return shown
    try:
        # Slots of the cache as it is now, from which keys may have been removed before.
        shown[tuple(each.cpu().numpy() for each in masked)] = False
    except IndexError as error:
        raise CertkError(
            f"layer {index}: masked_key_indices does not go with the {shown.shape[2]} keys that "
            f"are left in the cache ({error}): put the press that masks keys last"
        ) from None
    return shown


class _Seen:
    """What the cache of a layer was when it was certified."""

    def __init__(self, module: nn.Module, cache: Any, index: int) -> None:
        self.index = index
        self._module, self._cache = module, cache
        self._length = int(cache.layers[index].keys.shape[2])
        self._masks, self._before = self._masked(), self._stored()

    def changed(self) -> bool:
        """Whether it is another now; what was appended since does not count."""
        return self._masked() != self._masks or self._stored() != self._before

    def _masked(self) -> bytes:
        return fingerprint(*(getattr(self._module, "masked_key_indices", None) or ()))

    def _stored(self) -> tuple[Any, bytes]:
        layer = self._cache.layers[self.index]
        masked = getattr(self._module, "masked_key_indices", None)
        parts = []
        for each in (layer.keys, layer.values):
            part = each[:, :, : self._length].detach()
            if masked is not None:
                # kvpress writes over them.
                part = part.clone()
                part[tuple(masked)] = 0
            parts.append(part)
        return type(layer), fingerprint(*parts)


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
