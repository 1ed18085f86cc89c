"""The model of experiments/decoder.py: a small Llama of bytes that read this repository.

A Llama and not a GPT-2, because kvpress, whose presses certified pruning is compared with, takes
models with rotary positions only, and the comparison is to be of one model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("*.md", "docs/*.md", "src/**/*.rs", "python/**/*.py")
# One file in so many is never trained on.
HELD_OUT = 10

Tell = Callable[[int, int, float], None]


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


def trained(folder: Path, recipe: Recipe, tell: Tell) -> tuple[LlamaForCausalLM, list[Path]]:
    """Load the model in `folder` if this recipe made it, or train one and save it there.

    `tell` is called with the steps done, their number, and the loss in bits per byte. Beside the
    model come the files that it was not trained on.
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
    _train(model, b"".join(file.read_bytes() for file in files), recipe, tell)
    model.save_pretrained(folder)
    names = [str(file.relative_to(ROOT)) for file in held]
    note.write_text(json.dumps({"recipe": asdict(recipe), "held_out": names}, indent=1))
    return model.eval(), held


def _rows(data: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """For each step rows of bytes and the byte after them, (tokens / length, length + 1)."""
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        length = recipe.short if 3 * step < 2 * recipe.steps else recipe.positions
        rows = max(1, recipe.tokens // length)
        starts = torch.randint(len(data) - length, (rows, 1), generator=generator)
        yield data[starts + torch.arange(length + 1)].long()


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


def _train(model: LlamaForCausalLM, text: bytes, recipe: Recipe, tell: Tell) -> None:
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    both = optimizers(model, recipe.rate)

    def share(step: int) -> float:
        """Up for 20 steps, and down to 0 in the second half."""
        return min(1.0, (step + 1) / 20, 2 * (recipe.steps - step) / recipe.steps)

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, share) for each in both]
    model.train()
    for step, rows in enumerate(_rows(data, recipe)):
        # Products of bfloat16 are twice as fast where the processor has them.
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            logits = model(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        tell(step + 1, recipe.steps, loss.item() / math.log(2))
