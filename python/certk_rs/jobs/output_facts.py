"""What an output says of itself: its sets, tail masses and bounds, a layer at a time.

Everything is read from the file: what `certk verify` would find is not looked for here, but what
does not fit together is refused, and every tensor that is read has the hash that the certificate
says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._files.location import Location
from ..cache_format import (
    ITEMSIZE,
    Certificate,
    Form,
    Layer,
    Names,
    SafetensorsFile,
    counts_in,
    layout,
    output_tensors,
    read_certificate,
)
from ..errors import CertkError
from .layer_report import fewest_keys

PROMISED, HELD_OUT, LEFT_OUT = 0, 1, 2
KINDS = ("promised", "held_out", "left_out")
"""What a row is to the promise; a row that is both held out and left out counts as held out."""

Masses = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """One layer of an output. Rows are (heads, m), one per query of each query head.

    Some query sees `visible` keys. `sizes` and `bounds` have an entry per set: keys kept, and the
    recorded lower bound (of blocks where block_size is above 1), None without one. `upper` and
    `lower` are there with a full proof, `worst` and `violations`, an entry per query head, with a
    compact one. `weighted` rows (flat numbers) have the `weights` of the lower bounds.
    """

    layer: Layer
    eps: tuple[float, ...]
    bound_eps: tuple[float, ...] | None
    block_size: int
    visible: int
    by_head: bool
    sizes: NDArray[np.int64]
    bounds: NDArray[np.int64] | None
    held_out: NDArray[np.int64]
    left_out: NDArray[np.int64]
    upper: Masses | None
    lower: Masses | None
    worst: Masses | None
    violations: NDArray[np.int64] | None
    weighted: NDArray[np.int64]
    weights: NDArray[np.float32]

    @property
    def heads_of_set(self) -> int:
        """How many query heads share a set."""
        return self.layer.heads // len(self.sizes)

    def kinds(self) -> NDArray[np.uint8]:
        """What each row is to the promise, (heads, m), as a number of `KINDS`."""
        kinds = np.zeros((self.layer.heads, self.layer.m), np.uint8)
        kinds.reshape(-1)[self.left_out] = LEFT_OUT
        kinds[:, self.held_out] = HELD_OUT
        return kinds

    def least(self, group: int) -> int | None:
        """Keys that the lower bound of a set speaks of."""
        if self.bounds is None:
            return None
        return fewest_keys(int(self.bounds[group]), self.block_size, self.visible)


class OutputReader:
    """An output, opened. A context manager.

    Raises `CertkError` if it is none, or contradicts itself; `OSError` if it cannot be read.
    """

    certificate: Certificate
    layers: tuple[Layer, ...]

    def __init__(self, location: Location) -> None:
        self.location = location
        self._file = SafetensorsFile(location)
        try:
            self._read_certificate()
        except ValueError as error:
            self._file.close()
            raise self._wrong(str(error).removeprefix(f"{location}: ")) from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> OutputReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_certificate(self) -> None:
        text = self._file.header.metadata.get("certk")
        if text is None:
            raise ValueError("it has no certificate: it is not an output of certk prune")
        self.certificate, complaint = read_certificate(text)
        if complaint is not None:
            raise ValueError(f"its certificate: {complaint}")
        said = self.certificate
        inputs = {name: (fact.dtype, fact.shape) for name, fact in said.inputs.items()}
        names = Names(said.names)
        where = str(self.location)
        self.layers = layout(where, inputs, names, said.options.layout)
        found = {name: (e.dtype, e.shape) for name, e in self._file.header.entries.items()}
        planned: dict[str, Form] = {}
        for layer in self.layers:
            counts = counts_in(found, layer)
            planned |= output_tensors(layer, said.options, counts, said.mass_dtype)
            groups = layer.kv_heads if said.options.granularity == "head" else 1
            for budgets in (said.eps, said.bound_eps):
                if budgets is not None and len(budgets.get(layer.index, ())) != groups:
                    raise ValueError(f"layer {layer.index} has not one budget for each set")
        if planned != found:
            raise ValueError("its tensors are not those that its certificate asks for")
        if {name: (fact.dtype, fact.shape) for name, fact in said.outputs.items()} != found:
            raise ValueError("its tensors are not those that its certificate lists")
        self._names = names

    @property
    def header_sha256(self) -> str:
        """SHA-256 of all that precedes the data."""
        return hashlib.sha256(self._file.header.raw).hexdigest()

    @property
    def output_bytes(self) -> int:
        """All bytes of the output."""
        return self._file.size

    @property
    def proof_bytes(self) -> int:
        """Bytes of its tensors that are neither keys nor values, nor a guard."""
        return self._bytes(lambda role: role not in ("key", "value") and not _of_guard(role))

    @property
    def guard_bytes(self) -> int:
        """Bytes of what is remembered of the dropped keys and values."""
        return self._bytes(_of_guard)

    def _bytes(self, which: Callable[[str], bool]) -> int:
        entries = self._file.header.entries.values()
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
            match = self._names.match(name)
            if roles is None or (match is not None and match[1] in roles):
                total += prod(fact.shape) * ITEMSIZE[fact.dtype]
        return total

    def check(self) -> None:
        """Read everything that `read` does; a `CertkError` if a layer is not what was written.

        Whoever adds up layers as they come does not have to take any back then.
        """
        for _ in self.read():
            pass

    def read(self) -> Iterator[LayerFacts]:
        """Each layer in turn; memory holds the masses of one."""
        for layer in self.layers:
            yield self._layer(layer)

    def _layer(self, layer: Layer) -> LayerFacts:
        said, index = self.certificate, layer.index
        by_head = said.options.granularity == "head"
        if by_head:
            starts = self._get(layer, "indptr")
            total = self._file.header.entries[f"layers.{index}.indices"].shape[0]
            self._need(starts[0] == 0 and starts[-1] == total, layer, "indptr")
            self._need((np.diff(starts) >= 0).all() and (starts >= 0).all(), layer, "indptr")
            sizes = np.diff(starts)
        else:
            shape = self._file.header.entries[f"layers.{index}.indices"].shape
            sizes = np.array(shape, np.int64)
        self._need((sizes <= layer.n).all(), layer, "indices")
        rows = layer.heads * layer.m
        facts = LayerFacts(
            layer=layer,
            eps=said.eps[index],
            bound_eps=None if said.bound_eps is None else said.bound_eps[index],
            block_size=said.options.block_size,
            visible=layer.visible(said.causal_offset),
            by_head=by_head,
            sizes=sizes,
            bounds=self._optional(layer, "lower_bound"),
            held_out=self._places(layer, "held_out", layer.m),
            left_out=self._places(layer, "left_out", rows),
            upper=self._masses(layer, "tail_mass_upper"),
            lower=self._masses(layer, "tail_mass_lower"),
            worst=self._masses(layer, "worst_tail_mass"),
            violations=self._optional(layer, "violations"),
            weighted=self._places(layer, "lower_bound_rows", rows),
            weights=self._weights(layer),
        )
        self._check(facts)
        return facts

    def _check(self, facts: LayerFacts) -> None:
        layer, bounds, violations = facts.layer, facts.bounds, facts.violations
        self._need(bounds is None or (bounds >= 0).all(), layer, "lower_bound")
        for group, size in enumerate(facts.sizes.tolist()):
            # Bounds that refer to smaller budgets may be above what is kept.
            fits = facts.bound_eps is not None or (facts.least(group) or 0) <= size
            self._need(fits, layer, "lower_bound")
        count = len(facts.held_out)
        self._need(
            violations is None or ((violations >= 0) & (violations <= count)).all(),
            layer,
            "violations",
        )
        if facts.upper is not None and facts.lower is not None:
            self._need((facts.lower <= facts.upper).all(), layer, "tail_mass_lower")
        self._need(len(facts.weights) == len(facts.weighted), layer, "lower_bound_weights")

    def _get(self, layer: Layer, name: str) -> NDArray[Any]:
        """A tensor of a layer; a `CertkError` if it is not the one that was written."""
        full = f"layers.{layer.index}.{name}"
        raw = self._file.raw(full)
        if hashlib.sha256(raw.data).hexdigest() != self.certificate.outputs[full].sha256:
            raise self._wrong(f"tensor {full} has not the hash that its certificate says")
        entry = self._file.header.entries[full]
        kinds = {"I32": "<i4", "I64": "<i8", "F32": "<f4", "F64": "<f8"}
        return raw.view(kinds[entry.dtype]).reshape(entry.shape)

    def _optional(self, layer: Layer, name: str) -> NDArray[Any] | None:
        there = f"layers.{layer.index}.{name}" in self._file.header.entries
        return self._get(layer, name) if there else None

    def _masses(self, layer: Layer, name: str) -> Masses | None:
        masses = self._optional(layer, name)
        if masses is not None:
            self._need(((masses >= 0) & (masses <= 1)).all(), layer, name)
        return masses

    def _places(self, layer: Layer, name: str, end: int) -> NDArray[np.int64]:
        places = self._optional(layer, name)
        if places is None:
            return np.empty(0, np.int64)
        inside = (places >= 0) & (places < end)
        self._need(inside.all() and (np.diff(places) > 0).all(), layer, name)
        return places

    def _weights(self, layer: Layer) -> NDArray[np.float32]:
        weights = self._optional(layer, "lower_bound_weights")
        if weights is None:
            return np.empty(0, np.float32)
        self._need((np.isfinite(weights) & (weights > 0)).all(), layer, "lower_bound_weights")
        return weights

    def _need(self, condition: object, layer: Layer, name: str) -> None:
        if not condition:
            raise self._wrong(f"layers.{layer.index}.{name} is not what a job writes")

    def _wrong(self, what: str) -> CertkError:
        return CertkError(f"{self.location}: {what}: see what certk verify says of it")


@dataclass(frozen=True)
class SetFacts:
    """One keep-set: `head` is the kv head that it is of, or -1 for a whole layer.

    What the file does not tell is None. `worst_tail_mass` is the largest upper end of a promised
    row, `rows` are the promised ones. `violations` are held-out queries that may lose more than eps
    in some query head of the set: at least so many, and at most so many. Held out are the queries
    that the file says so of, or those of the trial in the record of the job.
    """

    layer: int
    head: int
    eps: float
    bound_eps: float | None
    kept: int
    total: int
    lower_bound: int | None
    worst_tail_mass: float | None
    rows: int
    rows_over_budget: int | None
    rows_left_out: int
    worst_left_out: float | None
    held_out_queries: int
    violations: tuple[int, int] | None

    @property
    def gap(self) -> int | None:
        """How many keys at most could be saved; None where the bound is of another budget."""
        if self.lower_bound is None or self.bound_eps is not None:
            return None
        return self.kept - self.lower_bound


def set_facts(facts: LayerFacts, kinds: NDArray[np.uint8]) -> list[SetFacts]:
    """The sets of a layer; `kinds` are those of its rows."""
    return [_set(facts, kinds, group) for group in range(len(facts.sizes))]


def _set(facts: LayerFacts, kinds: NDArray[np.uint8], group: int) -> SetFacts:
    size, eps = facts.heads_of_set, facts.eps[group]
    heads = slice(group * size, (group + 1) * size)
    kind = kinds[heads]
    queries = len(facts.held_out)
    worst = over = worst_left_out = violations = None
    if facts.upper is not None:
        upper = facts.upper[heads]
        worst = _largest(upper[kind == PROMISED]) or 0.0
        over = int(np.count_nonzero(_above(upper, eps) & (kind == PROMISED)))
        worst_left_out = _largest(upper[kind == LEFT_OUT])
        if queries:
            found = int(np.count_nonzero(_above(upper[:, facts.held_out], eps).any(axis=0)))
            violations = (found, found)
    elif facts.worst is not None:
        worst = _largest(facts.worst[heads]) or 0.0
        over = 0 if not _above(facts.worst[heads], eps).any() else None
        if facts.violations is not None and queries:
            each = facts.violations[heads]
            violations = (int(each.max()), min(queries, int(each.sum())))
    return SetFacts(
        layer=facts.layer.index,
        head=group if facts.by_head else -1,
        eps=eps,
        bound_eps=None if facts.bound_eps is None else facts.bound_eps[group],
        kept=int(facts.sizes[group]),
        total=facts.layer.n,
        lower_bound=facts.least(group),
        worst_tail_mass=worst,
        rows=int(np.count_nonzero(kind == PROMISED)),
        rows_over_budget=over,
        rows_left_out=int(np.count_nonzero(kind == LEFT_OUT)),
        worst_left_out=worst_left_out,
        held_out_queries=queries,
        violations=violations,
    )


def _above(masses: Masses, eps: float) -> NDArray[np.bool_]:
    # As float64: NumPy would compare in float32, and round eps.
    above: NDArray[np.bool_] = masses.astype(np.float64) > eps
    return above


def _largest(masses: Masses) -> float | None:
    return float(masses.max()) if masses.size else None


def _of_guard(role: str) -> bool:
    return role.startswith("guard_")
