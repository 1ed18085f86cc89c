"""Judgement of classes of transformers by their attention, beyond the registry they ask.

transformers judges a model by the file it is defined in. A class in it that goes its own way would
not be certified, and would take the masks that are made for certified attention for its own, which
are other ones. A class that has an indexer choose keys would be refused in the middle of a forward
pass. And a family that transformers does not run under "sdpa"
need not keep to what "sdpa" takes a missing mask for.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel


@cache
def computes_by_itself(kind: Any) -> bool:
    """Judge by its source, as transformers judges whole files, if a class attends by itself."""
    if "Attention" not in kind.__name__:
        return False
    code = _source(kind)
    own = "softmax(" in code or "scaled_dot_product_attention(" in code
    return own and "ALL_ATTENTION_FUNCTIONS" not in code


@cache
def beside_another(kind: type[Any]) -> bool:
    """Return True if a class is defined in one file with such an attention."""
    here = kind.__module__
    if not here.startswith("transformers."):
        return False
    others = [each for each in vars(sys.modules[here]).values() if isinstance(each, type)]
    return any(each.__module__ == here and computes_by_itself(each) for each in others)


def asks_for_more(module: nn.Module) -> str | None:
    """Name what an attention module chooses by itself; None if nothing."""
    kind: Any = type(module)
    code = _source(kind)
    # Layers without an indexer take over the choice of one before them.
    indexed = re.search(r"\b(block_)?indices=", code) and getattr(module, "indexer", None)
    if indexed is not None and "ALL_ATTENTION_FUNCTIONS" in code:
        return "has an indexer choose keys, which it names beside its mask"
    return None


def has_attention(model: nn.Module) -> bool:
    """Return True if some part may ask the registry; of classes from elsewhere it is not known."""
    kinds: set[Any] = {type(module) for module in model.modules()}
    return any(_may_ask(kind) for kind in kinds)


@cache
def _may_ask(kind: Any) -> bool:
    owner: Any = _owner(kind)
    if owner.__module__.startswith("torch."):
        return False
    if not owner.__module__.startswith("transformers."):
        return not issubclass(kind, PreTrainedModel)
    return "ALL_ATTENTION_FUNCTIONS" in _source(kind)


@cache
def masks_are_those_of_sdpa(config: type[Any]) -> bool:
    """Return True if all models of a config's family understand boolean masks, and none at all."""
    return all(_run_under_sdpa(config))


@cache
def is_causal_by_default(kind: type[Any]) -> bool:
    """Return True if a call without a mask is causal by default, as under "sdpa".

    Under "eager", all that a family without "sdpa" is written for, such a call sees everything.
    """
    found = list(_run_under_sdpa(kind))
    return any(found) or not found


def _run_under_sdpa(kind: type[Any]) -> Iterator[bool]:
    """Yield, for each model in the package of a config or a module, True if "sdpa" runs it."""
    own = [each for each in kind.__mro__ if each.__module__.startswith("transformers.models.")]
    package = own[0].__module__.rpartition(".")[0] if own else None
    for name, file in list(sys.modules.items()):
        if package is not None and name.startswith(f"{package}.modeling_"):
            for each in vars(file).values():
                model = isinstance(each, type) and issubclass(each, PreTrainedModel)
                if model and each.__module__ == name:
                    yield bool(each._supports_sdpa)


def _owner(kind: type[Any]) -> type[Any]:
    return next((each for each in kind.__mro__ if "forward" in vars(each)), kind)


@cache
def _source(kind: type[Any]) -> str:
    """Return the source of the class whose `forward` it is; empty if torch's, or not known."""
    owner = _owner(kind)
    if owner.__module__.startswith("torch."):
        return ""
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""
