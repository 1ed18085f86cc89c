"""A client of the service, with the standard library and NumPy alone.

It checks what it is told: every certificate is compared with softmax attention computed here, in
float64, which shares no code with the service. Run it beside a service to see it at work:

    python examples/service/client.py --url http://127.0.0.1:8080 --token secret
"""

from __future__ import annotations

import argparse
import http.client
import json
import struct
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

SAFETENSORS = "application/vnd.safetensors"
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "U32": np.uint32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class RefusedError(Exception):
    """The service answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def pack(tensors: dict[str, Array]) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


def unpack(file: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata."""
    (length,) = struct.unpack_from("<Q", file)
    header = json.loads(file[8 : 8 + length])
    about: dict[str, str] = header.pop("__metadata__", {})
    tensors = {}
    for name, each in header.items():
        start, end = each["data_offsets"]
        data = file[8 + length + start : 8 + length + end]
        tensors[name] = np.frombuffer(data, DTYPES[each["dtype"]]).reshape(each["shape"])
    return tensors, about


@dataclass(frozen=True)
class Sets:
    """Kept keys, a row for each query of each head."""

    version: int
    keys: int
    k: Array
    indptr: Array
    indices: Array
    tail_mass_upper: Floats
    tail_mass_lower: Floats
    certified: Array
    scored: Array

    def row(self, row: int) -> Array:
        """The positions that a row keeps."""
        return self.indices[self.indptr[row] : self.indptr[row + 1]]


@dataclass(frozen=True)
class Outputs:
    """Attention's outputs, and what is proven of them."""

    version: int
    keys: int
    out: Array
    tail_mass_upper: Floats
    error_bound: Floats
    k: Array
    scored: Array


class Client:
    """One connection to the service, opened again where it was closed."""

    def __init__(self, url: str, token: str | None = None, timeout: float = 60.0) -> None:
        parts = urllib.parse.urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.headers = {"authorization": f"Bearer {token}"} if token else {}
        self.timeout = timeout
        self.connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Closes the connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = "application/octet-stream",
        query: Mapping[str, object] | None = None,
    ) -> bytes:
        """What the service answers; an error is raised, and none is hidden by asking again."""
        given = {k: _text(value) for k, value in (query or {}).items() if value is not None}
        target = f"{path}?{urllib.parse.urlencode(given)}" if given else path
        if self.connection is None:
            self.connection = http.client.HTTPConnection(*self.address, timeout=self.timeout)
        try:
            self.connection.request(
                method, target, body, {**self.headers, "content-type": kind, "accept": SAFETENSORS}
            )
            response = self.connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        if response.status >= 400:
            try:
                message = json.loads(answer)["error"]
            except (ValueError, KeyError):
                message = answer.decode(errors="replace")
            raise RefusedError(response.status, message)
        return answer

    def put(self, name: str, keys: Array, values: Array | None = None) -> dict[str, Any]:
        """Makes a session of keys (heads, n, d) and values (heads, n, d_v)."""
        return self._change("PUT", f"/v1/sessions/{name}", keys, values)

    def append(
        self, name: str, keys: Array, values: Array | None = None, if_version: int | None = None
    ) -> dict[str, Any]:
        """Adds keys and values behind those of a session."""
        path = f"/v1/sessions/{name}/append"
        return self._change("POST", path, keys, values, {"if_version": if_version})

    def _change(
        self,
        method: str,
        path: str,
        keys: Array,
        values: Array | None,
        query: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        tensors = {"keys": keys} if values is None else {"keys": keys, "values": values}
        answer = self.ask(method, path, pack(tensors), SAFETENSORS, query)
        about: dict[str, Any] = json.loads(answer)
        return about

    def about(self, name: str) -> dict[str, Any]:
        """What a session is."""
        about: dict[str, Any] = json.loads(self.ask("GET", f"/v1/sessions/{name}"))
        return about

    def persist(self, name: str) -> dict[str, Any]:
        """Writes a session to its file."""
        about: dict[str, Any] = json.loads(self.ask("POST", f"/v1/sessions/{name}/persist"))
        return about

    def truncate(self, name: str, keys: int) -> dict[str, Any]:
        """Keeps the first keys only."""
        answer = self.ask("POST", f"/v1/sessions/{name}/truncate", query={"keys": keys})
        about: dict[str, Any] = json.loads(answer)
        return about

    def evict(self, name: str, positions: list[int]) -> dict[str, Any]:
        """Drops keys by position."""
        body = json.dumps({"positions": positions}).encode()
        path = f"/v1/sessions/{name}/evict"
        about: dict[str, Any] = json.loads(self.ask("POST", path, body, "application/json"))
        return about

    def delete(self, name: str) -> None:
        """Deletes a session and its file."""
        self.ask("DELETE", f"/v1/sessions/{name}")

    def search(self, name: str, queries: Array, eps: float, **more: object) -> Sets:
        """The fewest keys of each query (heads, m, d) that lose at most eps."""
        tensors, about = self._rows(name, "search", queries, eps=eps, **more)
        fields = Sets.__dataclass_fields__
        found = {name: tensors[name] for name in fields if name in tensors}
        return Sets(int(about["version"]), int(about["keys"]), **found)

    def attention(self, name: str, queries: Array, **more: object) -> Outputs:
        """Outputs within a budget: eps, or out_tol."""
        tensors, about = self._rows(name, "attention", queries, **more)
        fields = Outputs.__dataclass_fields__
        found = {name: tensors[name] for name in fields if name in tensors}
        return Outputs(int(about["version"]), int(about["keys"]), **found)

    def _rows(
        self, name: str, what: str, queries: Array, **query: object
    ) -> tuple[dict[str, Array], dict[str, str]]:
        asked = {"shape": queries.shape, "dtype": NAMES[queries.dtype].lower(), **query}
        body = np.ascontiguousarray(queries).tobytes()
        return unpack(self.ask("POST", f"/v1/sessions/{name}/{what}", body, query=asked))

    def select(self, scores: Array, eps: float, **more: object) -> dict[str, Array]:
        """The smallest set of each row of scores that loses at most eps."""
        body = np.ascontiguousarray(scores).tobytes()
        dtype = NAMES[scores.dtype].lower()
        asked = {"shape": scores.shape, "dtype": dtype, "eps": eps, **more}
        return unpack(self.ask("POST", "/v1/select", body, query=asked))[0]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return str(value)


# What float64 may be off by here: sums of some ten thousand weights, and scores of size 100.
SLACK = 1e-11


def softmax(scores: Floats) -> Floats:
    """Row by row."""
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    total: Floats = weights / weights.sum(-1, keepdims=True)
    return total


def weights_of(queries: Array, keys: Array) -> Floats:
    """Softmax weights (heads, m, n) of queries over the keys of their heads."""
    group = queries.shape[0] // keys.shape[0]
    wide = np.repeat(keys.astype(np.float64), group, 0)
    scores = queries.astype(np.float64) @ wide.swapaxes(1, 2) / np.sqrt(keys.shape[2])
    return softmax(scores)


def check_select(found: dict[str, Array], scores: Array, eps: float) -> int:
    """That no row of a selection lost more than it says, nor more than eps; how many there are."""
    weights = softmax(scores.astype(np.float64))
    for row, each in enumerate(weights.reshape(-1, scores.shape[-1])):
        kept = found["indices"][found["indptr"][row] : found["indptr"][row + 1]]
        _within(each, kept, found["tail_mass_lower"][row], found["tail_mass_upper"][row])
        if found["tail_mass_upper"][row] > eps:
            raise AssertionError(f"row {row}: over its budget")
    return int(found["k"].size)


def check_sets(found: Sets, queries: Array, keys: Array, eps: float) -> int:
    """The same of a search in a session that holds these keys."""
    if found.keys != keys.shape[1]:
        raise AssertionError(f"{found.keys} keys, not {keys.shape[1]}")
    weights = weights_of(queries, keys)
    upper, lower = found.tail_mass_upper.ravel(), found.tail_mass_lower.ravel()
    for row, each in enumerate(weights.reshape(-1, keys.shape[1])):
        _within(each, found.row(row), lower[row], upper[row])
        if found.certified.ravel()[row] and upper[row] > eps:
            raise AssertionError(f"row {row}: over its budget")
    return int(found.k.size)


def _within(weights: Floats, kept: Array, lower: float, upper: float) -> None:
    dropped = np.ones(weights.size, bool)
    dropped[kept] = False
    lost = weights[dropped].sum()
    if not lower - SLACK <= lost <= upper + SLACK:
        raise AssertionError(f"{lost} is lost, not between {lower} and {upper}")


def check_outputs(found: Outputs, queries: Array, keys: Array, values: Array) -> int:
    """That no output is farther from the real one than it says."""
    if found.keys != keys.shape[1]:
        raise AssertionError(f"{found.keys} keys, not {keys.shape[1]}")
    group = queries.shape[0] // keys.shape[0]
    real = weights_of(queries, keys) @ np.repeat(values.astype(np.float64), group, 0)
    off = np.linalg.norm(found.out.astype(np.float64) - real, axis=-1)
    if not (off <= found.error_bound + SLACK).all():
        raise AssertionError(f"off by {off.max()}, more than the bound")
    return int(found.k.size)


def main() -> None:
    """Makes a session, asks it, checks the answers and deletes it."""
    parser = argparse.ArgumentParser(description="an example client of the certk service")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--token")
    arguments = parser.parse_args()
    client = Client(arguments.url, arguments.token)
    random = np.random.default_rng(0)
    keys, values = random.standard_normal((2, 4, 8192, 64), dtype=np.float32)
    queries = 4 * random.standard_normal((8, 1, 64), dtype=np.float32)

    about = client.put("example", keys[:, :8000], values[:, :8000])
    about = client.append("example", keys[:, 8000:], values[:, 8000:], about["version"])
    print(f"version {about['version']}: {about['heads']} heads of {about['keys']} keys")

    sets = client.search("example", queries, 0.01)
    rows = check_sets(sets, queries, keys, 0.01)
    print(
        f"search: {rows} rows checked; {sets.k.mean():.0f} keys kept, "
        f"{sets.scored.mean():.0f} of {sets.keys} scored, {sets.tail_mass_upper.max():.4f} lost"
    )
    outputs = client.attention("example", queries, eps=0.01)
    rows = check_outputs(outputs, queries, keys, values)
    print(
        f"attention: {rows} rows checked; {outputs.k.mean():.0f} keys used, "
        f"errors at most {outputs.error_bound.max():.4f}"
    )
    scores = 3 * random.standard_normal((8, 4096), dtype=np.float32)
    print(f"select: {check_select(client.select(scores, 0.01), scores, 0.01)} rows checked")
    client.delete("example")


if __name__ == "__main__":
    main()
