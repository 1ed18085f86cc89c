"""A press for kvpress that drops only what it can prove to be small.

`CertkPress` runs wherever a press of kvpress does: around a prefill, or in the pipeline
"kv-press-text-generation", beside SnapKV, Knorm and the others. Those are told how many keys to
keep; this one is told how much attention mass may be lost, and how many keys that takes is found
out. See docs/kvpress.md.

Importing this needs kvpress (0.5.5), which needs transformers before 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CertkError, pip_install
from .keepset import keep_set

try:
    import torch
    from kvpress import BasePress
    from kvpress.presses.base_press import SUPPORTED_MODELS, is_prefilling
    from torch import nn
    from transformers import Gemma3ForConditionalGeneration
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ModuleNotFoundError as error:
    if error.name not in ("torch", "kvpress", "transformers"):
        raise
    raise ImportError(
        f"certk_rs.kvpress needs {error.name}, which is not installed: {pip_install('kvpress')}",
        name=error.name,
    ) from error

from .transformers.attention import unsupported
from .transformers.masked_layer import MaskedLayer, Watch, masking
from .transformers.masks import visibility_of
from .transformers.per_head import pad_with_latest, select_per_head
from .transformers.presses import NAME

__all__ = ["CertkPress", "PressedLayer"]

# What `_note` looks at itself, and what only adds an output.
_UNDERSTOOD = {"dropout", "scaling", "is_causal", "sliding_window", "output_attentions"}


@dataclass(frozen=True, eq=False)
class PressedLayer:
    """What is proven of one layer after a prompt."""

    layer: int
    n: int
    """Keys before."""
    kept: NDArray[np.int64]
    """(batch, kv_heads): how many keys each kv head needs, before `compact` fills any up."""
    tail_mass_upper: NDArray[np.float64]
    """(batch, heads, m): what each of the last m queries loses at most; less if filled up."""


@dataclass
class CertkPress(BasePress):  # type: ignore[misc]
    """Keep, per kv head, the keys that the last queries of the prompt need.

    For each kv head a small set is chosen such that every one of the last `window` queries, in
    every query head of the group, loses at most eps of its causal attention mass in that layer.
    This is proven, rounding included, of the queries and keys that attention was given in this
    forward pass: they are noted on their way there, not computed again. Nothing is promised of
    queries still to come, which are not known; the window stands in for them, as in SnapKV.

    kv heads keep different numbers of keys. What becomes of that:

    - `compact=False` leaves all keys in the cache, where each kv head has a mask of those it keeps,
      which attention obeys exactly: decoding is that over the kept keys, and appended ones. No
      memory is freed. (AdaKVPress does this by `module.masked_key_indices`, for which kvpress
      overwrites keys by a fake one that all queries of the call should dislike enough. That is not
      used here, since with several queries there need not be such a key, which is a ValueError.)
    - `compact=True` removes keys. A model makes one mask for all layers, so that all layers and
      heads must keep equally many: as many as the neediest, the others filled up with their latest
      dropped keys (which can only lower what is lost), as `prune_cache` does. They are removed
      after the last layer has run. The cache is then shorter than the text, so that positions must
      be given to the model, as kvpress's pipeline does.

    Args:
        eps: Budget of dropped mass, 0 <= eps < 1.
        window: How many queries at the end of the prompt to certify for, at least 1; all if there
            are fewer, or if None. More mean more keys, time and memory (8 bytes per query, key and
            head of a group).
        keep_first: Positions at the start that are always kept.
        keep_last: Positions at the end that are always kept.
        compact: See above.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: Bad arguments. While the model runs: padding or packed sequences, sliding
            windows, biases on the scores, float64, another device than the CPU, caches other than
            a `DynamicCache`, eager attention, use inside another press.
    """

    eps: float
    window: int | None = 64
    keep_first: int = 0
    keep_last: int = 0
    compact: bool = False
    threads: int | None = None
    certificates: list[PressedLayer] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """One per layer of the last prompt."""
    _run: _Run | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("eps", "window", "keep_first", "keep_last"):
            value: Any = getattr(self, name)
            kind = Real if name == "eps" else int
            if value is None and name == "window":
                continue
            if isinstance(value, bool) or not isinstance(value, kind):
                raise CertkError(f"{name} is {value!r}; pass one number")
        if self.window is not None and self.window < 1:
            raise CertkError(
                f"window is {self.window}; pass a number >= 1, or None for all queries"
            )
        # What the selection would refuse in the first layer is refused at once.
        first, last, threads = self.keep_first, self.keep_last, self.threads
        keep_set(np.zeros((1, 1)), self.eps, keep_first=first, keep_last=last, threads=threads)

    @property
    def compression_ratio(self) -> float:
        """Share of the keys that the last prompt's cache lost, over layers and heads.

        With `compact`, what was filled up is not lost. NaN before a prompt has run through all
        layers. It cannot be set, since eps decides.
        """
        run = self._run
        return math.nan if run is None or run.kept is None else 1 - run.kept

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        raise CertkError(
            f"compression_ratio = {value!r}: eps decides how many keys a CertkPress keeps, and "
            "compression_ratio tells; set eps"
        )

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Certify and drop after each prefill of `model` inside; hooks are removed on leaving.

        Raises:
            CertkError: A model whose layers kvpress would not find, or this press already at work.
        """
        if self._run is not None and self._run.active:
            raise CertkError("this CertkPress is at work already; make another")
        run = _Run(_attention_modules(model))
        if self.compact and len(run.modules) < run.layers:
            raise CertkError(
                f"compact=True: kvpress leaves {run.layers - len(run.modules)} layers of "
                f"{type(model).__name__} alone, which would stay longer than the others; leave "
                "compact out"
            )
        first: Any = next(iter(run.modules))
        name = first.config._attn_implementation
        self.certificates = []
        self._run = run
        run.active = True
        try:
            with _noting(name, run, self.window), super().__call__(model):
                yield
        finally:
            run.active = False
            run.noted.clear()
            run.chosen.clear()

    def forward_hook(
        self, module: nn.Module, input: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Do as every press, then, once all layers have run, finish; called by torch."""
        run = self._running(module)
        if not is_prefilling(kwargs["cache_position"], kwargs["hidden_states"].shape[1]):
            return output
        cache = kwargs.get("past_key_values")
        layer: Any = module.layer_idx
        layers = getattr(cache, "layers", [])
        if layer >= len(layers) or type(layers[layer]) is not DynamicLayer:
            kind = type(layers[layer] if layer < len(layers) else cache).__name__
            raise CertkError(
                f"layer {layer}: the cache is a {kind}; run the model with "
                "past_key_values=transformers.DynamicCache()"
            )
        output = super().forward_hook(module, input, kwargs, output)
        if len(run.chosen) == len(run.modules) and run.kept is None:
            self._finish(run, layers)
        return output

    def compress(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the sets of one layer; called by kvpress with keys (batch, kv_heads, n, d).

        Returns:
            Keys and values as they came: what is dropped is masked, or removed at the end.
        """
        run = self._running(module)
        index: int = run.modules[module]
        if index == min(run.modules.values()):
            self.certificates = []
            run.chosen.clear()
            run.kept = None
        call = run.noted.pop(module, None)
        if call is None or call.n != keys.shape[2]:
            raise CertkError(
                f"layer {index}: its attention was not seen: eager attention and static caches "
                "pass it by; use attn_implementation='sdpa' and a DynamicCache"
            )
        batch, n = keys.shape[0], keys.shape[2]
        chosen, upper = [], []
        for b in range(batch):
            sets, masses = select_per_head(
                f"layer {index}" if batch == 1 else f"layer {index}, sequence {b}",
                call.query[b],
                keys[b].detach(),
                self.eps,
                scale=call.scale,
                causal=True,
                keep_first=self.keep_first,
                keep_last=self.keep_last,
                threads=self.threads,
            )
            chosen.append(sets)
            upper.append(masses)
        counts = np.array([[len(each) for each in sets] for sets in chosen], dtype=np.int64)
        run.chosen[index] = chosen
        self.certificates.append(PressedLayer(index, n, counts, np.stack(upper)))
        return keys, values

    def _running(self, module: nn.Module) -> _Run:
        run = self._run
        if run is None or not run.active or module not in run.modules:
            raise CertkError(
                "a CertkPress works on its own, as `with press(model):`, and not inside another "
                "press, which might drop or change keys that it has certified"
            )
        return run

    def _finish(self, run: _Run, layers: Any) -> None:
        """After the last layer: remove what is dropped if so asked, and say how much is left."""
        counts = [certificate.kept for certificate in self.certificates]
        n = self.certificates[0].n
        if self.compact:
            most = max(int(each.max()) for each in counts)
            for index, chosen in run.chosen.items():
                _remove(layers[index], chosen, most)
            run.kept = most / n
            return
        watch = Watch()
        for index, chosen in run.chosen.items():
            layer = layers[index]
            layers[index] = MaskedLayer(layer.keys, layer.values, _dropped(chosen, n), index, watch)
        run.kept = float(np.mean(counts) / n)


@dataclass(eq=False)
class _Call:
    """What one attention module was given in prefill."""

    query: torch.Tensor
    """(batch, heads, m, d): the last m queries."""
    n: int
    scale: float | None


class _Run:
    """One time that a press is around a model."""

    def __init__(self, modules: tuple[dict[nn.Module, int], int]) -> None:
        self.modules, self.layers = modules
        self.active = False
        self.noted: dict[nn.Module, _Call] = {}
        self.chosen: dict[int, list[list[NDArray[np.int64]]]] = {}
        """For each layer, sequence and kv head the kept positions."""
        self.kept: float | None = None
        """Share of the keys that are left, when all layers have run."""


def _attention_modules(model: Any) -> tuple[dict[nn.Module, int], int]:
    """The attention modules that kvpress will hook, with their numbers, and how many there are."""
    inner = getattr(model, "model", None)
    language = getattr(inner, "language_model", inner)
    layers = list(getattr(language, "layers", None) or [])
    if not layers or not all(hasattr(each, "self_attn") for each in layers):
        raise CertkError(
            f"kvpress does not know where {type(model).__name__} has its layers: pass a decoder "
            f"like {', '.join(kind.__name__ for kind in SUPPORTED_MODELS)}"
        )
    found = [each.self_attn for each in layers]
    if isinstance(model, Gemma3ForConditionalGeneration):
        found = [each for each in found if not each.is_sliding]
    return {each: each.layer_idx for each in found}, len(layers)


@contextmanager
def _noting(name: str, run: _Run, window: int | None) -> Iterator[None]:
    """Note the queries on their way to attention, whose function is put back on leaving."""
    if (before := ALL_ATTENTION_FUNCTIONS.get(name)) is None:
        raise CertkError(
            f"attn_implementation={name!r} passes transformers' AttentionInterface by, so that "
            "queries cannot be noted: model.set_attn_implementation('sdpa')"
        )

    def noting(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kwargs |= dict(zip(("dropout", "scaling", "is_causal"), args, strict=False))
        if module in run.modules and query.shape[2] == key.shape[2]:
            place = f"layer {run.modules[module]}"
            run.noted[module] = _note(place, module, query, key, attention_mask, window, kwargs)
        return before(module, query, key, value, attention_mask, **kwargs)

    # What hides dropped keys stays, since the cache is used after the press; certified attention
    # does it by itself.
    if name != NAME and not hasattr(before, "certk_masks"):
        before = ALL_ATTENTION_FUNCTIONS[name] = masking(before)
    ALL_ATTENTION_FUNCTIONS[name] = noting
    try:
        yield
    finally:
        # What was registered for all stays visible, rather than hidden by a copy of it.
        del ALL_ATTENTION_FUNCTIONS[name]
        if ALL_ATTENTION_FUNCTIONS.get(name) is not before:
            ALL_ATTENTION_FUNCTIONS[name] = before


def _note(
    place: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
    kwargs: dict[str, Any],
) -> _Call:
    """The call, if it is plain causal attention."""
    if key.device.type != "cpu":
        raise CertkError(f"{place} is on device {key.device}; move the model to the CPU")
    told = {name: value for name, value in kwargs.items() if name not in _UNDERSTOOD}
    if kwargs.get("dropout"):
        raise CertkError(f"{place} drops attention weights at random: call model.eval()")
    if (other := unsupported(told)) is not None:
        raise CertkError(
            f"{place} asks for {other[0]}, {other[1]}: no certificate can be given for this model"
        )
    sliding: Any = kwargs.get("sliding_window")
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", math.inf)
    if sliding is not None and sliding < longest:
        raise CertkError(
            f"{place} has a sliding window of {sliding}: keys that are dropped would be counted by "
            "it, or be needed no more; CertkPress is for full attention"
        )
    n = key.shape[2]
    m = n if window is None else min(window, n)
    shape = (query.shape[0], query.shape[1], m, n)
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if mask is None:
        plain = bool(causal) or n == 1
    else:
        rows = visibility_of(mask[..., -m:, :], False, shape)
        ends = np.arange(n - m + 1, n + 1)
        plain = rows.mask is None and not rows.starts.any() and bool((rows.ends == ends).all())
    if not plain:
        raise CertkError(
            f"{place}: a query sees other keys than all up to its own (padding, packed sequences): "
            "run sequences of one length, without padding"
        )
    scale = kwargs.get("scaling")
    return _Call(query[:, :, n - m :].detach(), n, None if scale is None else float(scale))


def _dropped(chosen: list[list[NDArray[np.int64]]], n: int) -> torch.Tensor:
    """True for the keys (batch, kv_heads, n) that are not kept."""
    gone = torch.ones(len(chosen), len(chosen[0]), n, dtype=torch.bool)
    for b, sets in enumerate(chosen):
        for g, indices in enumerate(sets):
            gone[b, g, torch.from_numpy(indices)] = False
    return gone


def _remove(layer: Any, chosen: list[list[NDArray[np.int64]]], most: int) -> None:
    """Leave each kv head the keys it needs and its latest others, `most` in all."""
    n = layer.keys.shape[2]
    rows = np.stack(
        [np.stack([pad_with_latest(each, most, n) for each in sets]) for sets in chosen]
    )
    at = torch.from_numpy(rows)[..., None]
    layer.keys = layer.keys.gather(2, at.expand(-1, -1, -1, layer.keys.shape[-1]))
    layer.values = layer.values.gather(2, at.expand(-1, -1, -1, layer.values.shape[-1]))
