"""The attention backend that stands in the place of vLLM's own on CPUs.

vLLM's kernels want the keys of a block column by column, or in tiles. Certified layers store them
row by row in the same memory. So a layer is certified, or vLLM's own, for life.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from .. import _native
from ..errors import CertkError
from ..paged_rows import PagedRows
from ..sparse_attention import attention
from . import budget, record

_told: set[str] = set()


class CertkBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend of CPUs with certified layers. Its name stays, since vLLM looks it up."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Return the powers of two among vLLM's."""
        return [32, 64, 128, 256, 512, 1024, 2048]

    @staticmethod
    def get_impl_cls() -> type[CertkImpl]:
        """Return the class of layers."""
        return CertkImpl


class CertkImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer: certified, or vLLM's own where eps is 0 or that does not do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        why = self._unsupported() if budget() else None
        self.certified = bool(budget()) and why is None
        if budget() and self.kv_sharing_target_layer_name is not None:
            raise CertkError("layers that share caches are not certified: unset CERTK_VLLM_EPS")
        if why is not None and why not in _told:
            _told.add(why)
            warnings.warn(f"layers with {why} stay vLLM's own, not certified", stacklevel=2)

    def _unsupported(self) -> str | None:
        """Name what keeps this layer from being certified."""
        config = get_current_vllm_config()
        found = {
            f"attention of type {self.attn_type}": self.attn_type != AttentionType.DECODER,
            "a sliding window": self.sliding_window != -1,
            f"a cache of {self.kv_cache_dtype}": self.is_fp8_kv_cache,
            # Engines that take it over read it as vLLM stores it.
            "a cache that is transferred": config.kv_transfer_config is not None,
            "causality by request": getattr(config.model_config, "is_diffusion", False),
        }
        return next((name for name, is_so in found.items() if is_so), None)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store keys and values (tokens, kv_heads, head_size) at slots (tokens,), int64.

        Slots below 0 are none. `kv_cache` is as in `forward`.
        """
        if not self.certified:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slots, block_size = slot_mapping[tokens], kv_cache.shape[2]
        for cache, new in zip(_halves(kv_cache), (key, value), strict=True):
            cache[slots // block_size, :, slots % block_size] = new[tokens]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **others: Any,
    ) -> Tensor:
        """Write attention of each request over its pages into `output`, and return it.

        `query` is (tokens, heads, head_size), `kv_cache` (blocks, kv_heads, block_size,
        2 * head_size), `output` as `query` or with heads in one axis; all have one dtype. `key` and
        `value` are in the cache. Rows of no request stay, as do all where `attn_metadata` is None.

        Raises:
            CertkError: Causality by request.
            NotImplementedError: Scales of quantized outputs.
        """
        quantized = any(each is not None for each in (*scales, *others.values()))
        if not self.certified or attn_metadata is None or quantized:
            args = (layer, query, key, value, kv_cache, attn_metadata, output, *scales)
            return super().forward(*args, **others)  # type: ignore[no-any-return]
        if attn_metadata.dynamic_causal is not None:
            raise CertkError("causality by request is not certified: unset CERTK_VLLM_EPS")
        eps, causal = budget() or 0.0, bool(attn_metadata.causal)
        run = partial(
            attention,
            eps=eps,
            scale=self.scale,
            causal=causal,
            sinks=self.sinks,
            soft_cap=self.logits_soft_cap or None,
        )
        starts, lengths = attn_metadata.query_start_loc.numpy(), attn_metadata.seq_lens.numpy()
        counts, out = np.diff(starts), output.view(len(output), *query.shape[1:])
        # Steps of decoding go together, each part of a prompt by itself.
        groups = [np.flatnonzero(counts == 1), *np.flatnonzero(counts > 1)[:, None]]
        for requests in (group for group in groups if group.size):
            m, n = int(counts[requests[0]]), lengths[requests]
            at = torch.from_numpy(starts[requests, None] + np.arange(m)).long()
            table = attn_metadata.block_table.numpy()[requests]
            k, v = (PagedRows(half, table, n) for half in _halves(kv_cache))
            bias = None
            if self.alibi_slopes is not None:
                # Exact in float64. Beside a sink it matters where a row's own bias is 0.
                slopes = np.asarray(self.alibi_slopes, np.float64)[:, None, None]
                rows = n[:, None, None, None] - m + np.arange(m)[:, None]
                bias = slopes * (np.arange(n.max()) - (rows if self.sinks is not None else 0))
            with _native.OpenMpTeam():
                result = run(
                    query[at].transpose(1, 2), k, v, bias=bias, threads=torch.get_num_threads()
                )
            out[at] = result.out.transpose(1, 2)
            seen = n[:, None] - (np.arange(m)[::-1] if causal else 0)
            record(str(layer.layer_name), requests, seen[:, None], result, eps)
        return output


def _halves(kv_cache: Tensor) -> tuple[Tensor, ...]:
    """Return views of keys and values, (blocks, kv_heads, block_size, head_size), as vLLM does."""
    blocks, kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
