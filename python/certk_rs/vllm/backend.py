"""The attention backend that vLLM's CPU platform calls in the place of its own.

vLLM's kernels want the keys of a block column by column, or in tiles. Certified layers lay them down
row by row in the same memory, where `PagedRows` reads them. So a layer is certified for life, or
vLLM's own.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from .. import _native
from ..errors import CertkError
from ..paged_rows import PagedRows
from ..sparse_attention import attention
from .records import chosen, record

_told: set[str] = set()


class CertkBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU backend, whose layers of plain attention are certified.

    It goes by the name of CPU_ATTN, since vLLM looks names up among its own.
    """

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Return those of vLLM that are powers of two."""
        return [32, 64, 128, 256, 512, 1024, 2048]

    @staticmethod
    def get_impl_cls() -> type[CertkImpl]:
        """Return the class that computes."""
        return CertkImpl


class CertkImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """A layer's attention: certified, or, where that does not do or eps is 0, vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.certified = bool(chosen())
        if not self.certified:
            return
        if self.kv_sharing_target_layer_name is not None:
            raise CertkError(
                "certified attention in vLLM does not serve models whose layers share caches: "
                "unset CERTK_VLLM_EPS"
            )
        if (why := self._unsupported()) is not None:
            self.certified = False
            if why not in _told:
                _told.add(why)
                warnings.warn(
                    f"layers with {why} stay vLLM's own, without certificates (this is said once)",
                    stacklevel=2,
                )

    def _unsupported(self) -> str | None:
        """Name what keeps this layer from being certified."""
        config = get_current_vllm_config()
        found = {
            f"attention of type {self.attn_type!s}": self.attn_type != AttentionType.DECODER,
            "ALiBi": self.alibi_slopes is not None,
            "soft-capped scores": bool(self.logits_soft_cap),
            "a sliding window": self.sliding_window != -1,
            f"a cache of {self.kv_cache_dtype}": self.is_fp8_kv_cache,
            # Another engine would read the rows as vLLM lays them down.
            "transfer of caches": getattr(config, "kv_transfer_config", None) is not None,
            "attention that is causal by request": bool(
                getattr(getattr(config, "model_config", None), "is_diffusion", False)
            ),
        }
        return next((name for name, is_so in found.items() if is_so), None)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store keys and values (tokens, kv_heads, head_size) at their slots; below 0 is none."""
        if not self.certified:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slots, block_size = slot_mapping[tokens], kv_cache.shape[2]
        blocks, rows = slots // block_size, slots % block_size
        for cache, new in zip(_halves(kv_cache), (key, value), strict=True):
            cache[blocks, :, rows] = new[tokens]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention of each request over its pages into `output`, and return it.

        Args:
            layer: vLLM's layer; its `layer_name` is recorded.
            query: (tokens, heads, head_size), of the dtype of the cache.
            key: Not read: it is in the cache.
            value: Not read: it is in the cache.
            kv_cache: (blocks, kv_heads, block_size, 2 * head_size).
            attn_metadata: `CPUAttentionMetadata`; None warms up.
            output: (tokens, heads, head_size) or (tokens, heads * head_size); rows behind
                `num_actual_tokens` stay.
            output_scale: Must be None.
            output_block_scale: Must be None.

        Raises:
            CertkError: Requests of one batch are causal and others are not.
            NotImplementedError: An output scale.
        """
        scaled = output_scale is not None or output_block_scale is not None
        if not self.certified or attn_metadata is None or scaled:
            given = (layer, query, key, value, kv_cache, attn_metadata, output)
            return super().forward(*given, output_scale, output_block_scale)  # type: ignore[no-any-return]
        if attn_metadata.dynamic_causal is not None:
            raise CertkError(
                "attention that is causal by request is not certified: unset CERTK_VLLM_EPS"
            )
        starts = attn_metadata.query_start_loc.numpy()
        counts, (keys, values) = np.diff(starts), _halves(kv_cache)
        query, out = query.detach(), output.view(len(output), *query.shape[1:])
        # Steps of decoding go together, and each part of a prompt by itself.
        single = np.flatnonzero(counts == 1)
        groups = [single] if single.size else []
        groups += [np.array([at]) for at in np.flatnonzero(counts > 1)]
        for requests in groups:
            m, first = int(counts[requests[0]]), torch.from_numpy(starts[requests])
            at = (first[:, None] + torch.arange(m)).long()
            n = attn_metadata.seq_lens.numpy()[requests]
            where = (attn_metadata.block_table.numpy()[requests], n)
            eps, causal = chosen() or 0.0, bool(attn_metadata.causal)
            with _native.OpenMpTeam():
                result = attention(
                    query[at].transpose(1, 2),
                    PagedRows(keys, *where),
                    PagedRows(values, *where),
                    eps,
                    scale=self.scale,
                    causal=causal,
                    sinks=self.sinks,
                    threads=torch.get_num_threads(),
                )
            out[at] = result.out.transpose(1, 2)
            seen = n[:, None] + (np.arange(1 - m, 1) if causal else np.zeros(m, int))
            record(str(layer.layer_name), requests, seen[:, None], result, eps)
        return output


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of keys and values, (blocks, kv_heads, block_size, head_size), as vLLM's."""
    blocks, kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(blocks, kv_heads, 2 * block_size, -1).chunk(2, dim=2)
