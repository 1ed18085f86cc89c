"""ONNX Runtime as a peer, where it is installed: TopK, and attention over keys and values in int8.

A graph has one node; inputs and outputs are bound to memory before the time that counts.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from .clock import Bind, Work
from .rows import Array

try:
    metadata.version("onnx")
    HERE = tuple(map(int, metadata.version("onnxruntime").split(".")[:2])) >= (1, 32)
except metadata.PackageNotFoundError:
    HERE = False
MISSING = "ONNX Runtime is left out: it or onnx is not installed, or it is older than 1.32."

Port = tuple[str, type[np.generic], tuple[Any, ...]]


def session(
    kind: str, inputs: list[Port], outputs: list[Port], domain: str = "", **attributes: Any
) -> Any:
    """Return a session of one node on one thread; the name of an input that is left out is ""."""
    import onnxruntime
    from onnx import helper

    def values(ports: list[Port]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), s)
            for name, dtype, s in ports
            if name
        ]

    names = [[port[0] for port in ports] for ports in (inputs, outputs)]
    node = helper.make_node(kind, *names, domain=domain, **attributes)
    graph = helper.make_graph([node], kind, values(inputs), values(outputs))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def topk(k: int) -> Bind:
    """TopK of the largest, unsorted, told k."""
    rows: Port = ("rows", np.float32, ("many", "n"))
    outputs: list[Port] = [("values", np.float32, ("many", k)), ("at", np.int64, ("many", k))]
    run = session("TopK", [rows, ("k", np.int64, (1,))], outputs, sorted=0)

    def bind(placed: Array) -> Work:
        bound = run.io_binding()
        bound.bind_cpu_input("rows", placed)
        bound.bind_cpu_input("k", np.array([k]))
        bound.bind_output("values")
        bound.bind_output("at")

        def work() -> Any:
            run.run_with_iobinding(bound)
            return bound

        return work

    return bind


def int8_attention(q: Array, k: Array, v: Array) -> Callable[[], Array]:
    """One step of decoding by GroupQueryAttention over int8, with a scale for each channel.

    q (kv heads, queries of each, d); k and v (kv heads, n, d), the last the new token's; float32.
    """
    import onnxruntime

    heads, n, _ = k.shape
    many = heads * q.shape[1]
    codes, scales = [], []
    for each in (k, v):
        scale = np.abs(each).max(axis=1) / np.float32(127)
        codes.append(np.rint(each / scale[:, None]).astype(np.int8)[None])
        scales.append(scale.reshape(-1))
    inputs = {
        "query": q.reshape(1, 1, -1),
        "key": k[:, -1].reshape(1, 1, -1),
        "value": v[:, -1].reshape(1, 1, -1),
        "past_key": codes[0],
        "past_value": codes[1],
        "last": np.array([n - 1], np.int32),
        "length": np.array([n], np.int32),
        "key_scale": scales[0],
        "value_scale": scales[1],
    }
    # The past is also what comes out: a cache that is written in place.
    out: Array = np.zeros_like(inputs["query"])
    outputs = {"out": out, "next_key": codes[0], "next_value": codes[1]}
    given, made = (
        [(name, array.dtype.type, array.shape) for name, array in ports.items()]
        for ports in (inputs, outputs)
    )
    left_out: list[Port] = [("", np.float32, ())] * 5
    run = session(
        "GroupQueryAttention", [*given[:7], *left_out, *given[7:]], made, "com.microsoft",
        num_heads=many, kv_num_heads=heads, k_quant_type="PER_CHANNEL",
        v_quant_type="PER_CHANNEL", kv_cache_bit_width=8,
    )  # fmt: skip
    bound, stored = run.io_binding(), onnxruntime.OrtValue.ortvalue_from_numpy
    for name, array in inputs.items():
        bound.bind_ortvalue_input(name, stored(np.ascontiguousarray(array)))
    for name, array in outputs.items():
        bound.bind_ortvalue_output(name, stored(array))

    def work() -> Array:
        run.run_with_iobinding(bound)
        return out.reshape(q.shape)

    return work
