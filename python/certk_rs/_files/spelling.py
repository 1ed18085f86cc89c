"""Inference of the pattern of names from the tensor names of a file.

A template is a name with `{i}` for its layer number. A pattern needs a template with a word for
keys, and templates that differ from it only by a word for values or for queries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice, product

from .names import ROLES, Names

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
