"""Shards: tensors in several safetensors files, and an index JSON beside them.

The index is the file that transformers writes, `NAME.safetensors.index.json`. Its `weight_map` maps
every tensor to the file name of its part. Its optional `metadata` holds the metadata of the header
of a single file. Every part lies beside the index. Index and parts must agree on every tensor: if
they differ, nothing tells which is out of date, so that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import CertkError, one_line
from .location import Location, Place, locate
from .reader import Identity, open_reader, read_state
from .safetensors import Entry, Header, parse_json, quote
from .tensor_file import SafetensorsFile

INDEX_SUFFIX = ".index.json"
# Some hundred thousand tensors; JSON takes many times its text in memory.
MAX_INDEX = 1 << 24
OURS = ("scale", "causal_offset")
"""The metadata that are read: of these, index and parts must say the same."""


class ShardedFile(SafetensorsFile):
    """All parts of an index, opened and checked against it, as one file.

    `header.raw` is the text of the index. Offsets of `entries` count from the header of their part.
    Metadata are the strings in the `metadata` of the index, and those of the parts; all must agree
    in `OURS`.
    """

    def __init__(self, path: Location) -> None:
        self.path = path
        raw, identity = read_state(path, MAX_INDEX)
        weight_map, said = _parse_index(self.path, raw)
        self._home: dict[str, SafetensorsFile] = {}
        self._parts: list[SafetensorsFile] = []
        try:
            for name in sorted(set(weight_map.values())):
                self._parts.append(SafetensorsFile(self.path.beside(name)))
                self._take(name, self._parts[-1], weight_map)
            self.header = Header(self._entries(weight_map), self._metadata(said), raw)
        except BaseException:
            self.close()
            raise
        self.identity = (identity, *(part.identity for part in self._parts))
        self.size = len(raw) + sum(part.size for part in self._parts)

    def close(self) -> None:
        """Close all parts; closing twice is harmless."""
        for part in self._parts:
            part.close()

    def _fill(self, name: str, buffer: memoryview, start: int) -> None:
        self._home[name].read_into(name, buffer, start)

    def current_identity(self) -> Identity:
        """Return the present identities of the index and of all parts."""
        index = open_reader(self.path)
        index.close()
        return (index.identity, *(part.current_identity() for part in self._parts))

    def header_sha256s(self) -> list[str]:
        """Return SHA-256 of the index JSON, then of the header of each part, by name."""
        return [*super().header_sha256s(), *(part.header_sha256() for part in self._parts)]

    def _take(self, name: str, part: SafetensorsFile, weight_map: Mapping[str, str]) -> None:
        for tensor in part.header.entries:
            home = weight_map.get(tensor)
            if home != name:
                where = "does not list it" if home is None else f"says it is in {quote(home)}"
                raise CertkError(
                    f"{part.path}: tensor {quote(tensor)} is in this part, but {self.path} {where}"
                    ": write index and parts again"
                )
            self._home[tensor] = part

    def _entries(self, weight_map: Mapping[str, str]) -> dict[str, Entry]:
        for tensor, name in weight_map.items():
            if tensor not in self._home:
                raise CertkError(
                    f"{self.path}: tensor {quote(tensor)} is not in {quote(name)}, where the index "
                    "says it is: write index and parts again"
                )
        return {tensor: self._home[tensor].header.entries[tensor] for tensor in sorted(weight_map)}

    def _metadata(self, said: Mapping[str, str]) -> dict[str, str]:
        found, first = dict(said), dict.fromkeys(said, str(self.path))
        for part in self._parts:
            for key, value in part.header.metadata.items():
                if found.setdefault(key, value) != value and key in OURS:
                    raise CertkError(
                        f"{part.path}: metadata {quote(key)} is {quote(value)}, but "
                        f"{quote(found[key])} in {first[key]}: write index and parts again"
                    )
                first.setdefault(key, str(part.path))
        return found


def is_index(location: Location) -> bool:
    """Return True if the file's name is that of an index of shards."""
    return location.name.lower().endswith(".json")


def open_tensors(path: Place) -> SafetensorsFile:
    """Open a safetensors file, or all parts of an index if the name ends in .json."""
    location = locate(path)
    return ShardedFile(location) if is_index(location) else SafetensorsFile(location)


def parts_of(index: Location) -> set[str]:
    """Return the names of the parts that an index lists; raises as `ShardedFile` does."""
    raw, _ = read_state(index, MAX_INDEX)
    return set(_parse_index(index, raw)[0].values())


def _parse_index(where: object, raw: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Return the map from tensors to parts, and the metadata that are strings."""

    def wrong(what: str) -> CertkError:
        return CertkError(
            f"{where}: {what}: it is no index of safetensors shards, or damaged; write it again"
        )

    try:
        body = parse_json(raw.decode())
    except (ValueError, RecursionError) as error:
        raise wrong(f"it is not valid JSON ({one_line(error)})") from None
    if not isinstance(body, dict) or not isinstance(body.get("weight_map"), dict):
        raise wrong("it is not a JSON object with a weight_map from tensors to files")
    weight_map: dict[str, str] = {}
    for tensor, name in body["weight_map"].items():
        if not isinstance(name, str) or not _is_plain(name):
            raise wrong(
                f"tensor {quote(tensor)} is in {quote(name)}, which is not the name of a "
                ".safetensors file beside the index"
            )
        weight_map[tensor] = name
    if not weight_map:
        raise wrong("its weight_map is empty")
    metadata = body.get("metadata", {})
    if not isinstance(metadata, dict):
        raise wrong("its metadata is not an object")
    said = {key: value for key, value in metadata.items() if isinstance(value, str)}
    for key in OURS:
        if key in metadata and key not in said:
            raise wrong(f"metadata {key} is {quote(metadata[key])}, and must be a string")
    return weight_map, said


def _is_plain(name: str) -> bool:
    """Return True for a file name that leads to no other directory, on any system."""
    return (
        name.endswith(".safetensors")
        and not name.startswith(".")
        and not any(sign in name for sign in "/\\:\0?#")
        # A lone surrogate, as JSON can hold it, is in no name of a file.
        and not any("\ud800" <= sign <= "\udfff" for sign in name)
    )
