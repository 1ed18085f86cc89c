"""How often each key is needed, as scores for the presses of kvpress that hold another."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from kvpress import ScorerPress
from kvpress.utils import get_prerope_query_states
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

from ..errors import CertkError
from ..hot_keys import Demand, Rows


@dataclass
class CertkScorerPress(ScorerPress):  # type: ignore[misc]
    """Score keys by how many of the last queries need them to lose at most eps.

    A query needs the smallest set of keys outside of which its attention mass is at most eps, by
    certified selection; a kv head's key is needed by a query if one of the group's heads does. The
    score is the share of the last `window` queries that see a key and need it; keys of the window
    itself score highest, as in SnapKV. It can be held by the presses that take a `ScorerPress`
    (AdaKVPress, ChunkPress, ChunkKVPress, PerLayerCompressionPress, DecodingPress, ...) and stand
    in a ComposedPress, and is a press itself.

    Queries are computed again from hidden states, as kvpress's own presses do, so that scores are
    no certificates; around whichever press holds this one, a `CertifiedPress` gives them.

    Args:
        compression_ratio: Share of the keys to drop.
        eps: What a query may lose, 0 < eps < 1.
        window: How many queries at the end to ask.
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
        """Scores (batch, kv_heads, n) of keys (batch, kv_heads, n, d), in [0, 3)."""
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
        for b in range(batch):
            for head in range(kv_heads):
                group = queries[b, head * size : (head + 1) * size].detach().double()
                products = group @ keys[b, head].detach().double().T * scale
                demand = Demand(n, float(self.eps), self.threads)
                demand.add(Rows(each, lengths) for each in products.cpu().numpy())
                scores[b, head] = torch.from_numpy(demand.shares())
        scores[..., n - m :] += 1
        return scores.to(keys.device)
