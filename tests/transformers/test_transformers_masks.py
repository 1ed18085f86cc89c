"""Masks are read as what they are: runs where every row sees one, else as masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from certk_rs import CertkError
from certk_rs.transformers.masks import apart, visibility_of


def shown(arguments: dict[str, Any], shape: tuple[int, int, int, int]) -> np.ndarray:
    """Return the mask that the options of `certk_rs.attention` describe."""
    _, _, m, n = shape
    keys, rows = np.arange(n), np.arange(m)[:, None]
    found = np.ones(shape, dtype=bool)
    if arguments.get("causal"):
        found &= keys <= rows + n - m
    if "lengths" in arguments:
        found &= keys < arguments["lengths"][..., None]
    if "mask" in arguments:
        found &= arguments["mask"]
    return found


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    """Boolean masks (b, h or 1, m, n): runs, prefixes, causal ones, and anything."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    m, n = draw(st.integers(1, 6)), draw(st.integers(0, 9))
    kind = draw(st.sampled_from(["any", "runs", "prefixes", "causal", "padded", "all"]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    keys, shape = np.arange(n), (batch, heads, m)
    if kind == "any":
        return rng.random((*shape, n)) < 0.5
    if kind == "all":
        return np.ones((*shape, n), dtype=bool)
    stops = rng.integers(0, n + 1, shape)
    starts = rng.integers(0, n + 1, shape) if kind == "runs" else np.zeros(shape, dtype=int)
    if kind in ("causal", "padded"):
        stops = np.broadcast_to(np.arange(m) + n - m + 1, shape)
    if kind == "padded":
        starts = np.broadcast_to(rng.integers(0, n + 1, (batch, 1, 1)), shape)
    return (keys >= starts[..., None]) & (keys < stops[..., None])


@given(masks(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_mask_is_read_as_it_is(mask: np.ndarray, additive: bool, causal: bool) -> None:
    shape = (mask.shape[0], 2, *mask.shape[2:])
    full = np.broadcast_to(mask, shape)
    tensor = torch.from_numpy(mask)
    if additive:
        tensor = torch.zeros(mask.shape).masked_fill(~tensor, torch.finfo(torch.float32).min)
    read = visibility_of(tensor, causal, shape)
    assert (shown(read.arguments(), shape) == full).all()
    assert (np.broadcast_to(read.full_mask(), shape) == full).all()
    assert (read.counts == full.sum(-1)).all()
    inner = np.diff(np.pad(full, [(0, 0)] * 3 + [(1, 1)]).astype(int), axis=-1)
    assert (read.mask is None) == bool(((inner == 1).sum(-1) <= 1).all())
    starts = np.array([0, min(2, shape[3])])
    cut = full & (np.arange(shape[3]) >= starts[:, None, None])
    assert (shown(read.only_from(starts).arguments(), shape) == cut).all()
    assert (read.only_from(starts).counts == cut.sum(-1)).all()


@pytest.mark.parametrize(("m", "n"), [(1, 5), (5, 5), (3, 5), (4, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_no_mask_is_everything_or_causal_from_the_first_key(m: int, n: int, causal: bool) -> None:
    shape = (2, 3, m, n)
    full = np.ones(shape, dtype=bool)
    if causal and m > 1:
        full &= np.arange(n) <= np.arange(m)[:, None]
    assert (shown(visibility_of(None, causal, shape).arguments(), shape) == full).all()


def test_the_usual_masks_need_no_mask() -> None:
    triangle = torch.ones(3, 5, dtype=torch.bool).tril(2)[None, None]
    assert visibility_of(triangle, False, (2, 4, 3, 5)).arguments() == {"causal": True}
    padded = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])[:, None, None].expand(2, 1, 3, 5)
    assert list(visibility_of(padded, False, (2, 4, 3, 5)).arguments()) == ["lengths"]
    assert visibility_of(padded[:1], False, (2, 4, 3, 5)).arguments() == {}


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (np.ones((1, 1, 2, 3)), "is a ndarray"),
        (torch.ones(2, 3, dtype=torch.bool), "does not broadcast"),
        (torch.ones(1, 3, 2, 3, dtype=torch.bool), "does not broadcast"),
        (torch.ones(1, 1, 2, 3, dtype=torch.int64), "has dtype torch.int64"),
        (torch.tensor([0.0, -1.5, 0.0]).expand(1, 1, 2, 3), r"\[0, 0, 0, 1\] is -1.5"),
        (torch.tensor([0.0, torch.nan, 0.0]).expand(1, 1, 2, 3), "is nan"),
        (torch.ones(1, 1, 2, 3, dtype=torch.bool, device="meta"), "on device meta"),
    ],
)
def test_what_is_no_mask_is_refused(mask: Any, says: str) -> None:
    with pytest.raises(CertkError, match=says):
        visibility_of(mask, True, (1, 2, 2, 3))


def test_numbers_of_a_mask_and_a_bias_add_up_in_float64() -> None:
    mask = torch.tensor([1.0, 0.0, torch.finfo(torch.bfloat16).min]).to(torch.bfloat16)
    bias = torch.tensor([3 * 2.0**-9, 0.0, 1.0], dtype=torch.bfloat16)
    seen, added = apart(mask[None, None, None], bias[None, None, None])
    assert seen is not None
    assert added is not None
    assert seen[0, 0, 0].tolist() == [True, True, False]
    assert added[0, 0, 0, :2].tolist() == [1 + 3 * 2.0**-9, 0.0]
    # Zeros are no bias, and a mask of zeros and minima stays one.
    plain = torch.tensor([0.0, torch.finfo(torch.float16).min]).half()
    assert apart(plain, torch.zeros(2)) == (plain, None)
