"""Presses for kvpress: certified pruning, and certificates of what other presses drop.

`CertkPress` keeps the keys that a budget of attention mass needs, or, given a `compression_ratio`,
those that lose least at that size. `CertkScorerPress` scores keys for the presses of kvpress that
hold another press (AdaKV, Chunk, Decoding). `CertifiedPress` goes around any press and proves what
its choice has lost. See docs/kvpress.md.

Certificates speak of the queries and keys that attention was given. Both are noted on their way
there: queries that are computed again would be rounded otherwise.

Importing this needs kvpress (0.5.5), which needs transformers before 5.3.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from .errors import CertkError
from .errors import pip_install as _pip_install

try:
    import kvpress
    import torch
    from kvpress.presses.base_press import SUPPORTED_MODELS, is_prefilling
    from kvpress.utils import compute_n_kept, get_prerope_query_states
    from torch import nn
    from transformers import Gemma3ForConditionalGeneration
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import rotate_half
except ModuleNotFoundError as _error:
    if _error.name not in ("torch", "kvpress", "transformers"):
        raise
    raise ImportError(
        f"certk_rs.kvpress needs {_error.name}, which is not installed: {_pip_install('kvpress')}",
        name=_error.name,
    ) from _error

from . import _native
from ._arrays import coerce
from .guard import Guard
from .hot_keys import Demand, Rows
from .keepset import keep_set
from .transformers.attention import unsupported
from .transformers.caches import RowsOfCache, ShortenedLayer
from .transformers.guarded import GuardedLayer, Losses, LostCall, Manner, OnBreach
from .transformers.masked_layer import MaskedLayer, Watch, masking
from .transformers.masks import visibility_of
from .transformers.per_head import pad_with_latest, select_per_head
from .transformers.presses import NAME

__all__ = ["CertifiedPress", "CertkPress", "CertkScorerPress", "PressedLayer"]

# Budgets that are tried for a size, and how often the gap between two of them is halved.
_TRIED = (0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4, 1e-6, 1e-9)
_HALVED = 6
# A budget that only whole sets meet: the search then looks for the least loss at a size.
_NONE = 1e-300
# Arguments of attention that `_Prompt` checks itself, or that only add an output.
_UNDERSTOOD = {"dropout", "scaling", "is_causal", "sliding_window", "output_attentions"}
# These choose when the prompt is over, when its queries are gone.
_LATE = (kvpress.KVzipPress, kvpress.FastKVzipPress, kvpress.KVComposePress)


@dataclass(frozen=True, eq=False)
class PressedLayer:
    """Proven losses of one layer after a prompt."""

    layer: int
    n: int
    """Keys before."""
    kept: NDArray[np.int64]
    """(batch, kv_heads): the keys that each kv head keeps. A `CertkPress` counts those that it
    needs, before `compact` adds any."""
    tail_mass_upper: NDArray[np.float64]
    """(batch, heads, m): the most that each of the last m queries loses. Keys that `compact` adds
    can only lower it."""


_Sets = Sequence[Sequence[NDArray[np.int64]]]
"""The kept positions of each sequence and kv head."""
_Chosen = tuple[_Sets, PressedLayer]


# ------------------------------------------------------------------------ calls of a prompt


@dataclass(eq=False)
class _Call:
    """The arguments of one attention call of a prompt."""

    layer: int
    first: bool
    """True in the first layer of a prompt that is noted."""
    query: torch.Tensor
    """(batch, heads, m, d): the last m queries."""
    key: torch.Tensor
    """(batch, kv_heads, n, d): the cache's own tensor, or a copy if so asked."""
    value: torch.Tensor
    scale: float | None
    stored: bytes
    """The `_fingerprint` of key and value; empty if they are copies."""

    @property
    def n(self) -> int:
        """Keys of the prompt."""
        return int(self.key.shape[2])


def _fingerprint(*tensors: torch.Tensor) -> bytes:
    """Return a digest of the bits of tensors."""
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


class _Prompt:
    """The attention modules of a model, and the calls of its prompt that nobody has taken yet."""

    def __init__(self, model: Any, window: int | None, *, copied: bool) -> None:
        """Find the modules that kvpress hooks.

        Keys and values belong to the cache, where a press may write over them (ThinKPress does)
        before they are looked at. They are copied, or else their fingerprint is noted.
        """
        inner = getattr(model, "model", None)
        layers = list(getattr(getattr(inner, "language_model", inner), "layers", None) or [])
        if not layers or not all(hasattr(each, "self_attn") for each in layers):
            raise CertkError(
                f"kvpress does not know where {type(model).__name__} has its layers: pass a "
                f"decoder like {', '.join(kind.__name__ for kind in SUPPORTED_MODELS)}"
            )
        found = [each.self_attn for each in layers]
        if isinstance(model, Gemma3ForConditionalGeneration):
            found = [each for each in found if not each.is_sliding]
        self.layers = len(layers)
        self.modules: dict[nn.Module, int] = {each: each.layer_idx for each in found}
        self.implementation = str(found[0].config._attn_implementation)
        self._window, self._copied = window, copied
        self._calls: dict[nn.Module, _Call] = {}

    @contextmanager
    def watched(
        self, after: Callable[[_Call, Any], None], inside: AbstractContextManager[None]
    ) -> Iterator[None]:
        """Hand each call of a prompt to `after`, with the cache, behind the hooks of `inside`."""

        def hook(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> None:
            if is_prefilling(kwargs["cache_position"], kwargs["hidden_states"].shape[1]):
                cache = kwargs.get("past_key_values")
                after(self._taken(module, cache), cache)

        hooks: list[Any] = []
        try:
            with self._noted(), inside:
                for module in self.modules:
                    hooks.append(module.register_forward_hook(hook, with_kwargs=True))
                yield
        finally:
            for each in hooks:
                each.remove()
            self._calls.clear()

    def _taken(self, module: Any, cache: Any) -> _Call:
        """Return the call of a module, which is forgotten."""
        index = self.modules[module]
        layers = getattr(cache, "layers", [])
        layer = layers[index] if index < len(layers) else None
        if type(layer) is not DynamicLayer:
            raise CertkError(
                f"layer {index}: the cache is a {type(layer or cache).__name__}; run the model "
                "with past_key_values=transformers.DynamicCache()"
            )
        if (call := self._calls.pop(module, None)) is None:
            raise CertkError(
                f"layer {index}: its attention was not seen: eager attention and static caches "
                "pass it by; use attn_implementation='sdpa' and a DynamicCache"
            )
        return call

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note calls on their way to the attention function, which is put back on leaving."""
        name = self.implementation
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
            mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            kwargs |= dict(zip(("dropout", "scaling", "is_causal"), args, strict=False))
            if module in self.modules and query.shape[2] == key.shape[2]:
                self._calls[module] = self._call(module, query, key, value, mask, kwargs)
            return before(module, query, key, value, mask, **kwargs)

        # The wrapper that hides dropped keys stays, since the cache is used after the press.
        # Certified attention hides them by itself.
        if name != NAME and not hasattr(before, "certk_masks"):
            before = ALL_ATTENTION_FUNCTIONS[name] = masking(before)
        ALL_ATTENTION_FUNCTIONS[name] = noting
        try:
            yield
        finally:
            # A function that was registered for all stays visible, not hidden by a copy of it.
            del ALL_ATTENTION_FUNCTIONS[name]
            if ALL_ATTENTION_FUNCTIONS.get(name) is not before:
                ALL_ATTENTION_FUNCTIONS[name] = before

    def _call(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> _Call:
        """Note one call; refuse any but plain causal attention."""
        place = f"layer {self.modules[module]}"
        if key.device.type != "cpu":
            raise CertkError(f"{place} is on device {key.device}; move the model to the CPU")
        if kwargs.get("dropout"):
            raise CertkError(f"{place} drops attention weights at random: call model.eval()")
        told = {name: value for name, value in kwargs.items() if name not in _UNDERSTOOD}
        if (other := unsupported(told)) is not None:
            raise CertkError(
                f"{place} asks for {other[0]}, {other[1]}: no certificate can be given for this "
                "model"
            )
        sliding: Any = kwargs.get("sliding_window")
        longest = getattr(getattr(module, "config", None), "max_position_embeddings", math.inf)
        if sliding is not None and sliding < longest:
            raise CertkError(
                f"{place} has a sliding window of {sliding}: keys that are dropped would be "
                "counted by it, or be needed no more; CertkPress is for full attention"
            )
        n = key.shape[2]
        m = n if self._window is None else min(self._window, n)
        causal = kwargs.get("is_causal")
        plain = n == 1 or bool(getattr(module, "is_causal", True) if causal is None else causal)
        if mask is not None:
            shape = (query.shape[0], query.shape[1], m, n)
            rows = visibility_of(mask[..., -m:, :], False, shape)
            ends = np.arange(n - m + 1, n + 1)
            plain = rows.mask is None and not rows.starts.any() and bool((rows.ends == ends).all())
        if not plain:
            raise CertkError(
                f"{place}: a query sees other keys than all up to its own (padding, packed "
                "sequences): run sequences of one length, without padding"
            )
        key, value = key.detach(), value.detach()
        index = self.modules[module]
        return _Call(
            index,
            index == min(self.modules.values()),
            query[:, :, n - m :].detach().clone(),
            key.clone() if self._copied else key,
            value.clone() if self._copied else value,
            None if (scale := kwargs.get("scaling")) is None else float(scale),
            b"" if self._copied else _fingerprint(key, value),
        )


# ------------------------------------------------------------------------------ certified pruning


@dataclass
class CertkPress(kvpress.BasePress):  # type: ignore[misc]
    """Keep, per kv head, the keys that the last queries of the prompt need.

    Every one of the last `window` queries loses at most eps of its causal attention mass, in every
    query head of the group. This is proven, rounding included. Nothing is promised of later
    queries; the window stands in for them, as in SnapKV.

    Without eps set a `compression_ratio`. With `compact` every head then keeps as many keys as that
    leaves (`kvpress.utils.compute_n_kept`), those that lose least in the worst query. Otherwise all
    heads and layers have one budget, the smallest that keeps no more keys in all.

    kv heads keep different numbers of keys:

    - `compact=False` leaves all keys in the cache, and masks dropped ones exactly in each kv head.
      No memory is freed. (kvpress overwrites keys in `module.masked_key_indices` by a fake key that
      all queries of a call should dislike. Several queries need not have one.)
    - `compact=True` removes keys when the last layer has run. All layers and heads keep as many as
      the neediest, filled up with their latest dropped keys. The cache is shorter than the text,
      so give the model positions, as kvpress's pipeline does.

    Args:
        eps: Budget of dropped mass, 0 <= eps < 1; None: `compression_ratio` is set.
        window: Number of last queries to certify for, at least 1; None for all. It takes 8 bytes
            per query, key and head of a group.
        keep_first: Positions at the start that are always kept.
        keep_last: Positions at the end that are always kept.
        compact: Remove dropped keys, as above.
        rest: "file", with `compact` and certified attention (`certk_rs.transformers.use`): keep
            a byte per entry of every dropped key, and prove in `lost` what each later query has
            lost. One sequence at a time.
        on_breach: Answer to a later query that may lose more than `later_eps`: "report", "raise",
            or "recall", which holds on to dropped keys and values and fetches those that matter.
        later_eps: Budget of later queries, 0 <= eps < 1; None for `eps`.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: Bad arguments. While the model runs: padding or packed sequences, sliding
            windows, biases on the scores, float64, another device than the CPU, caches other than
            a `DynamicCache`, eager attention, use inside another press, or beside one that changes
            the cache.
    """

    eps: float | None = None
    window: int | None = 64
    keep_first: int = 0
    keep_last: int = 0
    compact: bool = False
    rest: Literal["drop", "file"] = "drop"
    on_breach: OnBreach = "report"
    later_eps: float | None = None
    threads: int | None = None
    certificates: list[PressedLayer] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """One per layer of the last prompt."""
    _ratio: float = field(default=0.0, init=False, repr=False)
    _kept: float | None = field(default=None, init=False, repr=False, compare=False)
    _losses: Losses | None = field(default=None, init=False, repr=False, compare=False)
    _active: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind, optional in (
            ("eps", Real, True),
            ("window", int, True),
            ("keep_first", int, False),
            ("keep_last", int, False),
        ):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind | None if optional else kind):
                raise CertkError(f"{name} is {value!r}; pass one number")
        if self.window is not None and self.window < 1:
            raise CertkError(
                f"window is {self.window}; pass a number >= 1, or None for all queries"
            )
        self._manner = self._guarding()
        # Refuse at once what the selection would refuse in the first layer.
        first, last, threads = self.keep_first, self.keep_last, self.threads
        eps = 0.0 if self.eps is None else self.eps
        keep_set(np.zeros((1, 1)), eps, keep_first=first, keep_last=last, threads=threads)

    def _guarding(self) -> Manner | None:
        """Return the guard's budget and its answer to losses; None without a guard."""
        if self.rest not in ("drop", "file"):
            raise CertkError(f"rest is {self.rest!r}; pass 'file' or 'drop'")
        if self.rest == "drop":
            if self.on_breach != "report" or self.later_eps is not None:
                raise CertkError("on_breach and later_eps go with a guard: pass rest='file'")
            return None
        if not self.compact:
            raise CertkError("rest='file' is for caches that keys leave: pass compact=True")
        eps = self.eps if self.later_eps is None else self.later_eps
        if eps is None:
            raise CertkError("a guard needs a budget for later queries: pass later_eps")
        return Manner(float(eps), self.on_breach)

    @property
    def lost(self) -> list[LostCall]:
        """Proven losses of each attention call after the last prompt, where there is a guard."""
        return [] if self._losses is None else list(self._losses.calls)

    @property
    def compression_ratio(self) -> float:
        """Share of the keys that the last prompt's cache lost, over layers and heads.

        With `compact`, keys that fill heads up are not lost. Without eps it can be set, and is the
        ratio that was set until a prompt has run. With eps it is NaN until then, and cannot be set.
        """
        if self._kept is None:
            return math.nan if self.eps is not None else self._ratio
        return 1 - self._kept

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        if self.eps is not None:
            raise CertkError(
                f"compression_ratio = {value!r}: eps decides how many keys a CertkPress keeps, and "
                "compression_ratio tells; set eps, or make a CertkPress() without it"
            )
        given: Any = value
        if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= float(given) < 1:
            raise CertkError(f"compression_ratio is {value!r}; pass a number in [0, 1)")
        self._ratio = float(value)
        if not self._active:
            self._kept, self._losses = None, None

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Certify and drop after each prefill of `model` inside; hooks are removed on leaving.

        Raises:
            CertkError: A model whose layers kvpress would not find, or this press already at work.
        """
        if self._active:
            raise CertkError("this CertkPress is at work already; make another")
        prompt = _Prompt(model, self.window, copied=False)
        alone = prompt.layers - len(prompt.modules)
        if self.compact and alone:
            raise CertkError(
                f"compact=True: kvpress leaves {alone} layers of {type(model).__name__} alone, "
                "which would stay longer than the others; leave compact out"
            )
        if self._manner is not None and prompt.implementation != NAME:
            raise CertkError(
                f"rest='file': {prompt.implementation!r} attention does not ask guards: switch "
                "the model over by certk_rs.transformers.use(model, eps=0)"
            )
        calls: list[_Call] = []

        def after(call: _Call, cache: Any) -> None:
            if call.first:
                self.certificates, self._kept = [], None
                calls.clear()
            calls.append(call)
            if len(calls) == len(prompt.modules):
                self._finish(calls, cache.layers)
                calls.clear()

        self.certificates, self._kept, self._losses = [], None, None
        self._active = True
        try:
            with prompt.watched(after, nullcontext()):
                yield
        finally:
            self._active = False

    def forward_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse; called by presses that hold this one."""
        raise CertkError(
            "a CertkPress works on its own, as `with press(model):`, and not inside another "
            "press, which might drop or change keys that it has certified"
        )

    compress = forward_hook

    def _finish(self, calls: list[_Call], layers: Any) -> None:
        """Choose the keys of all layers of a prompt, and drop the others."""
        for call in calls:
            layer = layers[call.layer]
            if _fingerprint(layer.keys, layer.values) != call.stored:
                raise CertkError(
                    f"layer {call.layer}: keys or values in the cache are no longer those that "
                    "attention was given: run no other press beside a CertkPress"
                )
        shared = self.eps is None and not self.compact
        chosen = self._shared_out(calls) if shared else [self._choose(call) for call in calls]
        proven, n = [told for _, told in chosen], calls[0].n
        if self.compact:
            most = max(int(told.kept.max()) for told in proven)
            self._remove(chosen, layers, most)
            self._kept = most / n
        else:
            watch = Watch()
            for sets, told in chosen:
                layer, gone = layers[told.layer], _dropped(sets, n)
                layers[told.layer] = MaskedLayer(layer.keys, layer.values, gone, told.layer, watch)
            self._kept = float(np.mean([told.kept for told in proven]) / n)
        self.certificates = proven

    def _choose(self, call: _Call, eps: float | None = None) -> _Chosen:
        """Choose the sets of one layer.

        Without a budget, here or of the press, the sets have the size of `compression_ratio`.
        """
        batch, most = call.key.shape[0], None
        eps = self.eps if eps is None else eps
        if eps is None:
            eps, most = _NONE, compute_n_kept(call.n, self._ratio)
            most = max(most, min(self.keep_first + self.keep_last, call.n))
        place = f"layer {call.layer}"
        found = [
            select_per_head(
                place if batch == 1 else f"{place}, sequence {b}",
                call.query[b],
                call.key[b],
                eps,
                scale=call.scale,
                causal=True,
                max_keep=most,
                keep_first=self.keep_first,
                keep_last=self.keep_last,
                threads=self.threads,
            )
            for b in range(batch)
        ]
        sets = [kept for kept, _ in found]
        counts = np.array([[len(each) for each in kept] for kept in sets], dtype=np.int64)
        upper = np.stack([masses for _, masses in found])
        return sets, PressedLayer(call.layer, call.n, counts, upper)

    def _shared_out(self, calls: list[_Call]) -> list[_Chosen]:
        """Choose by one budget for all heads and layers, the smallest that keeps few enough."""
        most = sum(
            compute_n_kept(call.n, self._ratio) * math.prod(call.key.shape[:2]) for call in calls
        )

        def at(eps: float) -> tuple[int, list[_Chosen]]:
            found = [self._choose(call, eps) for call in calls]
            return sum(int(told.kept.sum()) for _, told in found), found

        low, high, best = 0.0, 1 - 2.0**-24, None
        for eps in _TRIED:
            kept, found = at(eps)
            if kept > most:
                low = eps
                break
            high, best = eps, found
        for _ in range(_HALVED if low else 0):
            middle = math.sqrt(low * high) if high < 0.5 else (low + high) / 2
            kept, found = at(middle)
            if kept > most:
                low = middle
            else:
                high, best = middle, found
        return at(high)[1] if best is None else best

    def _remove(self, chosen: list[_Chosen], layers: Any, most: int) -> None:
        """Leave each kv head the keys it needs and its latest others, `most` in all."""
        if self._manner is not None:
            if layers[0].keys.shape[0] != 1:
                raise CertkError("rest='file' is for one sequence at a time")
            whole = [(layer.keys[0].detach(), layer.values[0].detach()) for layer in layers]
            recall = self._manner.on_breach == "recall"
            self._losses = Losses(self._manner, RowsOfCache(whole) if recall else None)
        for sets, told in chosen:
            layer = layers[told.layer]
            rows = np.stack(
                [[pad_with_latest(each, most, told.n) for each in kept] for kept in sets]
            )
            at = torch.from_numpy(rows)[..., None]
            keys, values = (
                each.gather(2, at.expand(-1, -1, -1, each.shape[-1]))
                for each in (layer.keys, layer.values)
            )
            if self._losses is None:
                layer.keys, layer.values = keys, values
                continue
            guard = Guard.build(layer.keys[0].detach(), layer.values[0].detach(), list(rows[0]))
            # Its length is that of the kept keys: positions are for the caller to give.
            heads = list(keys[0]), list(values[0])
            short = layers[told.layer] = ShortenedLayer(heads, most, most, told.layer)
            short.guarded = GuardedLayer(told.layer, guard, self._losses)


def _dropped(chosen: _Sets, n: int) -> torch.Tensor:
    """Return a mask that is True for the keys (batch, kv_heads, n) that are not kept."""
    gone = torch.ones(len(chosen), len(chosen[0]), n, dtype=torch.bool)
    for b, sets in enumerate(chosen):
        for head, kept in enumerate(sets):
            gone[b, head, torch.from_numpy(kept)] = False
    return gone


# -------------------------------------------------------------------- certificates of other presses


@dataclass
class CertifiedPress(kvpress.BasePress):  # type: ignore[misc]
    """Run another press, and prove what its choice loses.

    After a prompt `certificates` bounds, for every layer, the attention mass that each of the last
    `window` queries has lost to keys that the press removed or noted in
    `module.masked_key_indices`. It holds for any press that chooses among keys. The keys that are
    left are looked up among copies made before the press runs. Of pairs with equal keys and
    values, as many count as are left, the last of them: queries before may have lost their own.

    Args:
        press: A press of kvpress, or of this module.
        window: Number of queries at the end of the prompt; None for all.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: A press that cannot be certified, or that holds one: a `CertkPress`, which has
            certificates of its own; one that works while text is generated (DecodingPress and its
            kin, PrefillDecodingPress, DMSPress with `decoding`), which kvpress's pipeline would not
            find in here; one that drops keys when the prompt is over (KVzip and its kin, FastKVzip,
            KVCompose). While the model runs: a press that changes keys or values instead of
            choosing among them, and input that `CertkPress` refuses. On leaving: keys were dropped
            or changed since a layer was certified.
    """

    press: kvpress.BasePress
    window: int | None = 64
    threads: int | None = None
    certificates: list[PressedLayer] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """One per layer of the last prompt; none after an error."""

    def __post_init__(self) -> None:
        if not isinstance(self.press, kvpress.BasePress):
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
        """The ratio of the press inside."""
        return self.press.compression_ratio  # type: ignore[no-any-return]

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        self.press.compression_ratio = value

    @property
    def worst(self) -> float:
        """The most that any query of any layer and head has lost; NaN without certificates."""
        most = [each.tail_mass_upper.max(initial=0.0) for each in self.certificates]
        return float(max(most, default=math.nan))

    def post_init_from_model(self, model: Any) -> None:
        """Prepare the press inside."""
        self.press.post_init_from_model(model)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Run the press inside, and certify after each prefill; hooks are removed on leaving."""
        prompt = _Prompt(model, self.window, copied=True)
        modules = {index: module for module, index in prompt.modules.items()}
        self.certificates = []
        seen: list[tuple[int, Any, int, Any]] = []

        def after(call: _Call, cache: Any) -> None:
            if call.first:
                self.certificates = []
                seen.clear()
            layer, module = cache.layers[call.layer], modules[call.layer]
            self.certificates.append(self._certify(call, layer, module))
            n = int(layer.keys.shape[2])
            seen.append((call.layer, cache, n, _state(module, layer, n)))

        try:
            with prompt.watched(after, self.press(model)):
                yield
            # The press inside may drop something when its context ends, too.
            for index, cache, n, state in seen:
                if _state(modules[index], cache.layers[index], n) != state:
                    raise CertkError(
                        f"layer {index}: {type(self.press).__name__} has dropped or changed keys "
                        "since they were certified: what is lost cannot be told"
                    )
        except BaseException:
            self.certificates = []
            raise

    def compress(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse; a press that holds this one may drop keys that are certified here."""
        raise CertkError(
            "a CertifiedPress goes around all other presses, as `with press(model):`, and not "
            "inside one"
        )

    def _certify(self, call: _Call, layer: Any, module: Any) -> PressedLayer:
        """Find the keys that a layer of the cache shows, and bound the mass of the others."""
        shown = _shown(call.layer, module, layer)
        kept = np.zeros(call.key.shape[:3], np.bool_)
        for b, head in np.ndindex(*kept.shape[:2]):
            places: dict[bytes, list[int]] = {}
            for at, line in enumerate(_lines(call.key[b, head], call.value[b, head])):
                places.setdefault(line, []).append(at)
            left = _lines(layer.keys[b, head], layer.values[b, head])
            for slot in np.flatnonzero(shown[b, head]):
                if not places.get(line := left[slot]):
                    raise CertkError(
                        f"layer {call.layer}: {type(self.press).__name__} does not only choose "
                        "among keys and values but changes them: what is lost cannot be certified"
                    )
                # The last of equal pairs: a query before it may have lost its own copy.
                kept[b, head, places[line].pop()] = True
        upper = np.stack([_lost(call, b, each, self.threads) for b, each in enumerate(kept)])
        return PressedLayer(call.layer, call.n, kept.sum(axis=-1), upper)


def _parts(press: kvpress.BasePress) -> Iterator[kvpress.BasePress]:
    """Yield a press and those that it holds."""
    yield press
    for held in vars(press).values():
        for each in held if isinstance(held, list | tuple) else (held,):
            if isinstance(each, kvpress.BasePress):
                yield from _parts(each)


def _not_certified(press: kvpress.BasePress) -> str | None:
    """Return the reason why a press cannot be certified; None if there is none."""
    if isinstance(press, CertkPress):
        return "drops keys when all layers have run: see its own certificates"
    decoding = isinstance(press, kvpress.DMSPress) and press.decoding
    if decoding or isinstance(press, kvpress.DecodingPress | kvpress.PrefillDecodingPress):
        return (
            "drops keys while text is generated, where kvpress's pipeline would not run it in a "
            "CertifiedPress: pass the press for the prompt alone"
        )
    if isinstance(press, _LATE):
        return "drops keys when the prompt is over: what is lost cannot be told"
    return None


def _shown(index: int, module: Any, layer: Any) -> NDArray[np.bool_]:
    """Return the slots of the cache (batch, kv_heads, slots) that `masked_key_indices` leaves."""
    shown = np.ones(layer.keys.shape[:3], np.bool_)
    if (masked := getattr(module, "masked_key_indices", None)) is None:
        return shown
    try:
        # Indices are those of the cache as it is now; keys may have been removed before.
        shown[tuple(each.cpu().numpy() for each in masked)] = False
    except IndexError as error:
        raise CertkError(
            f"layer {index}: masked_key_indices does not go with the {shown.shape[2]} keys that "
            f"are left in the cache ({error}): put the press that masks keys last"
        ) from None
    return shown


def _state(module: Any, layer: Any, n: int) -> tuple[Any, bytes]:
    """Return the kind of a layer, and a fingerprint of its masks and its first n visible rows."""
    masked = tuple(getattr(module, "masked_key_indices", None) or ())
    parts = [each[:, :, :n].detach().clone() for each in (layer.keys, layer.values)]
    if masked:
        # kvpress writes over masked rows. Masks that do not fit are others than before.
        with suppress(IndexError):
            for part in parts:
                part[masked] = 0
    return type(layer), _fingerprint(*masked, *parts)


def _lines(keys: torch.Tensor, values: torch.Tensor) -> list[bytes]:
    """Return each key with its value, as bytes."""
    both = [each.detach().cpu().contiguous().view(torch.uint8).numpy() for each in (keys, values)]
    return [line.tobytes() for line in np.concatenate(both, axis=1)]


def _lost(call: _Call, b: int, kept: NDArray[np.bool_], threads: int | None) -> NDArray[np.float64]:
    """Bound what each query (heads, m) of a sequence loses with `kept` (kv_heads, n) only."""
    query, key = call.query[b], call.key[b]
    heads, m, d = query.shape
    size, n = heads // key.shape[0], key.shape[1]
    scale = float(_native.nearest_rsqrt(d) if call.scale is None else call.scale)
    upper = []
    for head, given in enumerate(kept):
        queries = coerce.as_native_floats("q", query[head * size : (head + 1) * size])
        keys = coerce.as_native_floats("k", key[head : head + 1])
        found = _native.keep_set_of_queries(
            [(queries, keys, scale)],
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
            "fast",
            threads,
        )
        upper.append(found.tail_mass_upper.reshape(size, m))
    return np.concatenate(upper)


# ------------------------------------------------------------------------ scores for other presses


@dataclass
class CertkScorerPress(kvpress.ScorerPress):  # type: ignore[misc]
    """Score keys by the share of the last queries that need them to lose at most eps.

    A query needs the smallest set of keys outside of which its attention mass is at most eps, by
    certified selection. A key of a kv head is needed if a query head of its group needs it. The
    score is the share of the last `window` queries that see a key and need it; keys of the window
    itself score highest, as in SnapKV. Presses that take a `ScorerPress` can hold it (AdaKVPress,
    ChunkPress, ChunkKVPress, PerLayerCompressionPress, DecodingPress, ComposedPress), and it is a
    press itself.

    Queries are computed again from hidden states, as kvpress's own presses do, so scores are no
    certificates. A `CertifiedPress` around the outermost press gives them.

    Args:
        compression_ratio: Share of the keys to drop.
        eps: Budget of dropped mass of each query, 0 < eps < 1.
        window: Number of queries at the end to ask.
        threads: Number of threads; None for all available.
    """

    compression_ratio: float = 0.0
    eps: float = 0.05
    window: int = 64
    threads: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        eps: Any = self.eps
        if isinstance(eps, bool) or not isinstance(eps, Real) or not 0 < float(eps) < 1:
            raise CertkError(f"eps is {self.eps!r}; pass a number with 0 < eps < 1")
        if type(self.window) is not int or self.window < 1:
            raise CertkError(f"window is {self.window!r}; pass a count of queries, 1 or more")

    def score(
        self,
        module: nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Return scores (batch, kv_heads, n) in [0, 3) of keys (batch, kv_heads, n, d)."""
        of: Any = module
        batch, kv_heads, n, _ = keys.shape
        m = min(self.window, hidden_states.shape[1], n)
        queries = get_prerope_query_states(module, hidden_states[:, -m:])
        cos, sin = (each[:, -m:].unsqueeze(1) for each in kwargs["position_embeddings"])
        queries = queries * cos + rotate_half(queries) * sin
        size = queries.shape[1] // kv_heads
        scale = float(getattr(of, "scaling", queries.shape[-1] ** -0.5))
        lengths = np.arange(n - m, n) + 1
        scores = torch.empty(batch, kv_heads, n, dtype=torch.float32)
        for b, head in np.ndindex(batch, kv_heads):
            group = queries[b, head * size : (head + 1) * size].detach().double()
            products = group @ keys[b, head].detach().double().T * scale
            demand = Demand(n, float(self.eps), self.threads)
            demand.add(Rows(each, lengths) for each in products.cpu().numpy())
            scores[b, head] = torch.from_numpy(demand.shares())
        scores[..., n - m :] += 1
        return scores.to(keys.device)
