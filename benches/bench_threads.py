"""Two threads against two processes: `python benches/bench_threads.py [select attention prune]`.

What two processes take that each do half with one thread, at the same moment and on the same
machine, is what two threads could take. A shared machine slows both alike, so the ratio of the
two says what wall time does not. The two take turns; the median of the ratios counts. Beside it
stand page faults and context switches of a warm call with two threads, and how much of such a
call only one thread worked (twice its wall time less its processor time, of the calmest reading):
what is left of it on many cores is an upper bound of how fast a call can get there.

Each work is checked first: two threads find the same bits as one. Exit code 1 when that fails.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import certk_rs as ck
from harness import table
from harness.table import Tell

SECTIONS = {
    "select": "select, certify and keep_set",
    "attention": "indexes, searches, decoding and prefill",
    "prune": "a prune job on a cache of 32 MB",
}
EPS = 0.01
GOAL, GOAL_OF_ONE = 0.9, 0.75
SECONDS = 0.3  # of a reading
MANY_CORES = (16, 64)

Work = Callable[[int], Any]  # takes the number of threads


@dataclass(frozen=True)
class Part:
    """All of a work, or one of the halves that two processes have."""

    at: int = 0
    of: int = 1

    def cut(self, array: np.ndarray, axis: int) -> np.ndarray:
        """The part's share of an array along an axis."""
        share = array.shape[axis] // self.of
        picked = [slice(None)] * array.ndim
        picked[axis] = slice(self.at * share, (self.at + 1) * share)
        return np.ascontiguousarray(array[tuple(picked)])


def rows(part: Part, rows: int, n: int) -> np.ndarray:
    """Gaussian rows of which 25 % are kept; of a single one, half of the scores."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(rows, n)).astype(np.float32) * np.float32(3)
    return part.cut(scores, 0 if rows > 1 else 1)


def heads(part: Part, heads: int, n: int, d: int, queries: int, sigma: float) -> Any:
    """Queries, keys and values of some heads; of a single one, half of the keys."""
    rng = np.random.default_rng(2)
    k, v = (rng.normal(size=(heads, n, d)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(heads, queries, d)).astype(np.float32)
    q *= np.float32(sigma * math.sqrt(d)) / np.linalg.norm(q, axis=-1, keepdims=True)
    if heads > 1:
        return part.cut(q, 0), part.cut(k, 0), part.cut(v, 0)
    return q, part.cut(k, 1), part.cut(v, 1)


def selecting(part: Part, many: int, n: int) -> Work:
    """`select` on rows."""
    scores = rows(part, many, n)
    return lambda threads: ck.select(scores, EPS, threads=threads)


def certifying(part: Part, many: int, n: int) -> Work:
    """`certify` of a set that somebody else chose: scores above 0."""
    scores = rows(part, many, n)
    keep = scores > 0
    return lambda threads: ck.certify(scores, keep, eps=0.5, threads=threads)


def sharing(part: Part, many: int, n: int) -> Work:
    """`keep_set` of rows; two processes have half of the rows each."""
    scores = rows(part, many, n)
    return lambda threads: ck.keep_set(scores, EPS, threads=threads)


def building(part: Part, many: int, n: int) -> Work:
    """`KeyIndex.build`."""
    _, k, _ = heads(part, many, n, 128, 1, 1.0)
    return lambda threads: ck.KeyIndex.build(k, threads=threads)


def searching(part: Part, many: int, n: int, queries: int) -> Work:
    """`KeyIndex.search`."""
    q, k, _ = heads(part, many, n, 128, queries, 4.0)
    index = ck.KeyIndex.build(k, threads=1)
    return lambda threads: index.search(q, EPS, threads=threads)


def decoding(part: Part, many: int, n: int, queries: int) -> Work:
    """`attention` with an index, a few queries a head."""
    q, k, v = heads(part, many, n, 128, queries, 4.0)
    index = ck.KeyIndex.build(k, threads=1)
    return lambda threads: ck.attention(q, k, v, EPS, index=index, threads=threads)


def dense(part: Part, many: int, n: int, queries: int) -> Work:
    """`attention` without an index, flat rows."""
    q, k, v = heads(part, many, n, 128, queries, 1.0)
    return lambda threads: ck.attention(q, k, v, EPS, threads=threads)


def prefill(part: Part, many: int, n: int, indexed: bool) -> Work:
    """`attention` of as many queries as keys, causal."""
    q, k, v = heads(part, many, n, 64, n, 5.0)
    index = ck.KeyIndex.build(k, threads=1) if indexed else None
    return lambda threads: ck.attention(
        q, k, v, EPS, index=index, causal=True, even_if_slower=indexed, threads=threads
    )


def pruning(part: Part, many: int, n: int) -> Work:
    """`prune` of a file."""
    from safetensors.numpy import save_file

    folder = Path(tempfile.mkdtemp(prefix="certk-threads-"))
    q, k, v = heads(part, many, n, 64, 64, 4.0)
    source, target = folder / "cache.safetensors", folder / "pruned.safetensors"
    layer = {"query": q, "key": k, "value": v}
    save_file({f"layers.0.{role}": array for role, array in layer.items()}, source)

    def work(threads: int) -> bytes:
        ck.prune(source, target, EPS, existing="replace", threads=threads)
        return target.read_bytes()

    return work


@dataclass(frozen=True)
class Case:
    """A work, how it is made of parts, and what it should reach."""

    section: str
    label: str
    make: Callable[..., Work]
    given: tuple[Any, ...]
    goal: float = GOAL


CASES = (
    Case("select", "select 64 x 4096", selecting, (64, 4096)),
    Case("select", "select 64 x 131072", selecting, (64, 131_072)),
    Case("select", "select 1 x 1M", selecting, (1, 1 << 20), GOAL_OF_ONE),
    Case("select", "certify 64 x 131072", certifying, (64, 131_072)),
    Case("select", "certify 1 x 1M", certifying, (1, 1 << 20), GOAL_OF_ONE),
    Case("select", "keep_set 64 x 131072", sharing, (64, 131_072)),
    Case("attention", "build 8 x 16384", building, (8, 16_384)),
    Case("attention", "build 1 x 131072", building, (1, 131_072), GOAL_OF_ONE),
    Case("attention", "search 8 x 16384, 1 query", searching, (8, 16_384, 1)),
    Case("attention", "search 8 x 16384, 4 queries", searching, (8, 16_384, 4)),
    Case("attention", "search 1 x 131072, 1 query", searching, (1, 131_072, 1), GOAL_OF_ONE),
    Case("attention", "decode 2 x 16384, 1 query", decoding, (2, 16_384, 1)),
    Case("attention", "decode 8 x 16384, 1 query", decoding, (8, 16_384, 1)),
    Case("attention", "decode 8 x 16384, 4 queries", decoding, (8, 16_384, 4)),
    Case("attention", "decode 1 x 131072, 1 query", decoding, (1, 131_072, 1), GOAL_OF_ONE),
    Case("attention", "dense 8 x 16384, 1 query", dense, (8, 16_384, 1)),
    Case("attention", "dense 1 x 131072, 1 query", dense, (1, 131_072, 1), GOAL_OF_ONE),
    Case("attention", "prefill 4 x 2048", prefill, (4, 2048, False)),
    Case("attention", "prefill 4 x 2048, index", prefill, (4, 2048, True)),
    Case("attention", "prefill 2 x 4096", prefill, (2, 4096, False)),
    Case("prune", "prune 8 x 8192, 64 queries", pruning, (8, 8192)),
)


@dataclass(frozen=True)
class Reading:
    """Calls in a row in one process."""

    calls: int
    wall: float
    cpu: float
    faults: int
    switches: int


def read(work: Work, threads: int, calls: int) -> Reading:
    """So many calls."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(calls):
        work(threads)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    switches = after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw
    return Reading(calls, wall, cpu, after.ru_minflt - before.ru_minflt, switches)


def same(one: Any, other: Any) -> bool:
    """Return True if two results hold equal arrays, or equal bytes but for times in a header."""
    if isinstance(one, bytes):
        return len(one) == len(other) and one[len(one) // 2 :] == other[len(one) // 2 :]
    names = ("indices", "indptr", "k", "tail_mass_upper", "out", "error_bound")
    for name in names:
        first, second = (np.asarray(getattr(found, name, 0)) for found in (one, other))
        if first.tobytes() != second.tobytes():
            return False
    return True


def serve(pipe: Connection, case: Case, part: Part) -> None:
    """A process that calls when it is told to, for as long as the pipe is open."""
    work = case.make(part, *case.given)
    pipe.send(same(work(1), work(2)) if part.of == 1 else True)
    while (wanted := pipe.recv()) is not None:
        pipe.send(read(work, *wanted))


class Server:
    """The other end of it."""

    def __init__(self, case: Case, part: Part) -> None:
        """Starts a process that has a part of the work."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, case, part), daemon=True)
        self.process.start()
        theirs.close()
        self.sound: bool = self.pipe.recv()

    def begin(self, threads: int, calls: int) -> None:
        """Has it call."""
        self.pipe.send((threads, calls))

    def end(self) -> Reading:
        """Waits for it."""
        found: Reading = self.pipe.recv()
        return found

    def close(self) -> None:
        """Ends the process."""
        self.pipe.send(None)
        self.process.join()


def at_once(servers: Iterable[Server], threads: int, calls: int) -> list[Reading]:
    """Has several call at the same moment."""
    servers = list(servers)
    for server in servers:
        server.begin(threads, calls)
    return [server.end() for server in servers]


def calls_for(server: Server, threads: int) -> int:
    """Return the number of calls that fill a reading; the search for it warms up."""
    once = min(at_once([server], threads, 2)[0].wall / 2 for _ in range(3))
    return max(2, round(SECONDS / once))


def judge(case: Case, repeat: int) -> tuple[bool, str]:
    """The line of a case, and whether its check held."""
    whole, halves = Server(case, Part()), [Server(case, Part(at, 2)) for at in range(2)]
    try:
        calls, half_calls = calls_for(whole, 2), calls_for(halves[0], 1)
        at_once(halves, 1, half_calls)
        ratios, warm, single = [], [], []
        for _ in range(repeat):
            (two,) = at_once([whole], 2, calls)
            each = at_once(halves, 1, half_calls)
            (one,) = at_once([whole], 1, max(calls // 2, 1))
            # Halves differ in what they take; two threads can even that out.
            ideal = statistics.fmean(half.wall / half.calls for half in each)
            ratios.append(ideal / (two.wall / two.calls))
            warm.append(two)
            single.append(one.wall / one.calls)
    finally:
        for server in (whole, *halves):
            server.close()
    found = statistics.median(ratios)
    wall = statistics.median(two.wall / two.calls for two in warm)
    calm = min(warm, key=lambda two: two.wall)
    alone = min(max(2 - calm.cpu / calm.wall, 0.0), 1.0)
    faults, switches = (
        statistics.median(getattr(two, name) / two.calls for two in warm)
        for name in ("faults", "switches")
    )
    rest = (1 - alone) * 2
    speeds = "".join(f"{(alone + rest) / (alone + rest / cores):7.1f}" for cores in MANY_CORES)
    mark = "ok" if found >= case.goal else "MISS"
    return whole.sound, (
        f"{case.label:28}{found:7.2f}{case.goal:6.2f} {mark:5}{wall * 1e3:9.2f}"
        f"{wall / statistics.median(single):7.2f}{faults:8.1f}{switches:9.1f}{alone:7.2f}{speeds}"
    )


def body(sections: set[str], repeat: int, tell: Tell) -> bool:
    """All cases of the sections."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sound = True
    tell(
        f"\n{'':28}{'ratio':>7}{'goal':>6}      {'ms':>9}{'/ one':>7}{'faults':>8}{'switches':>9}"
        f"{'alone':>7}" + "".join(f"{f'x{cores}':>7}" for cores in MANY_CORES)
    )
    for case in CASES:
        if case.section in sections:
            held, line = judge(case, repeat)
            sound &= held
            tell(line if held else f"{line}  WRONG: two threads find other bits than one")
    tell(
        "\nratio: what two processes take that have half of it each / a call on two threads; ms: "
        "a call on two threads; / one: over one thread, on this machine; alone: the share of a "
        "call in which one thread worked; x16, x64: times as fast as one thread by that, at most"
    )
    return sound


if __name__ == "__main__":
    sys.exit(table.run(__doc__, SECTIONS, "threads", 5, body))
