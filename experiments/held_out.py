"""Losses of later queries of a pruned cache, by every method, on held-out texts.

`python experiments/held_out.py` trains a small decoder that must look far back (far_decoder.py),
unless `--model` names a file that holds it. Caches of held-out prompts are pruned for the last
queries of the prompt, at several eps: certified without a guard, with one that reports, with one
that recalls, and by the presses of kvpress with as many bytes as the guarded cache takes. Then
comes the rest of the text, which may ask for anything. These are measured:

- perplexity, right answers in tasks, and the divergence from the whole cache;
- the true loss of each query of each layer and head, in float64 and without certk_rs
  (true_losses.py). If a guard misses a loss beyond eps, or claims less than the truth, the script
  fails;
- the bytes that are held, and those that are read for a token.

kvpress needs transformers < 5.3; without it only certified pruning is measured. Bytes are counted
with two for an entry of a key or value, as caches mostly are stored, which is harder on guards than
the four that this model's entries take.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import far_decoder
import far_texts
import numpy as np
import torch
from decoder import WINDOW, pressed, presses
from decoder_training import console_of
from numpy.typing import NDArray
from rich import box
from rich.progress import Progress
from rich.table import Table
from torch.nn.functional import log_softmax, nll_loss
from transformers import DynamicCache
from true_losses import Watch, lost

from certk_rs import transformers as ct

EPS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
KINDS = ("text", *far_texts.TASKS)
PLAIN, GUARDED, RECALLED = "certified", "guard, report", "guard, recall"
# Bytes of an entry of a key or value.
ENTRY = 2
console = console_of(120)

# A sum of float64 may be off by this.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Passage:
    """A prompt, the bytes that follow, and which of them only the prompt's beginning foretells."""

    kind: str
    prompt: torch.Tensor
    """(1, n)."""
    rest: torch.Tensor
    """(1, m)."""
    far: torch.Tensor
    """(m,): in texts every byte."""


@dataclass(frozen=True, eq=False)
class Whole:
    """All that a prompt leaves behind, and what the model says next with all of it."""

    cache: DynamicCache
    queries: list[torch.Tensor]
    """The last `WINDOW` of each layer, (1, heads, m, d)."""
    says: torch.Tensor
    """Log-probabilities (m - 1, 256) of the rest but for its first byte."""

    def keys(self, layer: int) -> torch.Tensor:
        """(kv_heads, n, d)."""
        found: torch.Tensor = self.cache.layers[layer].keys[0]
        return found


class Shelf:
    """The rows of a whole cache, which takes down what is fetched of them."""

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        self.taken: list[tuple[int, int, NDArray[np.int64]]] = []

    def fetch(
        self, layer: int, head: int, positions: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a kv head."""
        self.taken.append((layer, head, positions))
        rows, at = self.whole.cache.layers[layer], torch.from_numpy(positions)
        return rows.keys[0, head, at], rows.values[0, head, at]


def passages(count: int, prompt: int, rest: int) -> list[Passage]:
    """As many of each kind, from files that nothing was trained on and a seed of their own."""
    _, held = far_texts.files()
    corpus = b"".join(map(far_texts.prose, held))
    found = []
    for i in range(count):
        maker = far_texts.Maker(corpus, 1000 + i)
        for kind, text in zip(KINDS, _of_each_kind(maker, prompt, rest), strict=True):
            ids = torch.tensor(text.bytes).long()[None]
            far = torch.from_numpy(text.far)[prompt:]
            far = torch.ones_like(far) if kind == "text" else far
            found.append(Passage(kind, ids[:, :prompt], ids[:, prompt:], far))
    return found


def _of_each_kind(maker: far_texts.Maker, prompt: int, rest: int) -> list[far_texts.Text]:
    """Draw prompts whose answer stands before a gap of two thirds of the prompt or more."""
    size = min(rest // 2, prompt // 12)
    gaps = int(maker.rng.integers(2 * prompt // 3, prompt - 2 * size + 1)) if size else 0
    found = [maker.prose(prompt + rest)]
    for task in (maker.pairs(size, gaps, rest // 2), maker.copies(2 * size, gaps)):
        before = maker.prose(prompt - len(task[0].bytes))
        parts = [before, *task]
        if (short := rest - len(task[1].bytes)) > 0:
            parts.append(maker.prose(short))
        found.append(far_texts.joined(*parts))
    return [*found, maker.brackets(prompt + rest)]


def prefill(model: Any, passage: Passage) -> Whole:
    """Return the whole cache of a prompt, made by sdpa."""
    model.set_attn_implementation("sdpa")
    cache = DynamicCache()
    with torch.inference_mode(), Watch(model) as watch:
        model(passage.prompt, past_key_values=cache)
    layers = range(len(cache.layers))
    queries = [watch.queries(layer)[None, :, -WINDOW:] for layer in layers]
    kept = DynamicCache()
    for layer in layers:
        kept.update(cache.layers[layer].keys, cache.layers[layer].values, layer)
    return Whole(kept, queries, following(model, cache, passage)[0])


def following(
    model: Any, cache: Any, passage: Passage, each: Callable[[], None] | None = None
) -> tuple[torch.Tensor, Watch]:
    """Log-probabilities of what comes after each byte of the rest, and what the layers were given.

    The bytes go in at once, or one by one if there is something to do after each.
    """
    n, given = passage.prompt.shape[1], passage.rest[:, :-1]
    positions = torch.arange(n, n + given.shape[1])[None]
    size = given.shape[1] if each is None else 1
    said = []
    with torch.inference_mode(), Watch(model) as watch:
        for at in range(0, given.shape[1], size):
            part = slice(at, at + size)
            said.append(
                model(
                    given[:, part], past_key_values=cache, position_ids=positions[:, part]
                ).logits[0]
            )
            if each is not None:
                each()
    return log_softmax(torch.cat(said).double(), -1), watch


@dataclass
class Sums:
    """Sums over all passages of a kind, for one method of pruning at one eps."""

    loss: float = 0.0
    right: int = 0
    bytes: int = 0
    divergence: float = 0.0
    steps: int = 0
    """Of any text, layer and head."""
    over: int = 0
    losses: int = 0
    """Beyond eps to begin with: by the kept keys alone."""
    noticed: int = 0
    alarms: int = 0
    """What the guard says may be over eps."""
    tokens: int = 0
    predicted: int = 0
    excess: float = -math.inf
    """How far the truth is beyond what was proven."""
    held: float = 0.0
    """Share of the whole cache's bytes, summed over passages."""
    read: float = 0.0
    passages: int = 0

    def say(self, says: torch.Tensor, passage: Passage, whole: Whole) -> None:
        """Add what the model says with a pruned cache."""
        far, target = passage.far[1:], passage.rest[0, 1:]
        self.loss += nll_loss(says[far], target[far], reduction="sum").item()
        answers = says[far]
        if passage.kind == "brackets":
            # When one closes is chance, and which one is not.
            answers = torch.full_like(answers, -math.inf)
            closing = list(far_texts.CLOSE)
            answers[:, closing] = says[far][:, closing]
        self.right += int((answers.argmax(-1) == target[far]).sum())
        self.bytes += int(far.sum())
        self.divergence += (whole.says.exp() * (whole.says - says)).sum().item()
        self.tokens += len(target)
        self.passages += 1

    def judge(self, truth: NDArray[np.float64], eps: float) -> None:
        """Add true losses."""
        self.steps += truth.size
        self.over += int((truth > eps).sum())

    def hold(self, truth: NDArray[np.float64], proven: NDArray[np.float64], eps: float) -> None:
        """Add what a guard said of losses by the kept keys alone."""
        self.losses += int((truth > eps).sum())
        self.noticed += int(((truth > eps) & (proven > eps)).sum())
        self.alarms += int((proven > eps).sum())
        self.excess = max(self.excess, float((truth - proven).max()))

    def weigh(self, held: float, read: float) -> None:
        """Add shares of the whole cache's bytes."""
        self.held += held
        self.read += read

    def row(self) -> dict[str, float]:
        """As means."""
        return {
            "perplexity": math.exp(self.loss / max(1, self.bytes)),
            "right": self.right / max(1, self.bytes),
            "divergence": self.divergence / max(1, self.tokens),
            "steps": self.steps, "over": self.over, "losses": self.losses,
            "noticed": self.noticed, "alarms": self.alarms, "excess": self.excess,
            "held": self.held / max(1, self.passages), "read": self.read / max(1, self.passages),
        }  # fmt: skip


def masses_of(watch: Watch, whole: Whole) -> list[torch.Tensor]:
    """Return true weights of the prompt's keys, for each layer."""
    return [watch.masses(layer, whole.keys(layer)) for layer in range(len(whole.queries))]


def stacked(masses: list[torch.Tensor], dropped: list[torch.Tensor]) -> NDArray[np.float64]:
    """Return true losses, (layers, heads, m)."""
    each = [lost(*pair).numpy() for pair in zip(masses, dropped, strict=True)]
    return np.stack(each)


def dropped_of(cache: Any, whole: Whole) -> list[torch.Tensor]:
    """Return the keys of the prompt that a cache lacks, (kv_heads, n), by their bits."""
    found = []
    for layer in range(len(whole.queries)):
        every = whole.keys(layer)
        own = cache.layers[layer]
        # Presses of others leave layers as they are.
        kept = own.rows()[0] if isinstance(cache, ct.PrunedCache) else own.keys[0]
        gone = torch.ones(every.shape[:2], dtype=torch.bool)
        for head in range(len(every)):
            places = {row.tobytes(): at for at, row in enumerate(every[head].numpy())}
            gone[head, [places[row.tobytes()] for row in kept[head].numpy()]] = False
        found.append(gone)
    return found


def certified(
    model: Any, passage: Passage, whole: Whole, eps: float, sums: dict[str, Sums]
) -> float:
    """Measure certified pruning in its three ways; the share of bytes that guarded caches hold."""
    ct.use(model, eps=0)
    m, layers = passage.rest.shape[1] - 1, range(len(whole.queries))
    shelf = Shelf(whole)
    how: dict[str, Any] = {"keep_last": WINDOW}
    plain = ct.prune_cache(whole.cache, whole.queries, eps, **how)
    gone = dropped_of(plain, whole)
    guarded = ct.prune_cache(whole.cache, whole.queries, eps, rest="file", **how)
    recalling = ct.prune_cache(
        whole.cache, whole.queries, eps, rest="file", on_breach="recall", source=shelf, **how
    )
    d = whole.keys(0).shape[-1]
    pair = 2 * ENTRY * d
    keys = sum(each.numel() for each in gone)
    missing = sum(int(each.sum()) for each in gone)
    kept = 1 - missing / keys
    held = kept + guarded.guard_bytes / (keys * pair)
    # A code and what is beside it; positions are read of keys that come back.
    scanned = missing * (d + 4) / (keys * pair)

    says, watch = following(model, plain, passage)
    truth = stacked(masses_of(watch, whole), gone)
    sums[PLAIN].say(says, passage, whole)
    sums[PLAIN].judge(truth, eps)
    sums[PLAIN].weigh(kept, kept)

    again, _ = following(model, guarded, passage)
    if not torch.equal(says, again):
        raise SystemExit("a guard that reports has changed what the model says")
    proven = np.stack([call.lost for call in guarded.lost])
    sums[GUARDED].say(again, passage, whole)
    sums[GUARDED].judge(truth, eps)
    sums[GUARDED].hold(truth, proven, eps)
    sums[GUARDED].weigh(held, kept + scanned)

    back = [torch.zeros(len(each), m, each.shape[1], dtype=torch.bool) for each in gone]
    step = 0

    def take() -> None:
        nonlocal step
        for layer, head, positions in shelf.taken:
            back[layer][head, step, torch.from_numpy(positions)] = True
        shelf.taken.clear()
        step += 1

    says, watch = following(model, recalling, passage, take)
    masses = masses_of(watch, whole)
    calls = [[c for c in recalling.lost if c.layer == layer] for layer in layers]
    before = stacked(masses, gone)
    still = [g[:, None] & ~b for g, b in zip(gone, back, strict=True)]
    truth = stacked(masses, still)
    sums[RECALLED].say(says, passage, whole)
    sums[RECALLED].judge(truth, eps)
    for real, name in ((before, "lost"), (truth, "left")):
        proven = np.stack([np.concatenate([getattr(c, name) for c in of], 1) for of in calls])
        if name == "lost":
            sums[RECALLED].hold(real, proven, eps)
            missed = int(((real > eps) & (proven <= eps)).sum())
        else:
            sums[RECALLED].excess = max(sums[RECALLED].excess, float((real - proven).max()))
            missed += int((proven > eps).sum())
    if missed:
        raise SystemExit(f"{missed} losses beyond eps = {eps:g} were not noticed, or not mended")
    recalled = sum(int(each.sum()) for each in back) / (keys * m)
    sums[RECALLED].weigh(held, kept + scanned + recalled)
    return held


def baselines(
    model: Any, passage: Passage, whole: Whole, share: float, eps: float, sums: dict[str, Sums]
) -> None:
    """Measure the presses of kvpress at a share of the bytes."""
    model.set_attn_implementation("sdpa")
    for name, press in presses().items():
        cache = pressed(model, press, passage, min(1.0, share))
        gone = dropped_of(cache, whole)
        says, watch = following(model, cache, passage)
        truth = stacked(masses_of(watch, whole), gone)
        sums[name].say(says, passage, whole)
        sums[name].judge(truth, eps)
        kept = 1 - sum(int(g.sum()) for g in gone) / sum(g.numel() for g in gone)
        sums[name].weigh(kept, kept)


def measure(
    model: Any, chosen: Sequence[Passage], budgets: Sequence[float], tell: Callable[[int], None]
) -> dict[str, Any]:
    """Everything, at every eps; `tell` is called with the passages done."""
    names = [PLAIN, GUARDED, RECALLED, *presses()]
    sums = {(eps, name, kind): Sums() for eps in budgets for name in names for kind in KINDS}
    dense = {kind: Sums() for kind in KINDS}
    for done, passage in enumerate(chosen):
        whole = prefill(model, passage)
        dense[passage.kind].say(whole.says, passage, whole)
        for eps in budgets:
            mine = {name: sums[eps, name, passage.kind] for name in names}
            held = certified(model, passage, whole, eps, mine)
            baselines(model, passage, whole, held, eps, mine)
        tell(done + 1)
    excess = max(each.excess for each in sums.values())
    if excess > ROUNDING:
        raise SystemExit(f"a query has lost {excess:g} more than its guard has proven")
    return {
        "prompt": chosen[0].prompt.shape[1], "rest": chosen[0].rest.shape[1], "window": WINDOW,
        "passages": len(chosen), "excess": excess,
        "dense": {kind: each.row() for kind, each in dense.items()},
        "rows": [
            {"eps": eps, "method": name, "kind": kind, **each.row()}
            for (eps, name, kind), each in sums.items()
        ],
    }  # fmt: skip


def over_kinds(found: dict[str, Any], eps: float, method: str) -> dict[str, float]:
    """One row of a table: perplexity of texts, right answers in each task, all else over kinds."""
    rows = {r["kind"]: r for r in found["rows"] if (r["eps"], r["method"]) == (eps, method)}
    count = {
        name: sum(row[name] for row in rows.values())
        for name in ("steps", "over", "losses", "noticed")
    }
    means = {
        name: sum(row[name] for row in rows.values()) / len(rows)
        for name in ("divergence", "held", "read")
    }
    return {
        "perplexity": rows["text"]["perplexity"],
        **{kind: rows[kind]["right"] for kind in far_texts.TASKS},
        **means,
        "over": count["over"] / max(1, count["steps"]),
        "noticed": count["noticed"] / count["losses"] if count["losses"] else 1.0,
    }


def show(found: dict[str, Any]) -> None:
    """Return a table, a row for each eps and way of pruning."""
    table = Table(
        box=box.SIMPLE_HEAD, title="By later queries", title_justify="left", pad_edge=False
    )
    headings = (
        "eps", "pruned by", "held", "read", "perplexity", *far_texts.TASKS, "divergence",
        "over eps", "noticed",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "pruned by" else "right")
    whole = found["dense"]
    table.add_row(
        "", "nothing", "100.0%", "100.0%", f"{whole['text']['perplexity']:.3f}",
        *(f"{whole[kind]['right']:.1%}" for kind in far_texts.TASKS), "0", "0", "",
    )  # fmt: skip
    for eps, method in dict.fromkeys((row["eps"], row["method"]) for row in found["rows"]):
        row = over_kinds(found, eps, method)
        guarded = method in (GUARDED, RECALLED)
        table.add_row(
            f"{eps:g}", method, f"{row['held']:.1%}", f"{row['read']:.1%}",
            f"{row['perplexity']:.3f}", *(f"{row[kind]:.1%}" for kind in far_texts.TASKS),
            f"{row['divergence']:.4f}", f"{row['over']:.1%}",
            f"{row['noticed']:.0%}" if guarded else "",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Train or load, measure, show, draw."""
    options, out, model = far_decoder.start(__doc__, console, 8)
    quick = options.quick
    sizes = (256, 16) if quick else (1536, 64)
    chosen = passages(options.texts, *sizes)
    console.print(
        f"{len(chosen)} prompts of {sizes[0]} bytes, and the {sizes[1]} bytes after them\n"
    )
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=len(chosen))
        budgets = (0.3, 0.05) if quick else EPS
        found = measure(model, chosen, budgets, lambda done: bar.update(task, completed=done))
    show(found)
    if len(presses()) == 0:
        console.print("No baselines: kvpress is not installed here (it needs transformers < 5.3).")
    (out / "results.json").write_text(json.dumps(found, indent=1))
    console.print(f"[dim]results: {out / 'results.json'}[/]")
    if find_spec("matplotlib") is None:
        console.print("[dim]no figure: matplotlib is not installed[/]")
        return
    import figures

    figures.held_out(found, out / "held_out.svg")
    console.print(f"[dim]figure: {out / 'held_out.svg'}[/]")


if __name__ == "__main__":
    main()
