"""Forty prune jobs whose outputs are the same bytes from one version of the code to the next.

A change that should change no output leaves `prune_corpus.json` as it is. One that should is
followed by `CERTK_BLESS=1 pytest tests/files/test_prune_corpus.py`, and its diff is reviewed. The
hashes are those of outputs whose version number is blanked: a release changes none of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from certk_rs import CertkError, _native, prune
from cli_fixtures import write_cache
from levels import LEVELS
from repository import EXAMPLE

EXPECTED = Path(__file__).with_suffix("").with_name("prune_corpus.json")

CACHES: dict[str, dict[str, Any]] = {
    "small": {},
    "long": {"n": 300, "d": 8, "m": 20, "dtype": "F32", "layers": 3},
    "grouped": {"n": 130, "heads": 6, "m": 5, "dtype": "BF16", "spread": 1.0},
    "causal": {"n": 40, "m": 9, "metadata": {"scale": "0.75", "causal_offset": "31"}},
    "peaked": {"n": 500, "m": 12, "d": 16, "spread": 6.0, "kv_heads": 1, "heads": 1},
    "flat": {"n": 257, "m": 4, "spread": 0.05, "batch": False},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "loose": {"eps": 0.5},
    "usual": {"eps": 0.05},
    "tight": {"eps": 1e-6},
    "all": {"eps": 0.0},
    "by_layer": {"eps": "0=0.01,*=0.2"},
    "a_set_per_layer": {"eps": 0.05, "granularity": "layer"},
    "one_set": {"eps": 0.05, "granularity": "token"},
    "few": {"eps": 0.05, "max_keep": 6},
    "a_share": {"eps": 0.01, "max_keep": 0.25},
    "ends": {"eps": 0.1, "keep_first": 2, "keep_last": 5},
    "blocks": {"eps": 0.1, "block_size": 4, "keep_first": 1},
    "most_rows": {"eps": 0.05, "coverage": 0.8},
    "held_out": {"eps": 0.05, "holdout": 0.34},
    "every_row": {"eps": 0.05, "proof": "full"},
    "heads_alone": {"eps": 0.05, "proof": "compact"},
    "no_proof": {"eps": 0.05, "proof": "none"},
    "guarded": {"eps": 0.05, "rest": "file"},
    "coded": {"eps": 0.05, "rest": "codes", "key_bits": 16},
    "codes_alone": {"eps": 0.05, "rest": "codes", "key_bits": 12, "value_bits": 4, "hot": 0},
    "hot": {"eps": 0.05, "rest": "file", "hot": 0.2},
    "hot_count": {"eps": 0.3, "rest": "file", "hot": 30, "keep_last": 3},
    "sized": {"size": 0.3},
    "counted": {"size": 50, "keep_last": 2},
    "bytes": {"size_bytes": 28_000, "proof": "none"},
    "by_output": {"out_tol": 0.3},
    "units_of_heads": {"eps": 0.05, "unit": "head", "jobs": 2},
}
# Every request of one cache, and some of each cache.
JOBS = [(cache, request) for request in REQUESTS for cache in ["causal"]]
JOBS += [
    (cache, request)
    for cache in ("small", "long", "grouped", "peaked", "flat")
    for request in ("usual", "a_set_per_layer", "guarded", "coded", "by_output")
]


def hashes(folder: Path) -> dict[str, str]:
    """Run every job in this folder; return the hash of its output under its name."""
    inputs = {name: folder / "in" / f"{name}.safetensors" for name in CACHES}
    for seed, (name, shape) in enumerate(CACHES.items()):
        write_cache(inputs[name], seed=seed, **shape)
    inputs["real"] = EXAMPLE
    found = {}
    for cache, request in [*JOBS, ("real", "usual"), ("real", "guarded"), ("real", "codes_alone")]:
        out = folder / cache / request
        prune(inputs[cache], out, fail_fast=True, **REQUESTS[request])
        [output] = out.glob("*.safetensors")
        found[f"{cache} {request}"] = hashlib.sha256(blanked(output.read_bytes())).hexdigest()
    return found


def blanked(output: bytes) -> bytes:
    """Return an output without the version that wrote it, and without the seal that covers it."""
    start = 8 + int.from_bytes(output[:8], "little")
    head, body = json.loads(output[8:start]), output[start:]
    certificate = json.loads(head["__metadata__"].pop("certk"))
    del certificate["sha256"], certificate["library"]
    return json.dumps([head, certificate]).encode() + body


@pytest.fixture(params=LEVELS)
def at_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level that this processor has."""
    try:
        _native.set_simd_level(request.param)
    except CertkError as error:
        if "cannot run here" not in str(error):
            raise
        pytest.skip(f"no {request.param} here")
    yield request.param
    _native.set_simd_level(None)


def test_outputs_are_those_of_before(tmp_path: Path, at_level: str) -> None:
    found = hashes(tmp_path)
    if os.environ.get("CERTK_BLESS"):
        EXPECTED.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(EXPECTED.read_text())
    assert len(found) >= 40
