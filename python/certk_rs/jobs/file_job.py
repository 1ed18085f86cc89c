"""What is done for one input: a conversation that asks for units and is told what came of them.

`steps` is a generator: it yields calls (a function that can be imported, and its arguments), all of
which can be done at once and anywhere, is sent their values in the same order, and returns what is
now on the disk. So one driver can have many inputs under way, with whatever engine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._files.location import Location
from ..cache_format import (
    ITEMSIZE,
    ROW_MAJOR,
    Budgets,
    Cache,
    Layer,
    Options,
    TensorFacts,
    guard_bytes,
    mass_dtype,
    proof_bytes,
)
from ..errors import CertkError
from ..hot_keys import Edge, hottest
from .assemble import Order, Written, assemble
from .choose import Ask
from .chosen import Chosen, Demands, Probe
from .file_report import FileReport
from .inputs import Source, changed_at
from .layer_report import layer_report
from .request import Request
from .size_search import SizeSearch
from .solve import Limits
from .unit import Unit, UnitResult, hash_now, run_unit

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Steps = Generator[list[Call], list[Any], FileReport]

# A certificate of every row is written unless it takes a larger share of the cache's bytes.
FULL_PROOF = 0.02
# Bytes for both ends of the tail mass of a row, and its weight.
_ROW = 24
# The budget that is tried where none is asked for.
_TRIED = 0.05


@dataclass(frozen=True)
class FileTask:
    """One input and its output; all that is known before any of its data is read."""

    source: Source
    target: Location
    request: Request
    layers: tuple[Layer, ...]
    names: str
    layout: str
    identity: tuple[Any, ...]
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


def plan_file(source: Source, target: Location, request: Request) -> FileTask:
    """Read the header of one input, and see that what is asked for can be done with it.

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
            names=cache.names.pattern,
            layout=layers[0].layout,
            identity=cache.file.identity,
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
    """How many of `visible` keys `max_keep` leaves."""
    if limit is None:
        return visible
    if isinstance(limit, float):
        limit = max(1, math.floor(limit * visible))
    return min(limit, visible)


def _options(task: FileTask) -> Options:
    """What the certificate says was asked for; a size is known only when its task is."""
    request = task.request
    options = Options(**request.recorded(), layout=task.layout)
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
    """The most keys that may be kept, all groups together."""
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
    """A count of keys, or a share of all of them as one."""
    if isinstance(share, float):
        return max(1, math.floor(share * total))
    return min(share, total)


def _bytes_of_key(layer: Layer, granularity: str) -> int:
    vectors = layer.d * sum(ITEMSIZE[layer.dtypes[role]] for role in ("key", "value"))
    return vectors * (1 if granularity == "head" else layer.kv_heads) + 8


def steps(task: FileTask, replace_target: bool, by_head: bool, threads: int | None) -> Steps:
    """The work on one input, as said above.

    Args:
        task: What to do.
        replace_target: Whether an output that is there is replaced.
        by_head: Whether the units are kv heads, not layers; by head only.
        threads: How many threads a unit may use.
    """
    found = yield from _choose(task, 0.0, by_head, threads)
    if found.kept:
        # They are of the bytes of an earlier day: size, time and header may be the same of others.
        place = (task.source.location, task.names, task.layout, task.identity)
        facts = yield [(hash_now, (*place, name)) for name in task.tensors]
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
    of_groups: Budgets = {each.layer: tuple(map(float, each.eps)) for each in chosen}
    of_bounds = None
    if bound_eps is not None:
        of_bounds = {layer: (bound_eps,) * len(groups) for layer, groups in of_groups.items()}
    order = Order(
        source=task.source.location,
        names=task.names,
        layout=task.layout,
        identity=task.identity,
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
    """The sets of one input, with what they were made by; `masses` is the dtype of the masses.

    `facts` are those of all tensors where the sets are for all queries; some of it was `kept` by an
    earlier run, or none.
    """

    chosen: tuple[Chosen, ...]
    bound_eps: float | None
    masses: str
    facts: dict[str, TensorFacts]
    seconds: float
    kept: bool


def _content(facts: Mapping[str, TensorFacts]) -> str:
    """A hash of all tensors of an input."""
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
        every = [each for result in results for each in result.chosen]
        demands = {
            (each.layer, each.first_head + head): shares
            for each in every
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
            found = [each for result in results for each in result.chosen]
            search.tell(probes, [each for each in found if isinstance(each, Probe)], _shared(task))
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
    if options.size is not None and sum(len(i) for each in chosen for i in each.indices) > _most(
        task, options.size
    ):
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
    """The budgets that were asked for, by layer."""
    assert task.request.eps is not None
    return {layer.index: task.request.eps.of(layer.index) for layer in task.layers}


def units(task: FileTask, ask: Ask, by_head: bool) -> list[Unit]:
    """The units that choose sets: by layer, by kv head, or (by token) one for the whole file."""
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
    """A unit of this input, with nothing to do as yet."""
    place = (task.source.location, task.names, task.layout, task.identity)
    return Unit(*place, needs=_needs(task))


def _needs(task: FileTask) -> int:
    """Bytes that a unit that chooses sets has to have at once, and no more than that.

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
    return sum(of_layer) if _shared(task) else max(of_layer)


def _hashing(ask: Ask) -> bool:
    """Whether units with this ask hash what they read: those by which sets are written."""
    return not (ask.probes or ask.demands or ask.holdout)


def units_to_try(task: FileTask, layers: Sequence[Layer]) -> list[Unit]:
    """Units that tell how a job would go: the first kv head of some layers, or all of a layer."""
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
    """The units that hash what those of `units` do not."""
    left = list(task.others)
    if by_head and task.options.granularity == "head":
        left += _own_tensors(task)
    label = f"hashing {task.source.name}"
    common = replace(_unit(task), label=label)
    return [replace(common, hashes=(name,)) for name in left]


def _own_tensors(task: FileTask) -> tuple[str, ...]:
    return tuple(name for layer in task.layers for name in layer.names.values())


def _most(task: FileTask, size: int) -> int:
    """The most positions that all layers may list, of which by token each lists the same."""
    return size * len(task.layers) if _shared(task) else size


def _shared(task: FileTask) -> bool:
    """Whether all layers have one and the same set."""
    return task.options.granularity == "token"


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


def _layers(results: list[UnitResult]) -> tuple[Chosen, ...]:
    """What was chosen, a layer at a time, heads in their order."""
    parts: dict[int, list[Chosen]] = {}
    for result in results:
        for each in result.chosen:
            if isinstance(each, Chosen):
                parts.setdefault(each.layer, []).append(each)
    return tuple(
        Chosen.joined(sorted(parts[layer], key=lambda part: part.first_head))
        for layer in sorted(parts)
    )


def _report(
    task: FileTask,
    chosen: tuple[Chosen, ...],
    tried: tuple[Chosen, ...] | None,
    written: Written,
    seconds: float,
    bound_eps: float | None,
) -> FileReport:
    options = task.options
    layers = tuple(
        layer_report(
            layer,
            each,
            trial,
            options.granularity,
            options.block_size,
            layer.visible(task.causal_offset),
            bound_eps is None,
        )
        for layer, each, trial in zip(
            task.layers, chosen, tried or [None] * len(chosen), strict=True
        )
    )
    report = FileReport(
        name=task.source.name,
        source=str(task.source.location),
        target=str(task.target),
        header_sha256=written.header_sha256,
        layers=layers,
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
