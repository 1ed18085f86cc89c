"""Names of the tensors of a cache: a pattern, or the one known spelling that occurs."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
