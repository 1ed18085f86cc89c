"""The report of prune jobs, from their outputs: one object that pages and programs read alike.

One output is open at a time, one layer of it in memory. What an output does not hold, because its
proof is compact or none, is taken from the record of the job if there is one, and named as such.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from .._display.plain import plain
from .._files.certificate import Options
from .._files.layers import Layer
from .._files.location import Location
from .._files.output import OutputReader
from .._files.safetensors import ITEMSIZE
from .._files.tensor_file import SafetensorsFile
from ..errors import CertkError, told
from .engine import Progress
from .folder import Found, JobRecord, find_outputs, inputs_of
from .held_out import CONFIDENCE, HeldOut
from .inputs import Source
from .results import FileReport
from .sets import KINDS, PROMISED, LayerRecord, SetRecord, Sums, fewest_keys, set_records
from .write import byte_counts

MOST = 12
"""So many rows of each kind are named."""

EDGES = (*(k / 20 for k in range(21)), 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf)
"""Bins of tail mass over budget: each holds what is above its lower edge, and its upper edge."""

UNKNOWN = {
    "full": (
        "without the input, whether masses and bounds are true: certk verify --against tells",
    ),
    "compact": (
        "what single rows lose: only the worst promised row of each query head is in the file",
        "lower ends of tail masses, and what rows that are left out lose",
        "without the input, whether masses and bounds are true: certk verify --against tells",
    ),
    "none": (
        "what any row loses, and how few keys would do: neither masses nor bounds are in the file",
        "without the input, whether the rows are within eps: certk verify --against tells",
    ),
}
"""Statements about outputs that a level of proof leaves open."""


class ReportedOutput(OutputReader):
    """An open output, read a layer at a time for a report.

    Raises `CertkError` if it is none, or contradicts itself; `OSError` if it cannot be read.
    """

    def input_counts(self) -> dict[str, int]:
        """Return the bytes of the input's tensors, and of its keys and values."""
        counts = {"input_bytes": 0, "cache_bytes": 0}
        for name, fact in self.certificate.inputs.items():
            size, match = math.prod(fact.shape) * ITEMSIZE[fact.dtype], self.names.match(name)
            counts["input_bytes"] += size
            counts["cache_bytes"] += size * (match is not None and match[1] in ("key", "value"))
        return counts

    def read(self) -> Iterator[LayerRecord]:
        """Read each layer in turn; memory holds the masses of one.

        A layer that is not what a job writes is a `CertkError`.
        """
        for layer in self.layers:
            yield self._layer(layer)

    def numbers(self, record: LayerRecord) -> list[SetRecord]:
        """Return the sets of a layer in numbers."""
        said = self.certificate
        bounds = None if said.bound_eps is None else said.bound_eps[record.layer.index]
        return set_records(record, said.options, said.causal_offset, bounds)

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

    def _masses(self, layer: Layer, name: str) -> NDArray[Any] | None:
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


def _counted_rows(record: LayerRecord, upper: NDArray[Any]) -> LayerRecord:
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


def _above(masses: NDArray[Any], eps: Any) -> NDArray[np.bool_]:
    # As float64: NumPy would compare in float32, and round eps.
    above: NDArray[np.bool_] = masses.astype(np.float64) > eps
    return above


class WorstRows:
    """The rows with the largest upper ends, by kind, the worst first; equal ones as they came.

    Of a compact proof there is one entry per query head, without a query, and none of the other
    kinds.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}

    def add(self, record: LayerRecord, kinds: NDArray[np.uint8], output: str) -> None:
        """Take all rows of a layer."""
        upper = record.upper
        if upper is None:
            if record.worst is None:
                return
            upper = record.worst[:, None]
            kinds = np.full(upper.shape, PROMISED, np.uint8)
        flat = upper.reshape(-1)
        for kind, name in enumerate(KINDS):
            have = self.rows[name]
            # Rows that are no worse than those of earlier layers need not be sorted.
            floor = have[-1]["tail_mass_upper"] if len(have) == MOST else -1.0
            (rows,) = np.nonzero((kinds.reshape(-1) == kind) & (flat > floor))
            order = np.argsort(-flat[rows], kind="stable")[:MOST]
            for row in rows[order].tolist():
                head, query = divmod(row, upper.shape[1])
                lower = None if record.lower is None else float(record.lower[head, query])
                have.append(
                    {
                        "output": output,
                        "layer": record.layer.index,
                        "head": head,
                        "query": None if record.upper is None else query,
                        "tail_mass_lower": lower,
                        "tail_mass_upper": float(upper[head, query]),
                        "eps": float(record.eps[head // record.heads_of_set]),
                    }
                )
            have.sort(key=lambda row: -row["tail_mass_upper"])
            del have[MOST:]


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


class RowSink(Protocol):
    """A taker of every row, or every set, as it is read."""

    def take(
        self, output: str, record: LayerRecord, kinds: NDArray[np.uint8], sets: Sequence[SetRecord]
    ) -> None:
        """Take a layer."""


@dataclass
class _Read:
    """All that was read: sums over everything (), a layer (i,) and a set (i, head), and rows."""

    sinks: Sequence[RowSink]
    sums: dict[tuple[int, ...], Sums] = field(default_factory=lambda: defaultdict(Sums))
    spread: Spread = field(default_factory=Spread)
    worst: WorstRows = field(default_factory=WorstRows)

    def add(self, one: SetRecord, output: str) -> None:
        for place in ((), (one.layer,), (one.layer, one.head)):
            self.sums[place].add(one, output)

    def by(self, *names: str) -> list[dict[str, Any]]:
        """Return the sums by layer, or by layer and head."""
        found = sorted(
            (place, sums) for place, sums in self.sums.items() if len(place) == len(names)
        )
        return [dict(zip(names, place, strict=True)) | vars(sums) for place, sums in found]


def job_report(
    outs: Sequence[str],
    sinks: Iterable[RowSink] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read all outputs, once; hand every layer to the sinks.

    Args:
        outs: Output directories of jobs, patterns, or outputs.
        sinks: Told of every layer of every output that can be read.
        progress: Told of every output.

    Returns:
        An object of plain values; docs/report.md says what is in it. Numbers are exact: who shows
        a bound rounds it to its safe side.

    Raises:
        CertkError: There is no output, and no record of a job.
        OSError: A directory cannot be read.
    """
    every = find_outputs(outs)
    total = sum(len(found.sources) for found in every)
    read = _Read(list(sinks))
    outputs: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    failures: list[dict[str, str]] = []
    missing: list[str] = []
    alone = len(every) == 1
    for found in every:
        names = set()
        for source in found.sources:
            names.add(source.name)
            shown = plain(source.name if alone else str(source.location))
            if progress is not None:
                progress(f"reading {shown}", len(outputs) + len(unreadable), total)
            try:
                outputs.append(_output(found, source, shown, read))
            except (CertkError, OSError) as error:
                unreadable.append({"output": shown, "message": plain(told(error))})
        if found.whole:
            _without_output(found.record, names, failures, missing)
    return {
        "out": [plain(str(out)) for out in outs],
        "library": __version__,
        "jobs": [
            _job(folder.out, manifest) for found in every for folder, manifest in found.record.jobs
        ],
        "options": _options(outputs),
        "totals": _totals(outputs, read.sums[()]),
        "confidence": CONFIDENCE,
        "outputs": outputs,
        "failures": failures,
        "missing": missing,
        "unreadable": unreadable,
        "layers": read.by("layer"),
        "sets": read.by("layer", "head"),
        "tail_masses": read.spread.to_json(),
        "worst_rows": read.worst.rows,
        "unknown": {
            proof: list(UNKNOWN[proof]) for proof in sorted({each["proof"] for each in outputs})
        },
        "notes": [plain(note) for found in every for note in found.record.notes],
    }


def _output(found: Found, source: Source, shown: str, read: _Read) -> dict[str, Any]:
    """Read one output; nothing is added up before all of it could be read."""
    sets: list[SetRecord] = []
    borrowed: set[str] = set()
    with SafetensorsFile(source.location) as file:
        output = ReportedOutput(file)
        # Layers are added up as they come, and none has to be taken back.
        for _ in output.read():
            pass
        said, options = output.certificate, output.certificate.options
        header_sha256 = hashlib.sha256(file.header.raw).hexdigest()
        report = found.record.report(source.name, header_sha256)
        layers = () if report is None else report.layers
        recorded = {(one.layer, one.head): one for each in layers for one in each.sets}
        for record in output.read():
            kinds = record.kinds()
            of_layer = [_filled(one, recorded, borrowed) for one in output.numbers(record)]
            sets += of_layer
            read.spread.add(record, kinds)
            read.worst.add(record, kinds, shown)
            for sink in read.sinks:
                sink.take(shown, record, kinds, of_layer)
        counts = output.input_counts() | byte_counts(file.header)
    for one in sets:
        read.add(one, shown)
    numbers = vars(Sums.of(sets))
    del numbers["worst_output"]
    return {
        "output": shown,
        "input": None if report is None else plain(report.source),
        "header_sha256": header_sha256,
        "input_headers": list(said.input_headers),
        "library": plain(said.library),
        "names": plain(said.names),
        "causal_offset": said.causal_offset,
        **vars(options),
        "layers": len(output.layers),
        **numbers,
        "worst_at_least": _worst_at_least(sets, options, report, borrowed),
        **counts,
        "saved": 1 - counts["output_bytes"] / counts["cache_bytes"],
        "seconds": None if report is None else report.seconds,
        "warnings": [] if report is None else [plain(each) for each in report.warnings],
        "from_record": sorted(borrowed),
    }


def _worst_at_least(
    sets: Sequence[SetRecord], options: Options, report: FileReport | None, borrowed: set[str]
) -> float | None:
    """Return a mass that every choice of so many keys loses; None where nothing proves one."""
    if options.size is None or options.hot:
        return None
    if options.proof == "none":  # without bounds in the file: what the job has told
        if report is not None and report.worst_at_least is not None:
            borrowed.add("worst_at_least")
        return None if report is None else report.worst_at_least
    told = [one.bound_eps for one in sets if one.bound_eps is not None]
    # By token every layer says the same one set.
    each = [one for one in sets if options.granularity != "token" or one.layer == sets[0].layer]
    needed = sum(one.lower_bound or 0 for one in each)
    return min(told, default=None) if needed > options.size else 0.0


def _filled(
    found: SetRecord, recorded: dict[tuple[int, int], SetRecord], borrowed: set[str]
) -> SetRecord:
    """Return the set with what the file does not tell, but the record of the job does."""
    noted = recorded.get((found.layer, found.head))
    if noted is None:
        return found
    changes: dict[str, Any] = {}
    if found.lower_bound is None and noted.lower_bound is not None:
        changes["lower_bound"] = noted.lower_bound
    if found.worst_tail_mass is None and noted.worst_tail_mass is not None:
        changes["worst_tail_mass"] = noted.worst_tail_mass
    within = noted.worst_tail_mass is not None and noted.worst_tail_mass <= found.eps
    if found.rows_over_budget is None and within:
        changes["rows_over_budget"] = 0
    borrowed.update(changes)
    known, said = noted.held_out, found.held_out
    if known.queries and not said.queries:
        borrowed.update(("held_out_queries", "held_out_violations"))
        changes["held_out"] = known
    if known.queries == said.queries > 0 and known.violations is not None:
        low = 0 if said.violations is None else said.violations
        high = known.queries if said.most is None else said.most
        if low < high and low <= known.violations <= high:
            borrowed.add("held_out_violations")
            changes["held_out"] = HeldOut(known.queries, known.violations)
    return replace(found, **changes)


def _without_output(
    record: JobRecord, names: set[str], failures: list[dict[str, str]], missing: list[str]
) -> None:
    """Add the inputs of the job that have no output, and why."""
    for name in record.inputs:
        failure = record.failure(name)
        if failure is not None:
            failures.append({key: plain(value) for key, value in failure.items()})
        elif name not in names:
            missing.append(plain(name))


def _job(out: Location, manifest: dict[str, Any]) -> dict[str, Any]:
    request = manifest.get("request")
    return {
        "out": plain(str(out)),
        "state": plain(str(manifest.get("state"))),
        "library": plain(str(manifest.get("library"))),
        "inputs": len(inputs_of(manifest)),
        "request": _plain_values(request) if isinstance(request, dict) else {},
        "seconds": _number(manifest.get("seconds")),
        "peak_memory": _number(manifest.get("peak_memory")),
    }


def _plain_values(body: dict[str, Any]) -> dict[str, Any]:
    simple = (bool, int, float, type(None))
    return {
        plain(str(key)): value if isinstance(value, simple) else plain(str(value))
        for key, value in body.items()
    }


def _number(value: object) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _options(outputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options that occur in certificates, and how many outputs have them."""
    names = [*(each.name for each in fields(Options)), "eps_low", "eps_high"]
    counts = Counter(tuple(each[name] for name in names) for each in outputs)
    return [{"outputs": n, **dict(zip(names, key, strict=True))} for key, n in counts.items()]


def _totals(outputs: Sequence[dict[str, Any]], sums: Sums) -> dict[str, Any]:
    names = ("input_bytes", "cache_bytes", "output_bytes", "proof_bytes", "rest_bytes")
    counts = {name: sum(each[name] for each in outputs) for name in names}
    before, seconds = counts["cache_bytes"], [each["seconds"] for each in outputs]
    return {
        "outputs": len(outputs),
        **vars(sums),
        **counts,
        "saved": 1 - counts["output_bytes"] / before if before else None,
        "seconds": sum(seconds) if seconds and None not in seconds else None,
    }
