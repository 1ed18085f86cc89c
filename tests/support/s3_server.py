"""A real S3-compatible server on loopback (moto), which counts what it sends and asks for a key.

Nothing but loopback is reached while it runs: other names are not resolved.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

KEY, SECRET = "a-key", "a-secret"
_DENIED = (
    b'<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code><Message>The AWS Access Key Id '
    b"you provided does not exist in our records.</Message></Error>"
)


class Server:
    """`sent` and `received` count bytes of bodies, `requests` what was asked; `refuse` may answer.

    `refuse` is given method and path and may return a status, as of a server in trouble.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self.url = ""
        self.sent = self.received = 0
        self.requests: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], str | None] = lambda _method, _path: None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        self.received += int(environ.get("CONTENT_LENGTH") or 0)
        refusal = self.refuse(method, path)
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            refusal = "403 Forbidden"
        if refusal is not None:
            # What is sent is taken all the same, or the connection breaks.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = b"" if method == "HEAD" else _DENIED
            start(refusal, [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
            return [body]
        parts = list(self._app(environ, start))
        if method != "HEAD":
            self.sent += sum(map(len, parts))
        return parts

    def forget(self) -> None:
        """Count from zero."""
        self.sent = self.received = 0
        self.requests.clear()


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """Start a server on a free port, and stop it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = Server(DomainDispatcherApplication(create_backend_app))
    listening = make_server("127.0.0.1", 0, server, threaded=True)  # type: ignore[arg-type]
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def environment(url: str, folder: Path) -> dict[str, str]:
    """Return the environment of S3 packages: our server and key, and nothing of this machine."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
    }


def only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no name but that of this machine be resolved."""
    resolve = socket.getaddrinfo

    def local(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in ("127.0.0.1", "localhost", None):
            raise AssertionError(f"the outside is reached for: {host}")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", local)
