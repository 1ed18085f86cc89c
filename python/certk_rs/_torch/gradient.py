"""The gradient of `certk::attention`: that of attention truncated to the keys that were kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _native


def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass needs; masses and counts have no gradient."""
    q, k, v, _, scale, causal, _, lengths, mask, _ = inputs
    _, upper, kept = output
    ctx.mark_non_differentiable(upper, kept)
    ctx.save_for_backward(q, k, v, kept, lengths, mask)
    ctx.scale, ctx.causal = scale, causal


def truncated(ctx: Any, gradient: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of attention over the kept keys.

    The best keys are taken, as many as the forward pass has kept, equal scores by lower index
    first. Where that made codes of its own it may have kept others of nearly the same weight.
    With P the weights of a row, dP = dO V^T and dS = P (dP - sum P dP), gradients are
    dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO.
    """
    q, k, v, kept, lengths, mask = ctx.saved_tensors
    none = (None,) * 7
    m, n = q.shape[-2], k.shape[-2]
    if n == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), *none
    groups = q.shape[-3] // k.shape[-3] if q.dim() > 2 and k.shape[-3] > 0 else 1
    # What no row uses may be anything, and must not spread by a product with 0.
    wide = [torch.nan_to_num(x.to(torch.float64), 0.0, 0.0, 0.0) for x in (q, k, v)]
    queries, keys, values = wide
    if groups > 1:
        keys, values = (x.repeat_interleave(groups, dim=-3) for x in (keys, values))
    scale = _native.nearest_rsqrt(k.shape[-1]) if ctx.scale is None else ctx.scale
    scores = scale * (queries @ keys.transpose(-1, -2))
    position = torch.arange(n)
    seen = torch.ones((), dtype=torch.bool)
    if ctx.causal:
        seen = seen & (position <= torch.arange(m).unsqueeze(-1) + (n - m))
    if lengths is not None:
        seen = seen & (position < lengths.unsqueeze(-1))
    if mask is not None:
        # Of an additive mask, what is not 0 hides a key: the forward pass takes no other bias.
        seen = seen & (mask if mask.dtype is torch.bool else mask == 0)
    scores = scores.masked_fill(~seen, -torch.inf)
    best = scores.detach().argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(best).scatter_(-1, best, position.expand_as(best))
    keep = seen & (rank < kept.unsqueeze(-1))
    scores = scores.masked_fill(~keep, -torch.inf)
    top = scores.detach().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    weights = torch.exp(scores - top)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1.0)
    wanted = gradient.to(torch.float64)
    by_weight = wanted @ values.transpose(-1, -2)
    by_score = weights * (by_weight - (weights * by_weight).sum(dim=-1, keepdim=True))
    of_q = scale * (by_score @ keys)
    of_k = scale * (by_score.transpose(-1, -2) @ queries)
    of_v = weights.transpose(-1, -2) @ wanted
    if groups > 1:
        of_k, of_v = (x.unflatten(-3, (-1, groups)).sum(dim=-3) for x in (of_k, of_v))
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), *none
