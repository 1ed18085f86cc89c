"""Small caches and damaged files for the tests of the files, the audit and the command line.

The safetensors writer here is its own: it writes what it is told to, sense or nonsense.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from certk_rs import prune
from certk_rs._files.tensor_file import SafetensorsFile
from certk_rs.audit import OutputAudit, audit
from certk_rs.cli import main
from second_verifier import second_verdict

Tensor = tuple[str, tuple[int, ...], bytes]
Arrays = dict[str, np.ndarray]
Body = dict[str, Any]

FORGED = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
FORGED |= {"U8": "u1", "U64": "<u8", "C64": "<c8", "BOOL": "?"}
DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I32": np.int32}


def tensor(array: np.ndarray, dtype: str) -> Tensor:
    """An array as a stored tensor; BF16 by cutting float32 off (whose values then count)."""
    if dtype == "BF16":
        data = (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = array.astype(np.dtype(DTYPES[dtype]).newbyteorder("<")).tobytes()
    return dtype, array.shape, data


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """A plain safetensors file, tensors in the given order, header without padding."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        offsets = [position, position := position + len(data)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    return raw_file(json.dumps(header), b"".join(data for _, _, data in tensors.values()))


def raw_file(header: str | bytes, data: bytes = b"") -> bytes:
    """A header of any kind with its right length, and data."""
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + data


def cache_tensors(
    *,
    layers: int = 2,
    kv_heads: int = 2,
    heads: int = 4,
    m: int = 3,
    n: int = 24,
    d: int = 4,
    dtype: str = "F16",
    seed: int = 0,
    batch: bool = True,
    spread: float = 2.0,
    names: str = "layers.{i}.{role}",
) -> dict[str, Tensor]:
    """Gaussian vectors as the tensors of a cache."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for i in range(layers):
        for role, rows in (("key", (kv_heads, n)), ("value", (kv_heads, n)), ("query", (heads, m))):
            array = spread * rng.standard_normal((*rows, d))
            tensors[names.format(i=i, role=role)] = tensor(array[None] if batch else array, dtype)
    return tensors


def write_cache(
    path: Path, *, metadata: Mapping[str, str] | None = None, **shape: Any
) -> dict[str, np.ndarray]:
    """Write a small cache; return its tensors as float64."""
    tensors = cache_tensors(**shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return {name: as_float64(stored) for name, stored in tensors.items()}


def as_float64(stored: Tensor) -> np.ndarray:
    """The values of a stored tensor."""
    dtype, shape, data = stored
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype("<u4") << 16
        return bits.view("<f4").astype(np.float64).reshape(shape)
    return np.frombuffer(data, np.dtype(DTYPES[dtype])).astype(np.float64).reshape(shape)


def read_output(path: Path) -> dict[str, np.ndarray]:
    """All tensors of an output, BF16 as its bits."""
    with SafetensorsFile(path) as file:
        return {name: file.read(name) for name in file.header.entries}


def opened(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Read the metadata and the tensors of a safetensors file with none of the library's code."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    told = header.pop("__metadata__", {})
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = np.frombuffer(content[start + begin : start + end], FORGED[entry["dtype"]])
        arrays[name] = flat.reshape(entry["shape"]).copy()
    return told, arrays


def forge(
    path: Path,
    edit: Callable[[dict[str, np.ndarray]], None] = lambda _: None,
    say: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Forge an output with none of the library's code: all of it fits together, whatever it says.

    `edit` changes the tensors, whose types may change too. Then `say` changes the certificate as
    JSON, shapes and hashes included; a string "@text" stands in it for bare text, such as 1e999.
    """
    told, arrays = opened(path)
    body = json.loads(told["certk"])
    edit(arrays)
    called = {np.dtype(kind): name for name, kind in FORGED.items()}
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    entries, position = {}, 0
    for name in order:
        kind, shape = called[arrays[name].dtype], list(arrays[name].shape)
        offsets = [position, position := position + arrays[name].nbytes]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
    body["outputs"] = {
        name: {
            "dtype": entries[name]["dtype"],
            "shape": list(arrays[name].shape),
            "sha256": hashlib.sha256(arrays[name].tobytes()).hexdigest(),
        }
        for name in order
    }
    say(body)

    def text(sha256: str) -> str:
        said = json.dumps(body | {"sha256": sha256}, sort_keys=True, separators=(",", ":"))
        return re.sub(r'"@([^"]*)"', r"\1", said)

    sealed = text(hashlib.sha256(text("").encode()).hexdigest())
    written = json.dumps({"__metadata__": {"certk": sealed}} | entries, separators=(",", ":"))
    written += " " * (-len(written) % 8)
    path.write_bytes(raw_file(written, b"".join(arrays[name].tobytes() for name in order)))


def forge_input(
    source: Path,
    output: Path,
    edit: Callable[[dict[str, np.ndarray]], None],
    metadata: Callable[[dict[str, str]], None] = lambda _: None,
) -> None:
    """Change the input of an output, and what the output says of it, so that they fit together."""
    told, arrays = opened(source)
    edit(arrays)
    metadata(told)
    # BF16 are integers here, and nothing else is.
    called = {np.dtype(kind): name for name, kind in FORGED.items()} | {np.dtype("<u2"): "BF16"}
    tensors = {
        name: (called[array.dtype], array.shape, array.tobytes()) for name, array in arrays.items()
    }
    changed = safetensors_bytes(tensors, told)
    source.write_bytes(changed)
    head = changed[: 8 + int.from_bytes(changed[:8], "little")]

    def say(body: dict[str, Any]) -> None:
        body["input_headers"] = [hashlib.sha256(head).hexdigest()]
        body["inputs"] = {
            name: {
                "dtype": dtype,
                "shape": list(shape),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            for name, (dtype, shape, data) in tensors.items()
        }

    forge(output, say=say)


class Job:
    """A pruned cache: `source` and `output`, to be damaged and audited."""

    def __init__(self, folder: Path, *, eps: float = 0.1, **options: Any) -> None:
        self._lay_out(folder)
        write_cache(self.source, **options.pop("cache", {}))
        prune(self.source, self.output.parent, eps, **{"proof": "full"} | options)

    def _lay_out(self, folder: Path) -> None:
        self.source = folder / "in" / "x.safetensors"
        self.output = folder / "out" / "x.safetensors"

    @classmethod
    def of(cls, folder: Path, source: bytes, output: bytes | None = None) -> Job:
        """A job whose files are there."""
        job = cls.__new__(cls)
        job._lay_out(folder)
        for path, content in ((job.source, source), (job.output, output)):
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)
        return job

    @property
    def files(self) -> tuple[bytes, bytes]:
        """The contents of both files."""
        return self.source.read_bytes(), self.output.read_bytes()

    def prune(self, *arguments: object) -> None:
        """Prune the source on the command line."""
        command = ["prune", self.source, "-o", self.output.parent, "--eps", "0.1"]
        assert certk(*command, *arguments) == 0

    def check(
        self, *, against: bool = False, names: str | None = None, layout: str | None = None
    ) -> OutputAudit:
        given = [self.source] if against else []
        [output] = audit([self.output], given, names=names, layout=layout).outputs
        if against and names is None:
            # Two verifiers that share no code: whatever a test does to an output, they agree.
            code, said = second_verdict(self.output, self.source, layout)
            assert code == (0 if output.holds else 1), f"{said}\n{output.findings[:5]}"
        return output

    def lines(self, *, against: bool = False) -> str:
        return "\n".join(map(str, self.check(against=against).findings))


def certk(*arguments: object) -> int:
    """Run the command line in this process; return the exit code."""
    return main([str(argument) for argument in arguments])


class Said(NamedTuple):
    """The exit code of a call, and both streams."""

    code: int
    out: str
    err: str


def said(*arguments: object) -> Said:
    """Run the command line in this process; return all that it said."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = certk(*arguments)
    return Said(code, out.getvalue(), err.getvalue())


def answered(*arguments: object, code: int = 0) -> Body:
    """Run the command line with --json in this process; return the object."""
    found = said(*arguments, "--json")
    assert found.code == code, found.err
    body: Body = json.loads(found.out)
    return body
