"""Whole decoders, a token at a time: `python benches/bench_decoder.py [f32 bf16]`.

Llama-shaped models (hidden 1024, 8 layers, 16 heads of 64 or 128, 4 or 8 kv heads) with random
weights behind 16384 and 32768 random keys: tokens per second with `CertkCache` and certified
attention, and with sdpa over `DynamicCache` and `StaticCache`, taken in turn in one process, one
and two threads; and where the time of a token goes. Each result is checked before it is timed. Exit
code 1 when a check fails.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench_attention import EPS, CheckFailedError, contest
from harness import table
from harness.sharpened import sharpen
from harness.table import Tell

SECTIONS = {"f32": "float32 weights, keys and values", "bf16": "bfloat16 ones"}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
HIDDEN, LAYERS, HEADS = 1024, 8, 16
# Deviations of scores: few, some, and most keys carry 99 %.
SIGMAS = (5.0, 3.0, 1.0)
# How far outputs may lie from those of sdpa, in norm, when nothing to speak of is dropped: what is
# dropped at EPS grows from layer to layer of a model that was never trained, and says nothing.
LITTLE = 1e-6
FAR = 1e-3
# In bfloat16 every layer rounds: not this many times as far from float32 as sdpa.
MORE = 1.25
# Tokens that may follow in a cache of fixed length.
ROOM = 1024


@dataclass(frozen=True)
class Shape:
    """Of a model and of what lies in its cache."""

    dtype: str
    d: int
    kv_heads: int
    n: int

    def __str__(self) -> str:
        """As it stands in the table."""
        return f"{self.dtype} d {self.d:3} kv {self.kv_heads} n {self.n}"


class Shares:
    """Seconds of one token spent in attention, in the cache, and elsewhere."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.spent: dict[str, float] = {"attention": 0.0, "cache": 0.0}

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is added to a share."""

        def outer(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                self.spent[name] += time.perf_counter() - start

        return outer

    @contextmanager
    def watched(self, cache: Any, implementation: str) -> Iterator[None]:
        """Has an eye on a cache's updates, and on an attention function of transformers."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        attend = ALL_ATTENTION_FUNCTIONS[implementation]
        ALL_ATTENTION_FUNCTIONS[implementation] = self.timed("attention", attend)
        cache.update = self.timed("cache", cache.update)
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[implementation] = attend
            del cache.update


class Decoders:
    """The same model under both kinds of attention, and three caches with the same keys."""

    def __init__(self, shape: Shape) -> None:
        """Keys and values are normal."""
        import transformers

        import certk_rs.transformers as models

        torch.manual_seed(0)
        self.shape = shape
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=HIDDEN, intermediate_size=2816, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=shape.kv_heads, head_dim=shape.d,
            max_position_embeddings=2 * shape.n, pad_token_id=0,
        )  # fmt: skip
        dtype = DTYPES[shape.dtype]
        self.plain = transformers.LlamaForCausalLM(config).to(dtype).eval()
        self.grown = transformers.DynamicCache(config=config)
        self.fixed = transformers.StaticCache(config=config, max_cache_len=shape.n + ROOM)
        self.indexed = models.CertkCache(reserve=shape.n + ROOM)
        for layer in range(LAYERS):
            size = (2, 1, shape.kv_heads, shape.n, shape.d)
            keys, values = torch.randn(size).to(dtype)
            for cache in (self.grown, self.fixed, self.indexed):
                cache.update(keys, values, layer)
        self.ours: Any = None
        self.token = torch.ones(1, 1, dtype=torch.long)

    def sharpen(self, sigma: float) -> None:
        """Has scores of the deviation sigma from here on."""
        import certk_rs.transformers as models

        sharpen(self.plain, self.token, sigma)
        self.ours = models.use(copy.deepcopy(self.plain), eps=EPS)

    def step(self, model: Any, cache: Any) -> Any:
        """One token."""
        with torch.inference_mode():
            return model(input_ids=self.token, past_key_values=cache).logits.float()

    def check(self) -> None:
        """The models agree; before anything is timed, while all caches hold as many tokens."""
        import certk_rs.transformers as models

        for sigma in SIGMAS:
            self.sharpen(sigma)
            most = FAR
            wanted = self.precise()
            ours = models.use(copy.deepcopy(self.plain), eps=LITTLE)
            found = self.step(ours, self.indexed)
            for cache in (self.grown, self.fixed):
                dense = self.step(self.plain, cache)
                most = max(most, MORE * float((dense - wanted).norm() / wanted.norm()))
            far = float((found - wanted).norm() / wanted.norm())
            if not far <= most:
                raise CheckFailedError(
                    f"{self.shape} sigma {sigma:g}: off by {far:.3g}, {most:.3g}"
                )

    def precise(self) -> Any:
        """Return the logits of a token in float32."""
        import transformers

        cache = transformers.DynamicCache(config=self.plain.config)
        for layer, stored in enumerate(self.grown.layers):
            cache.update(stored.keys.float(), stored.values.float(), layer)
        return self.step(copy.deepcopy(self.plain).float(), cache)

    def kept(self) -> float:
        """The share of the keys that is kept; every certificate must hold."""
        import certk_rs.transformers as models

        with models.Recorder(rows=False) as recorder:
            self.step(self.ours, self.indexed)
        if not all(layer.holds for layer in recorder.layers):
            raise CheckFailedError(f"{self.shape}: {recorder}")
        return statistics.fmean(layer.kept for layer in recorder.layers)

    def line(self, sigma: float, threads: int, repeat: int) -> str:
        """One line of the table."""
        torch.set_num_threads(threads)
        kept = self.kept()
        entrants = {
            "ours": (self.ours, self.indexed, "certk"),
            "dynamic": (self.plain, self.grown, "sdpa"),
            "static": (self.plain, self.fixed, "sdpa"),
        }
        works: dict[str, Callable[[], object]] = {
            name: lambda model=model, cache=cache: self.step(model, cache)  # type: ignore[misc]
            for name, (model, cache, _) in entrants.items()
        }
        times = contest(works, repeat)
        median = {name: statistics.median(each) for name, each in times.items()}
        peer = min(("dynamic", "static"), key=median.__getitem__)
        text = f"{self.shape!s:25}{sigma:4g}{threads:3}{kept:7.3f}"
        text += "".join(f"{1 / median[name]:9.1f}" for name in entrants)
        text += f"{median['ours'] / median[peer]:7.2f} "
        for name in ("ours", peer):
            model, cache, implementation = entrants[name]
            shares, calls = Shares(), 5
            with shares.watched(cache, implementation):
                start = time.perf_counter()
                for _ in range(calls):
                    self.step(model, cache)
                whole = time.perf_counter() - start
            parts = list(shares.spent.values())
            for part in (*parts, whole - sum(parts)):
                text += f"{part * 1e3 / calls:8.1f}"
        return text


def measure(wanted: set[str], repeat: int, tell: Tell) -> bool:
    """The table; whether all checks held."""
    tell(
        "\ntokens per second; ratio of the medians of a token's time, ours / the faster cache's; "
        "ms of a token\nin attention, in the cache (with its index), and elsewhere, in a run of "
        f"its own\n\n{'':25}{'sigma':>4}{'thr':>3}{'k/n':>6}{'ours':>9}{'dynamic':>9}{'static':>9}"
        f"{'ratio':>7} {'ours:':>6}{'attends':>8}{'caches':>8}{'rest':>8}{'peer:':>6}"
    )
    shapes = [
        Shape(dtype, d, kv_heads, n)
        for dtype in SECTIONS
        if dtype in wanted
        for n in (16_384, 32_768)
        for d in (64, 128)
        for kv_heads in (4, 8)
    ]
    try:
        for shape in shapes:
            decoders = Decoders(shape)
            decoders.check()
            for sigma in SIGMAS:
                decoders.sharpen(sigma)
                for threads in (1, 2):
                    tell(decoders.line(sigma, threads, repeat))
            del decoders
    except CheckFailedError as error:
        tell(f"CHECK FAILED: {error}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "decoder", 7, measure))
