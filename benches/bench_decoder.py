"""Whole decoders, a token at a time: `python benches/bench_decoder.py [f32 bf16 small]`.

Llama-shaped models with random weights behind 8192 and 32768 random keys: 16 heads of 64 and 4 kv
heads (hidden 1024, 8 layers), 32 of 128 and 8 (hidden 2048, 4 layers); small ones (2 layers of 2 kv
heads of 128) behind 65536. Tokens per second with certified attention over a `CertkCache` (ours)
and one of exact weights, and with sdpa over `DynamicCache` and `StaticCache`, taken in turn in one
process, one and two threads; and the parts of a token's time. Each result is checked before it is
timed. Exit code 1 when a check fails.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench_attention import EPS
from harness import table
from harness.clock import Work, in_turn
from harness.decoders import fill, llama, sharpen
from harness.levels import SECOND, beside
from harness.table import Run
from harness.verify import CheckFailedError

SECTIONS = {
    "f32": "float32 weights, keys and values",
    "bf16": "bfloat16 ones",
    "small": "small models behind 65536 tokens, float32; with targets",
}
# Deviations of scores: few, some, and most keys carry 99 %. Targets of the ratio, if any.
WIDE: dict[float, float | None] = {5.0: None, 3.0: None, 1.0: None}
SINGLE: dict[float, float | None] = {4.0: 0.2, 5.0: 1 / 7, 2.5: 0.6}
GROUPED: dict[float, float | None] = {4.0: 1 / 3, 5.0: 1 / 3, 2.5: 1.1}
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
    """Shape of a model and of what lies in its cache."""

    d: int
    heads: int
    kv_heads: int
    n: int
    dtype: torch.dtype = torch.float32
    vocabulary: int = 4096
    hidden: int = 1024
    inner: int = 2816
    layers: int = 8

    def __str__(self) -> str:
        """Name it as the table does."""
        kind = "f32" if self.dtype is torch.float32 else "bf16"
        return f"{kind} d {self.d:3} kv {self.kv_heads} x {self.heads // self.kv_heads} n {self.n}"


class Shares:
    """Seconds of one token spent in attention, in the cache, and elsewhere."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {"attention": 0.0, "cache": 0.0}

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, whose time is added to a share."""

        def outer(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                self.spent[name] += time.perf_counter() - start

        return outer

    @contextmanager
    def watched(self, cache: Any, implementation: str) -> Iterator[None]:
        """Watch a cache's updates, and an attention function of transformers."""
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
    """The same model under both kinds of attention, and four caches with the same keys."""

    def __init__(self, shape: Shape) -> None:
        import transformers

        import certk_rs.transformers as models

        self.shape = s = shape
        self.plain = llama(
            vocab_size=s.vocabulary, hidden_size=s.hidden, intermediate_size=s.inner,
            num_hidden_layers=s.layers, num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads, head_dim=s.d, max_position_embeddings=2 * s.n,
        ).to(s.dtype)  # fmt: skip
        config = self.plain.config
        self.grown = transformers.DynamicCache(config=config)
        self.fixed = transformers.StaticCache(config=config, max_cache_len=s.n + ROOM)
        self.indexed = models.CertkCache(reserve=s.n + ROOM)
        self.exact = models.CertkCache(reserve=s.n + ROOM, weights="exact")
        fill((self.grown, self.fixed, self.indexed, self.exact), self.plain, s.n, s.n)
        self.ours: Any = None
        self.token = torch.ones(1, 1, dtype=torch.long)

    def sharpen(self, sigma: float) -> None:
        """Have scores of the deviation sigma from here on."""
        import certk_rs.transformers as models

        sharpen(self.plain, self.token, sigma)
        self.ours = models.use(copy.deepcopy(self.plain), eps=EPS)

    def step(self, model: Any, cache: Any) -> Any:
        """Return the logits of one token."""
        with torch.inference_mode():
            return model(input_ids=self.token, past_key_values=cache).logits.float()

    def check(self, sigma: float) -> None:
        """Compare the models, before anything is timed: all caches hold as many tokens."""
        import certk_rs.transformers as models

        self.sharpen(sigma)
        most = FAR
        wanted = self.precise()
        ours = models.use(copy.deepcopy(self.plain), eps=LITTLE)
        answers = [self.step(ours, cache) for cache in (self.indexed, self.exact)]
        for cache in (self.grown, self.fixed):
            dense = self.step(self.plain, cache)
            most = max(most, MORE * float((dense - wanted).norm() / wanted.norm()))
        far = max(float((found - wanted).norm() / wanted.norm()) for found in answers)
        if not far <= most:
            raise CheckFailedError(f"{self.shape} sigma {sigma:g}: off by {far:.3g}, {most:.3g}")

    def precise(self) -> Any:
        """Return the logits of a token in float32."""
        import transformers

        cache = transformers.DynamicCache(config=self.plain.config)
        for layer, stored in enumerate(self.grown.layers):
            cache.update(stored.keys.float(), stored.values.float(), layer)
        return self.step(copy.deepcopy(self.plain).float(), cache)

    def shares(self) -> list[float]:
        """Return the shares of keys that exact weights keep, and that ours scores exactly."""
        import certk_rs.transformers as models

        found = []
        for cache, share in ((self.exact, "kept"), (self.indexed, "scored")):
            with models.Recorder(rows=False) as recorder:
                self.step(self.ours, cache)
            if not all(layer.holds for layer in recorder.layers):
                raise CheckFailedError(f"{self.shape}: {recorder}")
            found.append(statistics.fmean(getattr(layer, share) for layer in recorder.layers))
        return found

    def line(self, sigma: float, target: float | None, threads: int, repeat: int) -> str:
        """Return one line of the table."""
        torch.set_num_threads(threads)
        kept, scored = self.shares()
        entrants = {
            "ours": (self.ours, self.indexed, "certk"),
            "exact": (self.ours, self.exact, "certk"),
            "dynamic": (self.plain, self.grown, "sdpa"),
            "static": (self.plain, self.fixed, "sdpa"),
        }
        works: dict[str, Work] = {
            name: lambda model=model, cache=cache: self.step(model, cache)  # type: ignore[misc]
            for name, (model, cache, _) in entrants.items()
        }
        times = in_turn(beside(works, "ours"), repeat)
        peer = min(("dynamic", "static"), key=times.median)
        text = f"{self.shape!s:27}{sigma:4g}{threads:3}{kept:7.3f}{scored:7.3f}"
        text += "".join(f"{1e3 / times.median(name):9.1f}" for name in entrants)
        ratio = times.ratio("ours", peer)[0]
        text += f"{ratio:7.2f}{times.lower('ours', peer) or math.nan:7.2f} "
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
        if target is not None:
            text += f"  <={target:.2f} {'ok' if ratio <= target else 'MISS'}"
        return text


def shapes(run: Run) -> Iterator[tuple[Shape, dict[float, float | None]]]:
    """Yield all shapes with their deviations and targets."""
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        for n in run.pick((8192, 32_768), (512,)) if name in run.wanted else ():
            yield Shape(64, 16, 4, n, dtype), WIDE
            if run.pick(True, False):
                yield Shape(128, 32, 8, n, dtype, 4096, 2048, 8192, 4), WIDE
    for group, targets in ((1, SINGLE), (4, GROUPED)) if "small" in run.wanted else ():
        n = run.pick(65_536, 512)
        yield Shape(128, 2 * group, 2, n, torch.float32, 512, 512, 1024, 2), targets


def measure(run: Run) -> None:
    """Tell the table."""
    run.tell(
        "\nk/n of exact weights; share of keys that ours scores exactly; tokens per second; ratio "
        "of the medians\nof a token's time, ours / the faster of dynamic and static, and the same "
        f"with ours at {SECOND};\nms of a token in attention, in the cache (with its index), and "
        "elsewhere, in a run of its own\n\n"
        f"{'':27}{'sigma':>4}{'thr':>3}{'k/n':>6}{'exact':>7}{'ours':>9}{'exact':>9}{'dynamic':>9}"
        f"{'static':>9}"
        f"{'ratio':>7}{'lower':>7} {'ours:':>6}{'attends':>8}{'caches':>8}{'rest':>8}{'peer:':>6}"
    )
    for shape, targets in shapes(run):
        decoders = Decoders(shape)
        for sigma in targets:
            decoders.check(sigma)
        for sigma, target in targets.items():
            decoders.sharpen(sigma)
            for threads in run.pick((1, 2), (1,)):
                run.tell(decoders.line(sigma, target, threads, run.repeat))
        del decoders


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "decoder", 7, measure))
