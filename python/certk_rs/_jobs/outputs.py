"""Reading outputs: the record of each layer, and the rows of many outputs that lose most.

Everything is read from the file. What `certk verify` would find is not looked for here, but what
does not fit together is refused, and every tensor that is read has the hash that the certificate
says.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.layers import Layer
from .._files.output import OutputReader
from .._files.safetensors import ITEMSIZE
from .sets import KINDS, PROMISED, LayerRecord, SetRecord, fewest_keys, set_records

MOST = 12
"""So many rows of each kind are named."""

EDGES = (*(k / 20 for k in range(21)), 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
"""Bins of tail mass over budget: each holds what is above its lower edge, and its upper edge."""

Masses = NDArray[np.floating[Any]]


class ReportedOutput(OutputReader):
    """An open output, read a layer at a time for a report.

    Raises `CertkError` if it is none, or contradicts itself; `OSError` if it cannot be read.
    """

    @property
    def header_sha256(self) -> str:
        """SHA-256 of all that precedes the data."""
        return hashlib.sha256(self.file.header.raw).hexdigest()

    @property
    def output_bytes(self) -> int:
        """All bytes of the output."""
        return self.file.size

    @property
    def proof_bytes(self) -> int:
        """Bytes of its tensors that are neither keys nor values, nor a guard."""
        return self._bytes(lambda role: role not in ("key", "value") and not _of_guard(role))

    @property
    def guard_bytes(self) -> int:
        """Bytes of what is remembered of the dropped keys and values."""
        return self._bytes(_of_guard)

    def _bytes(self, which: Callable[[str], bool]) -> int:
        entries = self.file.header.entries.values()
        rest = [e for e in entries if which(e.name.rpartition(".")[2])]
        return sum(entry.stop - entry.start for entry in rest)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of the input."""
        return self._input_bytes(("key", "value"))

    @property
    def input_bytes(self) -> int:
        """Bytes of all tensors of the input."""
        return self._input_bytes(None)

    def _input_bytes(self, roles: tuple[str, ...] | None) -> int:
        total = 0
        for name, fact in self.certificate.inputs.items():
            match = self.names.match(name)
            if roles is None or (match is not None and match[1] in roles):
                total += prod(fact.shape) * ITEMSIZE[fact.dtype]
        return total

    def check(self) -> None:
        """Read all that `read` does; a `CertkError` if a layer is not what a job writes.

        Whoever adds up layers as they come does not have to take any back then.
        """
        for _ in self.read():
            pass

    def read(self) -> Iterator[LayerRecord]:
        """Read each layer in turn; memory holds the masses of one."""
        for layer in self.layers:
            yield self._layer(layer)

    def numbers(self, record: LayerRecord) -> list[SetRecord]:
        """Return the sets of a layer in numbers."""
        said = self.certificate
        return set_records(
            record,
            self.by_head,
            said.options.block_size,
            record.layer.visible(said.causal_offset),
            None if said.bound_eps is None else said.bound_eps[record.layer.index],
        )

    def _layer(self, layer: Layer) -> LayerRecord:
        sizes = np.array([end - start for start, end in pairwise(self.ends(layer))], np.int64)
        self._need((sizes <= layer.n).all(), layer, "indices")
        rows = layer.heads * layer.m
        record = LayerRecord(
            layer=layer,
            first_head=0,
            sizes=sizes,
            eps=np.array(self.certificate.eps[layer.index], np.float64),
            lower_bounds=self.optional(layer, "lower_bound"),
            violations=None,
            held_out=self._places(layer, "held_out", layer.m),
            left_out=self._places(layer, "left_out", rows),
            upper=self._masses(layer, "tail_mass_upper"),
            lower=self._masses(layer, "tail_mass_lower"),
            worst=self._masses(layer, "worst_tail_mass"),
            over=None,
            weight_rows=self._places(layer, "lower_bound_rows", rows),
            weights=self._weights(layer),
        )
        self._check(record)
        return self._counted(record)

    def _check(self, record: LayerRecord) -> None:
        layer, bounds, said = record.layer, record.lower_bounds, self.certificate
        self._need(bounds is None or (bounds >= 0).all(), layer, "lower_bound")
        # Bounds that refer to smaller budgets may be above what is kept.
        if bounds is not None and said.bound_eps is None:
            visible, size = layer.visible(said.causal_offset), said.options.block_size
            for bound, kept in zip(bounds.tolist(), record.sizes.tolist(), strict=True):
                self._need(fewest_keys(bound, size, visible) <= kept, layer, "lower_bound")
        if record.upper is not None and record.lower is not None:
            self._need((record.lower <= record.upper).all(), layer, "tail_mass_lower")
        self._need(len(record.weights) == len(record.weight_rows), layer, "lower_bound_weights")

    def _counted(self, record: LayerRecord) -> LayerRecord:
        """Return the record with what its masses say of promised and held-out rows."""
        queries, violations = len(record.held_out), None
        per_head = self.optional(record.layer, "violations")
        if per_head is not None:
            inside = (per_head >= 0) & (per_head <= queries)
            self._need(inside.all(), record.layer, "violations")
        if record.upper is not None:
            return _counted_rows(record, record.upper)
        if record.worst is None:
            return record
        eps = np.repeat(record.eps, record.heads_of_set)
        over = np.where(_above(record.worst, eps), -1, 0)
        if per_head is not None:
            each = per_head.reshape(len(record.sizes), -1)
            violations = np.stack([each.max(axis=1), np.minimum(each.sum(axis=1), queries)], axis=1)
        return replace(record, over=over, violations=violations)

    def _masses(self, layer: Layer, name: str) -> Masses | None:
        masses = self.optional(layer, name)
        if masses is not None:
            self._need(((masses >= 0) & (masses <= 1)).all(), layer, name)
        return masses

    def _places(self, layer: Layer, name: str, end: int) -> NDArray[np.int64]:
        places = self.optional(layer, name)
        if places is None:
            return np.empty(0, np.int64)
        inside = (places >= 0) & (places < end)
        self._need(inside.all() and (np.diff(places) > 0).all(), layer, name)
        return places

    def _weights(self, layer: Layer) -> NDArray[np.float32]:
        weights = self.optional(layer, "lower_bound_weights")
        if weights is None:
            return np.empty(0, np.float32)
        self._need((np.isfinite(weights) & (weights > 0)).all(), layer, "lower_bound_weights")
        return weights

    def _need(self, condition: object, layer: Layer, name: str) -> None:
        if not condition:
            raise self.wrong(f"layers.{layer.index}.{name} is not what a job writes")


def _counted_rows(record: LayerRecord, upper: Masses) -> LayerRecord:
    """Count a set at a time, so that no more than its masses are widened at once."""
    promised = record.kinds() == PROMISED
    over, violations = [], []
    for group, eps in enumerate(record.eps):
        heads = slice(group * record.heads_of_set, (group + 1) * record.heads_of_set)
        above = _above(upper[heads], eps)
        over += np.count_nonzero(above & promised[heads], axis=1).tolist()
        violations += [[np.count_nonzero(above[:, record.held_out].any(axis=0))] * 2]
    worst = np.where(promised, upper, upper.dtype.type(0)).max(axis=1)
    return replace(record, worst=worst, over=np.array(over), violations=np.array(violations))


def _above(masses: Masses, eps: Any) -> NDArray[np.bool_]:
    # As float64: NumPy would compare in float32, and round eps.
    above: NDArray[np.bool_] = masses.astype(np.float64) > eps
    return above


def _of_guard(role: str) -> bool:
    return role.startswith("guard_")


class WorstRows:
    """The rows with the largest upper ends, by kind.

    Of a compact proof there is one entry per query head, without a query, and none of the other
    kinds. Equal ones rank as they came.
    """

    def __init__(self) -> None:
        self._heaps: list[list[tuple[float, int, dict[str, Any]]]] = [[] for _ in KINDS]
        self._count = 0

    def add(self, record: LayerRecord, kinds: NDArray[np.uint8], output: str) -> None:
        """Take all rows of a layer."""
        if record.upper is not None:
            flat = record.upper.reshape(-1)
            for kind in range(len(KINDS)):
                (rows,) = np.nonzero(kinds.reshape(-1) == kind)
                for row in rows[_top(flat[rows], self._floor(kind))].tolist():
                    head, query = divmod(row, record.layer.m)
                    lower = None if record.lower is None else float(record.lower[head, query])
                    self._push(kind, record, output, head, query, float(flat[row]), lower)
        elif record.worst is not None:
            for head in _top(record.worst, self._floor(PROMISED)).tolist():
                worst = float(record.worst[head])
                self._push(PROMISED, record, output, head, None, worst, None)

    def _floor(self, kind: int) -> float:
        heap = self._heaps[kind]
        return heap[0][0] if len(heap) == MOST else -1.0

    def _push(
        self,
        kind: int,
        record: LayerRecord,
        output: str,
        head: int,
        query: int | None,
        upper: float,
        lower: float | None,
    ) -> None:
        row = {
            "output": output,
            "layer": record.layer.index,
            "head": head,
            "query": query,
            "tail_mass_lower": lower,
            "tail_mass_upper": upper,
            "eps": float(record.eps[head // record.heads_of_set]),
        }
        self._count += 1
        item = (upper, -self._count, row)
        heap = self._heaps[kind]
        if len(heap) < MOST:
            heapq.heappush(heap, item)
        else:
            heapq.heappushpop(heap, item)

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Return plain values, the worst rows first."""
        ordered = [sorted(heap, key=lambda item: item[:2], reverse=True) for heap in self._heaps]
        return {
            kind: [row for _, _, row in rows] for kind, rows in zip(KINDS, ordered, strict=True)
        }


def _top(masses: NDArray[Any], floor: float) -> NDArray[np.intp]:
    """Return the places of the largest masses above a floor, in their order."""
    (above,) = np.nonzero(masses > floor)
    if len(above) > MOST:
        # The first of equal ones.
        order = np.argsort(-masses[above], kind="stable")[:MOST]
        above = np.sort(above[order])
    return above


class Spread:
    """Counts of rows by their upper end over their budget; outputs with a full proof only."""

    def __init__(self) -> None:
        self._counts = np.zeros((len(KINDS), len(EDGES) - 1), np.int64)

    def add(self, record: LayerRecord, kinds: NDArray[np.uint8]) -> None:
        """Count the rows of a layer."""
        if record.upper is None:
            return
        for head in range(record.layer.heads):
            eps = record.eps[head // record.heads_of_set]
            place = np.digitize(_over(record.upper[head], eps), EDGES[1:-1], right=True)
            for kind in range(len(KINDS)):
                found = np.bincount(place[kinds[head] == kind], minlength=len(EDGES) - 1)
                self._counts[kind] += found

    def to_json(self) -> dict[str, Any]:
        """Return the edges of the bins (null: no end) and the counts of each kind."""
        edges = [None if math.isinf(edge) else edge for edge in EDGES]
        counts = {kind: row.tolist() for kind, row in zip(KINDS, self._counts, strict=True)}
        return {"rows": int(self._counts.sum()), "edges": edges, **counts}


def _over(upper: NDArray[Any], eps: float) -> NDArray[np.float64]:
    masses = upper.astype(np.float64)
    if eps == 0:
        return np.where(masses > 0, np.inf, 0.0)
    over = masses / eps
    # A quotient may be rounded to 1 from above, and what is above the budget is.
    return np.where((masses > eps) & (over <= 1), np.nextafter(1.0, 2.0), over)
