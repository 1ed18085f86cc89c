"""A press that drops only what it can prove to be small, or what loses least at a size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from kvpress import BasePress
from kvpress.presses.base_press import is_prefilling
from kvpress.utils import compute_n_kept
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import DynamicLayer

from ..errors import CertkError
from ..keepset import keep_set
from ..transformers.guarded import Losses, LostCall, Manner, OnBreach
from ..transformers.masked_layer import MaskedLayer, Watch
from ..transformers.per_head import pad_with_latest, select_per_head
from ..transformers.presses import NAME
from .guarded import watched
from .noting import Call, Notes, fingerprint, noting
from .pressed import PressedLayer

# Budgets that are tried for a size, and how often the two between which it lies come closer.
_TRIED = (0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4, 1e-6, 1e-9)
_HALVED = 6
# A budget that no set of so many keys meets by chance: what is sought is the least loss.
_NONE = 1e-300


_Sets = Sequence[Sequence[NDArray[np.int64]]]
"""For each sequence and kv head the kept positions."""


@dataclass
class CertkPress(BasePress):  # type: ignore[misc]
    """Keep, per kv head, the keys that the last queries of the prompt need.

    For each kv head a small set is chosen such that every one of the last `window` queries, in
    every query head of the group, loses at most eps of its causal attention mass in that layer.
    This is proven, rounding included, of the queries and keys that attention was given in this
    forward pass: they are noted on their way there, not computed again. Nothing is promised of
    queries still to come, which are not known; the window stands in for them, as in SnapKV.

    Without eps it is told a `compression_ratio`, like any press of kvpress (and by its evaluation
    runner): with `compact`, every head keeps what that leaves (`kvpress.utils.compute_n_kept`),
    those keys that lose least in the worst query; without, all heads and layers have one budget,
    the smallest with which they keep no more in all. What was lost at that size is as proven.

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
        eps: Budget of dropped mass, 0 <= eps < 1; None: `compression_ratio` is set.
        window: How many queries at the end of the prompt to certify for, at least 1; all if there
            are fewer, or if None. More mean more keys, time and memory (8 bytes per query, key and
            head of a group).
        keep_first: Positions at the start that are always kept.
        keep_last: Positions at the end that are always kept.
        compact: See above.
        guard: "codes", with `compact` and certified attention (`certk_rs.transformers.use`): the
            cache remembers a byte an entry of every dropped key, and `lost` has what each query
            after the prompt has lost, proven. One sequence at a time.
        on_breach: What is done where a query after the prompt may lose more than `later_eps`:
            "report", "raise", or "recall", which holds on to the dropped keys and values and
            fetches what matters, as `prune_cache` does.
        later_eps: That budget, 0 <= eps < 1; None for `eps`.
        threads: Number of threads; None for all available.

    Raises:
        CertkError: Bad arguments. While the model runs: padding or packed sequences, sliding
            windows, biases on the scores, float64, another device than the CPU, caches other than
            a `DynamicCache`, eager attention, use inside another press, or beside one that
            changes what is in the cache.
    """

    eps: float | None = None
    window: int | None = 64
    keep_first: int = 0
    keep_last: int = 0
    compact: bool = False
    guard: Literal["none", "codes"] = "none"
    on_breach: OnBreach = "report"
    later_eps: float | None = None
    threads: int | None = None
    _ratio: float = field(default=0.0, init=False, repr=False)
    certificates: list[PressedLayer] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """One per layer of the last prompt."""
    _run: _Run | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("eps", "window", "keep_first", "keep_last"):
            value: Any = getattr(self, name)
            kind = Real if name == "eps" else int
            if value is None and name in ("eps", "window"):
                continue
            if isinstance(value, bool) or not isinstance(value, kind):
                raise CertkError(f"{name} is {value!r}; pass one number")
        if self.window is not None and self.window < 1:
            raise CertkError(
                f"window is {self.window}; pass a number >= 1, or None for all queries"
            )
        self._manner = self._how_to_guard()
        # What the selection would refuse in the first layer is refused at once.
        first, last, threads = self.keep_first, self.keep_last, self.threads
        eps = 0.0 if self.eps is None else self.eps
        keep_set(np.zeros((1, 1)), eps, keep_first=first, keep_last=last, threads=threads)

    def _how_to_guard(self) -> Manner | None:
        """What a guard does, if there is to be one."""
        if self.guard not in ("none", "codes"):
            raise CertkError(f"guard is {self.guard!r}; pass 'codes' or 'none'")
        if self.guard == "none":
            if self.on_breach != "report" or self.later_eps is not None:
                raise CertkError("on_breach and later_eps go with a guard: pass guard='codes'")
            return None
        if not self.compact:
            raise CertkError("guard='codes' is for caches that keys leave: pass compact=True")
        eps = self.eps if self.later_eps is None else self.later_eps
        if eps is None:
            raise CertkError("a guard needs a budget for later queries: pass later_eps")
        return Manner(float(eps), self.on_breach)

    @property
    def lost(self) -> list[LostCall]:
        """What each attention call after the last prompt has lost, where there is a guard."""
        run = self._run
        return [] if run is None or run.losses is None else list(run.losses.calls)

    @property
    def compression_ratio(self) -> float:
        """Share of the keys that the last prompt's cache lost, over layers and heads.

        With `compact`, what was filled up is not lost. Without eps it can be set, and is what was
        set until a prompt has run; with eps it is NaN till then, and cannot be set, since eps
        decides.
        """
        run = self._run
        if run is None or run.kept is None:
            return math.nan if self.eps is not None else self._ratio
        return 1 - run.kept

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
        self._run = None if self._run is None or not self._run.active else self._run

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Certify and drop after each prefill of `model` inside; hooks are removed on leaving.

        Raises:
            CertkError: A model whose layers kvpress would not find, or this press already at work.
        """
        if self._run is not None and self._run.active:
            raise CertkError("this CertkPress is at work already; make another")
        run = _Run(model)
        if self.compact and len(run.modules) < run.layers:
            raise CertkError(
                f"compact=True: kvpress leaves {run.layers - len(run.modules)} layers of "
                f"{type(model).__name__} alone, which would stay longer than the others; leave "
                "compact out"
            )
        if self._manner is not None and run.implementation != NAME:
            raise CertkError(
                f"guard='codes': {run.implementation!r} attention does not ask guards: switch the "
                "model over by certk_rs.transformers.use(model, eps=0)"
            )
        if self._manner is not None and len(run.modules) < run.layers:
            raise CertkError("guard='codes': kvpress leaves some layers of this model alone")
        self.certificates = []
        self._run = run
        run.active = True
        try:
            with noting(run, self.window), super().__call__(model):
                yield
        finally:
            run.active = False
            run.noted.clear()
            run.calls.clear()
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
        call = run.take(module, keys.shape[2])
        run.stored[index] = call.stored
        if self.eps is None and not self.compact:
            # What all heads keep is known when all layers have run.
            run.calls[index] = call
            run.chosen[index] = []
            return keys, values
        eps, most = self.eps, None
        if eps is None:
            eps, most = _NONE, compute_n_kept(call.n, self._ratio)
            most = max(most, min(self.keep_first + self.keep_last, call.n))
        self._record(run, index, call, *self._choose(index, call, eps, most))
        return keys, values

    def _choose(
        self, index: int, call: Call, eps: float, most: int | None = None
    ) -> tuple[_Sets, NDArray[np.float64]]:
        """The sets of one layer, and what they lose, (batch, heads, m)."""
        batch = call.key.shape[0]
        chosen, upper = [], []
        for b in range(batch):
            sets, masses = select_per_head(
                f"layer {index}" if batch == 1 else f"layer {index}, sequence {b}",
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
            chosen.append(sets)
            upper.append(masses)
        return chosen, np.stack(upper)

    def _record(
        self, run: _Run, index: int, call: Call, chosen: _Sets, upper: NDArray[np.float64]
    ) -> None:
        counts = np.array([[len(each) for each in sets] for sets in chosen], dtype=np.int64)
        run.chosen[index] = chosen
        self.certificates.append(PressedLayer(index, call.n, counts, upper))

    def _share_out(self, run: _Run) -> None:
        """One budget for all heads and layers, with which they keep no more than they may."""
        each = {
            index: compute_n_kept(call.n, self._ratio) * call.key.shape[0] * call.key.shape[1]
            for index, call in run.calls.items()
        }
        most = sum(each.values())

        def at(eps: float) -> tuple[int, dict[int, tuple[_Sets, NDArray[np.float64]]]]:
            found = {i: self._choose(i, call, eps) for i, call in run.calls.items()}
            kept = sum(len(one) for sets, _ in found.values() for part in sets for one in part)
            return kept, found

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
        if best is None:
            _, best = at(high)
        for index, (chosen, upper) in best.items():
            self._record(run, index, run.calls[index], chosen, upper)
        run.calls.clear()

    def _watch(self, run: _Run, layers: Any, most: int, manner: Manner) -> None:
        """Remove what is dropped, and remember it."""
        if layers[0].keys.shape[0] != 1:
            raise CertkError("guard='codes' is for one sequence at a time")
        order = sorted(run.chosen)
        n = layers[order[0]].keys.shape[2]
        kept = [[pad_with_latest(each, most, n) for each in run.chosen[i][0]] for i in order]
        found, run.losses = watched([layers[i] for i in order], kept, manner)
        for index, layer in zip(order, found, strict=True):
            layers[index] = layer

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
        for index, stored in run.stored.items():
            if fingerprint(layers[index].keys, layers[index].values) != stored:
                self.certificates = []
                raise CertkError(
                    f"layer {index}: keys or values in the cache are no longer those that "
                    "attention was given: run no other press beside a CertkPress"
                )
        if run.calls:
            self._share_out(run)
        counts = [certificate.kept for certificate in self.certificates]
        n = self.certificates[0].n
        if self.compact:
            most = max(int(each.max()) for each in counts)
            if self._manner is not None:
                self._watch(run, layers, most, self._manner)
                run.kept = most / n
                return
            for index, chosen in run.chosen.items():
                _remove(layers[index], chosen, most)
            run.kept = most / n
            return
        watch = Watch()
        for index, chosen in run.chosen.items():
            layer = layers[index]
            layers[index] = MaskedLayer(layer.keys, layer.values, _dropped(chosen, n), index, watch)
        run.kept = float(np.mean(counts) / n)


class _Run(Notes):
    """One time that a press is around a model."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.active = False
        self.calls: dict[int, Call] = {}
        """What layers were given that nothing has been chosen for yet."""
        self.chosen: dict[int, _Sets] = {}
        """For each layer, sequence and kv head the kept positions."""
        self.stored: dict[int, bytes] = {}
        """What the fingerprint of each layer's keys and values must still be in the end."""
        self.kept: float | None = None
        """Share of the keys that are left, when all layers have run."""
        self.losses: Losses | None = None


def _dropped(chosen: _Sets, n: int) -> torch.Tensor:
    """True for the keys (batch, kv_heads, n) that are not kept."""
    gone = torch.ones(len(chosen), len(chosen[0]), n, dtype=torch.bool)
    for b, sets in enumerate(chosen):
        for g, indices in enumerate(sets):
            gone[b, g, torch.from_numpy(indices)] = False
    return gone


def _remove(layer: Any, chosen: _Sets, most: int) -> None:
    """Leave each kv head the keys it needs and its latest others, `most` in all."""
    n = layer.keys.shape[2]
    rows = np.stack(
        [np.stack([pad_with_latest(each, most, n) for each in sets]) for sets in chosen]
    )
    at = torch.from_numpy(rows)[..., None]
    layer.keys = layer.keys.gather(2, at.expand(-1, -1, -1, layer.keys.shape[-1]))
    layer.values = layer.values.gather(2, at.expand(-1, -1, -1, layer.values.shape[-1]))
