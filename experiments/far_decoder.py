"""A small Llama of bytes that must look far back: the model of held_out.py and needles.py.

It is trained on far_texts.py, on short rows first and on long ones last. One thing is not left to
chance: heads of its first layer begin as heads that look one and two bytes back. Models
find such heads by themselves, but late; all that copies rests on them, and with them copying is
learned within a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import decoder_training as training
import far_texts
import numpy as np
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Recipe:
    """The model to train, and the time; the default takes minutes on two cores."""

    width: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    positions: int = 2048
    stages: tuple[tuple[int, int, int], ...] = (
        (250, 64, 2048), (500, 256, 4096), (250, 512, 4096), (250, 2048, 4096),
    )  # fmt: skip
    """Steps, length of a row, and bytes in a step; the first stage has copies alone."""
    rate: float = 0.004
    back: float = 6.0
    """How sharply heads of the first layer look back at the beginning."""
    spread: float = 0.02
    """Of the weights before training."""
    seed: int = 0

    @property
    def steps(self) -> int:
        """In all stages."""
        return sum(steps for steps, _, _ in self.stages)


# Attention of large random weights is peaked, so that keys can be dropped, and are missed.
QUICK = Recipe(width=64, layers=2, stages=((3, 64, 512), (2, 256, 512)), spread=0.3)


def untrained(recipe: Recipe) -> LlamaForCausalLM:
    """Random weights, and some heads that look back."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=recipe.width, intermediate_size=5 * recipe.width // 2,
            num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads, max_position_embeddings=recipe.positions,
            tie_word_embeddings=True, attention_bias=True, initializer_range=recipe.spread,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    attention = model.model.layers[0].self_attn
    frequencies = model.model.rotary_emb.inv_freq
    d, half = attention.head_dim, len(frequencies)
    with torch.no_grad():
        # Rotary positions turn a key of (1, 0) in every plane by its place. A query that is turned
        # back by some places fits the key that stands so many before it.
        attention.k_proj.bias[:half] = recipe.back
        for head in range(recipe.heads // recipe.kv_heads):
            turn = -(head + 1) * frequencies
            query = recipe.back * torch.cat([turn.cos(), turn.sin()])
            attention.q_proj.bias[head * d : (head + 1) * d] = query
    return model


def trained(path: Path, recipe: Recipe, console: Console) -> LlamaForCausalLM:
    """Load the model at `path` if this recipe made it, or train one and save it there."""
    # As JSON has it: without tuples.
    said = json.dumps(asdict(recipe))
    model = untrained(recipe)
    if path.exists():
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("recipe") == said:
                tied = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                model.load_state_dict(tied, strict=False)
                return model.eval()
    torch.manual_seed(recipe.seed)
    model = untrained(recipe)
    training.fit_with_bar(model, _batches(recipe), recipe, console)
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {n: w for n, w in model.state_dict().items() if n != "lm_head.weight"}
    save_file(weights, path, {"recipe": said})
    return model.eval()


def start(
    doc: str | None, console: Console, most: int, kvpress: bool = False
) -> tuple[argparse.Namespace, Path, LlamaForCausalLM]:
    """Read the command line of a script, and train or load its model.

    Args:
        doc: Of the script.
        console: Shows the training.
        most: Texts of each kind, unless the command line says otherwise.
        kvpress: End the script where kvpress is not installed.

    Returns:
        The options, the folder for results, and the model.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=far_texts.ROOT / "build" / "held-out")
    parser.add_argument(
        "--model", type=Path, help="where the model is, or goes (default: in --out)"
    )
    parser.add_argument("--texts", type=int, help=f"how many of each kind (default: {most})")
    parser.add_argument("--quick", action="store_true", help="a model that knows next to nothing")
    parser.add_argument("--threads", type=int, default=1, help="a model this small gains by none")
    options = parser.parse_args()
    if kvpress and find_spec("kvpress") is None:
        parser.error("kvpress is not installed here (it needs transformers < 5.3)")
    options.texts = options.texts or (1 if options.quick else most)
    torch.set_num_threads(options.threads)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    recipe = QUICK if options.quick else Recipe()
    return options, out, trained(options.model or out / "model.safetensors", recipe, console)


def _batches(recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each step rows (count, length + 1) of bytes, and what each byte counts."""
    files, _ = far_texts.files()
    maker = far_texts.Maker(b"".join(map(far_texts.prose, files)), recipe.seed)
    for stage, (steps, length, tokens) in enumerate(recipe.stages):
        for _ in range(steps):
            make = maker.repeats if stage == 0 else maker.row
            texts = [make(length + 1) for _ in range(tokens // length)]
            # What cannot be foretold teaches nothing, and what stands far before is to be learned.
            counted = [text.told.astype(np.float32) + text.far for text in texts]
            yield (
                torch.from_numpy(np.stack([text.bytes for text in texts])).long(),
                torch.from_numpy(np.stack(counted)),
            )
