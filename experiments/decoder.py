"""A small decoder whose cache is pruned: generation goes on, and what that costs.

`python experiments/decoder.py` trains a model of 1.6 million weights on the text of this repository
for some minutes (experiments/decoder_training.py), so that its attention is learned, and then, on
files that were held out:

1. captures queries, keys and values of a prompt, prunes them and goes on generating, by the
   command line (`certk capture`, `certk prune`) and `from_cache`;
2. measures the perplexity of the text that follows, and how far the predictions are from those
   with all keys, for several eps, beside the presses of kvpress with caches of the same size, and
   draws both.

Training needs torch >= 2.9. kvpress needs transformers < 5.3; without it only certified pruning is
measured. Nothing is downloaded. Everything goes to `--out`, where a later run finds the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import decoder_training as training
import torch
from rich import box
from rich.table import Table
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, nll_loss
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from certk_rs import transformers as ct

EPS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)
# Pruning certifies the attention of the last so many queries; SnapKV votes with as many.
WINDOW = 64
CERTIFIED, BARE = "certified", "certified, --keep-last 0"

Cost = dict[str, float]

console = training.console_of(100)


@dataclass(frozen=True)
class Passage:
    """The beginning of a held-out file: a prompt, and the text that follows it."""

    file: Path
    prompt: torch.Tensor
    """(1, P) bytes."""
    rest: torch.Tensor
    """(1, C) bytes."""


def passages(held: list[Path], most: int, prompt: int, rest: int) -> list[Passage]:
    """Up to `most` files that are long enough, evenly spread over the list of them."""
    files = [file for file in held if file.exists() and file.stat().st_size >= prompt + rest]
    if not files:
        raise SystemExit("no held-out file is long enough: train anew, with another --out")
    found = []
    for i in range(min(most, len(files))):
        file = files[i * len(files) // min(most, len(files))]
        ids = torch.tensor([list(file.read_bytes()[: prompt + rest])])
        found.append(Passage(file, ids[:, :prompt], ids[:, prompt:]))
    return found


def following(model: Any, cache: Any, passage: Passage) -> torch.Tensor:
    """Log-probabilities of all bytes after each byte of the rest, given a cache of the prompt."""
    n, given = passage.prompt.shape[1], passage.rest[:, :-1]
    # A cache that a press has cut is shorter than the text, and would have positions go on from
    # its own length.
    positions = torch.arange(n, n + given.shape[1])[None]
    with torch.inference_mode():
        logits = model(given, past_key_values=cache, position_ids=positions).logits
    return log_softmax(logits[0].double(), -1)


def cost(model: Any, caches: list[Any], chosen: list[Passage], dense: list[torch.Tensor]) -> Cost:
    """Return the cost of the rest of the passages, beside that with whole caches.

    The first byte is left out: it follows from the prompt's own forward pass, which has all keys.
    """
    losses, changes = [], []
    for cache, passage, whole in zip(caches, chosen, dense, strict=True):
        found = following(model, cache, passage)
        losses.append(nll_loss(found, passage.rest[0, 1:]).item())
        changes.append((whole.exp() * (whole - found)).sum(-1).mean().item())
    return {
        "perplexity": math.exp(sum(losses) / len(losses)),
        "divergence": sum(changes) / len(changes),
    }


def certk(*arguments: str | Path, show: bool = True) -> None:
    """Run the command line as a user would."""
    command = [sys.executable, "-m", "certk_rs", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    if show:
        console.print(f"$ {shlex.join(['certk', *map(_short, arguments)])}\n{done.stdout}", end="")


def _short(argument: str | Path) -> str:
    path = Path(argument)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(argument)


def go_on(model: Any, folder: Path, out: Path, passage: Passage, eps: float, new: int) -> int:
    """Capture, prune and generate; how many bytes come out as they do from the whole cache."""
    captured, n = out / "prompt.safetensors", passage.prompt.shape[1]
    certk(
        "capture", "--model", folder, "--text", passage.file, "-o", captured,
        "--max-tokens", str(n), "--queries", str(WINDOW),
    )  # fmt: skip
    certk(
        "prune",
        captured,
        "-o",
        out / "pruned",
        "--eps",
        f"{eps:g}",
        "--keep-last",
        str(WINDOW),
        "-q",
    )
    # Attention over what was kept drops nothing more.
    ct.use(model, eps=0)
    given = torch.cat([passage.prompt, passage.rest[:, :1]], dim=1)
    written = []
    for cache in (ct.from_cache(captured), ct.from_cache(out / "pruned" / captured.name)):
        ids = model.generate(
            given, attention_mask=torch.ones_like(given), past_key_values=cache,
            max_new_tokens=new, do_sample=False,
        )  # fmt: skip
        written.append(bytes(ids[0, given.shape[1] :].tolist()))
    for name, text in zip(("whole cache", "pruned cache"), written, strict=True):
        console.print(f"\n{name}: {text.decode(errors='replace')!r}", markup=False)
    pairs = list(zip(*written, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    console.print(f"\nThe first {same} of {len(pairs)} bytes are the same.\n")
    return same


def tail_masses(captured: Path, pruned: Path) -> tuple[float, float, float]:
    """Return the largest losses of captured queries: as proven, and by dense attention in float64.

    And the most by which a query loses more than is proven of it, which rounding of the dense
    masses alone can make positive.
    """
    whole, kept = load_file(captured), load_file(pruned)
    proven, truth, excess = 0.0, 0.0, -math.inf
    for layer in range(sum(name.endswith(".key") for name in whole)):
        query = whole[f"layers.{layer}.query"][0].double()
        keys = whole[f"layers.{layer}.key"][0].double()
        (heads, m, d), (kv_heads, n, _) = query.shape, keys.shape
        scores = query @ keys.repeat_interleave(heads // kv_heads, 0).mT / math.sqrt(d)
        later = torch.arange(n) > torch.arange(n - m, n)[:, None]
        mass = scores.masked_fill(later, -math.inf).softmax(-1)
        starts = kept[f"layers.{layer}.indptr"].tolist()
        dropped = torch.ones(kv_heads, n, dtype=torch.bool)
        for head in range(kv_heads):
            indices = kept[f"layers.{layer}.indices"][starts[head] : starts[head + 1]]
            dropped[head, indices.long()] = False
        lost = (mass * dropped.repeat_interleave(heads // kv_heads, 0)[:, None]).sum(-1)
        upper = kept[f"layers.{layer}.tail_mass_upper"]
        proven = max(proven, upper.max().item())
        truth = max(truth, lost.max().item())
        excess = max(excess, (lost - upper).max().item())
    return proven, truth, excess


def presses() -> dict[str, Callable[[float], Any]]:
    """Return the presses of kvpress for a share of keys to drop; none if it is not installed."""
    if find_spec("kvpress") is None:
        return {}
    import kvpress

    return {
        "SnapKV": lambda drop: kvpress.SnapKVPress(drop, window_size=WINDOW),
        "ExpectedAttention": kvpress.ExpectedAttentionPress,
        "Knorm": kvpress.KnormPress,
        "StreamingLLM": kvpress.StreamingLLMPress,
        "Random": lambda drop: kvpress.RandomPress(drop, seed=0),
    }


def pressed(model: Any, press: Callable[[float], Any], passage: Passage, kept: float) -> Any:
    """Return the cache of a prompt that a press has cut to the share `kept` in every head."""
    n = passage.prompt.shape[1]
    # Presses keep int(n * (1 - drop)) keys of each head; in the middle nothing hangs on rounding.
    drop = 1 - (max(1, round(kept * n)) + 0.5) / n
    cache = DynamicCache()
    with torch.inference_mode(), press(max(0.0, drop))(model):
        model.model(passage.prompt, past_key_values=cache)
    return cache


def measure(model: Any, out: Path, chosen: list[Passage], budgets: list[float]) -> dict[str, Any]:
    """Measure certified pruning at every budget, and every press at the same sizes."""
    folder = out / "captured"
    folder.mkdir()
    for i, passage in enumerate(chosen):
        ct.capture(model, passage.prompt, folder / f"{i:02}.safetensors", queries=WINDOW)
    files = sorted(folder.iterdir())
    ct.use(model, eps=0)
    dense = [following(model, ct.from_cache(f), p) for f, p in zip(files, chosen, strict=True)]
    rows, shares = [], []
    # SnapKV keeps the keys of its window whatever their mass; so do we, and see what that does.
    for keep_last in (WINDOW, 0):
        for eps in budgets:
            target = out / f"eps-{eps:g}-last-{keep_last}"
            # By itself a cache this small would have its worst rows proven, not each.
            certk(
                "prune", folder, "-o", target, "--eps", f"{eps:g}",
                "--keep-last", str(keep_last), "--proof", "full", "-q", show=False,
            )  # fmt: skip
            pruned = [target / file.name for file in files]
            caches = [ct.from_cache(file) for file in pruned]
            masses = [tail_masses(*pair) for pair in zip(files, pruned, strict=True)]
            share = [cache.kept_fraction for cache in caches]
            name = CERTIFIED if keep_last else BARE
            rows.append(
                {
                    "eps": eps,
                    "keep_last": keep_last,
                    "kept": sum(share) / len(share),
                    "bytes_before": sum(file.stat().st_size for file in files),
                    "bytes_after": sum(file.stat().st_size for file in pruned),
                    "proven": max(proven for proven, _, _ in masses),
                    "truth": max(truth for _, truth, _ in masses),
                    "excess": max(excess for _, _, excess in masses),
                    "costs": {name: cost(model, caches, chosen, dense)},
                }
            )
            shares.append(share)
    model.set_attn_implementation("sdpa")
    for name, press in presses().items():
        for row, share in zip(rows, shares, strict=True):
            if row["keep_last"]:
                caches = [pressed(model, press, p, s) for p, s in zip(chosen, share, strict=True)]
                row["costs"][name] = cost(model, caches, chosen, dense)
    losses = [nll_loss(d, p.rest[0, 1:]).item() for d, p in zip(dense, chosen, strict=True)]
    return {
        "texts": [str(passage.file.relative_to(training.ROOT)) for passage in chosen],
        "prompt": chosen[0].prompt.shape[1], "rest": chosen[0].rest.shape[1],
        "window": WINDOW, "dense": math.exp(sum(losses) / len(losses)), "rows": rows,
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Tables of what is proven, and of what each way of pruning costs at each size."""
    table = Table(box=box.SIMPLE_HEAD, title="Certified pruning", title_justify="left")
    for heading in (
        "eps", "last kept", "keys kept", "files", "worst mass lost", "proven", "perplexity"
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in found["rows"]:
        table.add_row(
            f"{row['eps']:g}",
            f"{row['keep_last']}",
            f"{row['kept']:.1%}",
            f"{row['bytes_after'] / 1e6:.1f} of {row['bytes_before'] / 1e6:.1f} MB",
            f"{row['truth']:.6f}",
            # An upper bound, so rounded up.
            f"{math.ceil(row['proven'] * 1e6) / 1e6:.6f}",
            f"{next(iter(row['costs'].values()))['perplexity']:.3f}",
        )
    table.add_row("all keys", "", "100.0%", "", "", "", f"{found['dense']:.3f}")
    console.print(table)
    rows = [row for row in found["rows"] if row["keep_last"]]
    names = list(rows[0]["costs"])
    if len(names) == 1:
        console.print(
            "No baselines: kvpress is not installed here (it needs transformers < 5.3).\n"
        )
    for what, title in (
        ("perplexity", f"Perplexity at equal size (all keys: {found['dense']:.3f})"),
        ("divergence", "Kullback-Leibler divergence from what all keys say, nats per byte"),
    ):
        if what == "perplexity" and len(names) == 1:
            continue
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for heading in ("keys kept", *names):
            table.add_column(heading, justify="right")
        for row in rows:
            values = [row["costs"][name][what] for name in names]
            form = ".3f" if what == "perplexity" else ".5f"
            cells = [f"[bold]{v:{form}}[/]" if v == min(values) else f"{v:{form}}" for v in values]
            table.add_row(f"{row['kept']:.1%}", *cells)
        console.print(table)


def start(
    doc: str | None, most: int
) -> tuple[argparse.Namespace, training.Recipe, Any, list[Path]]:
    """Read the command line of a script, and train or load its model.

    Args:
        doc: Of the script.
        most: Held-out texts, unless the command line says otherwise.

    Returns:
        The options, the recipe of the model, the model, and the files that were held out.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=training.ROOT / "build" / "decoder")
    parser.add_argument("--steps", type=int, help="of training (default: minutes)")
    parser.add_argument("--texts", type=int, help=f"how many held-out texts (default: {most})")
    parser.add_argument("--quick", action="store_true", help="a model that knows next to nothing")
    options = parser.parse_args()
    recipe = training.QUICK if options.quick else training.Recipe()
    if options.steps is not None:
        recipe = replace(recipe, steps=options.steps)
    options.texts = options.texts or (2 if options.quick else most)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    model, held = training.trained(options.out / "model", recipe, console)
    return options, recipe, model, held


def main() -> None:
    """Train or load, go on generating, measure, draw."""
    options, recipe, model, held = start(__doc__, 16)
    budgets = [0.3, 0.1, 0.01] if options.quick else list(EPS)
    out = options.out
    n = 3 * recipe.positions // 4
    chosen = passages(held, options.texts, n, n // 12)
    caches = out / "caches"
    shutil.rmtree(caches, ignore_errors=True)
    caches.mkdir()
    console.print("\n[bold]Prefill, prune, go on[/]\n")
    go_on(model, out / "model", caches, chosen[0], 0.05, 20 if options.quick else 100)
    console.print(
        f"[bold]{len(chosen)} held-out texts[/]: prompts of {n} bytes, the {n // 12} after them\n"
    )
    found = measure(model, caches, chosen, budgets)
    show(found)
    (out / "results.json").write_text(json.dumps(found, indent=1))
    console.print(f"[dim]results: {_short(out / 'results.json')}[/]")
    if find_spec("matplotlib") is None:
        console.print("[dim]no figure: matplotlib is not installed[/]")
        return
    import figures

    figures.decoder(found, out / "decoder.svg")
    console.print(f"[dim]figure: {_short(out / 'decoder.svg')}[/]")


if __name__ == "__main__":
    main()
