"""Arguments of a model's attention, its caches, and a step over pruned ones without the library."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import model_zoo as zoo  # noqa: E402


def run(model: Any, ids: Any, **more: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=ids, **more)


def logits_of(model: Any, ids: Any, cache: Any = None, **more: Any) -> Any:
    return run(model, ids, past_key_values=cache, **more).logits


def prefilled(model: Any, ids: Any, **more: Any) -> Any:
    return run(model, ids, use_cache=True, **more).past_key_values


def seen_by(model: Any, ids: Any) -> list[dict[str, Any]]:
    """Record the arguments of each layer's attention on their way through sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls: list[dict[str, Any]] = []

    def spy(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        calls.append({"query": query.clone(), "key": key.clone(), "value": value.clone()})
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    hf.AttentionInterface.register("test-spy", spy)
    hf.AttentionMaskInterface.register("test-spy", hf.masking_utils.sdpa_mask)
    model = copy.deepcopy(model)
    model.set_attn_implementation("test-spy")
    run(model, ids, use_cache=False)
    return calls


def last_queries(model: Any, ids: Any, m: int | None = None) -> list[Any]:
    """The last m queries of each layer, or all of them."""
    return [call["query"][:, :, -m if m else None :] for call in seen_by(model, ids)]


def prompt(name: str = "llama", n: int = 48, m: int | None = None) -> tuple[Any, Any, Any, Any]:
    """A model most of whose rows need few keys, n tokens, their cache and last m queries."""
    model, ids = zoo.peaked(name), zoo.tokens(1, n)
    return model, ids, prefilled(model, ids), last_queries(model, ids, m)


def rows_of(layer: Any) -> list[Any]:
    """The keys and the values of each head of a layer, also where heads have different numbers."""
    if hasattr(layer, "rows"):
        return [row for rows in layer.rows() for row in rows]
    return [*layer.keys.flatten(0, 1), *layer.values.flatten(0, 1)]


def same_cache(one: Any, other: Any) -> bool:
    """Compare the keys and values of two caches."""
    return all(
        torch.equal(x, y)
        for a, b in zip(one.layers, other.layers, strict=True)
        for x, y in zip(rows_of(a), rows_of(b), strict=True)
    )


def reference_step(model: Any, cache: Any, kept: list[list[np.ndarray]], ids: Any) -> Any:
    """Logits of one more step in which layer i, kv head g of the past is only kept[i][g].

    By sdpa with a mask per head over the full cache, so with keys where they always were.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def masked(module: Any, query: Any, key: Any, value: Any, _mask: Any, **kwargs: Any) -> Any:
        n, m = key.shape[2], query.shape[2]
        seen = torch.zeros(1, query.shape[1], m, n, dtype=torch.bool)
        group = query.shape[1] // key.shape[1]
        for g, indices in enumerate(kept[module.layer_idx]):
            seen[:, g * group : (g + 1) * group, :, torch.from_numpy(indices)] = True
        seen[..., n - m :] |= torch.ones(m, m, dtype=torch.bool).tril()
        return sdpa_attention_forward(module, query, key, value, seen, **kwargs)

    hf.AttentionInterface.register("test-masked", masked)
    hf.AttentionMaskInterface.register("test-masked", hf.masking_utils.sdpa_mask)
    model = copy.deepcopy(model)
    model.set_attn_implementation("test-masked")
    return logits_of(model, ids, copy.deepcopy(cache))


def pressed(press: Any, model: Any, ids: Any) -> Any:
    """The cache of a prompt under a press of kvpress."""
    cache = hf.DynamicCache()
    with torch.inference_mode(), press(model):
        model(input_ids=ids, past_key_values=cache)
    return cache
