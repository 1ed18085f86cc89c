"""Tasks: one input of a prune job and its output, as the header tells them; and the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import __version__
from .._files.cache import Cache
from .._files.certificate import Options
from .._files.layers import Layer
from .._files.location import Location
from .._files.output import guard_bytes, proof_bytes
from .._files.safetensors import ITEMSIZE
from ..errors import CertkError
from .inputs import Input, Source, changed_at
from .request import Request

# A certificate of every row is written unless it takes a larger share of the cache's bytes.
FULL_PROOF = 0.02


@dataclass(frozen=True)
class FileTask:
    """One input and its output, as its header tells them; no data is read."""

    source: Source
    target: Location
    request: Request
    layers: tuple[Layer, ...]
    input: Input
    options: Options
    input_bytes: int
    cache_bytes: int
    others: tuple[str, ...]
    tensors: tuple[str, ...]
    causal_offset: int | None
    warnings: tuple[str, ...]
    header_sha256s: tuple[str, ...]
    changed: tuple[int, ...] | None

    @property
    def total(self) -> int:
        """The visible keys of all groups; by token there is one."""
        visible = [layer.visible(self.causal_offset) for layer in self.layers]
        if self.request.granularity == "head":
            kv_heads = [layer.kv_heads for layer in self.layers]
            return sum(n * heads for n, heads in zip(visible, kv_heads, strict=True))
        return visible[0] if self.request.granularity == "token" else sum(visible)

    @property
    def shared(self) -> bool:
        """True if all layers have one and the same set."""
        return self.options.granularity == "token"


def plan_file(source: Source, target: Location, request: Request) -> FileTask:
    """Read the header of one input, and check that the request can be met.

    Raises `CertkError` or `OSError` for what is wrong with it.
    """
    with Cache(source.location, request.names, request.layout) as cache:
        layers = tuple(cache.layers)
        for layer in layers:
            _check_forced(source, layer, request, cache.causal_offset)
            if request.eps is not None:
                request.eps.of(layer.index)
        entries = cache.file.header.entries
        task = FileTask(
            source=source,
            target=target,
            request=request,
            layers=layers,
            input=Input(
                source.location, cache.names.pattern, layers[0].layout, cache.file.identity
            ),
            options=Options(),
            input_bytes=sum(_bytes(entry) for entry in entries.values()),
            cache_bytes=sum(
                _bytes(entries[layer.names[role]]) for layer in layers for role in ("key", "value")
            ),
            others=tuple(cache.others),
            tensors=tuple(entries),
            causal_offset=cache.causal_offset,
            warnings=tuple(cache.warnings),
            header_sha256s=tuple(cache.file.header_sha256s()),
            changed=changed_at(source),
        )
        return replace(task, options=_options(task))


def _bytes(entry: Any) -> int:
    return int(entry.stop - entry.start)


def _check_forced(
    source: Source, layer: Layer, request: Request, causal_offset: int | None
) -> None:
    visible = layer.visible(causal_offset)
    forced = min(request.keep_first + request.keep_last, visible)
    most = allowed(request.max_keep, visible)
    if forced > most:
        raise CertkError(
            f"{source.location}: layer {layer.index}: keep_first and keep_last force {forced} of "
            f"{visible} keys, max_keep allows {most}: raise max_keep or force fewer"
        )


def allowed(limit: int | float | None, visible: int) -> int:
    """Return how many of `visible` keys `max_keep` allows."""
    if limit is None:
        return visible
    if isinstance(limit, float):
        limit = max(1, math.floor(limit * visible))
    return min(limit, visible)


def _options(task: FileTask) -> Options:
    """Return the options that the certificate records, a size as a count of keys."""
    request = task.request
    options = Options(**request.recorded(), layout=task.layers[0].layout)
    proof = request.proof
    if proof == "auto":
        sizes = proof_bytes(task.layers, options, "F32")
        proof = "full" if sizes["full"] <= FULL_PROOF * task.cache_bytes else "compact"
    options = replace(options, proof=proof)
    if request.hot is not None:
        return replace(options, size=_count_of(request.hot, task.total), hot=True)
    if request.size is None and request.size_bytes is None:
        return options
    task = replace(task, options=options)
    return replace(options, size=_size(task, options))


def _size(task: FileTask, options: Options) -> int:
    """Return the most keys that may be kept, all groups together."""
    request, total = task.request, task.total
    if request.size is not None:
        return _count_of(request.size, total)
    assert request.size_bytes is not None
    # A key of the layer with the widest vectors, and what a header needs for every tensor.
    proof = proof_bytes(task.layers, options, "F32")[options.proof]
    fixed = proof + 1024 * len(task.layers) * 10 + 300 * len(task.tensors) + 4096
    of_key = [_bytes_of_key(layer, options.granularity) for layer in task.layers]
    widest = sum(of_key) if options.granularity == "token" else max(of_key)
    if options.guard != "none":
        # As if all were dropped: each key that is kept may save a little of it.
        fixed += guard_bytes(task.layers, 0.0) + 1024 * len(task.layers) * 10
    size = (request.size_bytes - fixed) // widest
    if size < 1:
        raise CertkError(
            f"{task.source.location}: {request.size_bytes} bytes do not even hold what an output "
            f"has beside keys ({fixed} bytes): give more"
        )
    return min(size, total)


def _count_of(share: float | int, total: int) -> int:
    """Return a count of keys, given as one or as a share of all."""
    if isinstance(share, float):
        return max(1, math.floor(share * total))
    return min(share, total)


def _bytes_of_key(layer: Layer, granularity: str) -> int:
    vectors = layer.d * sum(ITEMSIZE[layer.dtypes[role]] for role in ("key", "value"))
    return vectors * (1 if granularity == "head" else layer.kv_heads) + 8


def manifest(
    request: Request, tasks: Sequence[FileTask], state: str, refused: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the manifest of a job.

    `state` is "running" or "ended", `refused` the names of inputs that could not be planned for.
    """
    return {
        "state": state,
        "library": __version__,
        "request": request.to_json(),
        "inputs": {task.source.name: _input(task) for task in tasks},
        "refused": list(refused),
    }


def _input(task: FileTask) -> dict[str, Any]:
    # Not the numbers of device and inode, which a volume mounted anew may change.
    identity = task.input.identity
    if task.source.location.is_local and len(identity) == 4:
        identity = identity[2:]
    return {
        "source": str(task.source.location),
        "identity": [part if isinstance(part, int) else str(part) for part in identity],
        "headers": list(task.header_sha256s),
    }


def check_same(said: dict[str, Any], request: Request, tasks: Sequence[FileTask]) -> None:
    """Raise `CertkError` unless a job of this request and these inputs wrote the manifest.

    The message shows what differs.
    """
    now = manifest(request, tasks, "running")
    differences = [
        f"{name} was {_get(said, 'request', name)!r}, is {value!r}"
        for name, value in now["request"].items()
        if _get(said, "request", name) != value
    ]
    if said.get("library") != __version__:
        differences.append(f"the version was {said.get('library')}, is {__version__}")
    before, after = said.get("inputs", {}), now["inputs"]
    for name in sorted(before.keys() - after.keys()):
        differences.append(f"input {name} is gone")
    for name in sorted(after.keys() - before.keys()):
        differences.append(f"input {name} is new")
    for name in sorted(after.keys() & before.keys()):
        if {**before[name], "source": ""} != {**after[name], "source": ""}:
            differences.append(f"input {name} was changed")
    if differences:
        shown = "; ".join(differences[:5]) + (
            f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        )
        raise CertkError(
            f"the job to be resumed is another one: {shown}: give the same, or begin anew with "
            "--force, or add to it with --skip-existing"
        )


def _get(body: Any, *path: str) -> Any:
    for name in path:
        body = body.get(name, {}) if isinstance(body, dict) else {}
    return body
