"""Requests per second and latencies of the service, beside the same work in a process.

Needs NumPy, `oha` (`cargo install oha --version 1.16.0 --locked`), and certk_rs for Python: the
bare calls are made through it, on one thread. The clients run on the processors of the service.

    cargo build --release -p certk-service
    python examples/service/load.py --program target/release/certk-service
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from client import Array, Client, RefusedError, check_outputs, check_select, check_sets
from launch import Service

import certk_rs as ck


@dataclass(frozen=True)
class Work:
    """What is asked, again and again."""

    name: str
    path: str
    body: Array
    bare: Callable[[], object]
    check: Callable[[Client], int]


def oha(service: Service, work: Work, folder: Path, *options: str) -> dict[str, Any]:
    """One run of the load generator."""
    body = folder / "body"
    body.write_bytes(work.body.tobytes())
    command = [
        "oha",
        "--no-tui",
        "--output-format",
        "json",
        "-m",
        "POST",
        "-D",
        str(body),
        *options,
    ]
    done = subprocess.run([*command, service.url + work.path], capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def quantile(found: dict[str, Any], which: str) -> float:
    """Milliseconds."""
    return 1e3 * float(found["latencyPercentiles"][which])


def bare(work: Work, seconds: float) -> float:
    """Milliseconds of the call itself: the median."""
    times = []
    work.bare()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        work.bare()
        times.append(time.perf_counter() - begun)
    return 1e3 * float(np.median(times))


def works(client: Client) -> list[Work]:
    """Selection of few and of many rows, and a session of 8 heads that is asked as in decoding."""
    random = np.random.default_rng(0)
    few = 3 * random.standard_normal((1, 4096), dtype=np.float32)
    many = 3 * random.standard_normal((32, 16384), dtype=np.float32)
    keys, values = random.standard_normal((2, 8, 16384, 128), dtype=np.float32)
    queries = 4 * random.standard_normal((32, 1, 128), dtype=np.float32)
    client.put("load", keys, values)
    index = ck.KeyIndex.build(keys)
    rows = "shape=32,1,128&eps=0.01"

    def sets(client: Client) -> int:
        return check_sets(client.search("load", queries, 0.01), queries, keys, 0.01)

    def outputs(client: Client) -> int:
        found = client.attention("load", queries, eps=0.01)
        return check_outputs(found, queries, keys, values)

    def selected(scores: Array) -> Callable[[Client], int]:
        return lambda client: check_select(client.select(scores, 0.01), scores, 0.01)

    def attend() -> object:
        found = ck.attention(queries, keys, values, 0.01, index=index, threads=1)
        return found.error_bound

    return [
        Work(
            "select, 1 row of 4096",
            "/v1/select?shape=1,4096&eps=0.01",
            few,
            lambda: ck.select(few, 0.01, threads=1),
            selected(few),
        ),
        Work(
            "select, 32 rows of 16384",
            "/v1/select?shape=32,16384&eps=0.01",
            many,
            lambda: ck.select(many, 0.01, threads=1),
            selected(many),
        ),
        Work(
            "search, 32 heads over 8 x 16384 keys",
            f"/v1/sessions/load/search?{rows}",
            queries,
            lambda: index.search(queries, 0.01, threads=1),
            sets,
        ),
        Work(
            "attention, the same",
            f"/v1/sessions/load/attention?{rows}",
            queries,
            attend,
            outputs,
        ),
    ]


def overloaded(service: Service, work: Work, folder: Path, seconds: float) -> tuple[int, int, int]:
    """Answers and refusals of far too many clients, and answers that were checked meanwhile."""
    end = time.monotonic() + seconds
    checked = 0
    wrong: list[Exception] = []

    def watch() -> None:
        nonlocal checked
        client = Client(service.url)
        while time.monotonic() < end and not wrong:
            try:
                checked += work.check(client)
            except RefusedError as refused:
                if refused.status != 429:
                    wrong.append(refused)
            except AssertionError as error:
                wrong.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = oha(service, work, folder, "-z", f"{seconds}s", "-c", "256")
    watcher.join()
    if wrong:
        raise wrong[0]
    codes = found["statusCodeDistribution"]
    if set(codes) - {"200", "429"}:
        raise AssertionError(f"{work.name}: {codes}")
    return codes.get("200", 0), codes.get("429", 0), checked


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description="load on the certk service")
    parser.add_argument("--program", type=Path, default=Path("target/release/certk-service"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--options", default="", help="of the service, besides its defaults")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        service = Service(arguments.program, folder / "log", *arguments.options.split())
        service.start()
        try:
            table(service, folder, arguments.seconds)
        finally:
            service.end()


def table(service: Service, folder: Path, seconds: float) -> None:
    """A row for each kind of work."""
    head = ["work", "bare, ms", "alone: p50, ms", "peak, requests/s", "at half of it: p50, ms"]
    head += ["p99, ms", "2 p50 + 5 ms", "256 clients: answers/s", "429/s", "rows checked"]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    run = ["-z", f"{seconds}s"]
    for work in works(Client(service.url, timeout=600)):
        call = bare(work, seconds / 3)
        alone = oha(service, work, folder, *run, "-c", "1")
        peaks = [oha(service, work, folder, *run, "-c", str(c)) for c in (2, 4, 8)]
        peak = max(float(found["summary"]["requestsPerSec"]) for found in peaks)
        rate = f"{peak / 2:.2f}"
        half = oha(service, work, folder, *run, "-c", "64", "-q", rate, "--latency-correction")
        p50, p99 = quantile(half, "p50"), quantile(half, "p99")
        answered, refused, checked = overloaded(service, work, folder, seconds)
        cells = [f"{call:.3f}", f"{quantile(alone, 'p50'):.2f}", f"{peak:.0f}", f"{p50:.2f}"]
        cells += [f"{p99:.2f}", f"{2 * p50 + 5:.2f}", f"{answered / seconds:.0f}"]
        cells += [f"{refused / seconds:.0f}", str(checked)]
        print(f"| {work.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
