"""Compare a fixed k, alpha n^C and certified selection in a small decoder at equal compute.

`python experiments/window_perplexity.py` takes the model that decoder.py trains (or trains
it, some minutes) and reads the beginnings of held-out files. In every attention row of every layer
only some keys are kept, the best ones, and the softmax is taken over these:

- certified: the fewest keys whose dropped mass is proven to be within eps (`certk_rs.select`);
- alpha n^C: as many as the law says that is fitted to what certified selection keeps, n being
  what the row sees, with alpha scaled so that as many keys are kept in all;
- fixed k: the same k for all rows, with as many keys in all.

The law and the fixed k are one for all layers and heads. Perplexity is told by the length of the
context, so that it is seen what a window costs short prompts and long ones. Finding the best keys
is not what is compared: here all scores are computed, and then some are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from decoder import console, passages, start
from rich import box
from rich.table import Table
from torch.nn.functional import log_softmax
from transformers import AttentionInterface, AttentionMaskInterface
from window_fit import equal_sizes

import certk_rs as ck
from certk_rs import windows

EPS = (0.5, 0.1, 0.01)
NAME = "window"
SHORTEST = 16

# The scores (heads, n, n) of a call, -inf where a row does not see a key; what of them is kept.
Rule = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Windows:
    """The attention that models run under `NAME`; a causal one, of one sequence."""

    rule: Rule
    kept: int = 0
    lost: list[float] = field(default_factory=list)
    """Dropped mass of each call, in the mean over its rows, computed in float32."""
    worst: float = 0.0

    def __call__(
        self, _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        _mask: Any, scaling: float | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Answer one call, as transformers' AttentionInterface asks for it."""
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1)[0] for each in (key, value))
        scores = query[0] @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
        keep = self.rule(scores)
        self.kept += int(keep.sum())
        lost = scores.softmax(-1).masked_fill(keep, 0.0).sum(-1)
        self.lost.append(lost.mean().item())
        self.worst = max(self.worst, lost.max().item())
        out = scores.masked_fill(~keep, -math.inf).softmax(-1) @ value
        return out.transpose(0, 1)[None], None


def everything(scores: torch.Tensor) -> torch.Tensor:
    """Keep all that is visible."""
    return scores > -math.inf


def best(sizes: np.ndarray) -> Rule:
    """Keep the best keys, so many in each row; equal scores may make it a few more."""
    last = torch.from_numpy(sizes - 1)[None, :, None]

    def rule(scores: torch.Tensor) -> torch.Tensor:
        ordered = scores.sort(dim=-1, descending=True).values
        return scores >= ordered.gather(-1, last.expand(len(scores), -1, 1))

    return rule


class Certified:
    """Keep what certified selection keeps, and note how many keys that is."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.k: list[np.ndarray] = []
        self.proven = 0.0

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Select; every row is certified."""
        found = ck.select(scores.numpy(), self.eps, causal_offset=0)
        self.k.append(found.k.mean(axis=0))
        self.proven = max(self.proven, float(found.tail_mass_upper.max()))
        return torch.from_numpy(found.to_mask())


def losses(model: Any, texts: list[torch.Tensor], rule: Rule) -> tuple[np.ndarray, Windows]:
    """Return the mean loss in nats of each byte but the first, (n,), and the keys kept."""
    attention = Windows(rule)
    AttentionInterface.register(NAME, attention)
    # The attention above is causal by itself.
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)
    found = []
    with torch.inference_mode():
        for ids in texts:
            logits = model(ids[:, :-1], use_cache=False).logits[0].double()
            chosen = log_softmax(logits, -1).gather(1, ids[0, 1:, None])
            found.append(-chosen[:, 0].numpy())
    return np.mean(found, axis=0), attention


def fitted(k: np.ndarray) -> windows.WindowFit:
    """Fit the mean k (n,) of rows that see 1, 2, ... keys, from means over doubling n."""
    n, lengths, means = len(k), [], []
    while n >= SHORTEST:
        lengths.append((n // 2 + 1 + n) / 2)
        means.append(float(k[n // 2 : n].mean()))
        n //= 2
    return windows.fit(lengths, means)


def measure(model: Any, texts: list[torch.Tensor], budgets: list[float]) -> dict[str, Any]:
    """Return perplexities by length of the context, at every budget and for every rule."""
    n = texts[0].shape[1] - 1
    ends = [n >> i for i in range(4)][::-1]

    def row(name: str, rule: Rule, law: str, all_keys: int | None, eps: float) -> dict[str, Any]:
        loss, seen = losses(model, texts, rule)
        return {
            "rule": name, "eps": eps, "law": law, "kept": seen.kept,
            "share": seen.kept / all_keys if all_keys else 1.0,
            "lost": float(np.mean(seen.lost)), "worst": seen.worst,
            "perplexity": {str(e): math.exp(loss[e // 2 : e].mean()) for e in ends},
            "all": math.exp(loss.mean()),
        }  # fmt: skip

    rows = [row("all keys", everything, "", None, 0.0)]
    total = rows[0]["kept"]
    for eps in budgets:
        certified = Certified(eps)
        rows.append(row("certified", certified, "", total, eps))
        rows[-1]["proven"] = certified.proven
        slabs = total // (n * (n + 1) // 2)  # rows of one head over one text
        law = fitted(np.mean(certified.k, axis=0))
        for name, exponent in (("alpha n^C", law.C), ("fixed k", 0.0)):
            sizes, alpha = equal_sizes(
                np.arange(1, n + 1), exponent, round(rows[-1]["kept"] / slabs)
            )
            said = f"{alpha:.3g} n^{exponent:.2f}" if exponent else f"k = {alpha:.1f}"
            # Behind the certified row, whose total both are given.
            rows.append(row(name, best(sizes), said, total, eps) | {"C": exponent})
    return {"n": n, "texts": len(texts), "ends": ends, "rows": rows}


def show(found: dict[str, Any]) -> None:
    """Print a table with a row per budget and rule."""
    title = f"{found['texts']} held-out texts of {found['n']} bytes: perplexity by context length"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    ends = found["ends"]
    bins = [f"{e // 2}-{e}" for e in ends]
    for heading in ("eps", "kept by", "kept", "lost", "worst", *bins, "all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found["rows"]:
        table.add_row(
            f"{row['eps']:g}" if row["eps"] else "",
            row["law"] or row["rule"],
            f"{row['share']:.1%}",
            f"{row['lost']:.4f}",
            f"{row['worst']:.4f}",
            *(f"{row['perplexity'][str(e)]:.3f}" for e in ends),
            f"{row['all']:.3f}",
        )
    console.print(table)


def main() -> None:
    """Train or load, measure, show."""
    options, recipe, model, held = start(__doc__, 8)
    n = recipe.positions // 2
    chosen = passages(held, options.texts, n, 1)
    texts = [torch.cat([each.prompt, each.rest], dim=1) for each in chosen]
    found = measure(model, texts, [0.1] if options.quick else list(EPS))
    show(found)
    (options.out / "windows.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
