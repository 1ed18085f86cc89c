"""A million later queries answered from codes alone, and what is proven of each, against the truth.

Weights show in outputs where each value adds to one entry and takes as much from the next: sums of
entries are weights, and codes lose nothing of such values.
"""

from __future__ import annotations

import numpy as np
import pytest

from certk_rs._files.codes import code_tensors
from certk_rs._files.layers import Layer
from certk_rs.kept_rows import KeptRows
from certk_rs.key_index import written
from certk_rs.kv_index import KvIndex
from later_cases import Case, Truth, cases

QUERIES, OF_THEM = 1_000_000, 120_000
"""In all, and in `make test`."""
STEP = 127.0


def showing(n: int) -> np.ndarray:
    values = np.zeros((n, n), np.float32)
    values[np.arange(n), np.arange(n)] = STEP
    values[np.arange(n), (np.arange(n) + 1) % n] -= STEP
    return values


def losses(case: Case, index: KvIndex) -> np.ndarray:
    """Losses of the codes of keys (n, d), turned back, by the parts of the index."""
    (n, d), bits = case.keys.shape, index.bits
    layer = Layer(0, {}, {"key": "F32", "value": "F32"}, 1, 1, 1, n, d)
    parts = code_tensors("key", [written(index._index).tobytes()], layer)
    wide = (parts["key_scales"][0].astype("<u4") << 16).view("<f4")
    lines = parts["key_codes"][0].reshape(-1, -(-d // 4), 16, 4).swapaxes(1, 2)
    codes = lines.reshape(-1, -(-d // 4) * 4)[:n, :d].astype(float) - 128
    block = int(parts["key_bounds"][0, 5])
    moved = case.keys.astype(float) - parts["key_mean"][0]
    turn = np.eye(d)
    if block > 1:
        hadamard = np.ones((1, 1))
        while len(hadamard) < block:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        signs = np.where([_negative(j) for j in range(d)], -1.0, 1.0)
        turn = np.kron(np.eye(d // block), hadamard) * signs
    assert bits in (8, 12, 16)
    left = moved @ turn.T - wide[:, None] * codes
    return np.asarray(np.where(wide[:, None] > 0, left @ turn / block, 0))


def _negative(j: int) -> bool:
    bits = (j + 1) * 0x9E3779B97F4A7C15 % 2**64
    return (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9 % 2**64 >= 2**63


def with_queries_along_losses(case: Case, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half of the queries point where the codes of one key, or of all, lose the most."""
    queries = case.queries.astype(np.float64)
    _, _, axes = np.linalg.svd(left, full_matrices=False)
    half = len(queries) // 2
    found = left[rng.integers(len(left), size=half)] * rng.choice([-1.0, 1.0], (half, 1))
    all_of = rng.random(half) < 0.3
    found[all_of] = axes[0]
    size = np.sqrt(np.square(found).sum(1, keepdims=True))
    typical = np.sqrt(np.square(case.keys.astype(float)).sum(1).mean())
    reach = rng.choice([1.0, 4.0, 12.0, 60.0], (half, 1)) * case.keys.shape[1] ** 0.5
    queries[:half] = found / np.maximum(size, 1e-300) * reach / max(typical, 1e-30)
    with np.errstate(over="ignore"):
        stored = queries.astype(case.queries.dtype)
    stored[~np.isfinite(stored.astype(float)).all(1)] = 0
    return stored


@pytest.mark.parametrize("queries", [OF_THEM, pytest.param(QUERIES, marks=pytest.mark.heavy)])
def test_later_queries_from_codes_alone(queries: int) -> None:
    rng = np.random.default_rng(7)
    tried = within = tight = 0
    for at, case in enumerate(cases(queries)):
        n, bits = len(case.keys), [8, 12, 16][at % 3]
        values, plain = showing(n), case.values.astype(np.float32)
        shown, other = (
            KvIndex.build(case.keys[None], each[None], keep_keys=False, bits=bits)
            for each in (values, plain)
        )
        [bare] = shown.bare
        q = with_queries_along_losses(case, losses(case, shown), rng).astype(np.float32)
        eps = rng.choice([0.01, 0.05, 0.3], len(q))[None]
        kept = [KeptRows(case.keys[bare], each[bare], [bare]) for each in (values, plain)]
        found = shown.attention(q[None], eps, kept=kept[0])
        said = found.tail_mass_upper[0]
        truth = Truth(q, case.keys)
        share = truth.weights / truth.weights.sum(1, keepdims=True)
        used = np.cumsum(found.out[0].astype(np.float64), axis=1) / STEP
        # The last sum is that of all, 0: what each lacks is the same.
        used += ((1 - used.sum(1)) / n)[:, None]
        away = 0.5 * np.abs(used - share).sum(1)
        # Weights that multiply codes of values have sixteen bits.
        rounded = n * 1.6e-5 * (share.max(1) + said) + 2e-6 + truth.slack
        assert (away <= said + rounded).all(), (case.name, bits)
        mass = np.log(truth.weights.sum(1)) + truth.top
        wide = truth.slack + 1e-9 * (1 + np.abs(mass))
        assert (found.log_mass_lower[0] <= mass + wide).all(), (case.name, bits)
        assert (found.log_mass_upper[0] >= mass - wide).all(), (case.name, bits)
        # Outputs of any values.
        answers = other.attention(q[None], eps, kept=kept[1])
        assert np.array_equal(answers.tail_mass_upper[0], said)
        off = np.sqrt(np.square(answers.out[0] - share @ plain.astype(float)).sum(1))
        rounding = (truth.slack + 1e-9) * np.abs(plain).max()
        assert (off <= answers.error_bound[0] * (1 + 1e-9) + rounding).all(), (case.name, bits)
        tried += len(q)
        within += int((said <= eps[0]).sum())
        tight += int((away > 0.02 * said).sum())
    assert tried == queries
    assert within > 0.4 * queries
    assert tight > 0.02 * queries
