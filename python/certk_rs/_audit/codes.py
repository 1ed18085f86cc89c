"""The audit's own judgement of outputs with codes: whether these are true of all keys and values.

Keys have a plane of codes, and perhaps a low plane, which stands for part of what that is off by.
Then a key is off by e' = e - step low, rounded to float32. Values have a plane without turning, and
a matrix that bounds what their codes stand for. Keys without a code have rows, and so have the
values beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layouts import BIAS, Bytes, of_keys, of_low, of_values
from .matrices import NO_ENTRY, Floats, Matrix, Rows, Wrong
from .planes import Plane, PlaneJudge, Singles, Taken, is_empty, turning

# Places among the bounds of the low plane.
_REACH = 1
LOW_ADDITIONS, SPREAD_ADDITIONS = 2, 1
# The largest number in the low plane, by its bits.
_TOP = {4: 7, 8: 127}


@dataclass(frozen=True, eq=False)
class LowPlane:
    """Statements about the low plane: its bits of an entry, and the matrix that bounds all e'."""

    bits: int
    matrix: Matrix


@dataclass(frozen=True, eq=False)
class CodeClaims:
    """The codes of one layer, without their bytes.

    Attributes:
        keys: The plane of keys.
        limits: The largest norm of e with which an appended key of each kv head gets a code.
        low: The low plane of keys, None if there is none.
        values: The plane of values.
        value_bits: The bits of an entry of a value.
        spread: The matrix that bounds what the codes of values stand for.
        bare: The number of rows of keys without a code, and of values beside them.
    """

    keys: Plane
    limits: Floats
    low: LowPlane | None
    values: Plane
    value_bits: int
    spread: Matrix
    bare: int

    def bare_in(self, heads: slice | int, places: slice = slice(None)) -> int:
        """Return how many of some keys have no code."""
        return int((self.keys.scales[heads, places] == 0).sum())


@dataclass(frozen=True, eq=False)
class Piece:
    """Some keys and values of a kv head, from a whole group on, with what the output has of them.

    Attributes:
        rows: By role, as they are stored in the input, (r, d).
        wide: By role, widened to float32.
        bare: By role, the rows of the output.
        codes: By role the bytes, in whole groups.
        low: The rows of the low plane; None if there is none.
    """

    rows: Mapping[str, NDArray[Any]]
    wide: Mapping[str, Singles]
    bare: Mapping[str, NDArray[Any]]
    codes: Mapping[str, Bytes]
    low: Bytes | None


def nonsense(claims: CodeClaims, d: int) -> Wrong | None:
    """Return a tensor that no codes of any rows have, and why; None if there is none."""
    if (wrong := claims.keys.nonsense((1, turning(d)))) is not None:
        return wrong
    # NaN is no more than 0.
    if not (claims.limits > 0).all():
        return "key_bounds", "no error is so small that an appended key gets a code"
    without = claims.bare_in(slice(None))
    if claims.bare != without:
        return "key_bare", f"has {claims.bare} rows, but {without} keys have no code"
    if claims.low is not None and (wrong := claims.low.matrix.nonsense(d)) is not None:
        return wrong
    if (wrong := claims.values.nonsense((1,))) is not None:
        return wrong
    if not claims.values.scales.all():
        return "value_scales", NO_ENTRY
    return claims.spread.nonsense(d)


def untruths(claims: CodeClaims, head: int, pieces: Iterable[Piece]) -> list[Wrong]:
    """Return the tensors of codes of one kv head that are not true of its rows, and why.

    Args:
        claims: Codes without `nonsense`.
        head: The kv head.
        pieces: Its keys and values, some at a time.
    """
    d, wrong = claims.keys.mean.shape[1], dict[str, str]()
    keys, values = (PlaneJudge(plane, head, head, wrong) for plane in (claims.keys, claims.values))
    low = None if claims.low is None else _LowJudge(claims.low, head, d, wrong)
    spread = Rows(d)
    no_key = no_value = np.empty((0, d), np.uint8)
    for piece in pieces:
        count = len(piece.wide["key"])
        of_key = of_keys(piece.codes["key"], d)
        of_value = of_values(piece.codes["value"], d, claims.value_bits)
        taken = keys.take(piece.wide["key"], of_key[:count])
        if low is not None and piece.low is not None:
            low.take(taken, piece.low)
        spread.add(values.take(piece.wide["value"], of_value[:count]).decoded)
        # Only the last piece has codes behind its rows.
        no_key, no_value = of_key[count:], of_value[count:]
        for role, rows in piece.rows.items():
            bits = f"<u{rows.itemsize}"
            if not np.array_equal(rows[~taken.coded].view(bits), piece.bare[role].view(bits)):
                wrong[f"{role}_bare"] = "a row of a key without a code is not that of the input"
    keys.end(no_key)
    if low is not None:
        low.end()
    values.end(no_value)
    if not claims.spread.bounds_all(head, spread):
        wrong[claims.spread.name] = "it does not bound what all codes stand for"
    return [(name, f"kv head {head}: {what}") for name, what in wrong.items()]


class _LowJudge:
    """The judge of the low plane of one kv head, which takes its keys some at a time."""

    def __init__(self, plane: LowPlane, head: int, d: int, wrong: dict[str, str]) -> None:
        self._plane, self._head, self._wrong = plane, head, wrong
        self._rows = Rows(d)

    def take(self, keys: Taken, stored: Bytes) -> None:
        """Judge the rows of the next keys."""
        codes, d = of_low(stored, self._plane.bits), keys.errors.shape[1]
        if not is_empty(codes, keys.coded, d):
            self._wrong["key_low"] = "what is of no entry, or of a key without a code, is not 0"
        numbers = codes[keys.coded, :d].astype(np.float64) - BIAS
        most = _TOP[self._plane.bits]
        if not (np.abs(numbers) <= most).all():
            self._wrong["key_low"] = f"a number is not from -{most} to {most}"
        step = keys.scales.astype(np.float32) / np.float32(2 * most + 1)
        part = step.astype(np.float64)[:, None] * numbers
        errors = (keys.errors.astype(np.float64) - part).astype(np.float32)
        self._rows.add(errors.astype(np.float64))

    def end(self) -> None:
        """Judge what is said of all keys."""
        matrix = self._plane.matrix
        if not self._rows.longest <= matrix.bounds[self._head, _REACH]:
            self._wrong[matrix.beside] = "what both planes leave out is larger than it says"
        if not matrix.bounds_all(self._head, self._rows):
            self._wrong[matrix.name] = "it does not bound what both planes of all keys leave out"
