"""Contents of a file by its header alone: tensors, layers, and how prune would group them.

Nothing of the tensors is read, so values may still be refused, by prune as by anything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._files.cache import Cache
from .._files.certificate import Certificate, read_certificate
from .._files.layers import Layer, layout
from .._files.location import Location
from .._files.masses import Budgets
from .._files.names import Names, infer
from .._files.safetensors import ITEMSIZE
from .._files.sharded import ShardedFile, open_tensors
from .._files.tensor_file import SafetensorsFile
from .._files.transposed import HEAD_MAJOR, ROW_MAJOR
from ..errors import CertkError, one_line


@dataclass(frozen=True)
class TensorLine:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class LayerLine:
    """One layer of a cache, and what prune would do with it.

    `group` query heads share a kv head; one keep-set of all `visible` keys would serve `rows`
    queries, for each of `kv_heads` (with `--granularity layer` for all of them together). `bytes`
    is what key, value and query take, stored and in memory.
    """

    layer: int
    kv_heads: int
    heads: int
    group: int
    queries: int
    keys: int
    visible: int
    d: int
    dtypes: str
    scale: float
    rows: int
    bytes: int


@dataclass(frozen=True)
class CacheFacts:
    """A cache as it can be read. `needs` are the options without which prune would refuse it."""

    names: str
    layout: str
    causal_offset: int | None
    layers: tuple[LayerLine, ...]
    warnings: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass(frozen=True)
class OutputFacts:
    """The certificate of an output in a few numbers; only `certk verify` tells whether it is true.

    `kept` of `total` keys over all keep-sets, by the shapes of its tensors; `input_bytes` of
    tensors became `output_bytes`. `eps` is a number where all sets have the same budget, else the
    budgets of the sets of every layer. `complaint` is what is wrong with the certificate as a text.
    """

    library: str
    eps: float | dict[str, list[float]] | None
    options: Mapping[str, Any]
    names: str
    causal_offset: int | None
    layers: int
    kept: int
    total: int
    input_bytes: int
    output_bytes: int
    complaint: str | None


@dataclass(frozen=True)
class Inspection:
    """The contents of one file: a cache, an output of prune, or other tensors (see `complaint`).

    `kind` is "cache", "output", "other", or "unreadable" where there are no tensors to be seen.
    """

    kind: str

    path: str
    bytes: int
    parts: int
    metadata: Mapping[str, str]
    tensors: tuple[TensorLine, ...]
    cache: CacheFacts | None
    output: OutputFacts | None
    complaint: str | None

    @property
    def is_ready(self) -> bool:
        """True if prune would take it as it is, or if it is an output whose text is in order."""
        if self.output is not None:
            return self.output.complaint is None
        return self.cache is not None and not self.cache.needs


def inspect_all(
    locations: Sequence[Location], names: str | None = None, layout: str | None = None
) -> list[Inspection]:
    """Every file, also those that cannot be read; see `inspect`, which raises for these."""
    if names is not None:
        Names(names)
    found = []
    for location in locations:
        try:
            found.append(inspect(location, names, layout))
        except CertkError as error:
            found.append(_unreadable(location, str(error)))
        except OSError as error:
            found.append(_unreadable(location, f"{location}: {error.strerror or one_line(error)}"))
    return found


def inspect(location: Location, names: str | None = None, layout: str | None = None) -> Inspection:
    """Read the header of a file, or of all parts of an index.

    Args:
        location: What to look at.
        names: Pattern of the tensor names; None to find out, also such as prune must be told.
        layout: "hnd" or "nhd"; None to find out, likewise.

    Raises:
        CertkError: It is not safetensors at all, or an argument is wrong.
        OSError: The system or a server refuses it.
    """
    if names is not None:
        Names(names)
    with open_tensors(location) as file:
        entries = file.header.entries.values()
        tensors = tuple(
            TensorLine(entry.name, entry.dtype, entry.shape, entry.stop - entry.start)
            for entry in entries
        )
        metadata = {key: said for key, said in file.header.metadata.items() if key != "certk"}
        output = _output(file)
        parts = len(file.header_sha256s()) - 1 if isinstance(file, ShardedFile) else 1
        size = file.size
    cache, complaint = None, None
    if output is None:
        cache, complaint = _cache(location, names, layout, [tensor.name for tensor in tensors])
    kind = "cache" if cache else "output" if output else "other"
    return Inspection(kind, str(location), size, parts, metadata, tensors, cache, output, complaint)


def inspection_json(found: Inspection) -> dict[str, Any]:
    """Return one file as a JSON object."""
    return {**asdict(found), "is_ready": found.is_ready}


def _unreadable(location: Location, why: str) -> Inspection:
    return Inspection("unreadable", str(location), 0, 0, {}, (), None, None, why)


def _cache(
    location: Location, names: str | None, layout: str | None, held: Sequence[str]
) -> tuple[CacheFacts | None, str | None]:
    """Read the file as a cache, by options of our own if need be; or say why it is none."""
    inferred = infer(held) if names is None else None
    complaint = None
    for order in (layout,) if layout is not None else (None, ROW_MAJOR):
        for pattern in (names, inferred) if inferred is not None else (names,):
            try:
                with Cache(location, pattern, order) as cache:
                    needs = []
                    if pattern != names:
                        needs.append(f"--names {pattern!r}")
                    if order != layout:
                        needs.append(f"--layout {order}")
                    return _facts(cache, tuple(needs)), None
            except CertkError as error:
                complaint = complaint or str(error)
    return None, complaint


def _facts(cache: Cache, needs: tuple[str, ...]) -> CacheFacts:
    entries = cache.file.header.entries
    lines = []
    for layer in cache.layers:
        forms = [entries[layer.names[role]] for role in ("key", "value", "query")]
        kinds = dict.fromkeys(form.dtype for form in forms)
        group = layer.heads // layer.kv_heads
        lines.append(
            LayerLine(
                layer=layer.index,
                kv_heads=layer.kv_heads,
                heads=layer.heads,
                group=group,
                queries=layer.m,
                keys=layer.n,
                visible=layer.visible(cache.causal_offset),
                d=layer.d,
                dtypes="/".join(kinds),
                scale=cache.scales[layer.index],
                rows=group * layer.m,
                bytes=sum(form.stop - form.start for form in forms),
            )
        )
    return CacheFacts(
        cache.names.pattern,
        cache.layers[0].layout,
        cache.causal_offset,
        tuple(lines),
        tuple(cache.warnings),
        needs,
    )


def _output(file: SafetensorsFile) -> OutputFacts | None:
    if "certk" not in file.header.metadata:
        return None
    try:
        said, complaint = read_certificate(file.header.metadata["certk"])
        layers = _layers_of(said)
    except ValueError as error:  # CertkError among them
        return OutputFacts(
            "", None, {}, "", None, 0, 0, 0, 0, file.size, f"cannot be read: {one_line(error)}"
        )
    kept = total = 0
    for layer in layers:
        indices = file.header.entries.get(f"layers.{layer.index}.indices")
        if indices is None:
            complaint = complaint or f"layers.{layer.index}.indices is missing"
            continue
        by_layer = f"layers.{layer.index}.indptr" not in file.header.entries
        kept += math.prod(indices.shape)
        total += layer.n * (1 if by_layer else layer.kv_heads)
    before = sum(math.prod(facts.shape) * ITEMSIZE[facts.dtype] for facts in said.inputs.values())
    return OutputFacts(
        library=said.library,
        eps=_one_or_all(said.eps),
        options=vars(said.options),
        names=said.names,
        causal_offset=said.causal_offset,
        layers=len(layers),
        kept=kept,
        total=total,
        input_bytes=before,
        output_bytes=file.size,
        complaint=complaint,
    )


def _layers_of(said: Certificate) -> tuple[Layer, ...]:
    tensors = {name: (facts.dtype, facts.shape) for name, facts in said.inputs.items()}
    order = getattr(said.options, "layout", None) or getattr(said, "layout", None)
    return layout("inputs", tensors, Names(said.names), order or HEAD_MAJOR)


def _one_or_all(budgets: Budgets) -> float | dict[str, list[float]]:
    every = {budget for groups in budgets.values() for budget in groups}
    if len(every) == 1:
        return every.pop()
    return {str(layer): list(groups) for layer, groups in budgets.items()}
