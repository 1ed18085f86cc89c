"""The options of a prune job: one table for Python, the command line, manifests, certificates.

A budget of tail mass is one for all layers, or one by layer, from a rule or a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._files.bits import KEY_BITS, VALUE_BITS
from ..errors import CertkError, one_line

# Below this the float64 range ends, and with it what a recorded tail mass can promise (`choose`).
SMALLEST_EPS = 1e-300
# The loss by which keys are found to be needed where no eps is given.
LATER_EPS = 0.05

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


Check = Callable[[str, Any], None]


def _one_of(known: tuple[int, ...]) -> Check:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or value not in known:
            raise CertkError(f"{name} is {value!r}: give one of {known}")

    return check


def _choice(*allowed: str) -> Check:
    def check(name: str, value: object) -> None:
        if value not in allowed:
            raise CertkError(
                f"{name} is {value!r}: give {', '.join(allowed[:-1])} or {allowed[-1]}"
            )

    return check


def _count(least: int) -> Check:
    def check(name: str, value: object) -> None:
        if type(value) is not int or value < least:
            raise CertkError(f"{name} is {value!r}: give a count of {least} or more")

    return check


def _real(accepts: Callable[[float], bool], wanted: str) -> Check:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CertkError(f"{name} is {value!r}: give a number")
        if not accepts(value):
            raise CertkError(f"{name} is {value!r}: give {wanted}")

    return check


def _share_or_count(name: str, value: object) -> None:
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise CertkError(
                f"{name} is {value}: give a fraction in (0, 1], or a whole number of keys"
            )
    elif type(value) is not int:
        raise CertkError(f"{name} is {value!r}: give a fraction in (0, 1], or a whole number")
    elif value < 1:
        raise CertkError(f"{name} is {value}: at least one key must be kept")


def _hot(name: str, value: object) -> None:
    if type(value) is not int or value != 0:
        _share_or_count(name, value)


def _option(
    default: Any = None,
    *,
    metavar: str | None = None,
    said: str,
    check: Check | None = None,
    choices: tuple[str, ...] = (),
    flag: str | None = None,
    recorded: bool = False,
) -> Any:
    """Return the field of an option.

    Args:
        default: Its value where none is given; a default of None is not checked.
        metavar: The name of its value in the help of the command line.
        said: The help.
        check: Raises `CertkError` for a value that it cannot have.
        choices: The values that it can have, where they are few.
        flag: Its name on the command line; None: that of the field.
        recorded: Whether the certificate has it as it is given.
    """
    known = {"metavar": metavar, "help": said, "choices": choices, "flag": flag}
    check = _choice(*choices) if choices else check
    return field(default=default, metadata={**known, "check": check, "recorded": recorded})


@dataclass(frozen=True)
class Request:
    """The options of a prune job. Two jobs with equal requests write equal bytes.

    Exactly one of `eps`, `size`, `size_bytes` and `out_tol` is the target; where it is not `eps`,
    `eps` is None.
    """

    eps: Budgets | None = _option(  # noqa: RUF009  # makes a field
        metavar="EPS|RULE|FILE",
        said="Tail mass that a row may lose, 0 <= eps < 1; by layer: '0-3=0.01,*=0.05', or a .json "
        "file with such an object.",
    )
    size: float | int | None = _option(
        metavar="N|F",
        said="Instead of --eps: keep at most N keys of a file, or a fraction F, so distributed "
        "that the worst tail mass is least.",
        check=_share_or_count,
    )
    size_bytes: int | None = _option(
        metavar="N", said="Instead of --eps: the bytes of an output.", check=_count(1), flag="bytes"
    )
    hot: float | int | None = _option(
        metavar="N|F",
        said="With --eps and --rest: keep N keys of a file, or a fraction F, those that queries "
        "need most often; eps is what later ones may lose.",
        check=_hot,
    )
    out_tol: float | None = _option(
        metavar="X",
        said="Instead of --eps: the Euclidean error that a row's output may get.",
        check=_real(lambda x: 0 < x < float("inf"), "a positive number"),
        recorded=True,
    )
    granularity: str = _option(
        "head",
        said="One set per head, per layer, or per file (token).",
        choices=("head", "layer", "token"),
        recorded=True,
    )
    max_keep: int | float | None = _option(
        metavar="N|F",
        said="At most N keys (an integer) or a fraction in (0, 1].",
        check=_share_or_count,
        recorded=True,
    )
    keep_first: int = _option(
        0, metavar="N", said="Always keep the first N keys.", check=_count(0), recorded=True
    )
    keep_last: int = _option(
        0, metavar="N", said="Always keep the last N keys.", check=_count(0), recorded=True
    )
    block_size: int = _option(
        1, metavar="N", said="Keep whole blocks of N positions.", check=_count(1), recorded=True
    )
    coverage: float = _option(
        1.0,
        metavar="F",
        said="Share of the rows that must be within the budget, in (0, 1].",
        check=_real(lambda x: 0 < x <= 1, "a share in (0, 1]"),
    )
    holdout: float = _option(
        0.0,
        metavar="F",
        said="First try sets on a share of the queries that they were made without; what is "
        "written is then made for all queries.",
        check=_real(lambda x: 0 <= x < 1, "a share in [0, 1)"),
    )
    proof: str = _option(
        "auto",
        said="How much proof is written: full (every row), compact, none, or auto: full where "
        "that is at most 2 % of the cache.",
        choices=("auto", "full", "compact", "none"),
    )
    rest: str = _option(
        "drop",
        said="What is not kept: drop it; codes, which answer later queries with a proof of what "
        "they lost; or file: what proves their loss, and names the rows to read from the input.",
        choices=("drop", "codes", "file"),
        recorded=True,
    )
    key_bits: int | None = _option(
        metavar="N",
        said="With codes: 8, 12 or 16 bits an entry of a key. Default: 16, of half floats 12.",
        check=_one_of(KEY_BITS),
    )
    value_bits: int | None = _option(
        metavar="N",
        said="With codes: 8 or 4 bits an entry of a value. Default: 8.",
        check=_one_of(VALUE_BITS),
    )
    effort: str = _option(
        "default",
        said="How far the search for small sets goes: default, to 0.5 % above the lower bound or "
        "where more hardly helps; fast, to 2 %; thorough, until nothing helps.",
        choices=("fast", "default", "thorough"),
    )
    names: str | None = _option(
        metavar="PATTERN",
        said="Names of the tensors: {i} for the layer, {key|value|query} with the three words in "
        "use, as in 'model.{i}.attn.{key|value|query}'.",
    )
    layout: str | None = _option(
        said="How tensors are stored: hnd, (heads, rows, d), or nhd, (rows, heads, d). Default: "
        "hnd, and what looks otherwise is refused.",
        choices=("hnd", "nhd"),
    )

    queries: str = _option(
        "file",
        said="file, or with --rest codes none: sets are what --keep-first and --keep-last say, and "
        "nothing is promised.",
        choices=("file", "none"),
    )

    def __post_init__(self) -> None:
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if self.queries == "file" and len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise CertkError(
                f"the target is {what}: give exactly one of eps, size, size_bytes and out_tol"
            )
        for each in fields(self):
            value, check = getattr(self, each.name), each.metadata["check"]
            if check is not None and (value is not None or each.default is not None):
                check(each.name, value)
        self._check_combination()

    def _check_combination(self) -> None:
        if self.queries == "none":
            self._check_without_queries()
        if self.rest != "codes" and (self.key_bits or self.value_bits):
            raise CertkError("key_bits and value_bits are those of codes: give rest codes")
        sized = "size" if self.size is not None else "size_bytes"
        if self.size is not None or self.size_bytes is not None:
            if self.max_keep is not None:
                raise CertkError(f"max_keep and {sized} both limit the keys: leave one out")
            if self.coverage < 1:
                raise CertkError(
                    f"coverage goes with a budget, and {sized} finds one: leave one out"
                )
        if self.out_tol is not None and self.granularity == "token":
            raise CertkError("out_tol is of one layer's output: take granularity head or layer")
        if self.hot is not None:
            self._check_hot()

    def _check_without_queries(self) -> None:
        """Refuse what only queries can choose or prove."""
        if self.rest != "codes":
            raise CertkError(
                "queries none goes with rest codes: without queries nothing can be proven of what "
                "is dropped"
            )
        free = {"rest", "key_bits", "value_bits", "keep_first", "keep_last", "granularity"}
        free |= {"names", "layout", "queries", "effort"}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in free and value not in (each.default, "none"):
                raise CertkError(
                    f"queries none and {each.name} exclude each other: there is no query to choose "
                    "or to prove by; leave one out"
                )

    def _check_hot(self) -> None:
        """Refuse a hot set, which promises nothing by itself, without what makes it a promise."""
        if self.eps is None:
            raise CertkError("hot goes with eps, what later queries may lose: give eps")
        if self.eps.least <= 0:
            raise CertkError("hot needs eps above 0: a query that may lose nothing needs every key")
        if self.rest == "drop":
            raise CertkError(
                "hot keys promise nothing to a query by themselves: give rest codes or file, which "
                "prove what each has lost"
            )
        if self.hot == 0 and self.rest != "codes":
            raise CertkError("hot is 0: at least one key must be kept, but with rest codes")
        others = {
            "max_keep": self.max_keep is not None,
            "coverage": self.coverage < 1,
            "block_size": self.block_size > 1,
        }
        for name, given in others.items():
            if given:
                raise CertkError(f"hot and {name} exclude each other: leave one out")
        if self.granularity == "token":
            raise CertkError(
                "hot keys are chosen by head or layer: take one of these granularities"
            )

    @property
    def keeps_needed(self) -> bool:
        """True of a size with codes: the keys that are needed most stay, as with `hot`.

        Of other rows codes know enough. Blocks and tokens are chosen for the worst row.
        """
        sized = self.size is not None or self.size_bytes is not None
        return (
            sized and self.rest == "codes" and self.granularity != "token" and self.block_size == 1
        )

    def recorded(self) -> dict[str, Any]:
        """Return the options that a certificate has as they are given."""
        names = [each.name for each in fields(self) if each.metadata["recorded"]]
        return {name: getattr(self, name) for name in names} | {"coverage": float(self.coverage)}

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for a manifest."""
        body = asdict(self)
        body["eps"] = None if self.eps is None else str(self.eps)
        return body

    @classmethod
    def of(cls, **given: Any) -> Request:
        """Return the request of what users give: budgets as a rule, real numbers as whole ones."""
        if given.get("eps") is not None:
            given["eps"] = read_budgets(given["eps"])
        if type(given.get("out_tol")) is int:
            given["out_tol"] = float(given["out_tol"])
        return cls(**given)


TARGETS = ("eps", "size", "size_bytes", "out_tol")
