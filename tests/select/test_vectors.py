"""The library against `vectors/rows.json`, and the file against the script that makes it."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import certk_rs as ck
import make_vectors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VECTORS: list[dict[str, Any]] = json.loads(make_vectors.PATH.read_text())["vectors"]


def from_bits(text: str, dtype: str) -> np.ndarray:
    """Stored values from hex digits."""
    target = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    unsigned = np.dtype(f">u{target.itemsize}")
    return (
        np.frombuffer(bytes.fromhex(text), unsigned).astype(unsigned.newbyteorder("=")).view(target)
    )


def float64(text: str) -> float:
    """One float64 from hex digits."""
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def options(vector: dict[str, Any]) -> dict[str, Any]:
    """The row options of a vector."""
    given: dict[str, Any] = {"kind": vector["kind"], "scale": float64(vector["scale"])}
    if vector["mask"] is not None:
        mask = vector["mask"]
        boolean = mask["dtype"] == "bool"
        bits = mask["bits"]
        given["mask"] = (
            np.array([c == "1" for c in bits]) if boolean else from_bits(bits, mask["dtype"])
        )
    if vector["length"] is not None:
        given["lengths"] = vector["length"]
    return given


def holds(cert: Any, mass: dict[str, Any]) -> bool:
    """Return True if the reported interval holds the true mass."""
    low, high = (float64(end) for end in mass["bits"])
    return bool(cert.tail_mass_lower <= low and cert.tail_mass_upper >= high)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"].replace(" ", "-"))
@pytest.mark.parametrize("prove", [False, True])
def test_vector(vector: dict[str, Any], prove: bool) -> None:
    scores, expect = from_bits(vector["scores"], vector["dtype"]), vector["expect"]
    names = ("min_keep", "max_keep", "keep_first", "keep_last", "block_size")
    sel = ck.select(
        scores,
        float64(vector["eps"]),
        prove_minimal=prove,
        **options(vector),
        **{name: vector[name] for name in names},
    )
    assert ck.Status(int(sel.status)).name == expect["status"]
    assert expect["k_min"] <= sel.k <= expect["k_most"]
    if sel.minimal and expect["status"] == "CERTIFIED":
        assert sel.k == expect["k_min"]
    if sel.k == expect["k_min"]:
        assert sel.row(0).tolist() == expect["indices"]
        assert holds(sel, expect["tail_mass"])
    for independent in (False, True):
        given = expect["given"]
        cert = ck.certify(scores, given["indices"], independent=independent, **options(vector))
        assert cert.k == len(given["indices"])
        assert holds(cert, given["tail_mass"])


def test_the_file_is_what_the_script_makes() -> None:
    assert make_vectors.text() == make_vectors.PATH.read_text()
