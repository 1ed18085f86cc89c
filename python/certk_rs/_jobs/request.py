"""What a prune job is asked for: all of it that has a say in the bytes of its outputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import CertkError
from .budgets import Budgets, read_budgets

GRANULARITIES = ("head", "layer", "token")
PROOFS = ("auto", "full", "compact", "none")
GUARDS = ("none", "codes")


@dataclass(frozen=True)
class Request:
    """The options of a prune job. Two jobs with equal requests write equal bytes.

    Exactly one of `eps`, `size`, `size_bytes` and `out_tol` is the target; where it is not `eps`,
    `eps` is None.
    """

    eps: Budgets | None = None
    """Tail mass that a row may lose, by layer."""
    size: float | int | None = None
    """Keys to keep in a whole file: a count, or a fraction in (0, 1] of the visible ones."""
    size_bytes: int | None = None
    """Bytes that a whole output may have."""
    hot: float | int | None = None
    """Keys that stay in a whole file, given as `size` is: those needed most often."""
    out_tol: float | None = None
    """Euclidean norm of the error that dropping may cause in the attention output of a row."""
    granularity: str = "head"
    max_keep: int | float | None = None
    keep_first: int = 0
    keep_last: int = 0
    block_size: int = 1
    coverage: float = 1.0
    """Share of the queries of a group that must be within the budget."""
    holdout: float = 0.0
    """Share of the queries that sets are tried on which were made without them; the sets that are
    written are made for all."""
    proof: str = "auto"
    guard: str = "none"
    """What is remembered of the dropped keys, for queries to come."""
    names: str | None = None
    layout: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in TARGETS if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) or "nothing"
            raise CertkError(
                f"the target is {what}: give exactly one of eps, size, size_bytes and out_tol"
            )
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("proof", self.proof, PROOFS)
        _one_of("guard", self.guard, GUARDS)
        if self.layout is not None:
            _one_of("layout", self.layout, ("hnd", "nhd"))
        _share_or_count("max_keep", self.max_keep)
        _share_or_count("size", self.size)
        _share_or_count("hot", self.hot)
        for name in ("keep_first", "keep_last"):
            _at_least(name, getattr(self, name), 0)
        _at_least("block_size", self.block_size, 1)
        if self.size_bytes is not None:
            _at_least("size_bytes", self.size_bytes, 1)
        if self.out_tol is not None:
            _number("out_tol", self.out_tol)
        for name in ("coverage", "holdout"):
            _number(name, getattr(self, name))
        if self.out_tol is not None and not 0 < self.out_tol < float("inf"):
            raise CertkError(f"out_tol is {self.out_tol!r}: give a positive number")
        if not 0 < self.coverage <= 1:
            raise CertkError(f"coverage is {self.coverage!r}: give a share in (0, 1]")
        if not 0 <= self.holdout < 1:
            raise CertkError(f"holdout is {self.holdout!r}: give a share in [0, 1)")
        self._check_combination()

    def _check_combination(self) -> None:
        sized = "size" if self.size is not None else "size_bytes"
        if self.eps is None and self.out_tol is None:
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

    def _check_hot(self) -> None:
        """That a hot set, which promises nothing by itself, comes with what makes it one."""
        if self.eps is None:
            raise CertkError("hot goes with eps, what later queries may lose: give eps")
        if self.eps.least <= 0:
            raise CertkError("hot needs eps above 0: a query that may lose nothing needs every key")
        if self.guard == "none":
            raise CertkError(
                "hot keys promise nothing to a query by themselves: give guard codes, which proves "
                "what each has lost and names what to fetch"
            )
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

    def to_json(self) -> dict[str, Any]:
        """As plain data, for a manifest."""
        body = asdict(self)
        body["eps"] = None if self.eps is None else str(self.eps)
        return body

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Request:
        """The request that `to_json` gave this body; a `CertkError` for anything else."""
        if set(body) != {field.name for field in fields(cls)}:
            raise CertkError("the options of the job are not those of this version")
        eps = body["eps"]
        return cls(**body | {"eps": None if eps is None else read_budgets(eps)})


TARGETS = ("eps", "size", "size_bytes", "out_tol")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise CertkError(f"{name} is {value!r}: give {', '.join(allowed[:-1])} or {allowed[-1]}")


def _number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CertkError(f"{name} is {value!r}: give a number")


def _share_or_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise CertkError(
                f"{name} is {value}: give a fraction in (0, 1], or a whole number of keys"
            )
    elif type(value) is not int:
        raise CertkError(f"{name} is {value!r}: give a fraction in (0, 1], or a whole number")
    elif value < 1:
        raise CertkError(f"{name} is {value}: at least one key must be kept")


def _at_least(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise CertkError(f"{name} is {value!r}: give a count of {least} or more")
