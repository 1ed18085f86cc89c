"""The inputs to check against: each hashed at most once, and found by the hashes in an output."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from ..cache_format import INDEX_SUFFIX, Form, TensorFacts, open_tensors
from ..errors import CertkError

Facts = Mapping[str, TensorFacts]
_Key = tuple[tuple[str, TensorFacts], ...]


class Source:
    """An input, a file or an index of shards; tensors are hashed on first use."""

    def __init__(self, path: Path, pause: Callable[[], None]) -> None:
        self.path = path
        self._pause = pause
        with open_tensors(path) as file:
            self.headers = tuple(file.header_sha256s())
            self.identity = file.identity
            self.forms = file.header.forms
        self._turn = threading.Lock()
        self._tensors: dict[str, TensorFacts] | None = None

    @property
    def name(self) -> str:
        """The file name of its output."""
        return self.path.name.removesuffix(INDEX_SUFFIX)

    def tensors(self) -> Facts:
        """Return every tensor with its hash."""
        with self._turn:
            if self._tensors is None:
                with open_tensors(self.path) as file:
                    file.check_unchanged(self.identity)
                    found = {}
                    for name, (dtype, shape) in self.forms.items():
                        self._pause()
                        found[name] = TensorFacts(dtype, shape, file.sha256(name))
                    file.check_unchanged(self.identity)
                self._tensors = found
            return self._tensors


class Sources:
    """All inputs, found in constant time once they are hashed."""

    def __init__(self, sources: list[Source]) -> None:
        self._all = sources
        self._turn = threading.Lock()
        self._places = {source: place for place, source in enumerate(sources)}
        self._by_headers: dict[tuple[str, ...], list[Source]] = defaultdict(list)
        self._by_name: dict[tuple[tuple[str, ...], str], list[Source]] = defaultdict(list)
        for source in sources:
            self._by_headers[source.headers].append(source)
            self._by_name[source.headers, source.name].append(source)
        self._names = {source.name for source in sources}
        self._hashed: set[Source] = set()
        self._lost: dict[Source, CertkError | OSError] = {}
        self._by_tensors: dict[_Key, list[Source]] = defaultdict(list)
        self._holding: dict[tuple[str, TensorFacts], list[Source]] = defaultdict(list)
        self._matched: set[_Key] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def find(self, facts: Facts, headers: tuple[str, ...], name: str) -> Source | None:
        """Find the input with these tensors; prefer these headers, then this name."""
        key = _key(facts)
        likely = self._by_headers.get(headers, [])
        named = self._by_name.get((headers, name), [])
        found = None
        for some in (named, likely):
            if found is None:
                for source in self._not_hashed(some):
                    if self._hash(source) == key:
                        break
                found = self._among(key, headers, name)
        if found is None and not self._by_tensors.get(key):
            forms = _forms(facts)
            for source in self._not_hashed(self._all):
                if source.forms == forms and self._hash(source) == key:
                    break
        with self._turn:
            alike = self._by_tensors.get(key, [])
            if alike:
                self._matched.add(key)
            return found or (alike[0] if alike else None)

    def has_name(self, name: str) -> bool:
        """Return True if the output of an input has this name."""
        return name in self._names

    def lost(self, facts: Facts) -> CertkError | OSError | None:
        """Return the error of an input that may be the one with these tensors, if any."""
        forms = _forms(facts)
        with self._turn:
            errors = [error for source, error in self._lost.items() if source.forms == forms]
            return errors[0] if errors else None

    def nearest(self, facts: Facts, headers: tuple[str, ...]) -> tuple[Source, int]:
        """Return the input that shares most tensors with these, and how many; hashes all."""
        for source in self._not_hashed(self._all):
            self._hash(source)
        same: Counter[Source] = Counter()
        for item in facts.items():
            same.update(self._holding.get(item, ()))

        def alike(source: Source) -> tuple[int, bool, int]:
            return same[source], source.headers == headers, -self._places[source]

        candidates = [*same, *self._by_headers.get(headers, [])[:1], self._all[0]]
        best = max(candidates, key=alike)
        return best, same[best]

    def unmatched(self) -> tuple[Path, ...]:
        """Return the inputs of no output."""
        forms = [_forms(dict(key)) for key in self._matched]
        lone = []
        for source in self._all:
            # Other names and shapes tell inputs apart without hashes.
            known = source in self._hashed or source.forms in forms
            if not known or self._hash(source) not in self._matched:
                lone.append(source.path)
        return tuple(lone)

    def _among(self, key: _Key, headers: tuple[str, ...], name: str) -> Source | None:
        def place(source: Source) -> tuple[bool, int]:
            return source.name != name, self._places[source]

        with self._turn:
            alike = [s for s in self._by_tensors.get(key, ()) if s.headers == headers]
            return min(alike, key=place, default=None)

    def _not_hashed(self, sources: list[Source]) -> list[Source]:
        with self._turn:
            if len(self._hashed) + len(self._lost) == len(self._all):
                return []
            done = (self._hashed, self._lost)
            return [source for source in sources if not any(source in some for some in done)]

    def _hash(self, source: Source) -> _Key | None:
        """Hash an input; None if it cannot be read any more, which concerns its outputs alone."""
        try:
            tensors = source.tensors()
        except (CertkError, OSError) as error:
            with self._turn:
                self._lost.setdefault(source, error)
            return None
        key = _key(tensors)
        with self._turn:
            if source not in self._hashed:
                self._hashed.add(source)
                self._by_tensors[key].append(source)
                for item in tensors.items():
                    self._holding[item].append(source)
        return key


def _forms(facts: Facts) -> dict[str, Form]:
    return {name: (fact.dtype, fact.shape) for name, fact in facts.items()}


def _key(facts: Facts) -> _Key:
    return tuple(sorted(facts.items(), key=lambda item: item[0]))
