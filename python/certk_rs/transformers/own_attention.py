"""Classes of transformers that compute attention by themselves, beside others that ask.

transformers judges a model by the file it is defined in. A class that goes its own way would not be
certified, and would take the masks that are made for certified attention for its own, which are
other ones.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any


@cache
def computes_by_itself(kind: type[Any]) -> bool:
    """Whether a class is such an attention; by its source, as transformers judges whole files."""
    if "Attention" not in kind.__name__:
        return False
    owner = next((each for each in kind.__mro__ if "forward" in vars(each)), kind)
    if not owner.__module__.startswith("transformers."):
        return False
    try:
        code = inspect.getsource(owner)
    except (OSError, TypeError):
        return False
    own = "softmax(" in code or "scaled_dot_product_attention(" in code
    return own and "ALL_ATTENTION_FUNCTIONS" not in code


@cache
def beside_another(kind: type[Any]) -> bool:
    """Whether a class is defined in one file with such an attention."""
    here = kind.__module__
    if not here.startswith("transformers."):
        return False
    others = [each for each in vars(sys.modules[here]).values() if isinstance(each, type)]
    return any(each.__module__ == here and computes_by_itself(each) for each in others)
