"""Drafts from a pruned cache, verified by the whole one: the tokens are those of dense decoding.

`python examples/drafts.py` takes the decoder of examples/far_decoder.py. A copy of it that shares
its weights goes on from a pruned cache and drafts a few tokens; the model itself reads them all at
once with its whole cache, keeps those that it would have said, and adds one of its own. That is the
assisted generation of transformers, with a candidate generator of our own. However much is lost to
pruning, what comes out is what dense greedy decoding says; eps decides how many drafts are right.

Two kinds of drafts are measured: from a cache that was pruned once, which read the kept rows alone,
and by certified attention over all keys, of which each row drops what its budget allows. Beside
them: dense decoding without drafts, and drafts that look the last tokens up in the prompt
(`prompt_lookup_num_tokens`).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import far_decoder
import far_texts
import torch
from held_out import WINDOW, Passage, console, passages, prefill
from rich import box
from rich.table import Table
from transformers import DynamicCache
from transformers.generation.candidate_generator import CandidateGenerator

from certk_rs import transformers as ct

END = 0
EPS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.02)
PRUNED, CERTIFIED = "pruned cache", "certified"
# Whether what comes next stands far before.
NEAR, FAR = "near", "far"
COUNTED = ("runs", "kept", "tokens", "seconds", "drafted", "accepted", "rounds", "drafting")


class Drafts(CandidateGenerator):  # type: ignore[misc]
    """Drafts so many tokens by a model and a cache of the prompt, which is its own."""

    def __init__(self, model: Any, cache: Any, count: int, most: int) -> None:
        self.model, self.cache, self.count, self.most = model, cache, count, most
        self.drafted = self.accepted = self.rounds = 0
        self.seconds = 0.0

    def get_candidates(
        self, input_ids: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """The text so far, and drafts behind it."""
        begun = time.perf_counter()
        if (over := self.cache.get_seq_length() - (input_ids.shape[1] - 1)) > 0:
            crop(self.cache, over)
        given = input_ids[:, self.cache.get_seq_length() :]
        count = min(self.count, self.most - input_ids.shape[1] - 1)
        for _ in range(count):
            logits = self.model(given, past_key_values=self.cache).logits
            given = logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, given], dim=1)
            self.drafted += 1
            # Nothing comes behind an end, and generate looks for it in the last place alone.
            if int(given) == END:
                break
        self.seconds += time.perf_counter() - begun
        return input_ids, None

    def update_candidate_strategy(self, _: Any, __: Any, num_matches: Any) -> None:
        """Count what was right."""
        self.accepted += int(num_matches)
        self.rounds += 1


def crop(cache: Any, over: int) -> None:
    """Take back the last tokens; a negative number says so to caches of transformers 4 and 5."""
    cache.crop(-over)


def sharing(model: Any) -> Any:
    """A copy of a model with the same weights in memory, and attention of its own."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})


@contextmanager
def drafting(model: Any, drafts: Drafts) -> Iterator[None]:
    """Have `generate` take these drafts when it is asked for assistance."""
    # The one place where generate makes its candidate generator.
    model._get_candidate_generator = lambda *_, **__: drafts
    try:
        yield
    finally:
        del model._get_candidate_generator


@dataclass
class Run:
    """Tokens that came out, and how long they took, prompt included."""

    ids: list[int]
    seconds: float
    drafts: Drafts | None = None


def generate(
    model: Any, ids: torch.Tensor, new: int, drafts: Drafts | None = None, **more: Any
) -> Run:
    """Go on greedily, with a new cache: assisted, transformers 5 misuses one that is filled."""
    # No text has this byte; of transformers 4 prompt lookup needs some end.
    how = {"max_new_tokens": new, "do_sample": False, "eos_token_id": END}
    how |= {"pad_token_id": END, "attention_mask": torch.ones_like(ids)}
    begun = time.perf_counter()
    with torch.inference_mode():
        if drafts is None:
            out = model.generate(ids, **how, **more)
        else:
            with drafting(model, drafts):
                # The number only asks for assistance: how many are drafted is the drafts' matter.
                out = model.generate(ids, prompt_lookup_num_tokens=drafts.count, **how)
    return Run(out[0, ids.shape[1] :].tolist(), time.perf_counter() - begun, drafts)


def copied(cache: DynamicCache) -> DynamicCache:
    """Another cache of the same keys and values, to grow by itself."""
    found = DynamicCache()
    for index, layer in enumerate(cache.layers):
        found.update(layer.keys, layer.values, index)
    return found


def measure(
    model: Any, chosen: Sequence[Passage], budgets: Sequence[float], count: int, new: int
) -> list[dict[str, Any]]:
    """Decode all passages in all ways, and see that the same tokens come out."""
    totals: dict[tuple[str, float | None, str], dict[str, float]] = {}
    drafter = sharing(model)
    for passage in chosen:
        whole = prefill(model, passage)
        asks = FAR if passage.kind in ("pairs", "copies") else NEAR
        # The first bytes of the rest say which task it is.
        ids = torch.cat([passage.prompt, passage.rest[:, :2]], dim=1)
        # Every run reads the prompt densely; how long that takes is nobody's merit.
        prompt = min(generate(model, ids, 1).seconds for _ in range(3))
        dense = generate(model, ids, new)

        def add(
            way: str,
            eps: float | None,
            run: Run,
            kept: float,
            dense: Run = dense,
            prompt: float = prompt,
            asks: str = asks,
        ) -> None:
            if run.ids != dense.ids:
                raise SystemExit(f"{way}, eps {eps}: {run.ids}, but dense decoding {dense.ids}")
            total = totals.setdefault((way, eps, asks), dict.fromkeys(COUNTED, 0.0))
            drafts = run.drafts
            did = (drafts.drafted, drafts.accepted, drafts.rounds, drafts.seconds) if drafts else ()
            found = (1, kept, len(run.ids), run.seconds - prompt, *did)
            total |= {name: total[name] + more for name, more in zip(COUNTED, found, strict=False)}
            totals[way, eps, asks] = total

        add("dense", None, dense, 1.0)
        add("prompt lookup", None, generate(model, ids, new, prompt_lookup_num_tokens=count), 1.0)
        for eps in budgets:
            pruned = ct.prune_cache(whole.cache, whole.queries, eps, keep_last=WINDOW)
            kept = pruned.kept_fraction
            for way, cache in ((PRUNED, pruned), (CERTIFIED, copied(whole.cache))):
                ct.use(drafter, eps=0 if way == PRUNED else eps, even_if_slower=True)
                most = ids.shape[1] + new
                run = generate(model, ids, new, Drafts(drafter, cache, count, most))
                if way == CERTIFIED:
                    # Once more, since recording takes time.
                    again = Drafts(drafter, copied(whole.cache), count, most)
                    with ct.Recorder(error_bounds=False, rows=False) as recorder:
                        generate(model, ids, new, again)
                    kept = _kept(recorder)
                add(way, eps, run, kept)
    return [
        {"way": way, "eps": eps, "asks": asks, **total}
        for (way, eps, asks), total in totals.items()
    ]


def costs(model: Any, n: int, share: float, count: int) -> dict[str, float]:
    """Seconds of a step behind n random keys, of reading drafts, and of a draft from a share.

    Drafts are read by sdpa, and by certified attention that drops nothing.
    """
    exact = ct.use(sharing(model), eps=0)
    config = model.config
    shape = (1, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads)
    whole, part = DynamicCache(), DynamicCache()
    few = max(1, round(share * n))
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(shape), torch.randn(shape)
        whole.update(keys, values, layer)
        part.update(keys[:, :, :few], values[:, :, :few], layer)
    model.set_attn_implementation("sdpa")
    runs = {"step": (model, whole, 1), "reading": (model, whole, count + 1)}
    runs |= {"exact": (exact, whole, count + 1), "draft": (exact, part, 1)}
    found = {"n": float(n), "share": share}
    for name, (who, cache, m) in runs.items():
        ids, taken = torch.arange(m)[None], []
        for _ in range(12):
            begun = time.perf_counter()
            with torch.inference_mode():
                who(ids, past_key_values=cache, position_ids=torch.arange(n, n + m)[None])
            taken.append(time.perf_counter() - begun)
            crop(cache, m)
        found[name] = sorted(taken)[len(taken) // 2]
    return found


def _kept(recorder: ct.Recorder) -> float:
    """The share of keys that certified attention kept, over all calls."""
    layers = recorder.layers
    return sum(each.kept for each in layers) / max(1, len(layers))


def show(found: dict[str, Any]) -> None:
    """A row for each way and eps, and what steps cost behind longer texts."""
    table = Table(box=box.SIMPLE_HEAD, title="Drafts", title_justify="left")
    for heading in (
        "drafts by", "eps", "keys kept", f"right, {NEAR}", f"right, {FAR}", f"tokens/s, {NEAR}",
        f"tokens/s, {FAR}", "ms a draft",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "drafts by" else "right")
    rows = {(row["way"], row["eps"], row["asks"]): row for row in found["rows"]}
    for way, eps in dict.fromkeys((way, eps) for way, eps, _ in rows):
        both = [rows[way, eps, asks] for asks in (NEAR, FAR)]
        drafted = sum(row["drafted"] for row in both)
        kept = sum(row["kept"] for row in both) / sum(row["runs"] for row in both)
        table.add_row(
            way, "" if eps is None else f"{eps:g}", f"{kept:.1%}" if drafted else "",
            *(f"{row['accepted'] / row['drafted']:.1%}" if drafted else "" for row in both),
            *(f"{row['tokens'] / row['seconds']:.0f}" for row in both),
            f"{1e3 * sum(row['drafting'] for row in both) / drafted:.2f}" if drafted else "",
        )  # fmt: skip
    console.print(table)
    count = found["drafts"]
    table = Table(box=box.SIMPLE_HEAD, title="Milliseconds behind n keys", title_justify="left")
    for heading in (
        "n", "a dense step", f"reading {count} drafts", "by eps = 0", "a draft", "of the keys",
        "right to gain", "gain at most",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in found["costs"]:
        table.add_row(
            f"{row['n']:.0f}",
            *(f"{1e3 * row[name]:.2f}" for name in ("step", "reading", "exact", "draft")),
            f"{row['share']:.0%}", *_gain(row, count),
        )  # fmt: skip
    console.print(table)


def _gain(row: dict[str, float], count: int) -> tuple[str, str]:
    """How many drafts must be right in the mean, to take no longer, and what is gained at most."""
    taken = (count * row["draft"] + min(row["reading"], row["exact"])) / row["step"]
    least = f"{max(0.0, taken - 1):.1f} of {count}" if taken <= count + 1 else "more than all"
    return least, f"{(count + 1) / taken:.2f}"


def main() -> None:
    """Train or load, decode in all ways, show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=far_texts.ROOT / "build" / "held-out")
    parser.add_argument(
        "--model", type=Path, help="where the model is, or goes (default: in --out)"
    )
    parser.add_argument("--drafts", type=int, default=4, help="tokens that are drafted at a time")
    parser.add_argument("--quick", action="store_true", help="a model that knows next to nothing")
    parser.add_argument("--threads", type=int, default=1, help="a model this small gains by none")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    quick = options.quick
    recipe = far_decoder.QUICK if quick else far_decoder.Recipe()
    model = far_decoder.trained(options.model or out / "model.safetensors", recipe, console)
    chosen = passages(1, 256, 16) if quick else passages(3, 1536, 64)
    budgets = (0.5, 0.05) if quick else EPS
    new, count = 16 if quick else 64, options.drafts
    found: dict[str, Any] = {"drafts": count, "new": new}
    found["rows"] = measure(model, chosen, budgets, count, new)
    # Behind texts longer than it was trained for a model says nothing, in the same time.
    lengths = (256, 512) if quick else (2048, 16384, 65536)
    found["costs"] = [costs(model, n, 0.05, count) for n in lengths]
    console.print(
        f"{len(chosen)} prompts of {chosen[0].prompt.shape[1] + 2} bytes, {new} more of each, "
        f"{count} drafted at a time; the tokens of every run are those of dense decoding\n"
    )
    show(found)
    (out / "drafts.json").write_text(json.dumps(found, indent=1))
    console.print(f"[dim]results: {out / 'drafts.json'}[/]")


if __name__ == "__main__":
    main()
