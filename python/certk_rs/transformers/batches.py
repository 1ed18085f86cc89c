"""Continuous batching: calls of `generate_batch`, which hold many sequences end to end.

Queries come as (1, heads, M, d), and keys as (1, kv_heads, N, d), which transformers has read from
its paged cache. Two lists say where each sequence begins in both. A query sees the keys of its own
sequence up to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CertkError
from ..paged_rows import PagedRows
from ..results import AttentionResult
from .masks import Visibility
from .presses import NAME

PASSED = frozenset(
    {
        *{"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index"},
        *{"write_index", "logits_indices", "logits_processor_args", "cache"},
    }
)
"""Arguments of such calls: `attend` reads the first two, and the others change nothing here."""

Attend = Callable[..., AttentionResult]
Record = Callable[[AttentionResult, Visibility], None]


def take_in_batches() -> None:
    """Let `generate_batch` run models under certified attention.

    Its manager lists the implementations that it takes, by name. It calls models in a thread of its
    own, which here has the context of the caller: budgets and recorders hold in it.
    """
    manager: Any = None
    with suppress(ImportError):  # before transformers 5
        from transformers.generation.continuous_batching import continuous_api

        manager = continuous_api.ContinuousBatchingManager
    plain = getattr(manager, "switch_to_cb_friendly_attn", None)
    if plain is None or hasattr(plain, "certk"):
        return

    @wraps(plain)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != NAME:
            plain(self, model, *args, **kwargs)
            return
        self._run_generation_loop = partial(copy_context().run, self._run_generation_loop)

    switch.certk = True  # type: ignore[attr-defined]
    manager.switch_to_cb_friendly_attn = switch


def is_batch(kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call with these arguments holds sequences end to end."""
    return kwargs.get("read_index") is not None and kwargs.get("cu_seq_lens_q") is not None


def attend(
    module: nn.Module,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kwargs: Mapping[str, Any],
    attention_of: Attend,
    record: Record,
) -> torch.Tensor:
    """Answer a call: sequences with one query each together, the others one by one.

    Args:
        module: The attention module that asks.
        tensors: Queries (1, heads, M, d), keys and values (1, kv_heads, N, d).
        kwargs: The arguments of the call.
        attention_of: Attention of (q, k, v), with an option `causal`.
        record: Is told each result, and what its rows see.

    Returns:
        Outputs (1, M, heads, d_v).

    Raises:
        CertkError: A cache that was not read, or a sliding window.
    """
    query, key, value = tensors
    if kwargs.get("block_table") is not None or kwargs.get("sliding_window") is not None:
        raise CertkError(
            f"{type(module).__name__} asks for a sliding window or a block table in continuous "
            "batching: not supported; use generate, or another attn_implementation"
        )
    of_queries, of_keys = (np.asarray(kwargs[f"cu_seq_lens_{side}"].tolist()) for side in "qk")
    counts, lengths = np.diff(of_queries), np.diff(of_keys)
    heads = query.shape[1]
    out = query.new_zeros(1, query.shape[2], heads, value.shape[3])
    (single,) = np.nonzero(counts == 1)
    if len(single):
        longest = int(lengths[single].max())
        table = of_keys[single, None] + np.arange(longest)
        # Each row is a page of its own: heads lie between each other.
        rows = [
            PagedRows(each[0].transpose(0, 1)[:, :, None], table, lengths[single])
            for each in (key, value)
        ]
        at = torch.from_numpy(of_queries[single])
        result = attention_of(query[0][:, at].transpose(0, 1)[:, :, None], *rows, causal=False)
        out[0, at] = result.out[:, :, 0]
        ends = lengths[single, None, None]
        shape = (len(single), heads, 1, longest)
        record(result, Visibility(shape, np.zeros_like(ends), ends, None))
    for i in np.flatnonzero(counts > 1):
        m, n = int(counts[i]), int(lengths[i])
        rows_of = slice(of_queries[i], of_queries[i] + m)
        keys_of = slice(of_keys[i], of_keys[i] + n)
        result = attention_of(
            query[:, :, rows_of], key[:, :, keys_of], value[:, :, keys_of], causal=True
        )
        out[:, rows_of] = result.out.transpose(1, 2)
        ends = np.arange(n - m + 1, n + 1)[None, None]
        record(result, Visibility((1, heads, m, n), np.zeros_like(ends), ends, None))
    return out
