"""A line for each call over seeded rows: a hash of the positions and bounds that it returned.

Needs NumPy and `certk_rs` alone, so that it runs wherever a wheel does. Two machines, or two levels
of one, agree if their lines do. The rows are integers over a power of two, times a number, which
every processor makes the same.
"""

from __future__ import annotations

import hashlib

import numpy as np

import certk_rs as ck

ROWS = 320


def numbers(shape: tuple[int, ...], seed: int, spread: float) -> np.ndarray:
    """Numbers that look Gaussian enough: sums of four uniform ones."""
    drawn = np.random.default_rng(seed).integers(-(1 << 20), 1 << 20, (4, *shape))
    return (spread * drawn.sum(axis=0) / (1 << 20)).astype(np.float32)


def line(name: str, *arrays: np.ndarray) -> str:
    """A name, and a hash of what arrays hold."""
    sha = hashlib.sha256()
    for each in arrays:
        array = np.ascontiguousarray(each)
        sha.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    return f"{name} {sha.hexdigest()}"


def main() -> None:
    """Print the lines."""
    for n in (7, 63, 1000, 4096):
        for eps in (0.1, 0.001):
            for dtype in ("float16", "float32", "float64"):
                scores = numbers((ROWS, n), n, 3.0).astype(dtype)
                sel = ck.select(scores, eps)
                positions = np.concatenate([sel.row((i,)) for i in range(ROWS)])
                found = (positions, sel.k, sel.tail_mass_lower, sel.tail_mass_upper)
                print(line(f"select {n} {eps} {dtype}", *found))
    keys, values = numbers((2, 3000, 64), 1, 1.0), numbers((2, 3000, 64), 2, 1.0)
    index = ck.KeyIndex.build(keys)
    for queries in (1, 40):
        q = numbers((8, queries, 64), 3, 2.0)
        for eps in (0.1, 0.001):
            hit = index.search(q, eps)
            rows = [hit.row((h, i)) for h in range(8) for i in range(queries)]
            masses = (hit.tail_mass_lower, hit.tail_mass_upper, hit.scored)
            print(line(f"search {queries} {eps}", np.concatenate(rows), *masses))
            for name, by in (("index", index), ("none", None)):
                out = ck.attention(q, keys, values, eps, index=by)
                bounds = (out.tail_mass_upper, out.error_bound, out.k)
                print(line(f"attention {queries} {eps} {name}", out.out, *bounds))


if __name__ == "__main__":
    main()
