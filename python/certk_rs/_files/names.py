"""Names of the tensors of a cache: a pattern, the known spelling that occurs, or an inferred one.

Inference looks for templates, names with `{i}` for their layer number. A pattern needs a template
with a word for keys, and templates that differ from it only by a word for values or for queries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice, product

from ..errors import CertkError

ROLES = ("key", "value", "query")
DEFAULT_NAMES = "layers.{i}.{key|value|query}"
KNOWN_NAMES = tuple(
    stem + words
    for words in (
        "{key|value|query}",
        "{keys|values|queries}",
        "{k|v|q}",
        "{key_states|value_states|query_states}",
    )
    for stem in ("layers.{i}.", "layer.{i}.", "layers_{i}_", "layer_{i}_")
)

# Enough to find the pattern; more would only take time.
_MOST_NAMES = 4096
_MOST_TEMPLATES = 48
_MOST_LETTERS = 200
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")
_TAIL = r"(?:[_-]?(?:cache|state|proj|tensor|vec|layer|rot|embed)s?)*"
# Whole words only: neither a letter of the same word before them, nor one behind them.
_WORDS = {
    role: re.compile(rf"(?:(?<![a-zA-Z])|(?<=[a-z])(?=[A-Z]))(?i:{stem}{_TAIL})(?![a-z])")
    for role, stem in {
        "key": "(?:keys?|ks?)",
        "value": "(?:values?|vals?|vs?)",
        "query": "(?:query|queries|qs?)",
    }.items()
}
_QUERIES = {"keys": "queries", "key": "query", "k": "q"}


class Names:
    """A pattern of tensor names, compiled. Raises `CertkError` if the pattern is not one."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        pieces = re.split(r"(\{[^{}]*\})", pattern)
        fields = pieces[1::2]
        words = [field[1:-1].split("|") for field in fields if field != "{i}"]
        if (
            len(fields) != 2
            or fields.count("{i}") != 1
            or len(words[0]) != 3
            or len({*words[0], ""}) != 4
            or any(brace in text for text in pieces[::2] for brace in "{}")
        ):
            raise CertkError(
                f"--names {pattern!r}: give one {{i}} for the layer number and one "
                f"{{key|value|query}} with the three words used, for example {DEFAULT_NAMES!r}"
            )
        self._roles = dict(zip(words[0], ROLES, strict=True))
        choice = "(?P<role>" + "|".join(map(re.escape, words[0])) + ")"
        self._regex = re.compile(
            "".join(
                re.escape(piece) if not k % 2 else "(?P<i>[0-9]{1,9})" if piece == "{i}" else choice
                for k, piece in enumerate(pieces)
            )
        )

    def match(self, name: str) -> tuple[int, str] | None:
        """Return layer number and role of a tensor name; None if it is not part of the cache."""
        found = self._regex.fullmatch(name)
        return (int(found["i"]), self._roles[found["role"]]) if found else None


def detect(where: str, tensors: Iterable[str]) -> Names:
    """Return the known spelling that occurs among the tensor names, or else the default.

    Raises:
        CertkError: Several occur; the message begins with `where`.
    """
    held = list(tensors)
    candidates = [
        names
        for names in map(Names, KNOWN_NAMES)
        if any((match := names.match(name)) and match[1] == "key" for name in held)
    ]
    if len(candidates) > 1:
        both = " and ".join(names.pattern for names in candidates)
        raise CertkError(f"{where}: its tensors fit {both}: say which with --names")
    return candidates[0] if candidates else Names(DEFAULT_NAMES)


def infer(names: Iterable[str]) -> str | None:
    """Return the pattern that matches most layers; None if the names show none.

    A pattern has keys and values of at least one layer; the queries may be missing.
    """
    held = [name for name in islice(names, _MOST_NAMES) if len(name) <= _MOST_LETTERS]
    held = [name for name in held if not re.search(r"[{}|]", name)]
    templates = _templates(held)
    found = {pattern for key in templates for pattern in _patterns(key, templates)}
    scored = [(_score(Names(pattern), held), -len(pattern), pattern) for pattern in found]
    best = max(scored, default=None)
    return best[2] if best is not None and best[0] > (0, 0) else None


def _templates(names: list[str]) -> list[str]:
    """Return names with `{i}` for one of their numbers, the most frequent first."""
    counts = Counter(
        f"{name[: number.start()]}{{i}}{name[number.end() :]}"
        for name in names
        if any(words.search(name) for words in _WORDS.values())
        for number in _NUMBER.finditer(name)
    )
    return [template for template, _ in counts.most_common(_MOST_TEMPLATES)]


def _patterns(key: str, templates: list[str]) -> Iterable[str]:
    """Yield patterns in which this template is that of the keys."""
    for match in _WORDS["key"].finditer(key):
        before, of_key, behind = key[: match.start()], match[0], key[match.end() :]
        words: dict[str, list[str]] = {"value": [], "query": []}
        for other in templates:
            word = other[len(before) : len(other) - len(behind)]
            for role, found in words.items():
                if other == before + word + behind and _WORDS[role].fullmatch(word):
                    found.append(word)
        stem = re.sub("(?i)(keys|key|k)", lambda word: _analogue(word[0]), of_key, count=1)
        for of_value, of_query in product(words["value"], words["query"] or [stem]):
            three, tail = _without_tail((of_key, of_value, of_query))
            yield f"{before}{{{'|'.join(three)}}}{tail}{behind}"


def _without_tail(three: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Split off a tail that three words share, such as "_cache", if whole words remain."""
    for begin in re.finditer("[_A-Z-]", three[0]):
        tail = three[0][begin.start() :]
        stems = tuple(word.removesuffix(tail) for word in three)
        whole = (_WORDS[role].fullmatch(stem) for role, stem in zip(ROLES, stems, strict=True))
        if all(word.endswith(tail) for word in three) and all(whole):
            return stems, tail
    return three, ""


def _analogue(of_key: str) -> str:
    """Return the word for queries in the case of a word for keys."""
    word = _QUERIES[of_key.lower()]
    if of_key.isupper():
        return word.upper()
    return word.capitalize() if of_key[0].isupper() else word


def _score(names: Names, held: list[str]) -> tuple[int, int]:
    """Count the layers with all three tensors, and those with keys and values."""
    roles: dict[int, set[str]] = {}
    for name in held:
        if (match := names.match(name)) is not None:
            roles.setdefault(match[0], set()).add(match[1])
    whole = sum(len(found) == 3 for found in roles.values())
    return whole, sum({"key", "value"} <= found for found in roles.values())
