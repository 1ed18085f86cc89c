"""A prune job against a script of torch: `python benches/bench_prune.py [J1 growth] [--save]`.

J1: caches of keys and values in bfloat16 (d = 128, 8 kv heads, 32 query heads, 64 queries each):
one whose queries look at few keys, and one of independent queries (see `write_cache`), at the best
instruction level and at the second. The peer reads the same file, computes scores
and softmax in float32 on two threads, takes as many keys of each kv head as ours by `topk` of the
largest probability, gathers them and saves them: no certificate, no hash, no sync. Both run as
processes of their own, in turn; medians of wall time, beside CPU time, page faults and the peak of
resident memory. The output of ours is verified first.

growth: GB per minute as n, queries and heads grow.

Files are made in a temporary folder; TMPDIR says where.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness import table
from harness.levels import BEST, SECOND
from harness.table import Run

SECTIONS = {
    "J1": "wall time of a prune job / of a script of torch that proves nothing",
    "growth": "GB per minute as n, queries and heads grow",
}
EPS = 0.05
SIGMA = 4.0
KINDS = {"dependent": 0.9, "independent": 0.0}
D = 128
TARGET, SPARE = 0.7, 200e6

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

    layers: int = 2
    n: int = 8192
    queries: int = 64
    heads: int = 32
    kv_heads: int = 8
    alike: float = KINDS["dependent"]

    @property
    def layer_bytes(self) -> int:
        """Return the bytes of keys and values of a layer, in bfloat16."""
        return 2 * 2 * self.kv_heads * self.n * D


@dataclass(frozen=True)
class Spent:
    """Time and memory of one process."""

    wall: float
    cpu: float
    peak: int
    faults: int


def write_cache(path: str, *sizes: Any) -> None:
    """Write a cache; `sizes` are those of `Size`.

    Keys and values are Gaussian. The queries of a kv head look in one direction, each with a part
    of its own, stretched so that the scores of a row have a standard deviation of `SIGMA`, and
    those of two rows a correlation of `alike`.
    """
    size, tensors = Size(*sizes), {}
    torch.manual_seed(0)
    for layer in range(size.layers):
        key, value = torch.randn(2, size.kv_heads, size.n, D)
        group = size.heads // size.kv_heads
        own = torch.randn(size.kv_heads, group, size.queries, D)
        common = torch.randn(size.kv_heads, 1, 1, D)
        query = SIGMA * (size.alike**0.5 * common + (1 - size.alike) ** 0.5 * own)
        roles = {"key": key, "value": value, "query": query.reshape(size.heads, size.queries, D)}
        for role, tensor in roles.items():
            tensors[f"layers.{layer}.{role}"] = tensor.bfloat16().clone()
    save_file(tensors, path)


def made_elsewhere(path: Path, size: Size) -> None:
    """Write a cache in a process of its own: a child's peak begins with that of its parent."""
    call = f"import bench_prune as b; b.write_cache({str(path)!r}, *{astuple(size)})"
    here = str(Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    subprocess.run([sys.executable, "-c", call], check=True, env=environment)


def finished(command: list[str], level: str | None = None) -> Spent:
    """Run a process to its end, at a level of certk_rs; return its time and memory."""
    # Compiled once, as what is installed is.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    if level:
        environment["CERTK_LEVEL"] = level
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime
    return Spent(wall, cpu, usage.ru_maxrss * 1024, usage.ru_minflt)


def ours(source: Path, out: Path, level: str | None = None) -> Spent:
    """Prune a cache, with a certificate."""
    (out / source.name).unlink(missing_ok=True)
    command = [sys.executable, "-m", "certk_rs", "prune", str(source), "-o", str(out)]
    return finished([*command, "--eps", str(EPS), "--force", "-q"], level)


def peer(source: Path, target: Path, counts: list[int]) -> Spent:
    """The same number of keys, by torch."""
    target.unlink(missing_ok=True)
    listed = ",".join(map(str, counts))
    return finished([sys.executable, "-c", PEER, str(source), str(target), listed])


def counts_of(out: Path, source: Path) -> list[int]:
    """Return the number of keys that each kv head keeps."""
    state = json.loads((out / ".certk" / "files" / f"{source.name}.json").read_text())
    return [one["kept"] for layer in state["report"]["layers"] for one in layer["sets"]]


def verified(source: Path, out: Path) -> None:
    """End with an error unless the output is confirmed."""
    output = str(out / source.name)
    finished([sys.executable, "-m", "certk_rs", "verify", output, "--against", str(source), "-q"])


def median(spent: list[Spent], name: str) -> float:
    """The median of one of the figures."""
    return float(statistics.median(getattr(each, name) for each in spent))


def j1(run: Run, folder: Path, kind: str) -> None:
    """Compare the job with the peer."""
    size = Size(run.pick(4, 1), run.pick(65_536, 4096), alike=KINDS[kind])
    source, out = folder / "cache.safetensors", folder / "out"
    made_elsewhere(source, size)
    for level in (SECOND, None):
        ours(source, out, level)
        verified(source, out)
    counts = counts_of(out, source)
    mine, lower, theirs = [], [], []
    for _ in range(run.pick(run.repeat, 1)):
        mine.append(ours(source, out))
        lower.append(ours(source, out, SECOND))
        theirs.append(peer(source, folder / "peer.safetensors", counts))
    wall, cpu, below = (
        statistics.median(
            getattr(a, name) / getattr(b, name) for a, b in zip(spent, theirs, strict=True)
        )
        for spent, name in ((mine, "wall"), (mine, "cpu"), (lower, "wall"))
    )
    allowed = 3 * size.layer_bytes + SPARE
    gigabytes = source.stat().st_size / 1e9
    share = sum(counts) / (size.layers * size.kv_heads * size.n)
    run.tell(
        f"J1, {kind} queries: {gigabytes:.2f} GB, {size.layers} layers of n = {size.n}, kept "
        f"{share:.1%}"
    )
    run.tell(f"  wall ours / peer   {wall:.2f} (target {TARGET}), at {SECOND} {below:.2f}")
    run.tell(f"  CPU ours / peer    {cpu:.2f}")
    for name, spent in ((str(BEST), mine), (str(SECOND), lower), ("peer", theirs)):
        run.tell(
            f"  {name:8}  wall {median(spent, 'wall'):.2f} s  CPU {median(spent, 'cpu'):.2f} s  "
            f"peak {median(spent, 'peak') / 1e6:.0f} MB  page faults {median(spent, 'faults'):.0f}"
        )
    run.tell(f"  allowed peak {allowed / 1e6:.0f} MB")
    run.tell(f"  ours {60 * gigabytes / median(mine, 'wall'):.1f} GB per minute")


def growth(run: Run, folder: Path) -> None:
    """Tell GB per minute as one size grows; the others are those of `Size`."""
    grown: dict[str, tuple[int, ...]] = {
        "n": (2048, 8192, 32_768, 131_072), "queries": (16, 64, 256, 1024), "heads": (8, 32, 128),
    }  # fmt: skip
    run.tell("\nGB per minute, n = 8192, 32 query heads, 64 queries each, but")
    if run.quick:
        grown = {"n": (2048,)}
    for name, values in grown.items():
        for value in values:
            source, out = folder / f"{name}{value}.safetensors", folder / "out"
            said = f"  {name} {value}:"
            for kind, alike in KINDS.items():
                made_elsewhere(source, replace(Size(alike=alike), **{name: value}))
                walls = [ours(source, out).wall for _ in range(max(1, run.repeat // 2))]
                rate = 60 * source.stat().st_size / 1e9 / statistics.median(walls)
                said += f"  {kind} {rate:.2f}"
                source.unlink()
            run.tell(said)


def measure(run: Run) -> None:
    """Tell the table."""
    with tempfile.TemporaryDirectory() as name:
        if "J1" in run.wanted:
            for kind in KINDS:
                j1(run, Path(name), kind)
        if "growth" in run.wanted:
            growth(run, Path(name))


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "prune", 5, measure))
