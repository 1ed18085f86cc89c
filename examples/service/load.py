"""Load on the service: many clients at once, each answer compared with that of the Python package.

Run it after `cargo build --release -p certk-service` with `--program target/release/certk-service`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import certk_rs as ck

TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64"}


def safetensors(**arrays: np.ndarray[Any, Any]) -> bytes:
    """Return a safetensors file of named arrays."""
    header, parts, end = {}, [], 0
    for name, array in arrays.items():
        part = np.ascontiguousarray(array).tobytes()
        offsets = [end, end := end + len(part)]
        dtype = TYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        parts.append(part)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


class Client:
    """One connection to a service."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.took = 0.0

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        """Send a request, and return its status and what its JSON holds."""
        begun = time.perf_counter()
        self.connection.request(method, path, body)
        answer = self.connection.getresponse()
        text = answer.read()
        self.took = 1e3 * (time.perf_counter() - begun)
        # Outputs of attention are {"F64": [...]}.
        return answer.status, json.loads(text, object_hook=lambda found: found.get("F64", found))


class Load:
    """Requests with known answers, and a session that grows while others read it."""

    def __init__(self, port: int) -> None:
        self.port = port
        rng = np.random.default_rng(0)
        scores = (3 * rng.standard_normal((8, 4096))).astype(np.float32)
        self.keys, self.values = rng.standard_normal((2, 6000, 2, 64)).astype(np.float32)
        self.queries = 3 * rng.standard_normal((4, 2, 64))
        self.answers: list[tuple[str, bytes, dict[str, Any]]] = []
        self.grown = 2000
        self.turn = threading.Lock()
        client = Client(port)
        for name in ("fixed", "grown"):
            body = safetensors(keys=self.keys[:2000], values=self.values[:2000])
            assert client.ask("PUT", f"/sessions/{name}", body) == (200, {"keys": 2000})
        found = ck.select(scores, 0.05)
        body = safetensors(scores=scores)
        self.add("/select?eps=0.05", body, found, "k indptr indices tail_mass_upper minimal")
        indices = found.indices.astype(np.int64)
        body = safetensors(scores=scores, indptr=found.indptr, indices=indices)
        judged = ck.certify(scores, found, eps=0.05)
        self.add("/certify?eps=0.05", body, judged, "k tail_mass_upper tail_mass_lower holds")
        keys, values = (x[:2000].swapaxes(0, 1) for x in (self.keys, self.values))
        index, body = ck.KeyIndex.build(keys), safetensors(queries=self.queries)
        searched = index.search(self.queries, 0.02, causal=True)
        fields = "k indices tail_mass_upper scored"
        self.add("/sessions/fixed/search?eps=0.02&causal=true", body, searched, fields)
        attended = ck.attention(self.queries, keys, values, out_tol=0.1, index=index)
        fields = "out k tail_mass_upper error_bound"
        self.add("/sessions/fixed/attention?out_tol=0.1", body, attended, fields)

    def add(self, path: str, body: bytes, found: object, fields: str) -> None:
        """Add a request, and the fields that its answer has."""
        told = {name: np.asarray(getattr(found, name)) for name in fields.split()}
        self.answers.append((path, body, told))

    def known(self, client: Client) -> tuple[str, int]:
        """Ask what has one answer, to the last bit."""
        path, body, told = random.choice(self.answers)
        status, found = client.ask("POST", path, body)
        if status == 200:
            found |= found.pop("selection", {})
            for name, value in told.items():
                np.testing.assert_array_equal(found[name], value.ravel(), f"{path}: {name}")
        return path.partition("?")[0], status

    def append(self, client: Client) -> tuple[str, int]:
        """Append some keys, unless all are there."""
        with self.turn:
            at, end = self.grown, self.grown + random.randrange(1, 9)
            if end > len(self.keys):
                return "append: full", 200
            body = safetensors(keys=self.keys[at:end], values=self.values[at:end])
            status, found = client.ask("POST", f"/sessions/grown/append?at={at}", body)
            if status == 200:
                assert found == {"keys": end}, found
                self.grown = end
        return "append", status

    def attend(self, client: Client) -> tuple[str, int]:
        """Attend to the session that grows, and compare with float64 over the same keys."""
        before, body = self.grown, safetensors(queries=self.queries)
        status, found = client.ask("POST", "/sessions/grown/attention?eps=0.02", body)
        if status == 200:
            n = found["keys"]
            assert before <= n, f"{n} keys after {before}"
            keys, values = (x[:n].astype(float).swapaxes(0, 1) for x in (self.keys, self.values))
            weights = self.queries.reshape(2, 4, 64) @ keys.swapaxes(1, 2) / 8
            weights = np.exp(weights - weights.max(2, keepdims=True))
            exact = weights @ values / weights.sum(2, keepdims=True)
            off = np.linalg.norm(np.reshape(found["out"], (8, 64)) - exact.reshape(8, 64), axis=1)
            assert (off <= np.array(found["error_bound"]) + 1e-9).all(), off
            assert max(found["tail_mass_upper"]) <= 0.02, found["tail_mass_upper"]
        return "attention, grown", status

    def leave(self, client: Client) -> tuple[str, int]:
        """Go away before the answer."""
        path, body = "/sessions/fixed/attention?eps=0.1", safetensors(queries=self.queries)
        client.connection.request("POST", path, body)
        client.connection.close()
        client.took = 0.0
        return "gone away", 200


def run(load: Load, seconds: float, clients: int = 16) -> None:
    """Ask from many threads until the time is over, and print what was answered how fast."""
    counts: Counter[tuple[str, int]] = Counter()
    times: defaultdict[str, list[float]] = defaultdict(list)
    end = time.monotonic() + seconds

    def work(_: int) -> None:
        client = Client(load.port)
        kinds: list[Callable[[Client], tuple[str, int]]] = [load.known] * 6
        kinds += [load.append, load.attend, load.leave]
        while time.monotonic() < end:
            name, status = random.choice(kinds)(client)
            times[name].append(client.took)
            counts[name, status] += 1
            assert status in (200, 429), (name, status)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))
    for (name, status), count in sorted(counts.items()):
        median, late = np.quantile(times[name], [0.5, 0.99])
        print(f"{name:27} {status} {count:7} times, p50 {median:7.1f} ms, p99 {late:7.1f} ms")
    answered = {name for name, status in counts if status == 200}
    assert len(answered) >= 6, f"only {answered} were answered"


def main() -> None:
    """Start a service, load it, and end it."""
    parser = argparse.ArgumentParser(description="load on the example service")
    parser.add_argument("--program", type=Path, required=True, help="the service, built")
    parser.add_argument("--seconds", type=float, default=10.0)
    told = parser.parse_args()
    command = [told.program, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        try:
            port = int(service.stderr.readline().rpartition(":")[2])
            run(Load(port), told.seconds)
        finally:
            service.send_signal(signal.SIGTERM)
    assert service.returncode == 0, f"the service ended with {service.returncode}"


if __name__ == "__main__":
    main()
