"""The budget of a call: that of the innermost `budget`, else that of `use`.

Budgets of contexts live in a context variable, those of `use` on the model's modules, where copies
of a model and pickles take them along and `config.json` does not.
"""

from __future__ import annotations

import math
import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from numbers import Real
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from ..errors import CertkError
from ..sparse_attention import Weights, need_weights
from .own_attention import beside_another

_ON_MODULE = "_certk_budget"


@dataclass(frozen=True)
class Budget:
    """The budget of a row: a share `eps` of its mass, or `out_tol` of its output."""

    eps: float | None
    out_tol: float | None = None
    threads: int | None = None
    even_if_slower: bool = False
    """Drop keys also where computing all of them is faster."""
    weights: Weights = "codes"

    def __post_init__(self) -> None:
        need_weights(self.weights)
        if (self.eps is None) == (self.out_tol is None):
            given = "neither" if self.eps is None else "both"
            raise CertkError(
                f"eps and out_tol: {given} given; pass eps, a budget on the dropped mass, or "
                "out_tol, one on the output's error"
            )
        # Whatever the annotations say: these come from users.
        values: list[tuple[str, Any, float]] = [
            ("eps", self.eps, 1.0),
            ("out_tol", self.out_tol, math.inf),
        ]
        for name, value, most in values:
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real):
                raise CertkError(f"{name} is a {type(value).__name__}; pass one number")
            if not 0 <= float(value) < most:
                raise CertkError(f"{name} is {value!r}; pass a number with 0 <= {name} < {most:g}")


class Running:
    """A `budget` context: its budget, how many calls it has covered, and whether it is over."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.calls = 0
        self.over = False


RUNNING: ContextVar[tuple[Running, ...]] = ContextVar("certk_budgets", default=())


def put_on(model: nn.Module, budget: Budget) -> None:
    """Let `budget` hold for every attention call of the model's modules."""
    for module in model.modules():
        setattr(module, _ON_MODULE, budget)


def budget_for(module: nn.Module) -> Budget:
    """Return the budget that holds for a call of `module`, and count the call."""
    running = [context for context in RUNNING.get() if not context.over]
    kind: Any = type(module)
    if not hasattr(module, _ON_MODULE) and beside_another(kind):
        raise CertkError(
            f"{kind.__name__} comes from a family of which some parts compute attention by "
            "themselves: call certk_rs.transformers.use(model, eps=...) once, which judges it"
        )
    for context in running:
        context.calls += 1
    if running:
        return running[-1].budget
    found = getattr(module, _ON_MODULE, None)
    if not isinstance(found, Budget):
        raise CertkError(
            f"no budget for {type(module).__name__}: call certk_rs.transformers.use(model, "
            "eps=...), or run the model inside certk_rs.transformers.budget(eps=...)"
        )
    return found


# With fewer keys than this, or other dtypes, a CertkCache makes no index.
FEWEST_INDEXED = 256
INDEXED = (torch.float32, torch.float16, torch.bfloat16)
# The name of generate's argument, which transformers 5.24 has changed.
_PREPARE: Any = GenerationMixin.prepare_inputs_for_generation
_CACHE = "cache" if "cache" in signature(_PREPARE).parameters else "past_key_values"
_advised = False


def advise_an_index(module: nn.Module, budget: Budget, key: torch.Tensor) -> None:
    """Say that a step of decoding over `key` reads all of it, once in a process."""
    global _advised
    if _advised or budget.eps == 0 or budget.even_if_slower:
        return
    if key.shape[2] < FEWEST_INDEXED or key.dtype not in INDEXED:
        return
    if hasattr(key, "certk_index") or hasattr(key, "certk_dropped"):
        return
    # Layers with windows have no index in any cache.
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    at = getattr(module, "layer_idx", None)
    if at is not None and list(kinds[at : at + 1]) not in ([], ["full_attention"]):
        return
    _advised = True
    warnings.warn(
        "certk_rs.transformers.use alone does not speed up decoding, since every step reads all "
        f"keys to see which matter: pass {_CACHE}=certk_rs.transformers.CertkCache() to generate, "
        "whose index tells (this is said once)",
        stacklevel=3,
    )
