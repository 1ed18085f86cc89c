"""Decoding from files: `python benches/bench_offload.py [D R]`.

D: steps of a small Llama behind 32768 and 131072 tokens of random keys, from memory and from files,
in turn. From files twice: with room for all pages, and with room for a quarter of the keys and
values (all pages are dropped as soon as so much has been read; a system under pressure would choose
better ones). Outputs and certificates are compared, bit for bit. Keys are independent, and so are
the queries of successive tokens: neither pages nor steps share what they need.

R: one query at a time of real rows (n = 65536, which are 128 windows of 512 tokens side by side,
d = 32, with CERTK_DATA), no page in memory before each: what is read, of all that is there.

Bytes are those that the process has caused to be read from the disk (/proc/self/io). Linux only;
files are made in the working directory, or in CERTK_SCRATCH, which must be on a disk.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import certk_rs as ck
import certk_rs.transformers as models
from certk_rs._files.cache import Cache
from harness import table
from harness.decoders import fill, llama, sharpen
from harness.levels import SECOND, level
from harness.table import Run
from harness.verify import CheckFailedError

SECTIONS = {
    "D": "steps of decoding from files beside memory, random keys",
    "R": "bytes read for one query of real rows",
}
EPS = 0.05
SIGMA, FLATTER = 4.0, 2.0
LAYERS, KV_HEADS, GROUP, DIM = 4, 4, 2, 128
CHUNK = 4096
LEAST = 1 << 15  # tokens behind which flatter rows and the second level are measured, too
SCRATCH = Path(os.environ.get("CERTK_SCRATCH", "."))


def read_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def drop(cache: Any) -> None:
    """Have no page of a cache's files in memory."""
    for layer in cache.layers:
        layer.let_go()
        descriptor = layer._rows._own.descriptor
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def model_of(dtype: torch.dtype, sigma: float) -> Any:
    """Return a random Llama whose scores over normal keys have the deviation sigma."""
    model = llama(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=GROUP * KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
        max_position_embeddings=1 << 18,
    )  # fmt: skip
    sharpen(model, torch.arange(512)[None], sigma)
    return models.use(model.to(dtype), eps=EPS, threads=torch.get_num_threads())


class Steps:
    """A cache, what its steps took and read, and what came out of them."""

    def __init__(self, name: str, cache: Any, room: float | None) -> None:
        self.name, self.cache, self.room = name, cache, room
        self.times: list[float] = []
        self.amounts: list[int] = []
        self.found: list[list[Any]] = []
        self.held = math.inf

    def step(self, model: Any, token: int) -> None:
        """One more token; before it all pages are dropped if there is no room for them."""
        if self.room is not None and self.held > self.room:
            drop(self.cache)
            self.held = 0
        before, start = read_bytes(), time.perf_counter()
        with models.Recorder() as recorder, torch.inference_mode():
            out = model(input_ids=torch.tensor([[token]]), past_key_values=self.cache)
        self.times.append(time.perf_counter() - start)
        self.amounts.append(read_bytes() - before)
        self.held += self.amounts[-1]
        if not all(layer.holds for layer in recorder.layers):
            raise CheckFailedError(f"a certificate does not hold: {recorder}")
        told = [part for c in recorder.calls for part in (c.k, c.tail_mass_upper, c.error_bound)]
        self.found.append([out.logits.float().numpy(), *told])


def decoding(run: Run, n: int, dtype: torch.dtype, sigma: float) -> None:
    """D: from memory, from files that are in memory, from files of which a quarter is; in turn."""
    model = model_of(dtype, sigma)
    whole = n * LAYERS * KV_HEADS * 2 * DIM * dtype.itemsize
    places = (None, SCRATCH, SCRATCH)
    caches = [models.CertkCache(reserve=CHUNK, offload=place) for place in places]
    fill(caches, model, n, CHUNK)
    memory, files = (Steps(name, caches[at], None) for at, name in enumerate(("memory", "files")))
    quarter = Steps("a quarter", caches[2], whole / 4)
    rng = np.random.default_rng(1)
    steps = run.pick(24, 3)
    for token in rng.integers(1, 512, steps):
        for at in rng.permutation(3):
            (memory, files, quarter)[at].step(model, int(token))
        for other in (files, quarter):
            pairs = zip(other.found[-1], memory.found[-1], strict=True)
            if not all(np.array_equal(*pair) for pair in pairs):
                raise CheckFailedError(f"{other.name} and memory differ")
    kept = np.mean([part.mean() for step in memory.found for part in step[1::3]]) / n
    run.tell(
        f"D {n} tokens, {str(dtype).removeprefix('torch.')}, sigma {sigma:g}, {ck.simd_level()}: "
        f"{whole / 1e6:.0f} MB of keys and values, codes {memory.cache.index_bytes / whole:.3f} of "
        f"them, k/n {kept:.4f}; {steps} steps with equal outputs and certificates"
    )
    for each in (memory, files, quarter):
        # The first step makes room in the index: it is no step like the others.
        spent, amount = statistics.median(each.times[1:]), statistics.fmean(each.amounts[1:])
        run.tell(
            f"  {each.name:9} {1 / spent:7.1f} tokens/s   read {amount / 1e6:7.2f} MB a token, "
            f"{amount / whole:.4f} of all"
        )


def real_rows(run: Run, path: Path) -> None:
    """R: queries of real rows, each over a file of which nothing is in memory."""
    with Cache(path) as file:
        for layer in file.layers:
            parts = [file.read(layer, role) for role in ("query", "key", "value")]
            q, k, v = (torch.from_numpy(part.view(np.float16)) for part in parts)
            cache = models.CertkCache(offload=SCRATCH)
            cache.update(k[None], v[None], 0)
            keys, values = cache.layers[0].keys, cache.layers[0].values
            whole = keys.nbytes + values.nbytes
            for eps in (0.1, 0.01):
                shares, kept = [], []
                for row in range(0, q.shape[1], 4):
                    drop(cache)
                    before = read_bytes()
                    found = ck.attention(
                        q[None, :, row : row + 1], keys, values, eps,
                        index=keys.certk_index, ball=values.certk_ball,
                    )  # fmt: skip
                    shares.append((read_bytes() - before) / whole)
                    kept.append(found.k.mean() / keys.shape[2])
                run.tell(
                    f"R layer {layer.index} eps {eps:<5g} read {statistics.median(shares):.3f} of "
                    f"the file (most {max(shares):.3f})  k/n {statistics.median(kept):.4f}"
                )


def measure(run: Run) -> None:
    """Tell the table."""
    run.tell("")
    if "D" in run.wanted:
        for n in run.pick((LEAST, 1 << 17), (CHUNK,)):
            for dtype in (torch.float32, torch.bfloat16):
                decoding(run, n, dtype, SIGMA)
                if n == LEAST or run.quick:
                    decoding(run, n, dtype, FLATTER)
                    with level(SECOND):
                        decoding(run, n, dtype, SIGMA)
    folder = os.environ.get("CERTK_DATA")
    if "R" in run.wanted and folder:
        real_rows(run, Path(folder) / "minilm_n65536.safetensors")


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "offload", 1, measure))
