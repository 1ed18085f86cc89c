"""The attention function that transformers calls under the name "certk".

Its signature is that of `AttentionInterface`, and the order of its arguments that of "sdpa", since
who wraps attention functions (kvpress does) may hand them on by position: query (batch, heads, m,
d), key and value (batch, kv_heads, n, d), not repeated; the output is (batch, m, heads, d_v).
Whatever a model asks for beside the mask is either understood, known not to matter, or refused: an
argument that is silently ignored would make another model of it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import _native
from ..errors import CertkError
from ..results import AttentionResult
from ..sparse_attention import attention as attention_of
from . import batches, recorder, settings
from .caches import check_positions
from .capture_file import WRITING
from .coded_layer import CodedLayer
from .indexed_layer import known_of
from .masked_layer import hidden
from .masks import Visibility, apart, visibility_of
from .own_attention import is_causal_by_default
from .presses import dropped_by_a_press

# Who collects the weights of a forward pass; before transformers 5 there is none.
_COLLECTOR: Any = None
with suppress(ImportError):
    from transformers.utils import output_capturing

    _COLLECTOR = output_capturing._active_collector

# What models pass along that does not change what attention computes.
_HARMLESS = frozenset(
    {
        *{"position_ids", "cache_position", "position_embeddings", "token_type_ids", "layer_idx"},
        *{"past_key_values", "past_key_value", "use_cache", "return_dict", "logits_to_keep"},
        *{"output_hidden_states", "output_router_logits", "num_items_in_batch", "deterministic"},
        *{"encoder_hidden_states", "encoder_attention_mask"},
    }
)
_REFUSED = {
    "softcap": "soft-capped scores, as in Gemma 2",
    "position_bias": "a bias on the scores",
    "output_attentions": "attention weights as an output (use attn_implementation='eager')",
    "cache": "paged caches",
    "head_mask": "head masks",
}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def certified_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Answer one call of a model's attention module; see `AttentionInterface`.

    `s_aux` are attention sinks, a score per head that joins the softmax without a value. Scores are
    capped softly, and then `position_bias` and the numbers of an additive mask are added. Compilers
    leave this function as it is: it runs between the graphs of a compiled model.

    Raises:
        CertkError: No budget, or something that certified attention cannot do.
    """
    batch = batches.is_batch(kwargs)
    asked = kwargs
    if batch:
        asked = {name: each for name, each in kwargs.items() if name not in batches.PASSED}
    _refuse(module, dropout, asked)
    writer = WRITING.get()
    if writer is None:
        _refuse_gradients(query, key, value, s_aux, position_bias)
    attention_mask, bias = apart(attention_mask, position_bias)
    changes: dict[str, Any] = {"soft_cap": softcap, "bias": bias}
    changed = softcap is not None or bias is not None
    if changed and (batch or writer is not None or hasattr(key, "certk_first")):
        raise CertkError(
            f"{type(module).__name__} has soft caps or biases of scores, which captured files, "
            "pruned caches and generate_batch know nothing of: use generate with another cache"
        )
    if batch:
        window = {"sliding_window": sliding_window}
        return _of_batch(module, (query, key, value), kwargs | window, scaling, s_aux), None
    attention_mask = hidden(query, key, attention_mask)
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    causal = is_causal
    if causal is None:
        kind: Any = type(module)
        causal = is_causal_by_default(kind) and getattr(module, "is_causal", True)
    try:
        rows = visibility_of(attention_mask, bool(causal), shape)
    except CertkError as error:
        raise CertkError(f"{type(module).__name__}: {error}") from None
    if sliding_window is not None:
        _need_window(rows, int(sliding_window), attention_mask, key)
    if (coded := getattr(key, "certk_coded", None)) is not None:
        return _from_codes(module, coded, query, rows, scaling, s_aux, changes), None
    if (first := getattr(key, "certk_first", None)) is not None:
        # A pruned cache: each kv head has its keys at the end.
        first.used()
        check_positions(first, kwargs.get("position_ids"))
        slots = np.repeat(first.slots, shape[1] // key.shape[1])
        rows = rows.only_from(slots)
    if (gone := dropped_by_a_press(module, query, key)) is not None:
        rows = rows.without(np.repeat(gone, shape[1] // key.shape[1], axis=1))
    scale = None if scaling is None else float(scaling)
    if writer is not None:
        if first is not None and first.ragged is not None:
            raise CertkError("a pruned cache has not all keys: capture without it")
        writer.add(module, query, key, value, rows, scale)
        if s_aux is None:
            return _dense(module, query, key, value, attention_mask, scale, causal), None
        budget = settings.Budget(eps=0.0)
    else:
        budget = settings.budget_for(module)
        if shape[2] == 1 and causal and first is None and gone is None and sliding_window is None:
            settings.advise_an_index(module, budget, key)
    index, ball = known_of(key, value)
    attended, keys, values = rows, key, value
    if first is not None and first.ragged is not None:
        keys, values = first.ragged.rows()
        attended = rows.behind(slots, first.ragged.counts)
    with _native.OpenMpTeam():
        result = attention_of(
            query,
            keys,
            values,
            budget.eps,
            index=index,
            ball=ball,
            **_options(budget, scaling, s_aux),
            **changes,
            **attended.arguments(),
        )
    eps = None
    if first is not None and first.guarded is not None and writer is None:
        result = first.guarded.answer(query, result, scale=scale, threads=_threads(budget))
        budget, rows = first.guarded.promise(budget), first.guarded.whole(rows)
        eps = first.guarded.budgets(query.shape[1])
    if writer is None:
        recorder.record(module, result, rows, budget, eps)
    return result.out.transpose(1, 2).contiguous(), None


def _options(
    budget: settings.Budget, scaling: float | None, s_aux: torch.Tensor | None
) -> dict[str, Any]:
    """Return the options of attention that every call has, but for eps."""
    return {
        "out_tol": budget.out_tol,
        "scale": None if scaling is None else float(scaling),
        "sinks": None if s_aux is None else s_aux.detach(),
        "threads": _threads(budget),
        "even_if_slower": budget.even_if_slower,
        "weights": budget.weights,
    }


def _threads(budget: settings.Budget) -> int:
    return torch.get_num_threads() if budget.threads is None else budget.threads


def _of_batch(
    module: nn.Module,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kwargs: dict[str, Any],
    scaling: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Answer a call of continuous batching."""
    if WRITING.get() is not None:
        raise CertkError("generate_batch reads a paged cache: capture with generate")
    budget = settings.budget_for(module)

    attend = partial(attention_of, eps=budget.eps, **_options(budget, scaling, s_aux))

    def record(result: AttentionResult, rows: Visibility) -> None:
        recorder.record(module, result, rows, budget)

    with _native.OpenMpTeam():
        return batches.attend(module, tensors, kwargs, attend, record)


def _from_codes(
    module: nn.Module,
    layer: CodedLayer,
    query: torch.Tensor,
    rows: Visibility,
    scaling: float | None,
    s_aux: torch.Tensor | None,
    changes: dict[str, Any],
) -> torch.Tensor:
    """Answer a call over a cache of codes."""
    if WRITING.get() is not None:
        raise CertkError(
            "a cache of codes holds no keys and values to capture: run the model without it"
        )
    budget = settings.budget_for(module)
    with _native.OpenMpTeam():
        result = layer.attend(
            query,
            budget,
            rows,
            scale=None if scaling is None else float(scaling),
            sinks=None if s_aux is None else s_aux.detach(),
            threads=_threads(budget),
            **changes,
        )
    recorder.record(module, result, rows, budget)
    out: torch.Tensor = result.out.transpose(1, 2).contiguous()
    return out


def _refuse(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    who = type(module).__name__
    if dropout:
        raise CertkError(
            f"dropout is {dropout:g} in {who}: certified attention drops no weights at random; "
            "call model.eval(), or set the attention dropout of the config to 0"
        )
    # Not every model passes output_attentions on to its attention modules.
    asked = {"output_attentions": True} if _weights_are_collected() else {}
    if (other := unsupported(kwargs | asked)) is not None:
        raise CertkError(
            f"{who} asks for {other[0]}, {other[1]}: not supported; use another "
            "attn_implementation for this model"
        )


def unsupported(kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Name an argument that makes attention another one, and say what it is; None if none does."""
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None and value is not False:
            return name, _REFUSED.get(name, "an argument that certified attention does not know")
    return None


def _weights_are_collected() -> bool:
    """Return True if transformers 5 is collecting attention weights of this forward pass."""
    return _COLLECTOR is not None and "attentions" in (_COLLECTOR.get() or {})


def _refuse_gradients(*optional: torch.Tensor | None) -> None:
    tensors = [tensor for tensor in optional if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise CertkError(
            "gradients do not flow through certified attention: run the model under "
            "torch.no_grad() or torch.inference_mode()"
        )
    unpack: Any = forward_ad.unpack_dual
    if any(unpack(tensor).tangent is not None for tensor in tensors):
        raise CertkError(
            "tangents of forward-mode differentiation do not flow through certified attention"
        )
    # A tracer would take the answer for these inputs for a constant.
    tracing: Any = torch.jit
    if tracing.is_tracing() or get_proxy_mode() is not None:
        raise CertkError(
            "certified attention in a model cannot be traced: trace the model under another "
            "attn_implementation, or export certk_rs.torch.attention"
        )


def _need_window(
    rows: Visibility, window: int, mask: torch.Tensor | None, key: torch.Tensor
) -> None:
    """Make sure that a window which matters is in the mask: it is the mask that is obeyed."""
    if hasattr(key, "certk_first"):
        raise CertkError(
            f"sliding_window is {window}, but the keys of a pruned cache have lost their "
            "positions: prune models with full attention only"
        )
    if mask is None and rows.shape[3] > window:
        raise CertkError(
            f"sliding_window is {window}, but no mask came with {rows.shape[3]} keys: register the "
            "mask function too, by certk_rs.transformers.register()"
        )


def _dense(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: Any,
) -> torch.Tensor:
    """Plain attention, for capturing what a model attends to."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(
        module, query, key, value, mask, scaling=scale, is_causal=bool(causal)
    )
    return out  # type: ignore[no-any-return]
