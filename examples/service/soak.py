"""Minutes of mixed load on the service, with restarts, crashes and malformed requests.

Every certificate is checked in float64 by NumPy, against the version of the session that the
answer names; after a restart every session must be at the version that was acknowledged last, after
a crash at one that is not older than the last that was written. Prints what was counted, and ends
with an error if anything was wrong.

    cargo build --release -p certk-service
    python examples/service/soak.py --program target/release/certk-service --minutes 10
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from client import (
    SAFETENSORS,
    Array,
    Client,
    RefusedError,
    check_outputs,
    check_select,
    check_sets,
    pack,
)
from launch import Service

TOKEN = "soak"
SHED = (429, 503, 504)


@dataclass(frozen=True)
class Held:
    """What a session holds at some version."""

    keys: Array
    values: Array

    @property
    def n(self) -> int:
        """Keys of each head."""
        length: int = self.keys.shape[1]
        return length


@dataclass
class Session:
    """What is known of a session; one thread writes to it, all read it."""

    name: str
    held: dict[int, Held] = field(default_factory=dict)
    # What requests would have made whose answers never came.
    maybe: list[Held] = field(default_factory=list)
    version: int = 0
    written: int = 0
    exists: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def made(self, about: dict[str, Any], held: Held) -> None:
        """A change was acknowledged."""
        with self.lock:
            self.version = about["version"]
            self.held[self.version] = held
            self.exists = True
            self.maybe.clear()
            self.note(about)

    def note(self, about: dict[str, Any]) -> None:
        """What a crash takes us back to at most; older versions are not needed any more."""
        self.written = max(self.written, about["persisted"] or 0)
        for version in [version for version in self.held if version < self.written]:
            if len(self.held) > 6:
                del self.held[version]


class Soak:
    """What all threads share."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.end = threading.Event()
        self.up = threading.Event()
        self.sessions = [Session(f"s{number}") for number in range(9)]
        self.seed = seed
        self.lock = threading.Lock()

    def count(self, what: str, by: int = 1) -> None:
        """Counts something."""
        with self.lock:
            self.counts[what] += by

    def fail(self, what: str) -> None:
        """Something that must not be."""
        with self.lock:
            self.wrong.append(what)
        print("WRONG:", what, flush=True)

    def run(self, work: Callable[[], None]) -> threading.Thread:
        """A thread that works until the end; what it raises is wrong."""

        def guarded() -> None:
            try:
                work()
            except Exception:
                self.fail(traceback.format_exc())

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread


class Worker:
    """A client that writes to some sessions and reads all."""

    def __init__(self, soak: Soak, number: int, own: list[Session]) -> None:
        self.soak = soak
        self.own = own
        self.random = np.random.default_rng((soak.seed, number))
        self.client = Client(soak.service.url, TOKEN)

    def work(self) -> None:
        """Until the end."""
        epoch = -1
        while not self.soak.end.is_set():
            if not self.soak.up.wait(0.1):
                continue
            try:
                if epoch != self.soak.counts["starts"]:
                    epoch = self.soak.counts["starts"]
                    for session in self.own:
                        self.resolve(session)
                self.step()
            except RefusedError as refused:
                self.refused(refused)
            except (OSError, http.client.HTTPException):
                self.soak.count("connections lost")
                epoch = -1
                time.sleep(0.02)

    def refused(self, refused: RefusedError) -> None:
        """Being told to come back is well; being told of a bug is not."""
        if refused.status in SHED:
            self.soak.count(f"shed ({refused.status})")
            time.sleep(0.005)
        else:
            self.soak.fail(f"refused: {refused}")

    def tensors(self, n: int) -> Held:
        """Keys and values that look like something: a few keys matter."""
        keys = self.random.standard_normal((2, n, 32), dtype=np.float32)
        return Held(keys, self.random.standard_normal((2, n, 16), dtype=np.float32))

    def step(self) -> None:
        """One request, or a few."""
        kind = self.random.random()
        if kind < 0.25:
            self.change(self.own[self.random.integers(len(self.own))])
        elif kind < 0.6:
            self.search(self.soak.sessions[self.random.integers(len(self.soak.sessions))])
        elif kind < 0.9:
            self.attend(self.soak.sessions[self.random.integers(len(self.soak.sessions))])
        else:
            shape = (int(self.random.integers(1, 20)), int(self.random.integers(1, 5000)))
            dtype = (np.float32, np.float16, np.float64)[self.random.integers(3)]
            scores = (3 * self.random.standard_normal(shape)).astype(dtype)
            found = self.client.select(scores, 0.02)
            self.soak.count("rows selected", check_select(found, scores, 0.02))

    def resolve(self, session: Session) -> None:
        """What became of a session whose last requests may or may not have come through."""
        try:
            about = self.client.about(session.name)
        except RefusedError as refused:
            if refused.status != 404:
                raise
            with session.lock:
                if session.written:
                    self.soak.fail(f"{session.name} was written and is gone")
                session.exists = False
                session.held.clear()
                session.maybe.clear()
            return
        with session.lock:
            version = about["version"]
            if version < session.written:
                self.soak.fail(f"{session.name} is at {version}, {session.written} was written")
            if version not in session.held:
                fits = [held for held in session.maybe if held.n == about["keys"]]
                if not fits:
                    self.soak.fail(f"{session.name} is at {version}, which was never made")
                    return
                session.held[version] = fits[-1]
            session.version = version
            session.exists = True
            session.note(about)

    def change(self, session: Session) -> None:
        """Makes a new version, or writes the one that is there."""
        kind = self.random.random()
        name = session.name
        if not session.exists or kind < 0.08:
            held = self.tensors(int(self.random.integers(100, 3000)))
            self.changed(session, held, lambda: self.client.put(name, held.keys, held.values))
            return
        now = session.held[session.version]
        if kind < 0.2:
            about = self.client.persist(name)
            with session.lock:
                if about["persisted"] < session.version:
                    self.soak.fail(f"{name} was not written")
                session.note(about)
            self.soak.count("written")
        elif kind < 0.27 or now.n > 6000:
            keep = int(self.random.integers(1, now.n + 1))
            held = Held(now.keys[:, :keep], now.values[:, :keep])
            self.changed(session, held, lambda: self.client.truncate(name, keep))
        elif kind < 0.35:
            gone = self.random.choice(now.n, size=min(now.n // 3, 200), replace=False)
            held = Held(np.delete(now.keys, gone, 1), np.delete(now.values, gone, 1))
            self.changed(session, held, lambda: self.client.evict(name, gone.tolist()))
        else:
            more = self.tensors(int(self.random.choice([1, 1, 1, 8, 300])))
            keys = np.concatenate([now.keys, more.keys], 1)
            held = Held(keys, np.concatenate([now.values, more.values], 1))
            version = session.version
            self.changed(
                session,
                held,
                lambda: self.client.append(name, more.keys, more.values, version),
            )

    def changed(self, session: Session, held: Held, work: Callable[[], dict[str, Any]]) -> None:
        """A change, and what is known afterwards."""
        with session.lock:
            session.maybe.append(held)
        try:
            session.made(work(), held)
            self.soak.count("changes")
        except RefusedError as refused:
            # It was too late for an answer, not surely for the change.
            self.refused(refused)
            self.resolve(session)

    def queries(self) -> Array:
        """Of one to four queries for each head, or for two heads each."""
        shape = (int(self.random.choice([2, 4])), int(self.random.integers(1, 5)), 32)
        size = float(self.random.choice([0.5, 2, 6]))
        return (size * self.random.standard_normal(shape)).astype(np.float32)

    def known(self, session: Session, version: int, keys: int) -> list[Held]:
        """What a session held at a version; its writer may be about to learn of it."""
        for _ in range(500):
            with session.lock:
                if version in session.held:
                    return [session.held[version]]
                if not self.soak.up.is_set():
                    break
            time.sleep(0.01)
        with session.lock:
            return [held for held in session.maybe if held.n == keys]

    def judge(self, session: Session, version: int, keys: int, check: Callable[[Held], int]) -> int:
        """Checks an answer against what the session held."""
        candidates = self.known(session, version, keys)
        if not candidates:
            self.soak.count("answers about versions that a crash took back")
            return 0
        for held in candidates[:-1]:
            try:
                return check(held)
            except AssertionError:
                continue
        return check(candidates[-1])

    def search(self, session: Session) -> None:
        """Sets."""
        queries, eps = self.queries(), float(self.random.choice([0.001, 0.02, 0.2]))
        try:
            found = self.client.search(session.name, queries, eps)
        except RefusedError as refused:
            if refused.status != 404:
                raise
            self.soak.count("sessions that were not there")
            return

        def check(held: Held) -> int:
            return check_sets(found, queries, held.keys, eps)

        rows = self.judge(session, found.version, found.keys, check)
        self.soak.count("rows searched", rows)

    def attend(self, session: Session) -> None:
        """Outputs."""
        queries = self.queries()
        budget = {"eps": 0.02} if self.random.random() < 0.7 else {"out_tol": 0.1}
        try:
            found = self.client.attention(session.name, queries, **budget)
        except RefusedError as refused:
            if refused.status != 404:
                raise
            self.soak.count("sessions that were not there")
            return
        if "eps" in budget and not (found.tail_mass_upper <= 0.02).all():
            self.soak.fail("attention over its budget")
        if "out_tol" in budget and not (found.error_bound <= 0.1).all():
            self.soak.fail("attention over its tolerance")

        def check(held: Held) -> int:
            return check_outputs(found, queries, held.keys, held.values)

        rows = self.judge(session, found.version, found.keys, check)
        self.soak.count("rows attended", rows)


class Vandal:
    """Sends what nobody should, to a session of its own and to no session at all."""

    def __init__(self, soak: Soak) -> None:
        self.soak = soak
        self.random = random.Random(soak.seed)
        keys = np.random.default_rng(0).standard_normal((2, 50, 8)).astype(np.float32)
        self.file = pack({"keys": keys, "values": keys})
        self.text = json.dumps({"shape": [2, 8], "scores": [0.5] * 16, "eps": 0.1}).encode()

    def work(self) -> None:
        """Until the end."""
        while not self.soak.end.is_set():
            if not self.soak.up.wait(0.1):
                continue
            try:
                if self.random.random() < 0.7:
                    self.spoiled()
                else:
                    self.broken()
            except (OSError, http.client.HTTPException):
                self.soak.count("connections lost")
                time.sleep(0.01)
            time.sleep(0.002)

    def spoil(self, data: bytes) -> bytes:
        """Something else."""
        spoiled = bytearray(data)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(spoiled) + 1)
            kind = self.random.randrange(4)
            if kind == 0:
                del spoiled[at:]
            elif kind == 1:
                spoiled[at:at] = self.random.randbytes(self.random.randint(1, 30))
            elif kind == 2 and at < len(spoiled):
                spoiled[at] ^= 1 << self.random.randrange(8)
            else:
                spoiled[at : at + 8] = b"\xff" * 8
        return bytes(spoiled)

    def spoiled(self) -> None:
        """A request whose body or query is wrong in some way."""
        rows = "shape=2,2,8&eps=0.1"
        method, path, body, kind = self.random.choice(
            [
                ("PUT", "/v1/sessions/vandal", self.file, SAFETENSORS),
                ("POST", "/v1/sessions/vandal/append", self.file, SAFETENSORS),
                ("POST", f"/v1/sessions/vandal/search?{rows}", bytes(128), ""),
                ("POST", f"/v1/sessions/vandal/attention?{rows}", bytes(128), ""),
                ("POST", "/v1/select?shape=4,8&eps=0.1", bytes(128), ""),
                ("POST", "/v1/select", self.text, "application/json"),
                ("POST", "/v1/sessions/vandal/evict", b'{"positions":[1]}', "application/json"),
                ("POST", "/v1/sessions/vandal/truncate?keys=9", b"", ""),
                ("DELETE", "/v1/sessions/vandal", b"", ""),
                ("GET", "/v1/sessions/%2e%2e%2fvandal", b"", ""),
            ]
        )
        if self.random.random() < 0.3:
            path = "".join(
                self.random.choice("0123456789&=,x") if self.random.random() < 0.05 else letter
                for letter in path
            )
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": kind}
        if self.random.random() < 0.1:
            headers["x-timeout-ms"] = self.random.choice(["0", "1", "-1", "x", "9" * 30])
        if self.random.random() < 0.05:
            del headers["authorization"]
        connection = http.client.HTTPConnection("127.0.0.1", self.soak.service.port, timeout=20)
        try:
            body = self.spoil(body) if self.random.random() < 0.8 else body
            connection.request(method, path, body, headers)
            status = connection.getresponse().status
        finally:
            connection.close()
        self.soak.count(f"malformed, answered {status}")
        if status >= 500 and status not in (503, 504):
            self.soak.fail(f"{method} {path}: {status}")

    def broken(self) -> None:
        """What is no request, or only the beginning of one."""
        head = b"POST /v1/select?shape=1,4&eps=0.1 HTTP/1.1\r\nhost: x\r\n"
        head += b"authorization: Bearer soak\r\n"
        data = self.random.choice(
            [
                self.random.randbytes(300),
                head + b"content-length: 1000000000000\r\n\r\n",
                head + b"content-length: 16\r\n\r\nfour",
                head + b"content-length: -1\r\n\r\n",
                head + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
                head + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
                head + b"\r\n".join(b"h%d: 1" % i for i in range(5000)) + b"\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.random.randbytes(200),
            ]
        )
        address = ("127.0.0.1", self.soak.service.port)
        with socket.create_connection(address, timeout=2) as connection:
            connection.sendall(data)
            if self.random.random() < 0.5:
                connection.settimeout(0.2)
                try:
                    answer = connection.recv(100)
                except TimeoutError:
                    answer = b""
                if answer.startswith(b"HTTP/1.1 500"):
                    self.soak.fail(f"{data[:200]!r}: {answer!r}")
        self.soak.count("broken connections")


def restart(soak: Soak, how: signal.Signals) -> None:
    """Ends the service in the middle of everything, and starts it again."""
    code = soak.service.end(how)
    soak.up.clear()
    if how == signal.SIGTERM and code != 0:
        soak.fail(f"SIGTERM: the service returned {code}")
    seconds = soak.service.start()
    soak.count("starts")
    soak.count(f"restarts after {how.name}")
    soak.counts["slowest start, ms"] = max(soak.counts["slowest start, ms"], int(1e3 * seconds))
    soak.up.set()


def main() -> None:
    """Prints what was counted."""
    parser = argparse.ArgumentParser(description="minutes of mixed load on the certk service")
    parser.add_argument("--program", type=Path, default=Path("target/release/certk-service"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--token", TOKEN, "--data", str(folder / "data"), "--waiting", "8"]
        # Room for about half of the sessions.
        options += ["--session-memory", "8000000", "--call-memory", "100000000"]
        service = Service(arguments.program, folder / "log", *options)
        soak = Soak(service, arguments.seed)
        service.start()
        soak.count("starts")
        soak.up.set()
        shares = [soak.sessions[i :: arguments.workers] for i in range(arguments.workers)]
        workers = [Worker(soak, number, own) for number, own in enumerate(shares)]
        threads = [soak.run(worker.work) for worker in workers]
        threads.append(soak.run(Vandal(soak).work))
        begun = time.monotonic()
        # The first two fifths with restarts; then memory is watched.
        ends = list(np.arange(0.04, 0.41, 0.04) * seconds)
        hows = [signal.SIGTERM, signal.SIGKILL] * len(ends)
        resident: list[tuple[float, int]] = []
        while (now := time.monotonic() - begun) < seconds and not soak.wrong:
            if ends and now > ends[0]:
                ends.pop(0)
                restart(soak, hows.pop(0))
            elif not ends:
                resident.append((now, service.resident()))
            time.sleep(0.5)
        soak.end.set()
        for thread in threads:
            thread.join(30)
        metrics = Client(service.url, TOKEN).ask("GET", "/metrics").decode()
        code = service.end()
        if code != 0:
            soak.fail(f"at the end the service returned {code}")
        report(soak, resident, metrics, (folder / "log").read_text(errors="replace"))


def report(soak: Soak, resident: list[tuple[float, int]], metrics: str, log: str) -> None:
    """Prints it, and raises what was wrong."""
    for what, count in sorted(soak.counts.items()):
        print(f"{what:50} {count}")
    for line in metrics.splitlines():
        if line.startswith("certk_sessions_made_way "):
            print(f"{'sessions that left memory since the last start':50} {line.split()[1]}")
    if "panicked" in log:
        soak.fail("a panic: " + log[log.index("panicked") - 500 :][:2000])
    # An answer of 503 or 504 is one to a client, who was told so.
    told = ("503 Service Unavailable", "504 Gateway Timeout")
    for line in log.splitlines():
        if '"level":"ERROR"' in line and not any(status in line for status in told):
            soak.fail(f"an error in the log: {line}")
            break
    if len(resident) >= 9:
        third = len(resident) // 3
        early = max(size for _, size in resident[third : 2 * third])
        late = max(size for _, size in resident[2 * third :])
        print(f"{'resident, MB: second and last third':50} {early / 1e6:.1f} {late / 1e6:.1f}")
        ninths = np.array_split([size for _, size in resident], 9)
        print(f"{'resident, MB: most in each ninth':50}", *(f"{max(t) / 1e6:.0f}" for t in ninths))
        if late > 1.1 * early + 5e6:
            soak.fail(f"memory grows: {early} {late}")
    print(f"{'wrong':50} {len(soak.wrong)}")
    if soak.wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
