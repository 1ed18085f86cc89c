"""Contents of files by their headers alone: tensors, layers, and how prune would group them.

Nothing of the tensors is read, so values may still be refused, by prune as by anything else. What
is found is an object of plain values, which the command prints as text or as JSON:

    kind        "cache", "output", "other", or "unreadable" where there are no tensors to be seen
    path, bytes, parts, metadata
    tensors     name, dtype, shape and bytes of each
    cache       of a cache: names, layout, causal_offset, layers, warnings, and needs: the options
                without which prune would refuse it
    output      of an output of prune: its certificate in a few numbers. complaint is what is wrong
                with it as a text; only `certk verify` tells whether it is true
    complaint   the reason why it is no cache, or cannot be read
    is_ready    true if prune would take it as it is, or if it is an output in order

In a layer, `group` query heads share a kv head. One keep-set of all `visible` keys would serve
`rows` queries, for each of `kv_heads` (by layer for all of them together). `bytes` is what key,
value and query take, stored and in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from .._files.cache import Cache
from .._files.certificate import Certificate, read_certificate
from .._files.layers import Layer, layout
from .._files.location import Location
from .._files.masses import Budgets
from .._files.names import ROLES, Names, infer
from .._files.safetensors import ITEMSIZE
from .._files.sharded import ShardedFile, open_tensors
from .._files.tensor_file import SafetensorsFile
from .._files.transposed import HEAD_MAJOR, ROW_MAJOR
from ..errors import CertkError, one_line

Facts = dict[str, Any]


def inspect_all(
    locations: Sequence[Location], names: str | None = None, layout: str | None = None
) -> list[Facts]:
    """Inspect every file, also those that cannot be read; see `inspect`, which raises for these."""
    if names is not None:
        Names(names)
    found = []
    for location in locations:
        try:
            found.append(inspect(location, names, layout))
        except (CertkError, OSError) as error:
            why = str(error)
            if isinstance(error, OSError):
                why = f"{location}: {error.strerror or one_line(error)}"
            found.append(
                {
                    "kind": "unreadable",
                    "path": str(location),
                    "bytes": 0,
                    "parts": 0,
                    "metadata": {},
                    "tensors": [],
                    "cache": None,
                    "output": None,
                    "complaint": why,
                    "is_ready": False,
                }
            )
    return found


def inspect(location: Location, names: str | None = None, layout: str | None = None) -> Facts:
    """Read the header of a file, or of all parts of an index.

    Args:
        location: The file.
        names: Pattern of the tensor names; None to find out, also such as prune must be told.
        layout: "hnd" or "nhd"; None to find out, likewise.

    Raises:
        CertkError: It is not safetensors at all, or an argument is wrong.
        OSError: The system or a server refuses it.
    """
    if names is not None:
        Names(names)
    cache, complaint = None, None
    with open_tensors(location) as file:
        output = _output(file)
        entries = file.header.entries
        if output is None:
            cache, complaint = _cache(location, names, layout, [*entries])
        ready = output["complaint"] is None if output else cache is not None and not cache["needs"]
        return {
            "kind": "cache" if cache else "output" if output else "other",
            "path": str(location),
            "bytes": file.size,
            "parts": len(file.header_sha256s()) - 1 if isinstance(file, ShardedFile) else 1,
            "metadata": {key: v for key, v in file.header.metadata.items() if key != "certk"},
            "tensors": [
                {"name": e.name, "dtype": e.dtype, "shape": e.shape, "bytes": e.stop - e.start}
                for e in entries.values()
            ],
            "cache": cache,
            "output": output,
            "complaint": complaint,
            "is_ready": ready,
        }


def _cache(
    location: Location, names: str | None, layout: str | None, held: Sequence[str]
) -> tuple[Facts | None, str | None]:
    """Read the file as a cache, by options of our own if need be; or say why it is none."""
    inferred = infer(held) if names is None else None
    complaint = None
    orders = (layout,) if layout is not None else (None, ROW_MAJOR)
    patterns = (names, inferred) if inferred is not None else (names,)
    for queries in ("file", "none"):
        for order, pattern in product(orders, patterns):
            try:
                with Cache(location, pattern, order, queries) as cache:
                    needs = [] if pattern == names else [f"--names {pattern!r}"]
                    needs += [] if order == layout else [f"--layout {order}"]
                    needs += [] if queries == "file" else ["--queries none --rest codes"]
                    return {
                        "names": cache.names.pattern,
                        "layout": cache.layers[0].layout,
                        "causal_offset": cache.causal_offset,
                        "layers": [_layer(cache, layer) for layer in cache.layers],
                        "warnings": cache.warnings,
                        "needs": needs,
                    }, None
            except CertkError as error:
                complaint = complaint or str(error)
    return None, complaint


def _layer(cache: Cache, layer: Layer) -> Facts:
    roles = [role for role in ROLES if role in layer.names]
    forms = [cache.file.header.entries[layer.names[role]] for role in roles]
    group = layer.heads // layer.kv_heads
    return {
        "layer": layer.index,
        "kv_heads": layer.kv_heads,
        "heads": layer.heads,
        "group": group,
        "queries": layer.m,
        "keys": layer.n,
        "visible": layer.visible(cache.causal_offset),
        "d": layer.d,
        "dtypes": "/".join(dict.fromkeys(form.dtype for form in forms)),
        "scale": cache.scales[layer.index],
        "rows": group * layer.m,
        "bytes": sum(form.stop - form.start for form in forms),
    }


def _output(file: SafetensorsFile) -> Facts | None:
    """Return `kept` of `total` keys by the shapes of tensors, and what the certificate says."""
    if "certk" not in file.header.metadata:
        return None
    try:
        said, complaint = read_certificate(file.header.metadata["certk"])
        layers = _layers_of(said)
    except ValueError as error:  # CertkError among them
        return {
            "library": "",
            "eps": None,
            "options": {},
            "names": "",
            "causal_offset": None,
            "layers": 0,
            "kept": 0,
            "total": 0,
            "input_bytes": 0,
            "output_bytes": file.size,
            "complaint": f"cannot be read: {one_line(error)}",
        }
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
    return {
        "library": said.library,
        "eps": _one_or_all(said.eps),
        "options": vars(said.options),
        "names": said.names,
        "causal_offset": said.causal_offset,
        "layers": len(layers),
        "kept": kept,
        "total": total,
        "input_bytes": before,
        "output_bytes": file.size,
        "complaint": complaint,
    }


def _layers_of(said: Certificate) -> tuple[Layer, ...]:
    tensors = {name: (facts.dtype, facts.shape) for name, facts in said.inputs.items()}
    order = getattr(said.options, "layout", None) or getattr(said, "layout", None)
    return layout("inputs", tensors, Names(said.names), order or HEAD_MAJOR, said.queries)


def _one_or_all(budgets: Budgets) -> float | dict[str, list[float]]:
    """Return the budget of all sets, or where they differ, those of the sets of every layer."""
    every = {budget for groups in budgets.values() for budget in groups}
    if len(every) == 1:
        return every.pop()
    return {str(layer): list(groups) for layer, groups in budgets.items()}
