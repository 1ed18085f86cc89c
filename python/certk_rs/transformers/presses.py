"""Keys that presses of kvpress mask in some heads, by indices on attention modules.

Head-wise presses (AdaKV, DuoAttention, KVzip and others) remove no keys. They note what is dropped
in `module.masked_key_indices`, three index tensors (sequence, kv head, key), and kvpress wraps all
attention functions that it finds when it is imported, to overwrite these keys by one that all
queries of a call should dislike enough; there need not be such a key. Certified attention hides
them, which is exact, and does without the wrapper.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import CertkError

NAME = "certk"
"""The name of certified attention as an `attn_implementation`."""


def dropped_by_a_press(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor
) -> NDArray[np.bool_] | None:
    """Mark the keys (batch, kv_heads, n) that a press drops; None if it drops none.

    A prompt begins anew, as under kvpress's wrapper: what was dropped belongs to another one.

    Raises:
        CertkError: Indices of keys that are not there.
    """
    if query.shape[2] == key.shape[2]:
        if "kvpress" in sys.modules:
            module.masked_key_indices = None  # type: ignore[assignment]
            unwrap()
        return None
    told: Any = getattr(module, "masked_key_indices", None)
    if told is None:
        return None
    gone = torch.zeros(key.shape[:3], dtype=torch.bool)
    try:
        gone[tuple(told)] = True
    except (IndexError, TypeError, ValueError) as error:
        raise CertkError(
            f"{type(module).__name__}.masked_key_indices does not go with keys of shape "
            f"{tuple(key.shape)} ({error}): a press has dropped keys of another cache; run this "
            "cache's prompt under the press, or set masked_key_indices to None"
        ) from None
    return gone.numpy()


def unwrap() -> None:
    """Take kvpress's wrapper off certified attention, which hides keys by itself."""
    wrapper = ALL_ATTENTION_FUNCTIONS.get(NAME)
    if getattr(wrapper, "__module__", None) == "kvpress.attention_patch":
        # It hides the function that is registered for all.
        del ALL_ATTENTION_FUNCTIONS[NAME]
