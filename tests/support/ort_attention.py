"""ONNX Runtime's attention over caches that its own operator quantises, and a recorded case of it.

Run as a program it records the case again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from safetensors.numpy import load_file, save_file

from harness import ort
from real_rows import read_cache
from repository import EXAMPLE, ROOT

Array = np.ndarray
Inputs = tuple[Array, Array, Array]
RECORDED = ROOT / "tests" / "vectors" / "ort_int8.safetensors"


@dataclass
class Run:
    """Codes (kv_heads, n, d) and scales (kv_heads, 1, d) of keys and values, and the output."""

    key_codes: Array
    key_scale: Array
    value_codes: Array
    value_scale: Array
    out: Array

    @property
    def cache(self) -> tuple[Array, Array]:
        """The numbers behind the codes, in float32."""
        return self.key_scale * self.key_codes, self.value_scale * self.value_codes


def inputs_of(layer: int) -> Inputs:
    """Queries, keys and values of a layer of the example cache."""
    cache = read_cache(EXAMPLE)
    q, k, v = (cache[f"layers.{layer}.{name}"][0] for name in ("query", "key", "value"))
    return q, k, v


def recorded_inputs() -> Inputs:
    """Some queries of one kv head, and its first keys and values."""
    q, k, v = inputs_of(3)
    return q[1:2, :6], k[1:2, :64], v[1:2, :64]


def recorded() -> Run:
    return Run(**load_file(RECORDED))


def attend(q: Array, k: Array, v: Array, kind: str, bits: int) -> Run:
    """Let a prompt quantise all keys and values but the last, and then decode one token.

    Its queries are those of all query heads: q (kv_heads, m, d); k and v (kv_heads, n, d).
    """
    heads, _, d = k.shape
    axes = 1 if kind == "PER_CHANNEL" else None
    most = np.float32(2 ** (bits - 1) - 1)
    scales = [np.abs(x).max(axis=axes, keepdims=True) / most for x in (k, v)]
    form = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": bits}
    stored, width = (np.int8, d) if bits == 8 else (np.uint8, d // 2)
    nothing = [np.zeros((1, heads, 0, width), stored)] * 2
    prompt = k[:, :-1], v[:, :-1]
    _, *past = _step(np.zeros_like(prompt[0]), *prompt, nothing, scales, form)
    out, *codes = _step(q.reshape(-1, 1, d), k[:, -1:], v[:, -1:], past, scales, form)
    keys, values = (_entries(x[0]) if bits == 4 else x[0] for x in codes)
    k_scale, v_scale = (np.tile(x, (heads // len(x), 1, d // x.shape[2])) for x in scales)
    return Run(keys, k_scale, values, v_scale, out.reshape(q.shape))


def _step(
    q: Array, k: Array, v: Array, past: list[Array], scales: list[Array], form: dict[str, object]
) -> list[Array]:
    """Append tokens (heads, tokens, d) to the codes; return the output and all codes."""
    _, heads, before, width = past[0].shape
    n = before + k.shape[1]
    tokens = [x.swapaxes(0, 1).reshape(1, x.shape[1], -1) for x in (q, k, v)]
    counts = [np.array([n - 1], np.int32), np.array([n], np.int32)]
    given = [*tokens, *past, *counts, *(scale.reshape(-1) for scale in scales)]
    names = ["q", "k", "v", "past_k", "past_v", "last", "length", "k_scale", "v_scale"]
    ports = [(name, x.dtype.type, x.shape) for name, x in zip(names, given, strict=True)]
    codes = [(name, past[0].dtype.type, (1, heads, n, width)) for name in ("codes_k", "codes_v")]
    run = ort.session(
        "GroupQueryAttention",
        [*ports[:7], *[("", np.float32, ())] * 5, *ports[7:]],
        [("out", np.float32, tokens[0].shape), *codes],
        "com.microsoft",
        num_heads=len(q),
        kv_num_heads=heads,
        **form,
    )
    made: list[Array] = run.run(None, dict(zip(names, given, strict=True)))
    return made


def _entries(codes: Array) -> Array:
    """Take bytes apart: the first of two entries is in the low half, and 8 stands for 0."""
    halves = np.stack([codes & 15, codes >> 4], axis=-1).astype(np.int8) - np.int8(8)
    return halves.reshape(*codes.shape[:-1], -1)


if __name__ == "__main__":
    made = attend(*recorded_inputs(), "PER_CHANNEL", 8)
    save_file({name: np.ascontiguousarray(x) for name, x in asdict(made).items()}, RECORDED)
