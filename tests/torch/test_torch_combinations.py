"""Operators with many options at once: the answer of NumPy, and the gradient over the kept keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import certk_rs as ck

torch = pytest.importorskip("torch")

import certk_rs.torch as ct  # noqa: E402


def made(
    seed: int, dtype: Any, n: int = 90, m: int = 5
) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Vectors of two sequences, three kv heads and six heads, which are unlike; and all options."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 2, 3, n, 8))
    k *= 2.0 ** rng.integers(-2, 2, (2, 3, 1, 1))
    v += 10 * rng.standard_normal((2, 3, 1, 1))
    q = rng.choice([0.3, 3.0], (2, 6, m, 1)) * rng.standard_normal((2, 6, m, 8))
    # In turn with and without each of them; a row may see nothing.
    options: dict[str, Any] = {
        "causal": seed % 2 == 0,
        "lengths": torch.from_numpy(rng.integers(0, n + 1, (2, 6, m))) if seed % 3 else None,
        "mask": torch.from_numpy(rng.random((2, 6, 1, n)) < 0.7) if seed % 4 else None,
        "scale": -0.4 if seed % 5 == 1 else None,
    }
    if seed % 4 == 3:
        # Of one sequence, and additive.
        options["mask"] = torch.where(options["mask"][:1], 0.0, -torch.inf).to(dtype)
    options["eps"] = torch.from_numpy(rng.choice([0.0, 0.05, 0.4], (2, 6, m))).double()
    return tuple(torch.from_numpy(x).to(dtype) for x in (q, k, v)), options


# Further seeds only sweep: the first have each option on and off.
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(4, 12))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_attention_with_all_options_answers_as_that_of_numpy(seed: int, dtype: Any) -> None:
    (q, k, v), options = made(seed, dtype, n=600)
    eps = options.pop("eps")
    indexes: list[Any] = [None]
    if dtype is not torch.float64:
        index = ck.KeyIndex.build(k[..., :50, :])
        index.append(k[..., 50:, :])
        indexes += [index, ck.KvIndex.build(k, v)]
    for index in indexes:
        want = ck.attention(q, k, v, eps.numpy(), index=index, **options)
        got = ct.attention(
            q, k, v, eps, index=None if index is None else ct.index_tensors(index), **options
        )
        assert torch.equal(got.out, want.out)
        assert np.array_equal(got.tail_mass_upper.numpy(), want.tail_mass_upper)
        assert np.array_equal(got.k.numpy(), want.k)
        assert bool((got.tail_mass_upper <= eps).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_gradient_with_all_options_is_that_over_the_kept_keys(seed: int) -> None:
    """Compare with dense attention over the kept keys, which values of their own axes reveal."""
    (q, k, v), options = made(seed, torch.float64, n=40, m=3)
    eps = options.pop("eps")
    eyes = torch.eye(40, dtype=torch.float64).expand(2, 3, 40, 40).contiguous()
    keep = ct.attention(q, k, eyes, eps, **options).out > 0
    for x in (q, k, v):
        x.requires_grad_()
    upstream = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 6, 3, 8)))
    found = torch.autograd.grad(ct.attention(q, k, v, eps, **options).out, (q, k, v), upstream)
    wide = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, dim=1) for x in wide[1:])
    scores = wide[0] @ keys.transpose(-1, -2) * (options["scale"] or 8**-0.5)
    weights = torch.softmax(scores.masked_fill(~keep, -1e300), -1) * keep
    expected = torch.autograd.grad(weights @ values, wide, upstream)
    assert bool((keep.sum(-1) < 20).any())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
