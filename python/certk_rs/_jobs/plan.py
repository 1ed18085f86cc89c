"""Plans of prune jobs: each input and its output, as headers tell them; and the manifest.

No tensor is read here, and nothing is made.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from .._files.atomic import already_exists
from .._files.cache import Cache
from .._files.certificate import Certificate, Options, TensorFacts
from .._files.layers import Layer
from .._files.location import Location, locate
from .._files.masses import Budgets
from .._files.output import proof_bytes, rest_bytes
from .._files.safetensors import ITEMSIZE
from ..errors import CertkError
from .inputs import Input, Source, changed_at, check_apart, expand
from .request import Request
from .results import Failure, failure

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
    scales: Mapping[int, float]
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

    def certificate(
        self, eps: Budgets, bound_eps: Budgets | None, facts: Mapping[str, TensorFacts]
    ) -> Certificate:
        """Return the certificate of the output, but for the hashes of what will be in it."""
        return Certificate(
            library=__version__,
            eps=eps,
            bound_eps=bound_eps,
            options=self.options,
            names=str(self.input.names),
            causal_offset=self.causal_offset,
            scales=self.scales,
            input_headers=self.input.headers,
            inputs={name: facts[name] for name in self.tensors},
            outputs={},
        )


def plan_file(source: Source, target: Location, request: Request) -> FileTask:
    """Read the header of one input, and check that the request can be met.

    Raises `CertkError` or `OSError` for what is wrong with it.
    """
    with Cache(source.location, request.names, request.layout, request.queries) as cache:
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
                source.location,
                cache.names.pattern,
                layers[0].layout,
                cache.file.identity,
                tuple(cache.file.header_sha256s()),
                request.queries,
            ),
            options=Options(),
            input_bytes=sum(_bytes(entry) for entry in entries.values()),
            cache_bytes=sum(
                _bytes(entries[layer.names[role]]) for layer in layers for role in ("key", "value")
            ),
            others=tuple(cache.others),
            tensors=tuple(entries),
            causal_offset=cache.causal_offset,
            warnings=(*cache.warnings, *_no_promise(source, request)),
            scales=cache.scales,
            changed=changed_at(source),
        )
        return replace(task, options=_options(task))


def _no_promise(source: Source, request: Request) -> list[str]:
    if request.queries == "file":
        return []
    return [
        f"{source.location}: has no queries, so nothing is promised of any: codes prove what each "
        "later query loses"
    ]


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
    if request.rest == "codes":
        narrow = any(layer.dtypes["key"] != "F32" for layer in task.layers)
        key_bits = request.key_bits or (12 if narrow else 16)
        options = replace(options, key_bits=key_bits, value_bits=request.value_bits or 8)
    proof = "none" if request.queries == "none" else request.proof
    if proof == "auto":
        sizes = proof_bytes(task.layers, options, "F32")
        proof = "full" if sizes["full"] <= FULL_PROOF * task.cache_bytes else "compact"
    options = replace(options, proof=proof)
    if request.hot is not None:
        size = _count_of(request.hot, task.total) if request.hot else _least(task)
        return replace(options, size=size, hot=True)
    if request.size is None and request.size_bytes is None:
        return options
    task = replace(task, options=options)
    return replace(options, size=_size(task, options), hot=request.keeps_needed)


def _least(task: FileTask) -> int:
    """Return the keys that all sets need: the forced ones and one for rows that need more."""
    request, found = task.request, 0
    for layer in task.layers:
        needed = request.keep_first + request.keep_last + 1
        sets = layer.kv_heads if request.granularity == "head" else 1
        found += sets * min(needed, layer.visible(task.causal_offset))
    return found


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
    if options.rest != "drop":
        # As if all were dropped: each key that is kept may save a little of a guard.
        fixed += rest_bytes(task.layers, options, 0.0) + 1024 * len(task.layers) * 10
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


def _input(task: FileTask) -> dict[str, Any]:
    # Not the numbers of device and inode, which a volume mounted anew may change.
    identity = task.input.identity
    if task.source.location.is_local and len(identity) == 4:
        identity = identity[2:]
    return {
        "source": str(task.source.location),
        "identity": [part if isinstance(part, int) else str(part) for part in identity],
        "headers": list(task.input.headers),
    }


@dataclass(frozen=True)
class Manner:
    """The way that a job is done; no byte of an output depends on it.

    `existing` is for outputs that are there: "refuse" (the job), "skip" or "replace" (them). `unit`
    is the size of a unit of work, a "layer", a "head", or "auto": a head where layers are too few
    to keep the engine busy. `shard` (I, N) takes every N-th input, beginning with the I-th.
    """

    resume: bool = False
    existing: str = "refuse"
    fail_fast: bool = False
    unit: str = "auto"
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.unit not in ("auto", "layer", "head"):
            raise CertkError(f"unit is {self.unit!r}: give auto, layer or head")
        if self.existing not in ("refuse", "skip", "replace"):
            raise CertkError(f"existing is {self.existing!r}: give refuse, skip or replace")


def read_shard(text: str | None) -> tuple[int, int] | None:
    """Return I and N of "I/N"; a `CertkError` for other texts."""
    if text is None:
        return None
    number, _, count = str(text).partition("/")
    given = number.isdecimal() and count.isdecimal() and len(text) < 20
    if not given or not 1 <= int(number) <= int(count):
        raise CertkError(f"shard is {text!r}: give I/N with 1 <= I <= N, such as 1/4")
    return int(number), int(count)


@dataclass(frozen=True)
class Plan:
    """A job, every header of it read: the inputs that can be pruned, and the failures."""

    out: Location
    request: Request
    manner: Manner
    tasks: tuple[FileTask, ...]
    failures: tuple[Failure, ...]
    all_inputs: str = ""
    """Of a shard: a hash of the names of the inputs of all shards."""

    def manifest(self, state: str) -> dict[str, Any]:
        """Return the manifest of the job; `state` is "running" or "ended"."""
        body = {
            "state": state,
            "library": __version__,
            "request": self.request.to_json(),
            "inputs": {task.source.name: _input(task) for task in self.tasks},
            "refused": [bad.name for bad in self.failures],
        }
        return body | ({"all_inputs": self.all_inputs} if self.manner.shard else {})

    def check_same(self, said: Mapping[str, Any]) -> None:
        """Raise `CertkError` unless a job of this request and these inputs wrote the manifest."""
        now, asked = self.manifest("running"), said.get("request")
        asked = asked if isinstance(asked, dict) else {}
        differences = [
            f"{name} was {asked.get(name)!r}, is {value!r}"
            for name, value in now["request"].items()
            if asked.get(name) != value
        ]
        if said.get("library") != __version__:
            differences.append(f"the version was {said.get('library')}, is {__version__}")
        before, after = said.get("inputs", {}), now["inputs"]
        differences += [f"input {name} is gone" for name in sorted(before.keys() - after.keys())]
        differences += [f"input {name} is new" for name in sorted(after.keys() - before.keys())]
        for name in sorted(after.keys() & before.keys()):
            if {**before[name], "source": ""} != {**after[name], "source": ""}:
                differences.append(f"input {name} was changed")
        if differences:
            more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
            raise CertkError(
                f"the job to be resumed is another one: {'; '.join(differences[:5])}{more}: give "
                "the same, or begin anew with --force, or add to it with --skip-existing"
            )


def make_plan(
    caches: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    request: Request,
    manner: Manner,
    recursive: bool = False,
) -> Plan:
    """Read the headers of all inputs, and see what can be done. Nothing is made.

    Raises:
        CertkError: There is no input, two inputs have one name, an output would have the place of
            an input, or OUT cannot be written to.
    """
    place = locate(out)
    sources = expand(list(caches), recursive=recursive)
    _check_out(place)
    check_apart(sources, place)
    all_inputs = ""
    if manner.shard is not None:
        all_inputs = hashlib.sha256("\0".join(each.name for each in sources).encode()).hexdigest()
        sources = sources[manner.shard[0] - 1 :: manner.shard[1]]
    tasks: list[FileTask] = []
    failures: list[Failure] = []
    for source in sources:
        target = place / source.name
        if manner.existing == "refuse" and not manner.resume and target.exists():
            raise CertkError(
                f"{already_exists(target)}; or go on with --resume or --skip-existing, or "
                "begin anew with --force"
            )
        try:
            tasks.append(plan_file(source, target, request))
        except (CertkError, OSError) as error:
            if manner.fail_fast or len(sources) == 1:
                raise
            failures.append(failure(source, error))
    return Plan(place, request, manner, tuple(tasks), tuple(failures), all_inputs)


def _check_out(out: Location) -> None:
    """OUT must be, or be possible to make, a directory that can be written to."""
    if not out.is_local:
        return
    missing = [*missing_directories(out)]
    place = missing[-1].parent if missing else out.path
    if not place.is_dir():
        raise CertkError(f"{place} is not a directory: OUT ({out}) must be one, or not exist yet")
    if not os.access(place, os.W_OK | os.X_OK):
        raise CertkError(f"{place} cannot be written to: choose another OUT than {out}")


def missing_directories(out: Location) -> Iterator[Path]:
    """Return the directories that have to be made for OUT, the innermost first."""
    if out.is_local:
        place = out.path
        # A drive that is not there is its own parent.
        while not os.path.lexists(place) and place != place.parent:
            yield place
            place = place.parent
