"""A small Llama of bytes that must look far back: the model of held_out.py and needles.py.

It is trained on far_texts.py, on short rows first and on long ones last. One thing is not left to
chance: heads of its first layer begin as heads that look one and two bytes back. Models
find such heads by themselves, but late; all that copies rests on them, and with them copying is
learned within a minute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import far_texts
import numpy as np
import torch
from decoder_training import Tell, has_bfloat16, optimizers
from rich.console import Console
from rich.progress import Progress
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
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("training", total=recipe.steps)

        def tell(done: int, _: int, bits: float) -> None:
            bar.update(task, completed=done, description=f"training, {bits:.2f} bits per byte")

        train(model, recipe, tell)
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {n: w for n, w in model.state_dict().items() if n != "lm_head.weight"}
    save_file(weights, path, {"recipe": said})
    return model.eval()


def train(model: LlamaForCausalLM, recipe: Recipe, tell: Tell) -> None:
    """Train it; `tell` is called with the steps done, their number, and bits per byte."""

    def share(step: int) -> float:
        """Up for 20 steps, and down to 0 in the last half."""
        return min(1.0, (step + 1) / 20, 2 * (recipe.steps - step) / recipe.steps)

    each = optimizers(model, recipe.rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, share) for one in each]
    model.train()
    for step, (rows, weights) in enumerate(_batches(recipe)):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            logits = model(rows[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
        )
        counted = weights[:, 1:].flatten()
        loss = (losses * counted).sum() / counted.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(each, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        tell(step + 1, recipe.steps, loss.item() / math.log(2))


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
