"""Where a file is: a local path, or the URL of a file system that fsspec knows.

What a user gives is text. It is a URL if something that holds no slash stands before "://", and a
local path otherwise, so that "./s3://x" is a local file. Nothing that looks like a URL is ever
taken for a local folder of that name: neither one that no file system knows, nor "s3:/bucket",
which is what becomes of a URL that is made a path.
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
# One letter is a drive.
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
# On Windows file:///C:/x is C:/x, and a URL that is made a path gets their sign.
_DRIVES = os.name == "nt"
_DRIVE = re.compile(r"/[A-Za-z]:/")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::")
_MAGIC = re.compile(r"[*?[]")

# Within the class, `list` is a method.
Locations: TypeAlias = "list[Location]"
Children: TypeAlias = "list[tuple[str, bool]]"
Matches: TypeAlias = "list[tuple[str, Location, bool]]"


@dataclass(frozen=True)
class Location:
    """A place for a file or a directory, as `locate` makes it; hashable and picklable.

    `text` is what the user gave, `place` the local path or the URL, `protocol` that of the URL in
    lower case, and empty where the place is local. Methods that look raise `OSError` with its
    `filename` set, or `CertkError`.
    """

    text: str
    place: str
    protocol: str = ""

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[Location], tuple[str, str, str]]:
        # Who unpickles it may be in another directory.
        place = self.place if self.protocol else str(Path(self.place).absolute())
        return Location, (self.text, place, self.protocol)

    @property
    def is_local(self) -> bool:
        """Whether this is a path of the local file system."""
        return not self.protocol

    @property
    def path(self) -> Path:
        """The local path."""
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

    @property
    def suffix(self) -> str:
        """What `name` ends with from its last dot on."""
        return Path(self.name).suffix

    def __truediv__(self, name: str) -> Location:
        """What is at a relative path below this, its parts joined by '/'."""
        if not self.protocol:
            return _local(str(Path(self.place, name)))
        place = f"{self.place.rstrip('/')}/{name}"
        return Location(place, place, self.protocol)

    def beside(self, name: str) -> Location:
        """What has this name in the same directory."""
        if not self.protocol:
            return _local(str(Path(self.place).parent / name))
        place = f"{self.place.rstrip('/').rpartition('/')[0]}/{name}"
        return Location(place, place, self.protocol)

    def kind(self) -> str | None:
        """What is there: "directory", or something else; None if nothing is."""
        if not self.protocol:
            if not self.path.exists():
                return None
            return "directory" if self.path.is_dir() else "file"
        try:
            return str(remote.info(self.place).get("type"))
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether anything is there."""
        return self.kind() is not None

    def is_directory(self) -> bool:
        """Whether a directory is there, or a prefix of objects that stands for one."""
        return self.kind() == "directory"

    def size(self) -> int:
        """Bytes of the file."""
        if not self.protocol:
            return self.path.stat().st_size
        size = remote.info(self.place).get("size")
        if size is None:
            raise CertkError(f"{self.text}: its server does not say how long it is: copy it first")
        return int(size)

    def key(self) -> tuple[str | int, ...]:
        """What is the same for two locations of one file or directory, links followed."""
        if not self.protocol:
            status = self.path.stat()
            return (status.st_dev, status.st_ino)
        return (self.protocol, remote.filesystem(self.place)[1])

    def list(self) -> Locations:
        """What is in this directory, sorted by name."""
        return [self / name for name, _ in self.children()]

    def children(self) -> Children:
        """The names in this directory, each with whether it is a directory itself, sorted."""
        if self.protocol:
            return remote.children(self.place)
        with os.scandir(self.place) as held:
            return sorted((entry.name, _is_directory(entry)) for entry in held)

    def glob(self, pattern: str) -> Locations:
        """What a relative pattern matches below this directory, sorted by relative path."""
        return [found for _, found, _ in self.matches(pattern)]

    def matches(self, pattern: str) -> Matches:
        """What a relative pattern matches: path from here, place, and whether it is a directory.

        Sorted by path. As in shells: `*`, `?` and `[...]` within a component, `**` for any number
        of directories; hidden names only where the pattern's component begins with a dot, or has no
        sign in it. Links to directories are followed, none of them twice.
        """
        parts = tuple(part for part in pattern.split("/") if part)
        return sorted(set(_matches(self, "", parts)), key=lambda found: found[0])

    def make_directory(self) -> None:
        """Make this directory and its parents if they are not there.

        Nothing is done where directories are but prefixes, so that no bucket is ever made.
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


def locate(place: str | os.PathLike[str] | Location) -> Location:
    """What a text or path stands for. Nothing is looked at, except whether the protocol is known.

    "file:///x" is the local /x. Raises `CertkError` for what looks like a URL and is none.
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
    """The directory before the first sign of a glob pattern, and the pattern; None without one."""
    if location.protocol in ("http", "https"):  # whose '?' is their own
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
    """A directory and all below it, but for hidden ones: the path to each, and its children.

    Links are followed, but no directory is met twice, so that loops end. In no certain order, but
    always in the same.
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
