"""Queries on their way to attention, noted as they are: nothing is computed again.

What kvpress hands to a press is what an attention module was given, before its projections. Of
queries that are computed again no certificate could speak, since other products round otherwise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvpress.presses.base_press import SUPPORTED_MODELS
from torch import nn
from transformers import Gemma3ForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import CertkError
from ..transformers.attention import unsupported
from ..transformers.masked_layer import masking
from ..transformers.masks import visibility_of
from ..transformers.presses import NAME

# What `note` looks at itself, and what only adds an output.
_UNDERSTOOD = {"dropout", "scaling", "is_causal", "sliding_window", "output_attentions"}


@dataclass(eq=False)
class Call:
    """What one attention module was given in prefill."""

    query: torch.Tensor
    """(batch, heads, m, d): the last m queries."""
    key: torch.Tensor
    """(batch, kv_heads, n, d); unless copied, those of the cache."""
    value: torch.Tensor
    scale: float | None
    stored: bytes
    """The `fingerprint` of key and value; empty if they are copies."""

    @property
    def n(self) -> int:
        """Keys of the prompt."""
        return int(self.key.shape[2])


class Notes:
    """The attention modules of a model, and what those of them were given that nobody has taken."""

    def __init__(self, model: Any) -> None:
        """Find the modules that kvpress will hook."""
        self.modules, self.layers = _attention_modules(model)
        self.noted: dict[nn.Module, Call] = {}

    @property
    def implementation(self) -> str:
        """Under which name the model asks for attention."""
        first: Any = next(iter(self.modules))
        return str(first.config._attn_implementation)

    def take(self, module: nn.Module, n: int) -> Call:
        """What a module was given, over n keys; it is forgotten."""
        call = self.noted.pop(module, None)
        if call is None or call.n != n:
            raise CertkError(
                f"layer {self.modules[module]}: its attention was not seen: eager attention and "
                "static caches pass it by; use attn_implementation='sdpa' and a DynamicCache"
            )
        return call


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


def fingerprint(*tensors: torch.Tensor) -> bytes:
    """Return a digest of the bits of tensors."""
    digest = hashlib.sha256()
    for each in tensors:
        digest.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


@contextmanager
def noting(run: Notes, window: int | None, *, copied: bool = False) -> Iterator[None]:
    """Note the queries on their way to attention, whose function is put back on leaving.

    Keys and values belong to the cache, where a press may write over them (ThinKPress does) before
    they are looked at: they are copied, or else their fingerprint is noted.
    """
    name = run.implementation
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
            run.noted[module] = _note(
                place, module, query, key, value, attention_mask, window, kwargs, copied
            )
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
    value: torch.Tensor,
    mask: torch.Tensor | None,
    window: int | None,
    kwargs: dict[str, Any],
    copied: bool,
) -> Call:
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
    key, value = key.detach(), value.detach()
    return Call(
        query[:, :, n - m :].detach(),
        key.clone() if copied else key,
        value.clone() if copied else value,
        None if scale is None else float(scale),
        b"" if copied else fingerprint(key, value),
    )
