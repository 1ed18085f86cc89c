"""Locations of files: local paths, and URLs of file systems that fsspec knows.

A text is a URL if something without a slash stands before "://". Every other text is a local path,
so "./s3://x" is a local file. A text that looks like a URL is never taken for a local folder. This
includes URLs of unknown protocols, and "s3:/bucket", which `pathlib` makes of a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from ..errors import CertkError
from . import remote

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
# A single letter is a drive.
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
# On Windows, file:///C:/x is C:/x, and a path made of a URL has backslashes.
_DRIVES = os.name == "nt"
_DRIVE = re.compile(r"/[A-Za-z]:/")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::")
_MAGIC = re.compile(r"[*?[]")

Children = list[tuple[str, bool]]
"""Names in a directory, each with a flag for directories."""
Place: TypeAlias = "str | os.PathLike[str] | Location"
"""A file as callers give it; `locate` parses it."""


@dataclass(frozen=True)
class Location:
    """The place of a file or a directory, made by `locate`; hashable and picklable.

    Methods that read the file system raise `OSError` with `filename` set, or `CertkError`.

    Attributes:
        text: The user's spelling, for messages.
        place: The local path, or the URL.
        protocol: The URL's protocol in lower case; empty for a local path.
    """

    text: str
    place: str
    protocol: str = ""

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[Location], tuple[str, str, str]]:
        # The reader of the pickle may have another working directory.
        place = self.place if self.protocol else str(Path(self.place).absolute())
        return Location, (self.text, place, self.protocol)

    @property
    def is_local(self) -> bool:
        """True for a path of the local file system."""
        return not self.protocol

    @property
    def path(self) -> Path:
        """The local path; a `CertkError` for a URL."""
        if self.protocol:
            raise CertkError(f"{self.text} is not a local path: give a file of this machine")
        return Path(self.place)

    @property
    def name(self) -> str:
        """The last component."""
        if not self.protocol:
            return Path(self.place).name or Path(self.place).absolute().name
        place = self.place.partition("://")[2]
        if self.protocol in ("http", "https"):
            place = urlsplit(self.place).path
        return place.rstrip("/").rpartition("/")[2]

    def __truediv__(self, name: str) -> Location:
        """Return the location at a relative path below this one."""
        if not self.protocol:
            return _local(str(Path(self.place, name)))
        place = f"{self.place.rstrip('/')}/{name}"
        return Location(place, place, self.protocol)

    def beside(self, name: str) -> Location:
        """Return the location of this name in the same directory."""
        if not self.protocol:
            return _local(str(Path(self.place).parent / name))
        place = f"{self.place.rstrip('/').rpartition('/')[0]}/{name}"
        return Location(place, place, self.protocol)

    def kind(self) -> str | None:
        """Return "directory", another kind such as "file", or None if nothing is there."""
        if not self.protocol:
            if not self.path.exists():
                return None
            return "directory" if self.path.is_dir() else "file"
        try:
            return str(remote.info(self.place).get("type"))
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Return True if anything is there."""
        return self.kind() is not None

    def is_directory(self) -> bool:
        """Return True for a directory, or for a prefix of objects."""
        return self.kind() == "directory"

    def size(self) -> int:
        """Return the length of the file in bytes."""
        if not self.protocol:
            return self.path.stat().st_size
        size = remote.info(self.place).get("size")
        if size is None:
            raise CertkError(f"{self.text}: its server does not say how long it is: copy it first")
        return int(size)

    def key(self) -> tuple[str | int, ...]:
        """Return a key that all locations of one file share, links followed."""
        if not self.protocol:
            status = self.path.stat()
            return (status.st_dev, status.st_ino)
        return (self.protocol, remote.filesystem(self.place)[1])

    def children(self) -> Children:
        """Return the names in this directory, sorted, each with a flag for directories."""
        if self.protocol:
            return remote.children(self.place)
        with os.scandir(self.place) as held:
            return sorted((entry.name, _is_directory(entry)) for entry in held)

    def matches(self, pattern: str) -> list[tuple[str, Location, bool]]:
        """Return all matches of a relative glob pattern, sorted by path.

        `*`, `?` and `[...]` match within a component, `**` any number of directories. Hidden names
        match only components that begin with a dot, or have no wildcard. Links to directories are
        followed, each directory once.

        Returns:
            Of each match the path from here, the location, and a flag for directories.
        """
        parts = tuple(part for part in pattern.split("/") if part)
        return sorted(set(_matches(self, "", parts)), key=lambda found: found[0])

    def make_directory(self) -> None:
        """Make this directory and its parents.

        Object stores have no directories: nothing is done there, and no bucket is ever made.
        """
        if not self.protocol:
            self.path.mkdir(parents=True, exist_ok=True)
        elif self.protocol not in remote.OBJECT_STORES:
            system, path = remote.filesystem(self.place)
            with remote.remote_errors(self.text):
                system.makedirs(path, exist_ok=True)

    def remove(self) -> None:
        """Remove the file."""
        if not self.protocol:
            self.path.unlink()
            return
        system, path = remote.filesystem(self.place)
        with remote.remote_errors(self.text):
            system.rm_file(path)
            system.invalidate_cache(path)


def locate(place: Place) -> Location:
    """Parse a path or URL; a `Location` is returned as it is.

    The file system is not read. "file:///x" is the local /x.

    Raises:
        CertkError: The text is empty, or looks like a URL and is none, or its protocol is unknown.
    """
    if isinstance(place, Location):
        return place
    text = os.fsdecode(os.fspath(place))
    if not text or "\0" in text or not _can_be_path(text):
        raise CertkError(f"{text!r} is no path: give a file, a directory or a URL")
    scheme, sign, rest = text.partition("://")
    # "C://x" is a path, too.
    if sign and "/" not in scheme and len(scheme) != 1:
        return _from_url(text, scheme, rest)
    if mistyped := _ONE_SLASH.match(text.replace("\\", "/") if _DRIVES else text):
        raise CertkError(
            f"{text}: a URL has two slashes after {mistyped[1]}: (a URL must be given as text, "
            f"not as a path); a local file of that name is ./{text}"
        )
    if _CHAIN.match(text):
        raise CertkError(_no_chain(text))
    return _local(text)


def split_magic(location: Location) -> tuple[Location, str] | None:
    """Split at the first wildcard into directory and pattern; None without a wildcard."""
    if location.protocol in ("http", "https"):  # '?' begins a query
        return None
    scheme, sign, rest = location.place.rpartition("://")
    parts = rest.replace(os.sep, "/").split("/")
    first = next((k for k, part in enumerate(parts) if _MAGIC.search(part)), None)
    if first is None or (sign and first == 0):
        return None
    head = "/".join(parts[:first])
    if not sign and not head:
        head = "/" if first else "."
    place = f"{scheme}{sign}{head}"
    return Location(place, place, location.protocol), "/".join(parts[first:])


def _can_be_path(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _local(text: str) -> Location:
    return Location(text, text)


def _from_url(text: str, scheme: str, rest: str) -> Location:
    if "::" in scheme:
        raise CertkError(_no_chain(text))
    if not _SCHEME.fullmatch(scheme):
        raise CertkError(
            f"{text}: {scheme!r} is no protocol of URLs: check the spelling; a local file of that "
            f"name is ./{text}"
        )
    protocol = scheme.lower()
    if protocol in ("file", "local"):
        host, slash, path = rest.partition("/")
        if host not in ("", "localhost") or not slash:
            raise CertkError(f"{text}: a local file is file:///path, with three slashes")
        path = "/" + unquote(path)
        if _DRIVES and _DRIVE.match(path):
            path = path[1:]
        if "\0" in path:
            raise CertkError(f"{text} is no path: give a file, a directory or a URL")
        return Location(text, path)
    remote.check_protocol(protocol, text)
    if not rest.strip("/"):
        raise CertkError(f"{text}: nothing follows {protocol}://: give a file or a directory")
    return Location(text, f"{protocol}://{rest}", protocol)


def _no_chain(text: str) -> str:
    return f"{text}: URLs within URLs (with '::') are not taken: give the file's own URL"


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _matches(
    base: Location, prefix: str, parts: tuple[str, ...]
) -> Iterator[tuple[str, Location, bool]]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        for below, directory, held in directories(base):
            if rest:
                yield from _matches(directory, prefix + below, rest)
                continue
            for name, is_directory in held:
                if not name.startswith("."):
                    yield prefix + below + name, directory / name, is_directory
        return
    if _MAGIC.search(part):
        found = [
            (name, is_directory)
            for name, is_directory in base.children()
            if fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))
        ]
    else:
        kind = (base / part).kind()
        found = [] if kind is None else [(part, kind == "directory")]
    for name, is_directory in found:
        if not rest:
            yield prefix + name, base / name, is_directory
        elif is_directory:
            yield from _matches(base / name, f"{prefix}{name}/", rest)


def directories(base: Location) -> Iterator[tuple[str, Location, Children]]:
    """Walk a directory tree without hidden directories, in a fixed order.

    Links are followed, each directory once, so loops end.

    Yields:
        Of each directory the path from `base`, the location, and its children.
    """
    seen: set[tuple[str | int, ...]] = set()
    left = [("", base)]
    while left:
        prefix, directory = left.pop()
        key = directory.key()
        if key in seen:
            continue
        seen.add(key)
        held = directory.children()
        yield prefix, directory, held
        left += [
            (f"{prefix}{name}/", directory / name)
            for name, is_directory in reversed(held)
            if is_directory and not name.startswith(".")
        ]
