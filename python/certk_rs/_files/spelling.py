"""The pattern of names that would match what a file holds, inferred from its tensors' names.

Names of one layer differ in its number; put `{i}` there, and names that are alike are one template.
Three templates that differ in one place, where one has a word for keys, one for values and one for
queries, are a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product

from .names import ROLES, Names

# Enough to tell how names are formed; more would only take time.
_MOST_NAMES = 4096
_MOST_TEMPLATES = 48
_MOST_LETTERS = 200
_MOST_WORDS = 10
_BRACE = re.compile(r"[{}|]")
_NUMBER = re.compile(r"[0-9]+")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_STEMS = {"key": ("k", "key", "keys"), "value": ("v", "val", "value", "values"),
          "query": ("q", "query", "queries")}  # fmt: skip
_TAILS = ("", "s", "cache", "state", "states", "proj", "tensor", "vec", "layer", "rot", "embed")
_WORDS = {
    role: frozenset(stem + tail for stem in stems for tail in _TAILS)
    for role, stems in _STEMS.items()
}


def infer(names: Iterable[str]) -> str | None:
    """The pattern that matches most layers among tensor names; None if they show none.

    A pattern found has keys and values of at least one layer; the queries may be missing.
    """
    held = [name for _, name in zip(range(_MOST_NAMES), names, strict=False)]
    held = [name for name in held if len(name) <= _MOST_LETTERS and not _BRACE.search(name)]
    templates = _templates(held)
    found = {
        pattern
        for key in templates
        for pattern in _patterns(key, templates)
        if _is_pattern(pattern)
    }
    scored = [(_score(Names(pattern), held), pattern) for pattern in found]
    best = max(scored, key=lambda each: (each[0], -len(_choice(each[1])), each[1]), default=None)
    return best[1] if best is not None and best[0] > (0, 0) else None


def _templates(names: list[str]) -> list[str]:
    """Names with `{i}` for one of their numbers, the most frequent first."""
    counts: dict[str, int] = {}
    for name in names:
        for number in _NUMBER.finditer(name):
            if len(number[0]) <= 9:
                template = f"{name[: number.start()]}{{i}}{name[number.end() :]}"
                counts[template] = counts.get(template, 0) + 1
    telling = [template for template in counts if any(_role(w[0]) for w in _words(template))]
    return sorted(telling, key=lambda template: -counts[template])[:_MOST_TEMPLATES]


def _patterns(key: str, templates: list[str]) -> Iterable[str]:
    """Patterns in which this template is that of the keys."""
    for before, of_key, behind in _places(key):
        words: dict[str, set[str]] = {"value": set(), "query": set()}
        for other in templates:
            word = other[len(before) : len(other) - len(behind)]
            if len(other) > len(before) + len(behind) and other == before + word + behind:
                for role, found in words.items():
                    if _is_role(word, role):
                        found.add(word)
        for of_value, of_query in product(words["value"], words["query"] or {_analogue(of_key)}):
            yield f"{before}{{{of_key}|{of_value}|{of_query}}}{behind}"


def _places(key: str) -> Iterable[tuple[str, str, str]]:
    """The whole words of a template that name keys, with what is before and behind them."""
    words = list(_words(key))[-_MOST_WORDS:]
    for first, last in product(words, words):
        start, end = first.start(), last.end()
        if start < end and _is_role(key[start:end], "key"):
            yield key[:start], key[start:end], key[end:]


def _words(template: str) -> Iterable[re.Match[str]]:
    return (word for word in _WORD.finditer(template.replace("{i}", "0 0")))


def _role(word: str) -> str | None:
    return next((role for role in ROLES if word.lower() in _WORDS[role]), None)


def _is_role(words: str, role: str) -> bool:
    """Whether some words, as they stand in a name, name one role and no other."""
    if "{" in words or "|" in words or "." in words:
        return False
    return {found for word in _words(words) if (found := _role(word[0]))} == {role}


def _analogue(of_key: str) -> str:
    """The word for queries that goes with one for keys."""
    for key, query in (("keys", "queries"), ("Keys", "Queries"), ("KEYS", "QUERIES"),
                       ("key", "query"), ("Key", "Query"), ("KEY", "QUERY"),
                       ("k", "q"), ("K", "Q")):  # fmt: skip
        if key in of_key:
            return of_key.replace(key, query, 1)
    return "query"


def _choice(pattern: str) -> str:
    """The three words, and what is around them in the braces."""
    return max(pattern.replace("}", "{").split("{"), key=lambda piece: piece.count("|"))


def _is_pattern(pattern: str) -> bool:
    return pattern.count("{i}") == 1 and pattern.count("{") == 2


def _score(names: Names, held: list[str]) -> tuple[int, int]:
    """How many layers have all three tensors, and how many have keys and values."""
    roles: dict[int, set[str]] = {}
    for name in held:
        if (match := names.match(name)) is not None:
            roles.setdefault(match[0], set()).add(match[1])
    whole = sum(len(found) == 3 for found in roles.values())
    return whole, sum({"key", "value"} <= found for found in roles.values())
