"""Inputs of jobs, given as names, directories, glob patterns, URLs, or a list on standard input.

Nothing is read here but directories, and indexes of shards for the names of their parts.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from .._files.cache import Cache
from .._files.location import Location, directories, locate, split_magic
from .._files.sharded import INDEX_SUFFIX, is_index, parts_of
from ..errors import CertkError

SUFFIX = ".safetensors"

Given = str | os.PathLike[str] | Location


@dataclass(frozen=True)
class Source:
    """One input, and the name of what is made of it.

    `name` is the path relative to what was given (the file itself, a directory, or the directory
    before the first sign of a glob pattern), its parts joined by '/', of which none is empty, "."
    or "..". An index of shards has the name of the file that it stands for.
    """

    location: Location
    name: str


@dataclass(frozen=True)
class Input:
    """An input as it was planned: where it is, how it is read, its identity and its headers then.

    Names, scales and offsets of certificates are those of the headers, by their SHA-256.
    """

    location: Location
    names: str | None
    layout: str | None
    identity: tuple[Any, ...]
    headers: tuple[str, ...]
    queries: str = "file"

    @contextlib.contextmanager
    def read(self) -> Iterator[Cache]:
        """Open it to be read; a `CertkError` if it has changed since it was planned."""
        with Cache(self.location, self.names, self.layout, self.queries) as cache:
            cache.file.check_unchanged(self.identity)
            # A header can be another one of the same size and time.
            if tuple(cache.file.header_sha256s()) != self.headers:
                raise cache.file.changed()
            yield cache


def expand(
    texts: Sequence[Given],
    recursive: bool = False,
    *,
    same_names: bool = False,
    listing: BinaryIO | None = None,
) -> list[Source]:
    """Return the inputs that are meant, each once, in the order given and then by name.

    A directory stands for the `.safetensors` files in it, where an index of shards stands for its
    parts, and nothing hidden. A glob pattern stands for what it matches; a file of that very name
    goes before. "-" is a list on standard input, one a line, or separated by NUL if there is one.
    What is a file twice, by links or other paths, is taken once, by its first name.

    Args:
        texts: Paths or URLs of files or directories, glob patterns, "-".
        recursive: Take directories in directories, too. Links are followed, loops end.
        same_names: Whether two inputs may have one name.
        listing: What is read for "-"; None for standard input.

    Raises:
        CertkError: There is no input, or none where one was named; two have one name.
        OSError: A directory or list cannot be read.
    """
    found: dict[tuple[str | int, ...], Source] = {}
    for text in _with_listed(texts, listing):
        for source in _sources(locate(text), recursive):
            found.setdefault(_key(source.location), source)
    sources = _without_parts(found)
    if not sources:
        raise CertkError(_nothing(texts, recursive))
    if not same_names:
        _check_names(sources)
    return sources


def _with_listed(texts: Sequence[Given], listing: BinaryIO | None) -> Iterator[Given]:
    listed = False
    for text in texts:
        if isinstance(text, Location) or os.fspath(text) != "-":
            yield text
            continue
        if listed:
            raise CertkError("- is given twice: standard input can be read once")
        listed = True
        yield from _listed(listing)


def _listed(listing: BinaryIO | None) -> Iterator[str]:
    stream = listing or (sys.stdin and sys.stdin.buffer)
    if not stream:
        raise CertkError("- reads a list from standard input, which is closed")
    content = stream.read()
    lines = content.split(b"\0") if b"\0" in content else content.splitlines()
    for line in lines:
        if line == b"-":
            raise CertkError("the list on standard input holds -, itself: a file of it is ./-")
        if line:
            yield os.fsdecode(line)


def _sources(location: Location, recursive: bool) -> list[Source]:
    kind = location.kind()
    if kind == "directory":
        return sorted(_in_directory(location, "", recursive), key=lambda source: source.name)
    if kind is not None or _is_link(location):
        return [Source(location, _name(location.name))]
    pattern = split_magic(location)
    if pattern is None:
        raise CertkError(f"{location} does not exist: give a file or a directory of files")
    base, parts = pattern
    sources: list[Source] = []
    for name, match, is_directory in base.matches(parts) if base.is_directory() else []:
        if is_directory:
            # What `**` matches is recursive by itself.
            if parts != "**" and not parts.endswith("/**"):
                sources += _in_directory(match, f"{name}/", recursive)
        elif not parts.endswith("**") or _is_cache(match.name):
            sources.append(Source(match, _name(name)))
    if not sources:
        raise CertkError(f"{location} does not exist and, as a pattern, matches no file: check it")
    return sorted(sources, key=lambda source: source.name)


def _in_directory(directory: Location, prefix: str, recursive: bool) -> Iterator[Source]:
    walk = directories(directory) if recursive else [("", directory, directory.children())]
    for below, place, held in walk:
        for name, is_directory in held:
            if not is_directory and not name.startswith(".") and _is_cache(name):
                yield Source(place / name, _name(f"{prefix}{below}{name}"))


def _is_cache(name: str) -> bool:
    return name.endswith((SUFFIX, SUFFIX + INDEX_SUFFIX))


def _is_link(location: Location) -> bool:
    return location.is_local and location.path.is_symlink()


def _name(path: str) -> str:
    if path.endswith(".json"):
        path = path.removesuffix(".json").removesuffix(".index")
        return path if path.endswith(SUFFIX) else path + SUFFIX
    return path


def _key(location: Location) -> tuple[str | int, ...]:
    try:
        return location.key()
    except OSError:  # a link that leads nowhere, which is told when it is opened
        return (location.place,)


def files_of(source: Source) -> list[Location]:
    """Return the file of an input, and of an index also the parts that it names."""
    files = [source.location]
    if is_index(source.location):
        # One that cannot be read is told when it is opened.
        with contextlib.suppress(CertkError, OSError):
            files += [source.location.beside(name) for name in parts_of(source.location)]
    return files


def changed_at(source: Source) -> tuple[int, ...] | None:
    """Return the last change of each file of an input by the system's clock; None if unknown.

    Unlike the time that files show and keep when they are copied, nobody can set this one back.
    Of a URL there is none, since the state of an object is told by its identity.
    """
    if not source.location.is_local:
        return ()
    if os.name == "nt":  # the time when it was made
        return None
    return tuple(file.path.stat().st_ctime_ns for file in files_of(source))


def check_apart(sources: Sequence[Source], out: Location) -> None:
    """Raise `CertkError` if an output in `out` would have the place of an input or of a part."""
    given: dict[tuple[str | int, ...], Location] = {}
    for source in sources:
        for file in files_of(source):
            given.setdefault(_key(file), file)
    for source in sources:
        target = out / source.name
        same = given.get(_key(target))
        if same is not None:
            also = "" if str(same) == str(target) else f" (given as {same})"
            raise CertkError(
                f"{target} is an input of this job{also}, and an output never replaces an input: "
                "choose another OUT"
            )


def _without_parts(found: dict[tuple[str | int, ...], Source]) -> list[Source]:
    """Return all sources but those that an index among them stands for."""
    claimed: set[tuple[str | int, ...]] = set()
    for source in found.values():
        if is_index(source.location):
            claimed |= _parts(source, found)
    return [source for key, source in found.items() if key not in claimed]


def _parts(index: Source, found: dict[tuple[str | int, ...], Source]) -> set[tuple[str | int, ...]]:
    try:
        return {_key(index.location.beside(name)) for name in parts_of(index.location)}
    except (CertkError, OSError):
        # It cannot be read, which is told when it is opened. Its parts are no caches even so.
        stem = re.escape(index.name.removesuffix(SUFFIX))
        part = re.compile(stem + r"-[0-9]+-of-[0-9]+" + re.escape(SUFFIX))
        return {key for key, source in found.items() if part.fullmatch(source.name)}


def _check_names(sources: Sequence[Source]) -> None:
    named: dict[str, Location] = {}
    for source in sources:
        other = named.setdefault(source.name, source.location)
        if other is not source.location:
            raise CertkError(
                f"{other} and {source.location} have the same name, and so would their outputs: "
                "rename one, or prune them into two directories"
            )
    for name, location in named.items():
        for end in (k for k, sign in enumerate(name) if sign == "/"):
            if name[:end] in named:
                raise CertkError(
                    f"{named[name[:end]]} has the name of the directory that {location} is in, and "
                    "so would their outputs: rename one, or prune them into two directories"
                )


def _nothing(texts: Sequence[Given], recursive: bool) -> str:
    if not texts:
        return "no input: give at least one cache file"
    shown = " or ".join(map(str, texts[:5])) + (" or others" if len(texts) > 5 else "")
    deeper = "" if recursive else ", or --recursive for directories in directories"
    return f"no input: there is no {SUFFIX} file in {shown}: give at least one cache file{deeper}"
