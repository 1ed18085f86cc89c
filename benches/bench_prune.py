"""A prune job against a script of torch: `python benches/bench_prune.py [--growth] [--save]`.

J1: a cache of keys and values in bfloat16 (d = 128, 8 kv heads, 32 query heads, 64 queries each),
whose queries look at few keys (see `parts`). The peer reads the same file, computes scores and
softmax in float32 on two threads, takes as many keys of each kv head as ours by `topk` of the
largest probability, gathers them and saves them: no certificate, no hash, no sync. Both run as
processes of their own, in turn; medians of wall time, beside CPU time, page faults and the peak of
resident memory. The output of ours is verified first.

With --growth, GB per minute as n, queries and heads grow.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness import machine, report

EPS = 0.05
SIGMA, ALIKE = 4.0, 0.9
D, KV_HEADS, HEADS, QUERIES, KEYS = 128, 8, 32, 64, 65_536
TARGET, SPARE = 0.7, 200e6
RESULTS = Path(__file__).parent / "results"

PEER = """
import sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
torch.set_num_threads(2)
source, target, counts = sys.argv[1], sys.argv[2], [int(x) for x in sys.argv[3].split(",")]
out = {}
with safe_open(source, "pt") as file:
    layers = sorted({name.split(".")[1] for name in file.keys()}, key=int)
    for layer in layers:
        q, k, v = (file.get_tensor(f"layers.{layer}.{role}") for role in ("query", "key", "value"))
        for head in range(k.shape[0]):
            size = q.shape[0] // k.shape[0]
            queries = q[head * size : (head + 1) * size].reshape(-1, q.shape[2]).float()
            scores = queries @ k[head].float().T
            scores *= q.shape[2] ** -0.5
            best = torch.softmax(scores, dim=-1).amax(dim=0)
            kept = best.topk(counts[int(layer) * k.shape[0] + head]).indices.sort().values
            out[f"{layer}.{head}.key"] = k[head][kept]
            out[f"{layer}.{head}.value"] = v[head][kept]
save_file(out, target)
"""


@dataclass(frozen=True)
class Size:
    """A cache to be made."""

    layers: int
    n: int = KEYS
    queries: int = QUERIES
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    @property
    def layer_bytes(self) -> int:
        """Of keys and values, in bfloat16."""
        return 2 * 2 * self.kv_heads * self.n * D


@dataclass(frozen=True)
class Spent:
    """Time and memory of one process."""

    wall: float
    cpu: float
    peak: int
    faults: int


def bfloat16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype("<u2")


def parts(size: Size, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a cache, role by role of each layer.

    Keys and values are Gaussian. The queries of a kv head look in one direction, each with a part
    of its own, stretched so that the scores of a row have a standard deviation of `SIGMA`, and
    those of two rows a correlation of `ALIKE`.
    """
    for layer in range(size.layers):
        rng = np.random.default_rng([seed, layer])
        key = rng.standard_normal((size.kv_heads, size.n, D), np.float32)
        value = rng.standard_normal((size.kv_heads, size.n, D), np.float32)
        common = rng.standard_normal((size.kv_heads, 1, 1, D), np.float32)
        group = size.heads // size.kv_heads
        own = rng.standard_normal((size.kv_heads, group, size.queries, D), np.float32)
        query = SIGMA * (ALIKE**0.5 * common + (1 - ALIKE) ** 0.5 * own)
        query = query.reshape(size.heads, size.queries, D)
        yield f"layers.{layer}.key", bfloat16(key)
        yield f"layers.{layer}.value", bfloat16(value)
        yield f"layers.{layer}.query", bfloat16(query)


def write_cache(path: Path, size: Size, seed: int = 0) -> None:
    """Write a cache, a tensor at a time."""
    shapes = {}
    for layer in range(size.layers):
        for role in ("key", "value"):
            shapes[f"layers.{layer}.{role}"] = (size.kv_heads, size.n, D)
        shapes[f"layers.{layer}.query"] = (size.heads, size.queries, D)
    header, start = {}, 0
    for name, shape in shapes.items():
        stop = start + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in parts(size, seed):
            file.write(array.tobytes())


def made_elsewhere(path: Path, size: Size) -> None:
    """Write a cache in a process of its own: a child's peak begins with that of its parent."""
    sizes = (size.layers, size.n, size.queries, size.heads, size.kv_heads)
    call = f"import bench_prune as b, pathlib; b.write_cache(pathlib.Path({str(path)!r}), "
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    command = [sys.executable, "-c", f"{call}b.Size(*{sizes}))"]
    subprocess.run(command, check=True, env=environment)


def run(command: list[str]) -> Spent:
    """Run a process to its end; what it took."""
    # Compiled once, as what is installed is.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime
    return Spent(wall, cpu, usage.ru_maxrss * 1024, usage.ru_minflt)


def ours(source: Path, out: Path, *more: str) -> Spent:
    """Prune a cache, with a certificate."""
    (out / source.name).unlink(missing_ok=True)
    command = [sys.executable, "-m", "certk_rs", "prune", str(source), "-o", str(out)]
    return run([*command, "--eps", str(EPS), "--force", "-q", *more])


def peer(source: Path, target: Path, counts: list[int]) -> Spent:
    """The same number of keys, by torch."""
    target.unlink(missing_ok=True)
    listed = ",".join(map(str, counts))
    return run([sys.executable, "-c", PEER, str(source), str(target), listed])


def counts_of(out: Path, source: Path) -> list[int]:
    """Return the number of keys that each kv head keeps."""
    state = json.loads((out / ".certk" / "files" / f"{source.name}.json").read_text())
    return [one["kept"] for layer in state["report"]["layers"] for one in layer["sets"]]


def verified(source: Path, out: Path) -> None:
    """End with an error unless the output is confirmed."""
    output = str(out / source.name)
    run([sys.executable, "-m", "certk_rs", "verify", output, "--against", str(source), "-q"])


def median(spent: list[Spent], name: str) -> float:
    """The median of one of the figures."""
    return float(statistics.median(getattr(each, name) for each in spent))


def j1(folder: Path, mib: int, repeat: int, verify: bool, more: list[str]) -> str:
    """The job against the peer."""
    layers = max(1, round(mib * 2**20 / Size(1).layer_bytes))
    size, source, out = Size(layers), folder / "cache.safetensors", folder / "out"
    made_elsewhere(source, size)
    ours(source, out, *more)
    if verify:
        verified(source, out)
    counts = counts_of(out, source)
    mine, theirs = [], []
    for _ in range(repeat):
        mine.append(ours(source, out, *more))
        theirs.append(peer(source, folder / "peer.safetensors", counts))
    ratio = statistics.median(a.wall / b.wall for a, b in zip(mine, theirs, strict=True))
    cpu = statistics.median(a.cpu / b.cpu for a, b in zip(mine, theirs, strict=True))
    allowed = 3 * size.layer_bytes + SPARE
    gigabytes = source.stat().st_size / 1e9
    lines = [
        f"J1: {gigabytes:.2f} GB, {layers} layers of n = {size.n}, kept "
        f"{100 * sum(counts) / (layers * KV_HEADS * size.n):.1f} %",
        f"  wall ours / peer   {ratio:.2f} (target {TARGET})",
        f"  CPU ours / peer    {cpu:.2f}",
    ]
    for name, spent in (("ours", mine), ("peer", theirs)):
        lines.append(
            f"  {name}  wall {median(spent, 'wall'):.2f} s  CPU {median(spent, 'cpu'):.2f} s  peak "
            f"{median(spent, 'peak') / 1e6:.0f} MB  page faults {median(spent, 'faults'):.0f}"
        )
    lines.append(f"  allowed peak {allowed / 1e6:.0f} MB")
    lines.append(f"  ours {60 * gigabytes / median(mine, 'wall'):.1f} GB per minute")
    return "\n".join(lines)


def growth(folder: Path, repeat: int) -> list[tuple[str, int, float]]:
    """GB per minute as one size grows, the others as they are in J1 but n = 8192."""
    cases = [("n", n, Size(2, n=n)) for n in (2048, 8192, 32_768, 131_072)]
    cases += [("queries", m, Size(2, n=8192, queries=m)) for m in (16, 64, 256, 1024)]
    cases += [("heads", h, Size(2, n=8192, heads=h)) for h in (8, 32, 128)]
    found = []
    for name, value, size in cases:
        source, out = folder / f"{name}{value}.safetensors", folder / "out"
        made_elsewhere(source, size)
        walls = [ours(source, out).wall for _ in range(repeat)]
        rate = 60 * source.stat().st_size / 1e9 / statistics.median(walls)
        found.append((name, value, rate))
        source.unlink()
    return found


def plot(found: list[tuple[str, int, float]], path: Path) -> None:
    """Draw what `growth` found."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    names = list(dict.fromkeys(name for name, _, _ in found))
    figure, axes = plt.subplots(1, len(names), figsize=(10, 3), sharey=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        points = [(value, rate) for each, value, rate in found if each == name]
        axis.plot(*zip(*points, strict=True), "o-", color="#1f4e79")
        axis.set(xscale="log", yscale="log", xlabel="keys (n)" if name == "n" else name)
        labels = [f"{value:,}".replace(",", " ") for value, _ in points]
        axis.set_xticks([value for value, _ in points], labels, fontsize=9)
        axis.set_xticks([], minor=True)
        axis.margins(x=0.12)
        axis.grid(alpha=0.3)
    # All panels share it: each power of two, in numbers as one says them.
    rates = [rate for _, _, rate in found]
    low, high = math.floor(math.log2(min(rates))), math.ceil(math.log2(max(rates)))
    axes[0].set_yticks([2.0**k for k in range(low, high + 1)])
    axes[0].yaxis.set_major_formatter(ScalarFormatter())
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel("GB per minute")
    figure.savefig(path)


def table(found: list[tuple[str, int, float]]) -> str:
    """Return the results of `growth` as text."""
    lines = ["GB per minute, n = 8192, 32 query heads, 64 queries each, but"]
    return "\n".join(lines + [f"  {size} {value}: {rate:.2f}" for size, value, rate in found])


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the cache")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--growth", action="store_true", help="also GB per minute as sizes grow")
    parser.add_argument("--save", action="store_true", help=f"into {RESULTS}, with a plot")
    parser.add_argument("--folder", metavar="DIR", help="where the files go, else a temporary one")
    known, more = parser.parse_known_args()
    described = machine.describe()
    texts = []

    def say(text: str) -> None:
        texts.append(text)
        print(text, flush=True)

    say(report.machine_text(described))
    found: list[tuple[str, int, float]] = []
    with tempfile.TemporaryDirectory(dir=known.folder) as name:
        folder = Path(name)
        if known.repeat:
            say(j1(folder, known.mib, known.repeat, not known.no_verify, more))
        if known.growth:
            found = growth(folder, max(1, known.repeat // 2))
            say(table(found))
    if known.save:
        RESULTS.mkdir(exist_ok=True)
        stem = f"{described['date'][:10]}-{machine.cpu_slug()}-prune"
        text = "```\n" + "\n\n".join(texts) + "\n```\n"
        if found:
            plot(found, RESULTS / f"{stem}.svg")
            text += f"\n![GB per minute]({stem}.svg)\n"
        (RESULTS / f"{stem}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
