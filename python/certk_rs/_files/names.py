"""Names of the tensors of a cache: a pattern, the known spelling that occurs, or an inferred one.

Inference looks for templates, names with `{i}` for their layer number. A pattern needs a template
with a word for keys, and one that differs from it only by the word for values. Queries may have a
word of another kind, and another ending.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain, islice

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
_WORDS = {
    case(key): (case(key), case(value), case(query))
    for key, value, query in (ROLES, ("keys", "values", "queries"), ("k", "v", "q"))
    for case in (str.lower, str.capitalize, str.upper)
}
_QUERIES = {query for _, _, query in _WORDS.values()}
# Whole words only: neither a letter of the same word before them, nor one behind them.
_WORD = re.compile(
    rf"(?:(?<![a-zA-Z])|(?<=[a-z])(?=[A-Z]))(?:{'|'.join(chain(*_WORDS.values()))})(?![a-z])"
)


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
    counts = Counter(
        f"{name[: number.start()]}{{i}}{name[number.end() :]}"
        for name in held
        if _WORD.search(name)
        for number in _NUMBER.finditer(name)
    )
    templates = {template for template, _ in counts.most_common(_MOST_TEMPLATES)}
    found = set()
    for template in templates:
        for word in _WORD.finditer(template):
            before, behind = template[: word.start()], template[word.end() :]
            three = _WORDS.get(word[0])
            if three is not None and f"{before}{three[1]}{behind}" in templates:
                found.add(f"{before}{{{'|'.join(three)}}}{behind}")
                ends = {other[len(before) :] for other in templates if other.startswith(before)}
                found |= {
                    f"{before}{{{three[0]}{behind}|{three[1]}{behind}|{end}}}"
                    for end in ends
                    if "{i}" in before and (first := _WORD.match(end)) and first[0] in _QUERIES
                }
    scored = [(_score(Names(pattern), held), -len(pattern), pattern) for pattern in found]
    best = max(scored, default=None)
    return best[2] if best is not None and best[0] > (0, 0) else None


def _score(names: Names, held: list[str]) -> tuple[int, int]:
    """Count the layers with all three tensors, and those with keys and values."""
    roles: dict[int, set[str]] = {}
    for name in held:
        if (match := names.match(name)) is not None:
            roles.setdefault(match[0], set()).add(match[1])
    whole = sum(len(found) == 3 for found in roles.values())
    return whole, sum({"key", "value"} <= found for found in roles.values())
