"""The inputs to check against: each hashed at most once, and found by the hashes in an output."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path

from .._files.certificate import TensorFacts, forms_of
from .._files.sharded import INDEX_SUFFIX, open_tensors
from ..errors import CertkError
from .workers import SMALL, Workers

Facts = Mapping[str, TensorFacts]
Headers = tuple[str, ...]
_Key = frozenset[tuple[str, TensorFacts]]


class Source:
    """An input, a file or an index of shards; tensors are hashed on first use."""

    def __init__(self, path: Path, workers: Workers) -> None:
        self.path = path
        self._workers = workers
        with open_tensors(path) as file:
            self.headers = tuple(file.header_sha256s())
            self.identity = file.identity
            self.forms = file.header.forms

    @property
    def name(self) -> str:
        """The file name of its output."""
        return self.path.name.removesuffix(INDEX_SUFFIX)

    @cached_property
    def tensors(self) -> Facts:
        """Every tensor with its hash."""
        with open_tensors(self.path) as file:
            file.check_unchanged(self.identity)
            work = [partial(file.sha256, name) for name in self.forms]
            hashes = list(self._workers.run(work, small=file.size < SMALL))
            file.check_unchanged(self.identity)
        forms = zip(self.forms.items(), hashes, strict=True)
        return {name: TensorFacts(*form, digest) for (name, form), digest in forms}


class Sources:
    """All inputs, found in constant time once they are hashed."""

    def __init__(self, sources: list[Source]) -> None:
        self._all = sources
        self._places = {source: place for place, source in enumerate(sources)}
        self._by_headers: dict[Headers, list[Source]] = defaultdict(list)
        self._by_name: dict[tuple[Headers, str], list[Source]] = defaultdict(list)
        for source in sources:
            self._by_headers[source.headers].append(source)
            self._by_name[source.headers, source.name].append(source)
        self._names = {source.name for source in sources}
        # Of every source that was hashed its key, or None if it could not be read.
        self._keys: dict[Source, _Key | None] = {}
        self._lost: dict[Source, CertkError | OSError] = {}
        self._by_tensors: dict[_Key, list[Source]] = defaultdict(list)
        self._holding: dict[tuple[str, TensorFacts], list[Source]] = defaultdict(list)
        self._matched: set[_Key] = set()

    def __bool__(self) -> bool:
        return bool(self._all)

    def find(self, facts: Facts, headers: Headers, name: str) -> Source | None:
        """Find the input with these tensors; prefer these headers, then this name."""
        key, forms = frozenset(facts.items()), forms_of(facts)
        likely = (self._by_name.get((headers, name), []), self._by_headers.get(headers, []))
        found = None
        for some in likely:
            self._hash_until(key, some)
            found = self._among(key, headers, name)
            if found is not None:
                break
        if found is None and not self._by_tensors.get(key):
            self._hash_until(key, (each for each in self._all if each.forms == forms))
        alike = self._by_tensors.get(key, [])
        if alike:
            self._matched.add(key)
        return found or (alike[0] if alike else None)

    def has_name(self, name: str) -> bool:
        """Return True if the output of an input has this name."""
        return name in self._names

    def lost(self, facts: Facts) -> CertkError | OSError | None:
        """Return the error of an input that may be the one with these tensors, if any."""
        forms = forms_of(facts)
        return next((error for at, error in self._lost.items() if at.forms == forms), None)

    def nearest(self, facts: Facts, headers: Headers) -> tuple[Source, int]:
        """Return the input that shares most tensors with these, and how many; hashes all."""
        self._hash_until(None, self._all)
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
        forms = [forms_of(dict(key)) for key in self._matched]
        # Other names and shapes tell inputs apart without hashes.
        self._hash_until(None, (each for each in self._all if each.forms in forms))
        keys = [(source, self._keys.get(source)) for source in self._all]
        return tuple(source.path for source, key in keys if key not in self._matched)

    def _among(self, key: _Key, headers: Headers, name: str) -> Source | None:
        def place(source: Source) -> tuple[bool, int]:
            return source.name != name, self._places[source]

        alike = [s for s in self._by_tensors.get(key, ()) if s.headers == headers]
        return min(alike, key=place, default=None)

    def _hash_until(self, key: _Key | None, sources: Iterable[Source]) -> None:
        """Hash inputs that are not hashed yet, up to the one with these tensors."""
        if len(self._keys) < len(self._all):
            for source in sources:
                if source not in self._keys and self._hash(source) == key is not None:
                    break

    def _hash(self, source: Source) -> _Key | None:
        """Hash an input; None if it cannot be read any more, which concerns its outputs alone."""
        try:
            tensors = source.tensors
        except (CertkError, OSError) as error:
            self._keys[source], self._lost[source] = None, error
            return None
        key = self._keys[source] = frozenset(tensors.items())
        self._by_tensors[key].append(source)
        for item in tensors.items():
            self._holding[item].append(source)
        return key
