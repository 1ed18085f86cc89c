"""Random decoders whose scores over normal keys are as far apart as a bench asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch


def llama(**sizes: int) -> Any:
    """Return a Llama of float32 random weights, the same in every run.

    Args:
        sizes: Of `transformers.LlamaConfig`.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).eval()


@torch.inference_mode()
def sharpen(model: Any, tokens: torch.Tensor, sigma: float) -> None:
    """Make the queries of a Llama so long that scores over normal keys have the deviation sigma.

    That is exact for the first layer of these `tokens` (batch, length), and about right behind it.
    """
    d = model.config.head_dim
    embedded = model.model.embed_tokens(tokens)
    for layer in model.model.layers:
        made = layer.self_attn.q_proj(layer.input_layernorm(embedded)).view(-1, d)
        layer.self_attn.q_proj.weight *= sigma * math.sqrt(d) / made.float().norm(dim=-1).mean()


def fill(caches: Iterable[Any], model: Any, n: int, chunk: int) -> None:
    """Put n normal keys and values into each layer of some caches, the same into all of them."""
    config, caches = model.config, list(caches)
    for start in range(0, n, chunk):
        for layer in range(config.num_hidden_layers):
            made = torch.Generator().manual_seed(start + layer)
            shape = (2, 1, config.num_key_value_heads, chunk, config.head_dim)
            keys, values = torch.randn(shape, generator=made).to(model.dtype)
            for cache in caches:
                cache.update(keys, values, layer)
