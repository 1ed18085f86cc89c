"""Needles in a haystack, asked for after kvpress has made the cache of it smaller.

`python experiments/needles.py` takes the decoder that must look far back (far_decoder.py; `--model`
names the file that holds it, or it is trained) and goes about it as kvpress's own evaluation does:
a press compresses the cache of a context at a ratio, without having seen the question; the question
is read, and the answer decoded greedily. The tasks are in the style of RULER, in bytes:

- single: one needle, a row of symbols, at any depth of prose; its first two ask for the others;
- many: sixteen needles, one of which is asked for;
- chain: a symbol stands for a second one, elsewhere that for a third, and so on: three links.

Our presses and those of kvpress are told the same ratio; `CertifiedPress` proves of each what the
last queries of the context have lost. One of ours leaves a guard in the cache, which fetches back
what the question and the answer need. Needs kvpress, and so transformers < 5.3.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import far_decoder
import far_texts
import numpy as np
import torch
from decoder import WINDOW, presses
from decoder_training import console_of
from rich import box
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

from certk_rs import transformers as ct

RATIOS = (0.3, 0.5, 0.7, 0.9)
TASKS = ("single", "many", "chain")
# Bytes of a needle, and of its beginning that asks for the rest.
NEEDLE, ASKED = 8, 2
NEEDLES, LINKS = 16, 3
# With a guard: what a later query may lose.
LATER = 0.05
GUARDED = "Certk, guard, recall"
WHOLE = "the whole cache"
console = console_of(120)


@dataclass(frozen=True)
class Needle:
    """A context, a question about it, and the answer, as bytes."""

    task: str
    context: torch.Tensor
    question: torch.Tensor
    answer: torch.Tensor


def needles(count: int, length: int) -> Iterator[Needle]:
    """As many of each task, in prose that nothing was trained on, from a seed."""
    _, held = far_texts.files()
    corpus = b"".join(map(far_texts.prose, held))
    for i in range(count):
        maker = far_texts.Maker(corpus, 5000 + i)
        for task in TASKS:
            yield _made(task, maker, length)


def _made(task: str, maker: far_texts.Maker, length: int) -> Needle:
    rng = maker.rng
    symbols = rng.permutation(far_texts.SYMBOLS)
    if task == "chain":
        # Each link is a row of its own: what stands for what.
        rows = [symbols[i : i + 2] for i in range(LINKS)]
        question, answer = symbols[:1], symbols[1 : 1 + LINKS]
    else:
        many = NEEDLES if task == "many" else 1
        # Shorter contexts have room for fewer.
        many = max(1, min(many, length // (4 * NEEDLE)))
        rows = list(symbols[: many * NEEDLE].reshape(many, NEEDLE))
        row = rows[int(rng.integers(many))]
        question, answer = row[:ASKED], row[ASKED:]
    prose = maker.prose(length - sum(map(len, rows))).bytes
    # The last places are the window that presses look at: nothing is hidden there.
    places = np.sort(rng.choice(len(prose) - min(WINDOW, len(prose) // 2), len(rows), False))
    parts = np.split(prose, places)
    text = [parts[0]]
    for row, part in zip(rows, parts[1:], strict=True):
        text += [row, part]
    context, asked, told = (
        torch.from_numpy(each.astype(np.int64))[None]
        for each in (np.concatenate(text), question, answer)
    )
    return Needle(task, context, asked, told)


def ours() -> dict[str, Callable[[float], Any]]:
    """Our presses, for a share of keys to drop."""
    from certk_rs.kvpress import CertkPress, CertkScorerPress

    def told(ratio: float, compact: bool, **guard: Any) -> Any:
        press = CertkPress(window=WINDOW, keep_last=WINDOW, compact=compact, **guard)
        press.compression_ratio = ratio
        return press

    return {
        "Certk": lambda ratio: told(ratio, False),
        "Certk, compact": lambda ratio: told(ratio, True),
        GUARDED: lambda ratio: told(ratio, True, rest="file", on_breach="recall", later_eps=LATER),
        "CertkScorer": lambda ratio: CertkScorerPress(ratio, window=WINDOW),
    }


def compressed(model: Any, press: Any, needle: Needle) -> tuple[Any, float]:
    """Return the cache of a context under a press, and the proven losses of its last queries."""
    from certk_rs.kvpress import CertifiedPress, CertkPress

    outer = press if isinstance(press, CertkPress) else CertifiedPress(press, window=WINDOW)
    cache = DynamicCache()
    with torch.inference_mode(), outer(model):
        model(needle.context, past_key_values=cache)
    return cache, max(float(each.tail_mass_upper.max()) for each in outer.certificates)


def score(model: Any, cache: Any, needle: Needle) -> float:
    """Return the share of the answer's bytes that greedy decoding gets right, at their places."""
    at, given, right = needle.context.shape[1], needle.question, 0
    for byte in needle.answer[0].tolist():
        positions = torch.arange(at, at + given.shape[1])
        with torch.inference_mode():
            logits = model(
                given,
                past_key_values=cache,
                position_ids=positions[None],
                cache_position=positions,
            ).logits
        at, given = at + given.shape[1], logits[:, -1:].argmax(-1)
        right += int(given[0, 0]) == byte
    return right / needle.answer.shape[1]


def measure(
    model: Any, chosen: list[Needle], ratios: tuple[float, ...], tell: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Return a row for every press and ratio: the mean score of each task, and the worst loss."""
    found: dict[tuple[str, float], dict[str, list[float]]] = {}
    every = ours() | presses()
    for done, needle in enumerate(chosen):
        cache = DynamicCache()
        with torch.inference_mode():
            model(needle.context, past_key_values=cache)
        right = found.setdefault((WHOLE, 0.0), {})
        right.setdefault(needle.task, []).append(score(model, cache, needle))
        for ratio in ratios:
            for name, make in every.items():
                # Guards are asked by certified attention.
                if name == GUARDED:
                    ct.use(model, eps=0)
                cache, worst = compressed(model, make(ratio), needle)
                row = found.setdefault((name, ratio), {})
                row.setdefault(needle.task, []).append(score(model, cache, needle))
                row.setdefault("lost", []).append(worst)
                model.set_attn_implementation("sdpa")
        tell(done + 1)
    return [
        {
            "press": name,
            "ratio": ratio,
            **{task: float(np.mean(row[task])) for task in TASKS},
            "lost": max(row["lost"]) if "lost" in row else 0.0,
            "median_lost": float(np.median(row["lost"])) if "lost" in row else 0.0,
        }
        for (name, ratio), row in sorted(found.items(), key=lambda item: item[0][1])
    ]


def show(found: list[dict[str, Any]]) -> None:
    """Return the table."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("dropped", "press", *TASKS, "lost, median", "lost, worst"):
        table.add_column(name, justify="left" if name == "press" else "right")
    before = None
    for row in found:
        if before not in (None, row["ratio"]):
            table.add_section()
        before = row["ratio"]
        table.add_row(
            f"{row['ratio']:.0%}", row["press"], *(f"{row[task]:.0%}" for task in TASKS),
            f"{row['median_lost']:.3f}", f"{row['lost']:.3f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Train or load, measure, show."""
    options, out, model = far_decoder.start(__doc__, console, 16, kvpress=True)
    model.set_attn_implementation("sdpa")
    count, length = options.texts, 256 if options.quick else 1536
    chosen = list(needles(count, length))
    console.print(f"{len(chosen)} contexts of {length} bytes, {count} of each task\n")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(chosen))
        ratios = (0.5, 0.9) if options.quick else RATIOS
        found = measure(model, chosen, ratios, lambda done: bar.update(task, completed=done))
    show(found)
    (out / "needles.json").write_text(json.dumps(found, indent=1))
    console.print(f"[dim]results: {out / 'needles.json'}[/]")


if __name__ == "__main__":
    main()
