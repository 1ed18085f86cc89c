"""True losses of attention over a part of a prompt's keys, in float64 and without certk_rs.

While a `Watch` is open, it takes down what the layers of a Llama are given, and makes queries and
new keys of that by the layer's own projections. The softmax over all keys of the prompt, dropped or
not, and the new ones is then that of a few lines of torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class Watch:
    """Queries (heads, m, d) and new keys (kv_heads, m, d) of each layer, of all calls so far."""

    def __init__(self, model: Any) -> None:
        self._modules = [layer.self_attn for layer in model.model.layers]
        self._queries: list[list[torch.Tensor]] = [[] for _ in self._modules]
        self._keys: list[list[torch.Tensor]] = [[] for _ in self._modules]
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        self._hooks = [
            module.register_forward_pre_hook(self._note, with_kwargs=True)
            for module in self._modules
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: Any, _: Any, given: dict[str, Any]) -> None:
        states = given["hidden_states"]
        shape = (*states.shape[:-1], -1, module.head_dim)
        query, key = (
            part(states).view(shape).transpose(1, 2) for part in (module.q_proj, module.k_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *given["position_embeddings"])
        self._queries[module.layer_idx].append(query[0])
        self._keys[module.layer_idx].append(key[0])

    def queries(self, layer: int) -> torch.Tensor:
        """Return the queries of a layer, (heads, m, d)."""
        return torch.cat(self._queries[layer], dim=1)

    def masses(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Return the masses of keys (kv_heads, n, d) for each query, (heads, m, n).

        Of a softmax that is over these and the new keys up to the query's own.
        """
        query = self.queries(layer).double()
        new = torch.cat(self._keys[layer], dim=1).double()
        (heads, m, d), (kv_heads, n, _) = query.shape, keys.shape
        every = torch.cat([keys.double(), new], dim=1).repeat_interleave(heads // kv_heads, 0)
        scores = query @ every.mT / math.sqrt(d)
        later = torch.arange(n + m) > torch.arange(n, n + m)[:, None]
        return scores.masked_fill(later, -math.inf).softmax(-1)[..., :n]


def lost(masses: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """Sum the shares of dropped keys, (heads, m); `dropped`: (kv_heads, n) or (kv_heads, m, n)."""
    if dropped.ndim == 2:
        dropped = dropped[:, None]
    size = masses.shape[0] // dropped.shape[0]
    return (masses * dropped.repeat_interleave(size, 0)).sum(-1)
