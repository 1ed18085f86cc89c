"""Stored bits as tensors of the same dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .._files.safetensors import STORAGE


def tensor(raw: NDArray[Any], dtype: str) -> torch.Tensor:
    """View an array in the storage type of a dtype (uint16 for BF16) as a tensor."""
    if dtype == "BF16":
        return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
    assert raw.dtype == np.dtype(STORAGE[dtype])
    return torch.from_numpy(raw)
