"""The model of experiments/decoder.py: a small Llama of bytes that read this repository.

A Llama and not a GPT-2, because kvpress, whose presses certified pruning is compared with, takes
models with rotary positions only, and the comparison is to be of one model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("*.md", "docs/*.md", "src/**/*.rs", "python/**/*.py")
# One file in so many is never trained on.
HELD_OUT = 10

Batches = Iterable[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Recipe:
    """The model to train, and the time; the default takes minutes on two cores."""

    width: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    positions: int = 2048
    """The longest row, for the last third of the steps; short ones learn faster before."""
    short: int = 512
    tokens: int = 4096
    """In each step."""
    steps: int = 400
    rate: float = 0.01
    seed: int = 0


QUICK = Recipe(width=64, layers=2, positions=512, short=128, tokens=1024, steps=20)


def tokenizer() -> PreTrainedTokenizerFast:
    """Token i is the byte i: every text can be said, and a token is a character or part of one."""
    inner = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def texts() -> tuple[list[Path], list[Path]]:
    """Return the files to train on, and those held out: every tenth of a sorted list."""
    files = sorted({path for pattern in TEXTS for path in ROOT.glob(pattern)})
    held = files[HELD_OUT // 2 :: HELD_OUT]
    return [path for path in files if path not in held], held


def untrained(recipe: Recipe) -> LlamaForCausalLM:
    """Random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=recipe.width, intermediate_size=5 * recipe.width // 2,
            num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads, max_position_embeddings=recipe.positions,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip


def trained(folder: Path, recipe: Recipe, console: Console) -> tuple[LlamaForCausalLM, list[Path]]:
    """Load the model in `folder` if this recipe made it, or train one and save it there.

    Beside the model come the files that it was not trained on.
    """
    note = folder / "training.json"
    # Anew in every run, since transformers 4 does not read the tokenizers that 5 writes.
    tokenizer().save_pretrained(folder)
    if note.exists():
        told = json.loads(note.read_text())
        if told["recipe"] == asdict(recipe):
            model = LlamaForCausalLM.from_pretrained(folder, local_files_only=True)
            return model.eval(), [ROOT / name for name in told["held_out"]]
    files, held = texts()
    torch.manual_seed(recipe.seed)
    model = untrained(recipe)
    text = bytearray(b"".join(file.read_bytes() for file in files))
    fit_with_bar(model, _rows(torch.frombuffer(text, dtype=torch.uint8), recipe), recipe, console)
    model.save_pretrained(folder)
    names = [str(file.relative_to(ROOT)) for file in held]
    note.write_text(json.dumps({"recipe": asdict(recipe), "held_out": names}, indent=1))
    return model.eval(), held


def _rows(data: torch.Tensor, recipe: Recipe) -> Batches:
    """Yield rows of bytes and the byte after them, (tokens / length, length + 1), for each step."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        length = recipe.short if 3 * step < 2 * recipe.steps else recipe.positions
        rows = max(1, recipe.tokens // length)
        starts = torch.randint(len(data) - length, (rows, 1), generator=generator)
        yield data[starts + torch.arange(length + 1)].long(), None


def has_bfloat16() -> bool:
    """Return True if the processor multiplies bfloat16."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which needs half of AdamW's steps; AdamW for the rest."""
    inner = {n: p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}
    outer = [p for n, p in model.named_parameters() if n not in inner]
    return [
        torch.optim.Muon(inner.values(), lr=rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=0.3 * rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(
    model: LlamaForCausalLM, batches: Batches, recipe: Any, tell: Callable[[int, float], None]
) -> None:
    """Train a model, with a rate that rises for 20 steps and falls to 0 in the second half.

    Args:
        model: Trained in place.
        batches: For each step rows (count, length + 1) of tokens, and the weight of each token as
            an answer; None for equal weights.
        recipe: Has the number of steps and the rate.
        tell: Called with the steps done and the loss in bits per token.
    """

    def share(step: int) -> float:
        return min(1.0, (step + 1) / 20, 2 * (recipe.steps - step) / recipe.steps)

    each = optimizers(model, recipe.rate)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, share) for one in each]
    model.train()
    for step, (rows, weights) in enumerate(batches):
        # Products of bfloat16 are twice as fast where the processor has them.
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            logits = model(rows[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none"
        )
        counted = torch.ones_like(losses) if weights is None else weights[:, 1:].flatten()
        loss = (losses * counted).sum() / counted.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(each, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        tell(step + 1, loss.item() / math.log(2))


def fit_with_bar(model: LlamaForCausalLM, batches: Batches, recipe: Any, console: Console) -> None:
    """Train a model as `fit` does, and show a bar meanwhile."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("training", total=recipe.steps)

        def tell(done: int, bits: float) -> None:
            bar.update(task, completed=done, description=f"training, {bits:.2f} bits per byte")

        fit(model, batches, recipe, tell)


def console_of(width: int) -> Console:
    """Return a console; where it is no terminal, its lines have so many columns."""
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        return console
    return Console(highlight=False, soft_wrap=True, width=width)
