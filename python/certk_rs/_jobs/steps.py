"""The steps of pruning one input: a conversation that asks for units and is told their results.

`steps` is a generator. It yields calls (a function that can be imported, and its arguments), all of
which can be done at once and anywhere, is sent their values in the same order, and returns the
report of the output. So one driver can have many inputs under way, on any engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._files.certificate import TensorFacts
from .._files.layers import Layer
from .._files.masses import Budgets, mass_dtype
from .._files.safetensors import ITEMSIZE
from .._files.transposed import ROW_MAJOR
from ..errors import CertkError
from ..hot_keys import Edge, hottest
from .choose import Ask
from .held_out import HeldOut
from .results import FileReport, LayerReport
from .sets import Demands, LayerRecord, Probe, joined, set_records
from .solve import Limits
from .task import FileTask
from .units import Unit, UnitResult, hash_now, run_unit
from .write import Order, Written, assemble

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
    seconds = found.seconds
    tried = None
    if task.request.holdout:
        # After the sets, since those see to it that all numbers are finite.
        content = _content(found.facts)
        trial = yield from _choose(task, task.request.holdout, by_head, threads, content)
        seconds += trial.seconds
        tried = trial.chosen
    chosen, bound_eps = found.chosen, found.bound_eps
    of_groups: Budgets = {each.layer.index: tuple(map(float, each.eps)) for each in chosen}
    of_bounds = None
    if bound_eps is not None:
        of_bounds = {layer: (bound_eps,) * len(groups) for layer, groups in of_groups.items()}
    order = Order(
        input=task.input,
        target=task.target,
        replace=replace_target,
        options=task.options,
        eps=of_groups,
        bound_eps=of_bounds,
        masses=found.masses,
        facts={name: found.facts[name] for name in task.tensors},
    )
    [written] = yield [(assemble, (order, chosen))]
    return _report(task, chosen, tried, written, seconds, bound_eps)


@dataclass(frozen=True)
class _Sets:
    """The sets of one input; `masses` is the dtype of the masses.

    `facts` are those of all tensors where the sets are for all queries. `kept` tells whether some
    of it was left by an earlier run.
    """

    chosen: tuple[LayerRecord, ...]
    bound_eps: float | None
    masses: str
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

    def calls(some: Iterable[Unit]) -> list[Call]:
        return [(run_unit, (replace(unit, content=content), threads)) for unit in some]

    kept = False
    request, options = task.request, task.options
    eps: dict[int, float] = {}
    bound_eps: float | None = None
    seconds = 0.0
    hot: tuple[tuple[tuple[int, int], Edge], ...] = ()
    if options.hot:
        assert options.size is not None
        ask = replace(_ask(task, _eps(task), None, (), holdout), demands=True)
        results = yield calls(units(task, ask, by_head))
        seconds += sum(result.seconds for result in results)
        kept = any(result.kept for result in results)
        demands = {
            (each.layer.index, each.first_head + head): shares
            for result in results
            for each in result.answers
            if isinstance(each, Demands)
            for head, shares in enumerate(each.shares)
        }
        edges = hottest(list(demands.values()), options.size)
        hot = tuple(zip(demands, edges, strict=True))
        eps = _eps(task)
    elif options.size is not None:
        search = SizeSearch(options.size)
        while (probes := search.probes()) is not None:
            ask = _ask(task, {}, None, probes, holdout)
            results = yield calls(units(task, ask, by_head))
            kept = kept or any(result.kept for result in results)
            seconds += sum(result.seconds for result in results)
            found = [each for result in results for each in result.answers]
            search.tell(probes, [each for each in found if isinstance(each, Probe)], task.shared)
        eps = dict.fromkeys([layer.index for layer in task.layers], search.eps)
        bound_eps = search.bound_eps
    elif request.eps is not None:
        eps = _eps(task)
    ask = replace(_ask(task, eps, bound_eps, (), holdout), hot=hot)
    hashed: list[UnitResult] = []
    if not holdout and (apart := hash_units(task, by_head)):
        # First, since they see to it that all numbers are finite.
        hashed = yield calls(apart)
    results = yield calls(units(task, ask, by_head))
    chosen = _layers(results)
    # By token each layer lists the same positions.
    most = None if options.size is None else options.size * (len(chosen) if task.shared else 1)
    if most is not None and sum(int(each.sizes.sum()) for each in chosen) > most:
        raise CertkError(
            f"{task.source.location}: {options.size} keys are too few for what must be kept (each "
            "set has a key, and those of keep_first and keep_last): give more"
        )
    results = [*hashed, *results]
    seconds += sum(result.seconds for result in results)
    facts = {name: fact for result in results for name, fact in result.facts.items()}
    kept = kept or any(result.kept for result in results)
    return _Sets(chosen, bound_eps, ask.dtype, facts, seconds, kept)


def _eps(task: FileTask) -> dict[int, float]:
    """Return the budgets of the request, by layer."""
    assert task.request.eps is not None
    return {layer.index: task.request.eps.of(layer.index) for layer in task.layers}


def units(task: FileTask, ask: Ask, by_head: bool) -> list[Unit]:
    """Return the units that choose sets: by layer, by kv head, or by token one for the file."""
    common = replace(_unit(task), ask=ask)
    label = f"pruning {task.source.name}"
    if task.options.granularity == "token":
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


def units_to_try(task: FileTask, layers: Sequence[Layer]) -> list[Unit]:
    """Return units for an estimate: the first kv head of some layers, or all of a layer."""
    eps = {}
    if task.request.eps is not None:
        eps = {layer.index: task.request.eps.of(layer.index) for layer in layers}
    elif task.options.out_tol is None:
        eps = {layer.index: _TRIED for layer in layers}
    ask = _ask(task, eps, None, ())
    if ask.granularity == "token":
        ask = replace(ask, granularity="layer")
    common = replace(_unit(task), ask=ask)
    heads = (0, 1) if ask.granularity == "head" else None
    label = f"trying {task.source.name}"
    return [replace(common, layers=(each.index,), heads=heads, label=label) for each in layers]


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


def _ask(
    task: FileTask,
    eps: dict[int, float],
    bound_eps: float | None,
    probes: tuple[float, ...],
    holdout: float = 0.0,
) -> Ask:
    options = task.options
    budgets = [*eps.values(), *probes, *([] if bound_eps is None else [bound_eps])]
    return Ask(
        granularity=options.granularity,
        limits=Limits(options.max_keep, options.keep_first, options.keep_last, options.block_size),
        eps=tuple(eps.items()),
        out_tol=options.out_tol,
        bound_eps=bound_eps,
        coverage=options.coverage,
        holdout=holdout,
        # Sets that are tried are not written, and nothing is proven of them.
        masses=options.proof == "full" and not holdout,
        bounds=options.proof != "none" and not holdout,
        probes=probes,
        dtype=mass_dtype({0: tuple(budgets)}),
    )


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
    chosen: tuple[LayerRecord, ...],
    tried: tuple[LayerRecord, ...] | None,
    written: Written,
    seconds: float,
    bound_eps: float | None,
) -> FileReport:
    options = task.options
    layers = []
    for number, each in enumerate(chosen):
        held_out = [HeldOut(0, 0)] * len(each.sizes)
        if tried is not None:
            trial = tried[number]
            assert trial.violations is not None
            counts = trial.violations[:, 0].tolist()
            held_out = [HeldOut(len(trial.held_out), count) for count in counts]
        visible, by_head = each.layer.visible(task.causal_offset), options.granularity == "head"
        sets = set_records(each, by_head, options.block_size, visible, None, held_out)
        if bound_eps is not None:  # lower bounds of other budgets prove nothing of these
            sets = [replace(one, lower_bound=0) for one in sets]
        layers.append(LayerReport(each.layer.index, tuple(sets)))
    report = FileReport(
        name=task.source.name,
        source=str(task.source.location),
        target=str(task.target),
        header_sha256=written.header_sha256,
        layers=tuple(layers),
        proof=options.proof,
        granularity=options.granularity,
        block_size=options.block_size,
        input_bytes=task.input_bytes,
        cache_bytes=task.cache_bytes,
        output_bytes=written.output_bytes,
        proof_bytes=written.proof_bytes,
        guard=options.guard,
        guard_bytes=written.guard_bytes,
        seconds=seconds,
        worst_at_least=bound_eps,
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
