"""Budgets of tail mass: one for all layers, or one by layer, from a rule or a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CertkError, one_line

# Below this the float64 range ends, and with it what a recorded tail mass can promise (choose).
SMALLEST_EPS = 1e-300

_RULE = re.compile(r"(?P<first>[0-9]{1,9})?(?P<to>-)?(?P<last>[0-9]{1,9})?")
_FORM = "a number, or a rule such as '0-3=0.01,4-=0.05,*=0.1', or a .json file {\"0-3\": 0.01}"


@dataclass(frozen=True)
class Budgets:
    """The budget of every layer: that of the first rule it is in, or the default.

    A rule is (first layer, last layer, eps), ends included; `last` None: all that follow. Without a
    default a layer that no rule names is an error.
    """

    default: float | None
    rules: tuple[tuple[int, int | None, float], ...] = ()

    def of(self, layer: int) -> float:
        """Return the budget of one layer; a `CertkError` if there is none."""
        for first, last, eps in self.rules:
            if first <= layer and (last is None or layer <= last):
                return eps
        if self.default is None:
            raise CertkError(
                f"eps names no budget for layer {layer}: add a rule for it, or '*=...' for the rest"
            )
        return self.default

    @property
    def least(self) -> float:
        """The smallest budget that any layer may have."""
        every = [eps for _, _, eps in self.rules]
        return min(every if self.default is None else [*every, self.default])

    def __str__(self) -> str:
        if not self.rules:
            return repr(self.default)
        parts = [f"{_layers(first, last)}={eps!r}" for first, last, eps in self.rules]
        return ",".join(parts + ([] if self.default is None else [f"*={self.default!r}"]))


def check_eps(eps: float) -> float:
    """Return a budget that a prune job can promise; a `CertkError` for any other number."""
    if not (eps == 0 or SMALLEST_EPS <= eps < 1):
        raise CertkError(f"eps is {eps!r}: give 0 or a number from {SMALLEST_EPS} to below 1")
    return float(eps)


def read_budgets(given: float | str | Path | Mapping[str | int, float] | Budgets) -> Budgets:
    """Budgets from a number, a rule, a mapping like a rule, or a `.json` file that holds one.

    A rule lists layers and budgets: `0-3=0.01,4=0.02,5-=0.05,*=0.1`; the first that fits counts,
    `*` is all the others.
    """
    if isinstance(given, Budgets):
        return given
    if isinstance(given, Mapping):
        return _of_pairs(list(given.items()))
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return Budgets(check_eps(float(given)))
    text = str(given).strip()
    if text.endswith(".json"):
        return _of_file(Path(text))
    if "=" not in text:
        return Budgets(check_eps(_number(text)))
    pairs = [part.split("=", 1) for part in text.split(",") if part.strip()]
    if any(len(pair) != 2 for pair in pairs):
        raise CertkError(f"eps {text!r} is not a rule: give {_FORM}")
    return _of_pairs([(layers.strip(), _number(eps)) for layers, eps in pairs])


def _of_file(path: Path) -> Budgets:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CertkError(f"eps: {path} is not JSON ({one_line(error)}): give {_FORM}") from None
    if not isinstance(body, dict):
        raise CertkError(f"eps: {path} holds no object of layers and budgets: give {_FORM}")
    return _of_pairs(list(body.items()))


def _of_pairs(pairs: list[tuple[Any, Any]]) -> Budgets:
    default, rules = None, []
    for layers, eps in pairs:
        if isinstance(eps, bool) or not isinstance(eps, (int, float)):
            raise CertkError(f"eps of layers {layers!r} is {eps!r}: give a number")
        budget = check_eps(float(eps))
        if layers in ("*", "default"):
            default = budget
            continue
        found = _RULE.fullmatch(str(layers))  # {0: 0.1} is meant as it looks
        if found is None or found["first"] is None:
            raise CertkError(f"eps: {layers!r} are no layers: write 3, 0-3, 4- or * ({_FORM})")
        first = int(found["first"])
        last = int(found["last"]) if found["last"] else None if found["to"] else first
        rules.append((first, last, budget))
    return Budgets(default, tuple(rules))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CertkError(f"eps (--eps) {text!r} is not a number: give {_FORM}") from None


def _layers(first: int, last: int | None) -> str:
    return f"{first}-" if last is None else f"{first}" if first == last else f"{first}-{last}"
