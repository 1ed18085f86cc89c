"""Arrays of other libraries that are lent by DLPack alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck
from certk_rs import CertkError


class Lent:
    """An array that knows DLPack and nothing of NumPy."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_rows_are_those_of_the_array(dtype: str) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 300)).astype(dtype)
    found, wanted = ck.select(Lent(rows), 0.05), ck.select(rows, 0.05)  # type: ignore[arg-type]
    assert np.array_equal(found.indices, wanted.indices)
    assert found.tail_mass_upper.tobytes() == wanted.tail_mass_upper.tobytes()
    assert np.array_equal(np.from_dlpack(found.indices), wanted.indices)


def test_bfloat16_goes_through_torch() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.randn(4, 300, generator=torch.manual_seed(0)).bfloat16()
    found = ck.select(Lent(rows), 0.05)  # type: ignore[arg-type]
    assert np.array_equal(found.indices, ck.select(rows, 0.05).indices)


def test_what_cannot_be_lent_is_refused() -> None:
    class Elsewhere(Lent):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("it is on another device")

    with pytest.raises(CertkError, match=r"scores cannot be read by DLPack \(it is on another"):
        ck.select(Elsewhere(np.ones(3)), 0.05)  # type: ignore[arg-type]
    with pytest.raises(CertkError, match="scores has dtype complex128"):
        ck.select(Lent(np.ones(3, complex)), 0.05)  # type: ignore[arg-type]
