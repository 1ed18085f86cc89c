"""What a prune job will do: which file becomes which, under which options, all of it checked first.

Nothing is created here. What this module accepts can still fail on the disk, but not on its input:
every file has been read to its last byte, so a NaN in the last tensor of the last file is found
before the first output is begun.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .._files.atomic import already_exists
from ..cache_format import Cache, Layer, Names, Options, TensorFacts
from ..errors import CertkError

Progress = Callable[[str, int, int], None]
"""Told (what is being done, done so far, total); totals are bytes or steps."""

# Below this the float64 range ends, and with it what a recorded tail mass can promise (jobs.prune).
SMALLEST_EPS = 1e-300


@dataclass(frozen=True)
class Task:
    """One input and its output; `identity` and `facts` are those of the bytes that were checked."""

    source: Path
    target: Path
    identity: tuple[int, ...]
    facts: Mapping[str, TensorFacts]
    layers: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """A whole job. `names` is None where the spelling is found file by file."""

    out: Path
    eps: float
    options: Options
    names: str | None
    tasks: tuple[Task, ...]


def make_plan(
    caches: Sequence[Path],
    out: Path,
    eps: float,
    options: Options,
    names: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Check everything; `CertkError` or `OSError` for the first thing that is not right.

    Args:
        caches: Files, and directories that stand for the `.safetensors` files in them.
        out: The directory to write to; it need not exist.
        eps: Tail-mass budget of every query row, 0 or 1e-300 <= eps < 1.
        options: See `Options`.
        names: Pattern of the tensor names, None to find out.
        progress: Told about the bytes read.
    """
    check_eps(eps)
    _check_options(options)
    if names is not None:
        Names(names)
    sources = inputs(caches)
    _check_out(out)
    targets: dict[str, Path] = {}
    for source in sources:
        if source.name in targets:
            raise CertkError(
                f"{targets[source.name]} and {source} have the same name, and so would their "
                f"outputs in {out}: rename one, or prune them into two directories"
            )
        targets[source.name] = source
        if os.path.lexists(out / source.name):
            raise already_exists(out / source.name)
    # The headers of all files before the data of any: most mistakes show at once.
    for source in sources:
        with Cache(source, names) as cache:
            for layer in cache.layers:
                _check_forced(source, layer, options, cache.causal_offset)
    total = sum(source.stat().st_size for source in sources)
    tell = counting(progress, total)
    tasks = [
        _task(source, out / source.name, names, partial(tell, f"checking {source.name}"))
        for source in sources
    ]
    return Plan(out, eps, options, names, tuple(tasks))


def counting(progress: Progress | None, total: int) -> Callable[[str, int], None]:
    """What is called with every piece that is done: its label, and how much of the total it is."""
    done = 0

    def tell(label: str, count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(label, done, total)

    return tell


def inputs(caches: Sequence[Path]) -> list[Path]:
    """The files that are meant by files and directories; a `CertkError` if there is none."""
    paths = [path for cache in caches for path in expand(cache)]
    if not paths:
        held = " or ".join(map(str, caches))
        raise CertkError(
            f"no input: there is no .safetensors file in {held}: give at least one cache file"
            if caches
            else "no input: give at least one cache file"
        )
    return paths


def expand(path: Path) -> list[Path]:
    """A file as it is, a directory as its `.safetensors` files in order of their names."""
    if not path.exists():
        raise CertkError(f"{path} does not exist: give a file or a directory of files")
    if not path.is_dir():
        return [path]
    return sorted(child for child in path.iterdir() if child.suffix == ".safetensors")


def check_eps(eps: float) -> None:
    """Raise `CertkError` unless a prune job can promise `eps`."""
    if not (eps == 0 or SMALLEST_EPS <= eps < 1):
        raise CertkError(f"eps is {eps!r}: give 0 or a number from {SMALLEST_EPS} to below 1")


def allowed(options: Options, visible: int) -> int:
    """How many of `visible` keys `max_keep` leaves."""
    limit = options.max_keep
    if limit is None:
        return visible
    if isinstance(limit, float):
        limit = max(1, math.floor(limit * visible))
    return min(limit, visible)


def _task(source: Path, target: Path, names: str | None, tell: Callable[[int], None]) -> Task:
    with Cache(source, names) as cache:
        tell(len(cache.file.header.raw))
        facts = cache.check_values(tell)
        cache.file.check_unchanged(cache.file.identity)
        warnings = []
        if cache.others:
            shown = ", ".join(map(repr, cache.others[:3])) + ", ..." * (len(cache.others) > 3)
            warnings.append(
                f"{source}: {len(cache.others)} tensors that are not named like "
                f"{cache.names.pattern} are left out: {shown}"
            )
        identity, layers = cache.file.identity, len(cache.layers)
        return Task(source, target, identity, facts, layers, tuple(warnings))


def _check_options(options: Options) -> None:
    if options.granularity not in ("head", "layer"):
        raise CertkError(f"granularity is {options.granularity!r}: give head or layer")
    limit = options.max_keep
    if isinstance(limit, float) and not 0 < limit <= 1:
        raise CertkError(
            f"max_keep is {limit}: give a fraction in (0, 1], or a whole number of keys"
        )
    if isinstance(limit, int) and limit < 1:
        raise CertkError(f"max_keep is {limit}: at least one key must be kept")
    for name in ("keep_first", "keep_last"):
        if getattr(options, name) < 0:
            raise CertkError(f"{name} is {getattr(options, name)}: give a count of 0 or more")


def _check_out(out: Path) -> None:
    """OUT must be, or be possible to make, a directory that can be written to."""
    place = out
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        raise CertkError(f"{place} is not a directory: OUT ({out}) must be one, or not exist yet")
    if not os.access(place, os.W_OK | os.X_OK):
        raise CertkError(f"{place} cannot be written to: choose another OUT than {out}")


def _check_forced(source: Path, layer: Layer, options: Options, causal_offset: int | None) -> None:
    visible = layer.visible(causal_offset)
    forced = min(options.keep_first + options.keep_last, visible)
    if forced > allowed(options, visible):
        raise CertkError(
            f"{source}: layer {layer.index}: keep_first and keep_last force {forced} of {visible} "
            f"keys, max_keep allows {allowed(options, visible)}: raise max_keep or force fewer"
        )
