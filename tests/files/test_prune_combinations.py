"""Options of prune together: what is written is confirmed by both verifiers.

Causal rows see unlike numbers of keys, rows that are set aside or left out may see more than
others, and blocks end behind the last key that anybody sees. Neither verifier shares code with what
chose the sets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certk_rs import keep_set_of_queries, prune, verify
from cli_fixtures import read_output, write_cache
from second_verifier import second_verdict


def one_job(seed: int, folder: Path) -> None:
    rng = np.random.default_rng([3, seed])
    m, n = int(rng.choice([1, 4, 9, 20])), int(rng.choice([5, 24, 47]))
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    offset = int(rng.integers(max(-m + 1, -3), n)) if rng.random() < 0.6 else None
    source = folder / "x.safetensors"
    write_cache(
        source,
        metadata=None if offset is None else {"causal_offset": str(offset)},
        kv_heads=kv_heads, heads=kv_heads * group, m=m, n=n, seed=seed,
        dtype=str(rng.choice(["F16", "F32", "BF16"])), spread=float(rng.choice([0.5, 2.0, 4.0])),
    )  # fmt: skip
    options: dict[str, Any] = {
        "granularity": str(rng.choice(["head", "layer", "token"])),
        "block_size": int(rng.choice([1, 3, 8])),
        "holdout": float(rng.choice([0.0, 0.3])) if m > 1 else 0.0,
        "proof": str(rng.choice(["auto", "full"])),
        "unit": str(rng.choice(["auto", "head"])),
    }
    if rng.random() < 0.4:
        options["coverage"] = float(rng.choice([0.5, 0.8]))
    if rng.random() < 0.4:
        options |= {"keep_first": int(rng.integers(3)), "keep_last": int(rng.integers(5))}
    if rng.random() < 0.2 and options["block_size"] == 1 and "keep_last" not in options:
        options["max_keep"] = [3, 0.5][int(rng.integers(2))]
    if rng.random() < 0.4:
        options["guard"] = "codes"
    eps: Any = str(rng.choice(["0.2", "0.02", "0=0,*=0.3", "0=0.3,*=1e-9"]))
    result = prune(source, folder / "out", eps, **options)
    assert not result.failures, (options, [str(each) for each in result.failures])
    output = Path(result.outputs[0].target)
    found = verify(folder / "out", against=source)
    assert found.holds, (options, offset, found.outputs[0].findings)
    code, said = second_verdict(output, source)
    assert code == 0, (options, offset, said)
    # What every head must keep, of the keys that anybody sees.
    first, last = options.get("keep_first", 0), options.get("keep_last", 0)
    seen = n if offset is None else min(max(m + offset, 0), n)
    if not options["holdout"]:
        tensors = read_output(output)
        asked = {*range(min(first, seen)), *range(max(0, seen - last), seen)}
        for name, array in tensors.items():
            if name.endswith(".indices") or name == "indices":
                starts = tensors.get(name.replace("indices", "indptr"))
                parts = [array] if starts is None else np.split(array, starts[1:-1])
                assert all(asked <= set(part.tolist()) for part in parts), (options, name)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_is_confirmed(seed: int, tmp_path: Path) -> None:
    one_job(seed, tmp_path)


@pytest.mark.heavy
def test_what_is_written_of_many_is_confirmed(tmp_path: Path) -> None:
    for seed in range(1000, 2500):
        one_job(seed, tmp_path / str(seed))


@pytest.mark.parametrize("block_size", [2, 3, 8])
@pytest.mark.parametrize("offset", [None, 7, 13])
def test_forced_ends_force_the_blocks_that_they_are_in(block_size: int, offset: Any) -> None:
    """Also where the last block has fewer keys than are forced."""
    rng = np.random.default_rng(block_size)
    for n in (20, 23, 25):
        keys, queries = rng.standard_normal((n, 8)), rng.standard_normal((4, 8))
        seen = n if offset is None else min(n, 4 + offset)
        for first, last in ((1, 0), (0, 2), (3, 4), (2, 9)):
            found = keep_set_of_queries(
                queries.astype(np.float32), keys.astype(np.float32), 0.7, causal_offset=offset,
                block_size=block_size, keep_first=first, keep_last=last,
            )  # fmt: skip
            forced = {*range(first), *range(seen - last, seen)}
            assert forced <= set(found.indices.tolist())
