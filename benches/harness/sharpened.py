"""Random decoders whose scores over normal keys are as far apart as a bench asks for."""

from __future__ import annotations

import math
from typing import Any

import torch


@torch.inference_mode()
def sharpen(model: Any, tokens: torch.Tensor, sigma: float) -> None:
    """Makes the queries of a Llama so long that scores over normal keys have the deviation sigma.

    That is exact for the first layer of these `tokens` (batch, length), and about right behind it.
    """
    d = model.config.head_dim
    embedded = model.model.embed_tokens(tokens)
    for layer in model.model.layers:
        made = layer.self_attn.q_proj(layer.input_layernorm(embedded)).view(-1, d)
        layer.self_attn.q_proj.weight *= sigma * math.sqrt(d) / made.float().norm(dim=-1).mean()
