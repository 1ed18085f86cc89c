"""The steps of pruning one input: a conversation that asks for units and is told their results.

`steps` is a generator. It yields calls (a function that can be imported, and its arguments), all of
which can be done at once and anywhere, is sent their values in the same order, and returns the
report of the output. So one driver can have many inputs under way, on any engine.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._files.certificate import TensorFacts
from .._files.layers import Layer
from .._files.output import proof_bytes, rest_bytes
from .._files.safetensors import ITEMSIZE
from .._files.transposed import ROW_MAJOR
from ..errors import CertkError
from ..hot_keys import hottest
from .choose import Ask
from .engine import Unit, UnitResult, hash_now, run_unit
from .held_out import HeldOut
from .plan import FileTask
from .request import LATER_EPS, Budgets
from .results import FileReport, LayerReport
from .sets import Demands, LayerRecord, Probe, joined, set_records
from .write import Written, assemble

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Steps = Generator[list[Call], list[Any], FileReport]

# Bytes for both ends of the tail mass of a row, and its weight.
_ROW = 24
# The budget that is tried where none is asked for.
_TRIED = 0.05
# Budgets that a search for a size tries first, how many between in later rounds, and their number.
_FIRST = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4, 1e-6, 1e-9)
_REFINED, _ROUNDS = 5, 4
_CLOSE = 1.01
_MOST = 1 - 2.0**-24


def steps(task: FileTask, replace_target: bool, by_head: bool, threads: int | None) -> Steps:
    """Prune one input.

    Args:
        task: The input and its output.
        replace_target: Whether an output that is there is replaced.
        by_head: Whether units are kv heads instead of layers; by head only.
        threads: The most threads of a unit.
    """
    found = yield from _choose(task, 0.0, by_head, threads)
    if found.kept:
        # They are of the bytes of an earlier day: size, time and header may be the same of others.
        facts = yield [(hash_now, (task.input, name)) for name in task.tensors]
        now = dict(zip(task.tensors, facts, strict=True))
        if now != found.facts:
            found = yield from _choose(task, 0.0, by_head, threads, _content(now))
            if now != found.facts:
                raise CertkError(
                    f"{task.source.location} was changed while it was being used: run the command "
                    "again"
                )
    seconds, tried = found.seconds, None
    if task.request.holdout:
        # After the sets, since those see to it that all numbers are finite.
        content = _content(found.facts)
        trial = yield from _choose(task, task.request.holdout, by_head, threads, content)
        seconds += trial.seconds
        tried = trial.chosen
    eps = {each.layer.index: tuple(map(float, each.eps)) for each in found.chosen}
    bound_eps = None
    if found.bound_eps is not None:
        bound_eps = {layer: (found.bound_eps,) * len(groups) for layer, groups in eps.items()}
    said = task.certificate(eps, bound_eps, found.facts)
    [written] = yield [(assemble, (task.input, task.target, replace_target, said, found.chosen))]
    return _report(task, found, tried, written, seconds)


@dataclass(frozen=True)
class _Sets:
    """The sets of one input.

    `facts` are those of all tensors where the sets are for all queries. `kept` tells whether some
    of it was left by an earlier run.
    """

    chosen: tuple[LayerRecord, ...]
    bound_eps: float | None
    facts: dict[str, TensorFacts]
    seconds: float
    kept: bool


def _content(facts: Mapping[str, TensorFacts]) -> str:
    """Return a hash of all tensors of an input."""
    text = "\n".join(f"{name!r} {facts[name].sha256}" for name in sorted(facts))
    return hashlib.sha256(text.encode()).hexdigest()


def _choose(
    task: FileTask, holdout: float, by_head: bool, threads: int | None, content: str = ""
) -> Generator[list[Call], list[Any], _Sets]:
    """Choose the sets of one input: for all queries, or to be tried on a share `holdout` of them.

    Tensors are hashed, and seen to be finite, where the sets are for all queries. With `content`,
    what an earlier run has kept is taken only where it is of these bytes.
    """
    done: list[UnitResult] = []

    def results_of(some: list[Unit]) -> Generator[list[Call], list[Any], list[UnitResult]]:
        calls: list[Call] = [(run_unit, (replace(each, content=content), threads)) for each in some]
        found = (yield calls) if calls else []
        done.extend(found)
        return found

    options = task.options
    effort = task.request.effort
    ask = Ask(options, _eps(task, task.layers), effort, holdout=holdout)
    if options.hot:
        assert options.size is not None
        results = yield from results_of(units(task, replace(ask, demands=True), by_head))
        demands = {
            (each.layer.index, each.first_head + head): shares
            for result in results
            for each in result.answers
            if isinstance(each, Demands)
            for head, shares in enumerate(each.shares)
        }
        # Of none, each set has the one key that it must have.
        edges = hottest(list(demands.values()), 0 if task.request.hot == 0 else options.size)
        ask = replace(ask, hot=tuple(zip(demands, edges, strict=True)))
    elif options.size is not None:
        search = SizeSearch(options.size)
        while (probes := search.probes()) is not None:
            results = yield from results_of(units(task, replace(ask, probes=probes), by_head))
            found = [each for result in results for each in result.answers]
            search.tell(probes, [each for each in found if isinstance(each, Probe)], task.shared)
        every = tuple((layer.index, search.eps) for layer in task.layers)
        ask = replace(ask, eps=every, bound_eps=search.bound_eps)
    if not holdout:
        # First, since they see to it that all numbers are finite.
        yield from results_of(hash_units(task, by_head))
    chosen = _layers((yield from results_of(units(task, ask, by_head))))
    # By token each layer lists the same positions.
    most = None if options.size is None else options.size * (len(chosen) if task.shared else 1)
    needed = sum(int(each.sizes.sum()) for each in chosen)
    if most is not None and needed > most:
        least = needed // (len(chosen) if task.shared else 1)
        raise CertkError(
            f"{task.source.location}: {options.size} keys are too few for what must be kept (each "
            f"set has a key, and those of keep_first and keep_last): give a size of {least} or more"
        )
    facts = {name: fact for result in done for name, fact in result.facts.items()}
    seconds, kept = sum(each.seconds for each in done), any(each.kept for each in done)
    return _Sets(chosen, ask.bound_eps, facts, seconds, kept)


def _eps(task: FileTask, layers: Sequence[Layer]) -> tuple[tuple[int, float], ...]:
    """Return the budgets of the request for some layers; none where it has another target."""
    eps = task.request.eps
    if eps is None and task.request.keeps_needed:
        eps = Budgets(LATER_EPS)
    return () if eps is None else tuple((each.index, eps.of(each.index)) for each in layers)


def units(task: FileTask, ask: Ask, by_head: bool) -> list[Unit]:
    """Return the units that choose sets: by layer, by kv head, or by token one for the file."""
    common = replace(_unit(task), ask=ask)
    label = f"pruning {task.source.name}"
    if task.shared:
        every = tuple(layer.index for layer in task.layers)
        hashes = _own_tensors(task) if _hashing(ask) else ()
        return [replace(common, layers=every, hashes=hashes, label=label)]
    found = []
    for layer in task.layers:
        unit = replace(common, layers=(layer.index,), label=f"{label}, layer {layer.index}")
        if by_head and task.options.granularity == "head":
            heads = range(layer.kv_heads)
            found += [replace(unit, heads=(head, head + 1)) for head in heads]
        else:
            hashes = tuple(layer.names.values()) if _hashing(ask) else ()
            found.append(replace(unit, hashes=hashes))
    return found


def _unit(task: FileTask) -> Unit:
    """Return a unit of this input with nothing to do."""
    return Unit(task.input, needs=_needs(task))


def _needs(task: FileTask) -> int:
    """Return the bytes that a unit which chooses sets has to have at once, and no more than that.

    These are the queries and keys of a group, and what is known of its rows.
    """
    of_layer = []
    for layer in task.layers:
        query, key = (layer.d * ITEMSIZE[layer.dtypes[role]] for role in ("query", "key"))
        groups = layer.kv_heads if task.options.granularity == "head" else 1
        # Heads that lie between each other are read at once.
        reads = 1 if layer.layout == ROW_MAJOR else groups
        of_layer.append(
            layer.m * (query * (layer.heads // reads) + _ROW * (layer.heads // groups))
            + layer.n * key * (layer.kv_heads // reads)
        )
    return sum(of_layer) if task.shared else max(of_layer)


def _hashing(ask: Ask) -> bool:
    """Return whether units with this ask hash what they read: those whose sets are written."""
    return not (ask.probes or ask.demands or ask.holdout)


def hash_units(task: FileTask, by_head: bool) -> list[Unit]:
    """Return the units that hash what those of `units` do not."""
    left = list(task.others)
    if by_head and task.options.granularity == "head":
        left += _own_tensors(task)
    label = f"hashing {task.source.name}"
    common = replace(_unit(task), label=label)
    return [replace(common, hashes=(name,)) for name in left]


def _own_tensors(task: FileTask) -> tuple[str, ...]:
    return tuple(name for layer in task.layers for name in layer.names.values())


def _layers(results: list[UnitResult]) -> tuple[LayerRecord, ...]:
    """Return the record of each layer, heads in their order."""
    parts: dict[int, list[LayerRecord]] = {}
    for result in results:
        for each in result.answers:
            if isinstance(each, LayerRecord):
                parts.setdefault(each.layer.index, []).append(each)
    return tuple(
        joined(sorted(parts[layer], key=lambda part: part.first_head)) for layer in sorted(parts)
    )


def _report(
    task: FileTask,
    found: _Sets,
    tried: tuple[LayerRecord, ...] | None,
    written: Written,
    seconds: float,
) -> FileReport:
    options = task.options
    layers = []
    for number, each in enumerate(found.chosen):
        held_out = [HeldOut(0, 0)] * len(each.sizes)
        if tried is not None:
            trial = tried[number]
            assert trial.violations is not None
            counts = trial.violations[:, 0].tolist()
            held_out = [HeldOut(len(trial.held_out), count) for count in counts]
        sets = set_records(each, options, task.causal_offset, None, held_out)
        if found.bound_eps is not None:  # lower bounds of other budgets prove nothing of these
            sets = [replace(one, lower_bound=0) for one in sets]
        layers.append(LayerReport(each.layer.index, tuple(sets)))
    report = FileReport(
        name=task.source.name,
        source=str(task.source.location),
        target=str(task.target),
        layers=tuple(layers),
        proof=options.proof,
        granularity=options.granularity,
        block_size=options.block_size,
        input_bytes=task.input_bytes,
        cache_bytes=task.cache_bytes,
        rest=options.rest,
        effort=task.request.effort,
        seconds=seconds,
        worst_at_least=found.bound_eps,
        **vars(written),
    )
    warnings = list(task.warnings)
    if (warning := report.size_warning()) is not None:
        warnings.append(warning)
    if tried is not None and not any(len(each.held_out) for each in tried):
        warnings.append(
            f"{task.source.location}: has fewer than two queries that see a key, so that no set "
            "could be tried on one that it was made without"
        )
    return replace(report, warnings=tuple(warnings))


class SizeSearch:
    """The smallest budget for which all kept sets of a file have no more than so many keys.

    The worst tail mass of a file is least where all groups have the same budget: were it larger in
    one of them, that one alone would decide. So one number is sought, `eps`, by a grid that is
    narrowed three times. `bound_eps` is a budget at which the proven lower bounds add up to more
    keys than there may be: no distribution of so many keys has a worst tail mass below it.

    `eps` may be `_MOST` where not even that suffices (forced keys), and `bound_eps` 0, below which
    no mass is.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._round = 0
        self.eps = _MOST
        self.bound_eps = 0.0

    def probes(self) -> tuple[float, ...] | None:
        """Return the budgets to try next; None when the answer is known."""
        if self._round == 0:
            return _FIRST
        if self._round >= _ROUNDS or self.eps <= max(self.bound_eps, 1e-12) * _CLOSE:
            return None
        low = max(self.bound_eps, self.eps * 1e-3, 1e-12)
        inner = np.geomspace(low, self.eps, _REFINED + 2)[1:-1]
        return tuple(float(eps) for eps in inner[::-1])

    def tell(self, probes: tuple[float, ...], found: Sequence[Probe], shared: bool) -> None:
        """Take what all layers keep at these budgets; `shared`: they have the same set."""
        self._round += 1
        layers = found[:1] if shared else found
        kept = sum(probe.kept.sum(axis=0) for probe in layers)
        needed = sum(probe.lower_bounds.sum(axis=0) for probe in layers)
        for eps, have, need in zip(probes, kept, needed, strict=True):
            if have <= self._size:
                self.eps = min(self.eps, eps)
            if need > self._size:
                self.bound_eps = max(self.bound_eps, eps)


@dataclass(frozen=True)
class Estimate:
    """Cost and savings of pruning one input, as far as some heads of it tell.

    `scores` are the products of a query with a key that have to be judged; `seconds` what one
    worker needs; `memory` what one unit of work needs at a time, in bytes.
    """

    name: str
    source: str
    input_bytes: int
    cache_bytes: int
    output_bytes: int
    kept_share: float
    scores: int
    seconds: float
    memory: int
    warnings: tuple[str, ...]


def estimate(task: FileTask, threads: int | None) -> Estimate:
    """Try one kv head (or, by layer, one layer) of some layers.

    With a size for a target the share that is kept is known, and only the time is measured. By
    token the sets of the layers tried, one each, stand for the one of all layers.

    Raises `CertkError` or `OSError` for what is wrong with the data that is read.
    """
    tried = _units_to_try(task)
    kept = total = scores = 0
    begun = time.monotonic()
    for unit in tried:
        for found in run_unit(unit, threads).answers:
            if isinstance(found, LayerRecord):
                layer = found.layer
                kept += int(found.sizes.sum())
                total += layer.n * len(found.sizes)
                scores += layer.n * layer.m * _heads(unit, layer)
    # A trial takes as long again.
    spent = (time.monotonic() - begun) * (2 if task.request.holdout else 1)
    every = sum(layer.n * layer.m * layer.heads for layer in task.layers)
    share = kept / total if total else 1.0
    if task.options.size is not None:
        share = min(1.0, task.options.size / max(1, task.total))
    proof = proof_bytes(task.layers, task.options, "F32")[task.options.proof]
    rest = rest_bytes(task.layers, task.options, share)
    indices = 4 * share * sum(layer.n * layer.kv_heads for layer in task.layers)
    return Estimate(
        task.source.name,
        str(task.source.location),
        task.input_bytes,
        task.cache_bytes,
        int(share * task.cache_bytes + indices + proof + rest + 600 * len(task.tensors)),
        share,
        every,
        spent * every / scores if scores else spent,
        max(_memory(task, layer) for layer in task.layers),
        task.warnings,
    )


def _units_to_try(task: FileTask) -> list[Unit]:
    """Return units for the first, the last and a middle layer: a kv head, or all of it."""
    last = len(task.layers) - 1
    layers = [task.layers[i] for i in sorted({0, last // 2, last})]
    options, eps = task.options, _eps(task, layers)
    if not eps and options.out_tol is None:
        eps = tuple((layer.index, _TRIED) for layer in layers)
    if task.shared:
        options = replace(options, granularity="layer")
    heads = (0, 1) if options.granularity == "head" else None
    common = replace(_unit(task), ask=Ask(options, eps, task.request.effort), heads=heads)
    return [
        replace(common, layers=(each.index,), label=f"trying {task.source.name}") for each in layers
    ]


def _heads(unit: Unit, layer: Layer) -> int:
    if unit.heads is None:
        return layer.heads
    return (unit.heads[1] - unit.heads[0]) * (layer.heads // layer.kv_heads)


def _memory(task: FileTask, layer: Layer) -> int:
    """Return the bytes of a unit: keys and queries, rows that are solved for, results of rows.

    A bound of what was measured, rounded up: see docs/prune.md.
    """
    together = 1 if task.options.granularity == "head" else layer.kv_heads
    heads = together * (layer.heads // layer.kv_heads)
    keys = together * layer.n * layer.d * ITEMSIZE[layer.dtypes["key"]]
    queries = heads * layer.m * layer.d * ITEMSIZE[layer.dtypes["query"]]
    rows = heads * layer.m
    return keys * 2 + queries * 2 + 64 * rows + 16 * min(rows, 2048) * layer.n
