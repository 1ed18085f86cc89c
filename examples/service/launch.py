"""Starts a service beside a test, and ends it as an operator or a crash would."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import time
from pathlib import Path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Service:
    """A service on a port of its own; its log goes to a file."""

    def __init__(self, program: Path, log: Path, *options: str) -> None:
        self.program = program
        self.log = log
        self.options = options
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> float:
        """Starts it, and says how many seconds passed until it answered."""
        begun = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, "--listen", f"127.0.0.1:{self.port}", *self.options], stderr=log
            )
        while time.monotonic() - begun < 30:
            if self.process.poll() is not None:
                raise RuntimeError(f"the service ended at once: see {self.log}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
                connection.request("GET", "/healthz")
                if connection.getresponse().status == 200:
                    return time.monotonic() - begun
            except OSError:
                time.sleep(0.01)
            finally:
                connection.close()
        raise RuntimeError("the service does not answer")

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Ends it, and returns what it returned."""
        if self.process is None:
            return 0
        self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self.process = None
        return code

    def resident(self) -> int:
        """Bytes that it has in memory."""
        if self.process is None:
            return 0
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        for line in status.splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0
