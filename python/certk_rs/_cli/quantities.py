"""How numbers are written on the command line and in configuration files.

Readers for `typer.Option(parser=...)`. They are given what was typed, the default of an option or a
value of a configuration file; what they refuse becomes a usage error that names the option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import typer

# One form for all, so that no number depends on the locale or on digits of other scripts.
_DECIMAL = re.compile(r"[+-]?[0-9](_?[0-9])*(\.[0-9](_?[0-9])*)?(e[+-]?[0-9]{1,9})?", re.IGNORECASE)
_SIZE = re.compile(r"([0-9][0-9_.]*) ?([a-z]*)", re.IGNORECASE)
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgtp")},
    **{f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgtp")},
}
_MOST = 2**63 - 1
_DIGITS = 18  # behind the first


def whole_number(least: int | None = None) -> Callable[[Any], int]:
    """A reader of whole numbers, not below `least`: 4096, 1_000_000, 1e6, 2.5e3."""

    def read_whole_number(given: Any) -> int:
        number = whole(given)
        if number is None:
            written = _exact(given)
            raise typer.BadParameter(
                f"{_shown(given)} is not a whole number: give one such as 4096, 1_000_000 or 1e6"
                if written is None or _fits(written)
                else f"{_shown(given)} is beyond 2^63: give a smaller number"
            )
        if least is not None and number < least:
            raise typer.BadParameter(f"{_shown(given)} is too small: give {least} or more")
        return number

    return read_whole_number


WHOLE = whole_number()
COUNT = whole_number(least=0)
AT_LEAST_ONE = whole_number(least=1)


def NUMBER(given: Any) -> float:  # noqa: N802  # beside COUNT and SIZE, and used like them
    """Read a real number; what is not finite is left to be refused where it is used."""
    try:
        if isinstance(given, str | int | float) and not isinstance(given, bool):
            return float(given)
    except (ValueError, OverflowError):
        pass
    raise typer.BadParameter(f"{_shown(given)} is not a number: give one such as 0.05 or 1e-3")


def SIZE(given: Any) -> int:  # noqa: N802
    """Read a number of bytes: 4096, 512MB (10^6), 1.5GiB (2^30)."""
    match = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    number = _exact(match[1] if match else given)
    unit = match[2].lower() if match else ""
    if number is None or unit not in _UNITS:
        letter = unit.upper()
        raise typer.BadParameter(
            f"{_shown(given)} is not a size: say {letter}B (10^n) or {letter}iB (2^n)"
            if number is not None and f"{unit}ib" in _UNITS
            else f"{_shown(given)} is not a size: give bytes, or a number with kB, MB, GB or GiB"
        )
    size = number * _UNITS[unit] if _fits(number) else None
    if size is None or size != size.to_integral_value() or not 0 <= size <= _MOST:
        raise typer.BadParameter(
            f"{_shown(given)} is no number of bytes: give a whole number of them, below 2^63"
        )
    return int(size)


def MAX_KEEP(given: Any) -> str:  # noqa: N802
    """See that this is a count or a fraction; it stays text, which alone tells 1 from 1.0."""
    text = str(given)
    try:
        count_or_fraction(text)
    except ValueError:
        raise typer.BadParameter(
            f"{_shown(given)}: give a whole number of keys or a fraction in (0, 1]"
        ) from None
    return text


class Place(str):
    """A path or a URL, as it was typed."""

    __slots__ = ()


def PLACE(given: Any) -> Place:  # noqa: N802
    """Read a path or a URL."""
    if not isinstance(given, str):
        raise typer.BadParameter(f"{_shown(given)} is no path: give text")
    return Place(given)


def BUDGETS(given: Any) -> str:  # noqa: N802
    """Read a budget or a rule of budgets; it stays text, and is judged where it is used."""
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise typer.BadParameter(f"{_shown(given)} is no budget: give a number or a rule")
    return given if isinstance(given, str) else repr(given)


def count_or_fraction(text: str) -> int | float:
    """What is written as a whole number (7, 1e6) is a count, anything else a fraction.

    So 1 is one key, and 1.0 all of them. ValueError if it is no number.
    """
    count = None if "." in text else whole(text)
    return float(text) if count is None else count


def whole(given: Any) -> int | None:
    """A whole number as it is written, None if it is none, or none that fits 64 bits."""
    number = _exact(given)
    if number is None or not _fits(number) or number != number.to_integral_value():
        return None
    return int(number)


def _fits(number: Decimal) -> bool:
    # The digits first, before anything makes an integer of 1e999999999.
    return not number or (number.adjusted() <= _DIGITS and abs(number) <= _MOST)


def _exact(given: Any) -> Decimal | None:
    """A number as it is written, None if it is none."""
    if isinstance(given, float | int) and not isinstance(given, bool):
        given = repr(given)
    if not isinstance(given, str) or not _DECIMAL.fullmatch(given.strip()):
        return None
    return Decimal(given.strip().replace("_", ""))


def _shown(given: Any) -> str:
    return repr(given) if isinstance(given, str) else str(given)
