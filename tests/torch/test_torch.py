"""`certk_rs.torch`: operators that torch accepts, functions that answer as those of NumPy do."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import certk_rs as ck  # noqa: E402
import certk_rs.torch as ct  # noqa: E402
from certk_rs import _native  # noqa: E402
from certk_rs._torch.operators import as_index  # noqa: E402

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CODED = (torch.float32, torch.float16, torch.bfloat16)
OPS = torch.ops.certk
Tensor = torch.Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(dtype: torch.dtype) -> dict[str, Tensor]:
    """Scores of every layout."""
    plain = (3 * normal(3, 4, 40)).to(dtype)
    return {
        "plain": plain,
        "one row": plain[0, 0],
        "transposed rows": plain.transpose(0, 1),
        "transposed keys": plain.transpose(1, 2),
        "offset": plain.flatten()[7:87].view(2, 40),
        "strided": plain[:, ::2],
        "expanded": plain[:1].expand(3, 4, 40),
        "no rows": plain[:0],
        "requires a gradient": plain.clone().requires_grad_(),
    }


def attended(dtype: torch.dtype, n: int = 40, m: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of two."""
    q = (3 * normal(2, 4, m, 16, seed=1)).to(dtype)
    return q, normal(2, 2, n, 16, dtype=dtype, seed=2), normal(2, 2, n, 8, dtype=dtype, seed=3)


LAYOUTS = tuple(rows(torch.float32))
# An operator is checked in every layout and in every dtype, not in every pair: that takes minutes.
CHECKED = [(torch.float32, layout) for layout in LAYOUTS] + [(d, "plain") for d in DTYPES[1:]]


def same(found: Any, expected: Any) -> None:
    found = found.numpy()
    assert found.dtype == expected.dtype or found.dtype == np.int64
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


# ------------------------------------------------------------------------------- operators


SELECTIONS = ["select", "select_mask", "selection", "keep_set"]


def test_every_operator_is_checked() -> None:
    every = torch._C._dispatch_get_all_op_names()
    checked = [*SELECTIONS, "certify", "attention", "attention_indexed", "attention_paged"]
    assert {name for name in every if name.startswith("certk::")} == {
        f"certk::{n}" for n in checked
    }


def opcheck(operator: Any, arguments: tuple[Any, ...], layout: str) -> None:
    """Check an operator; tracing takes seconds, so it is checked in two layouts only."""
    checks: dict[str, Any] = {"test_utils": ("test_schema", "test_faketensor")}
    if layout in ("plain", "requires a gradient") and arguments[0].dtype is torch.float32:
        checks = {}
    torch.library.opcheck(operator, arguments, **checks)


@pytest.mark.parametrize(("dtype", "layout"), CHECKED, ids=str)
@pytest.mark.parametrize("name", SELECTIONS)
def test_opcheck_of_selections(name: str, dtype: torch.dtype, layout: str) -> None:
    opcheck(getattr(OPS, name).default, (rows(dtype)[layout], 0.05), layout)


@pytest.mark.parametrize(("dtype", "layout"), CHECKED, ids=str)
def test_opcheck_of_certify(dtype: torch.dtype, layout: str) -> None:
    scores = rows(dtype)[layout]
    kept = ct.select(scores, 0.05)
    opcheck(OPS.certify.default, (scores, scores.detach() > 0, None, 0.05), layout)
    opcheck(OPS.certify.default, (scores, kept.indices, kept.indptr, None), layout)


def layouts_of_attention(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    q, k, v = attended(dtype)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    offset = [torch.cat([x.flatten()[:5], x.flatten()])[5:].view(x.shape) for x in (q, k, v)]
    return {
        "plain": (q, k, v),
        "one head": (q[0, 0], k[0, 0], v[0, 0]),
        "heads inside": (apart[0], apart[1], apart[2]),
        "transposed": (q, k.mT.contiguous().mT, v),
        "offset": (offset[0], offset[1], offset[2]),
        "no queries": (q[:, :, :0], k, v),
        "requires a gradient": (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()),
    }


ATTENDED = tuple(layouts_of_attention(torch.float32))
CHECKED_ATTENTION = [(torch.float32, x) for x in ATTENDED] + [(d, "plain") for d in DTYPES[1:]]


@pytest.mark.parametrize(("dtype", "layout"), CHECKED_ATTENTION, ids=str)
def test_opcheck_of_attention(dtype: torch.dtype, layout: str) -> None:
    q, k, v = layouts_of_attention(dtype)[layout]
    opcheck(OPS.attention.default, (q, k, v, 0.05, None, False), layout)
    if layout != "requires a gradient":
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(5)
        budgets = torch.full(q.shape[:-1], 0.1, dtype=torch.float64)
        more = (0.3, True, budgets, torch.tensor(39), mask, 1)
        opcheck(OPS.attention.default, (q, k, v, 0.0, *more), layout)


@pytest.mark.parametrize(
    ("dtype", "layout"), [case for case in CHECKED_ATTENTION if case[0] in CODED], ids=str
)
def test_opcheck_of_attention_with_an_index(dtype: torch.dtype, layout: str) -> None:
    q, k, v = layouts_of_attention(dtype)[layout]
    for index in (ck.KeyIndex.build(k), ck.KvIndex.build(k, v)):
        *keys, values = ct.index_tensors(index)
        more = (0.05, None, True, None, None, None, None, values)
        opcheck(OPS.attention_indexed.default, (q, k, v, *keys, *more), layout)


def in_pages(rows: Tensor, size: int = 16) -> tuple[Tensor, Tensor]:
    """Cut rows (sequences, heads, n, d) into blocks, the last of them first."""
    sequences, heads, n, d = rows.shape
    width = -(-n // size)
    padded = torch.nn.functional.pad(rows.detach(), (0, 0, 0, width * size - n))
    blocks = padded.view(sequences, heads, width, size, d).transpose(1, 2).flatten(0, 1)
    table = torch.arange(sequences * width).view(sequences, width)
    return blocks.flip(0).contiguous(), (sequences * width - 1 - table).to(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_attention(dtype: torch.dtype) -> None:
    q, k, v = (each.detach() for each in attended(dtype))
    keys, table = in_pages(k)
    values, _ = in_pages(v)
    lengths = torch.full((len(k),), k.shape[-2], dtype=torch.int32)
    pages = (q, keys, values, table, lengths, "hnd", 0.05)
    opcheck(OPS.attention_paged.default, pages, "plain")
    found = ct.attention(q, keys, values, 0.05, block_table=table, key_lengths=lengths)
    for one, other in zip(found, ct.attention(q, k, v, 0.05), strict=True):
        assert torch.equal(one, other)
    compiled = torch.compile(
        lambda *given: ct.attention(*given[:3], 0.05, block_table=given[3], key_lengths=given[4]),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    assert torch.equal(compiled(q, keys, values, table, lengths).out, found.out)
    with pytest.raises(ck.CertkError, match="goes with key_lengths"):
        ct.attention(q, keys, values, 0.05, block_table=table)
    with pytest.raises(ck.CertkError, match="attention with pages has none"):
        ct.attention(q.requires_grad_(), keys, values, 0.05, block_table=table, key_lengths=lengths)


def everything(
    scores: Tensor, q: Tensor, k: Tensor, v: Tensor, index: Any, both: Any, eps: Any
) -> list[Any]:
    """All functions, with work of torch before and after."""
    kept = ct.select(2 * scores, eps, max_keep=0.5, lengths=torch.tensor(scores.shape[-1] - 1))
    mask, upper = ct.select_mask(scores, eps, causal_offset=3)
    one = ct.keep_set(scores, eps)
    proven = ct.certify(2 * scores, kept, eps=eps)
    full = ct.attention(q, k, v, eps, causal=True)
    few = ct.attention(q, k, v, eps, index=index)
    coded = ct.attention(0.1 * q, k, v, eps, index=both)
    made = [*kept, mask, upper, *one, *proven, *full, *few, *coded]
    return [x.clone() if x.dtype is torch.bool else x + 1 for x in made if x is not None]


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]
)
def test_compiled_functions_give_the_same_bits(backend: str) -> None:
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    q, _, _ = attended(torch.float32)
    for n in (640, 57):
        _, k, v = attended(torch.float32, n)
        index = ct.index_tensors(ck.KeyIndex.build(k))
        both = ct.index_tensors(ck.KvIndex.build(k, v))
        scores = 3 * normal(5, n)
        for eps in (0.01, 0.1):
            pairs = zip(
                compiled(scores, q, k, v, index, both, eps),
                everything(scores, q, k, v, index, both, eps),
                strict=True,
            )
            assert all(torch.equal(a, b) for a, b in pairs)


def test_a_compiled_gradient_is_that_of_eager_code() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (ct.attention(q, k, v, 0.05, causal=True).out ** 2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = [x.requires_grad_() for x in attended(torch.float64)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    found = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


class Module(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> tuple[Tensor, ...]:
        full = ct.attention(q, k, v, 0.05, causal=True)
        few = ct.attention(q, full.out.new_ones(()) * k, v, 0.05, index=ct.IndexTensors(*index))
        kept = ct.select(full.out, 0.1)
        return full.out.sum(-1), full.k, few.out, few.tail_mass_upper, kept.indices, kept.k


def test_an_exported_module_gives_the_same_bits() -> None:
    q, k, v = attended(torch.float32, 640)
    for index in (ck.KeyIndex.build(k), ck.KvIndex.build(k, v)):
        inputs = (q, k, v, *(x for x in ct.index_tensors(index) if x is not None))
        exported = torch.export.export(Module(), inputs).module()
        other = 0.1 * attended(torch.float32)[0]
        pairs = zip(exported(other, *inputs[1:]), Module()(other, *inputs[1:]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------- the same answers, without copies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_answer_as_those_of_numpy(dtype: torch.dtype, layout: str) -> None:
    scores = rows(dtype)[layout]
    eps = torch.linspace(0.01, 0.3, scores[..., 0].numel()).reshape(scores.shape[:-1])
    for budget in (0.05, eps):
        for options in ({}, {"max_keep": 0.1}, {"max_keep": 4, "keep_first": 1}, {"scale": 0.5}):
            expected = ck.select(scores, budget, **options)
            found = ct.select(scores, budget, **options)
            for name in ct.Selection._fields:
                same(getattr(found, name), getattr(expected, name))
            assert found.indices.dtype is torch.int64
            mask, upper = ct.select_mask(scores, budget, **options)
            same(mask, expected.to_mask())
            same(upper, expected.tail_mass_upper)
            for given in (mask, found, torch.from_numpy(expected.to_padded().astype(np.int64))):
                proven = ct.certify(scores, given, eps=budget)
                wanted = ck.certify(scores, expected, eps=budget)
                for name in ct.Certificate._fields:
                    same(getattr(proven, name), getattr(wanted, name))
        together = ck.keep_set(scores, budget)
        one = ct.keep_set(scores, budget)
        same(one.indices, together.indices)
        same(one.tail_mass_upper, together.tail_mass_upper)
        same(one.tail_mass_lower, together.tail_mass_lower)
        assert one.lower_bound.item() == together.lower_bound
        assert one.status.item() == together.status
    assert ct.certify(scores, mask).holds is None
    assert all(not x.requires_grad for x in (found.tail_mass_upper, upper, one.tail_mass_upper))


def test_tensors_are_of_their_own_and_may_be_written_to() -> None:
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            # Of a tensor over memory that must not be written to, torch only warns.
            warnings.simplefilter("error")
            found = ct.select(normal(3, 40), 0.1)
    finally:
        torch.set_warn_always(False)
    for tensor in found:
        tensor.zero_()


def test_rows_of_unequal_length_and_masks() -> None:
    scores, indptr = 3 * normal(100), torch.tensor([0, 30, 30, 100])
    expected = ck.select(scores, 0.05, indptr=indptr)
    found = ct.select(scores, 0.05, indptr=indptr)
    same(found.indptr, expected.indptr)
    same(found.indices, expected.indices)
    assert found.status.tolist() == [0, 2, 0]
    same(ct.select_mask(scores, 0.05, indptr=indptr)[0], expected.to_mask())
    assert bool(ct.certify(scores, found, indptr=indptr, eps=0.05).holds.all())
    bias = torch.where(normal(2, 50) > 0, 0.0, -torch.inf).bfloat16()
    for mask in (bias, bias == 0):
        for name in ("k", "indices", "tail_mass_upper"):
            arguments = (normal(3, 2, 50), 0.05)
            same(
                getattr(ct.select(*arguments, mask=mask), name),
                getattr(ck.select(*arguments, mask=mask), name),
            )


@pytest.mark.parametrize("layout", ATTENDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_answers_as_that_of_numpy(dtype: torch.dtype, layout: str) -> None:
    q, k, v = (x.detach() for x in layouts_of_attention(dtype)[layout])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(20)
    budgets = torch.full(q.shape[:-1], 0.1, dtype=torch.float64)
    for eps in (0.0, 0.05, budgets):
        for options in ({}, {"causal": True}, {"mask": mask}, {"lengths": torch.tensor(17)}):
            found = ct.attention(q, k, v, eps, scale=0.3, **options)
            expected = ck.attention(q, k, v, eps, scale=0.3, **options)
            assert found.out.dtype is dtype
            assert torch.equal(found.out, expected.out)
            same(found.tail_mass_upper, expected.tail_mass_upper)
            same(found.k, expected.k)


@pytest.mark.parametrize("layout", ["plain", "transposed rows", "offset", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_read_where_they_are(
    dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = rows(dtype)[layout]
    places = []

    def select(lent: tuple[Any, ...], *others: Any) -> Any:
        (stored, _), *_ = lent
        places.append(stored.ctypes.data)
        return select_here(lent, *others)

    select_here = _native.select
    monkeypatch.setattr(_native, "select", select)
    OPS.select(scores, 0.05)
    assert places == [scores.data_ptr()]


# ---------------------------------------------------------------------------- index tensors


def thinned(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, ck.KeyIndex]:
    """Many keys, a few of them without a code, and queries that need few."""
    q, k, v = (6 * normal(1, 4, 2, 32)).to(dtype), normal(1, 2, 3000, 32), normal(1, 2, 3000, 16)
    k[0, 1, 100:103] *= 50
    k = k.to(dtype)
    return q, k, v.to(dtype), ck.KeyIndex.build(k)


@pytest.mark.parametrize("dtype", CODED, ids=str)
def test_an_index_as_tensors_is_the_index(dtype: torch.dtype) -> None:
    q, k, v, index = thinned(dtype)
    tensors = ct.index_tensors(index)
    assert tensors.bare.max() > 0
    expected = ck.attention(q, k, v, 0.01, index=index)
    assert (expected.rung == ck.Rung.RESCORED).sum() >= 6
    found = ct.attention(q, k, v, 0.01, index=tensors)
    assert torch.equal(found.out, expected.out)
    same(found.tail_mass_upper, expected.tail_mass_upper)
    same(found.k, expected.k)
    three = OPS.attention_indexed(q, k, v, *tensors[:-1], 0.01, None)
    assert all(torch.equal(a, b) for a, b in zip(three, found, strict=True))
    # Heads that lie apart in a larger tensor, and each head by itself.
    apart = (torch.cat([part, part], -1)[..., : part.shape[-1]] for part in tensors[:-1])
    wide = ct.IndexTensors(*apart)
    assert torch.equal(ct.attention(q, k, v, 0.01, index=wide).out, found.out)
    for head in range(2):
        part = ct.IndexTensors(*(x[0, head] for x in tensors[:-1]))
        alone = ct.attention(q[0, 2 * head], k[0, head], v[0, head], 0.01, index=part)
        assert torch.equal(alone.out, found.out[0, 2 * head])


def test_parts_of_an_index_are_read_where_they_are() -> None:
    tensors = ct.index_tensors(thinned(torch.bfloat16)[-1])
    for tensor, array in zip(tensors[:-1], as_index(tuple(tensors))._index, strict=True):
        assert array.ctypes.data == tensor.data_ptr() or tensor.numel() == 0


@pytest.mark.parametrize("value", CODED, ids=str)
@pytest.mark.parametrize("key", CODED, ids=str)
def test_codes_of_values_as_a_tensor(key: torch.dtype, value: torch.dtype) -> None:
    """Answers are those of the index, and as true as it says."""
    k, v = normal(1, 2, 900, 32, dtype=key, seed=4), normal(1, 2, 900, 20, dtype=value, seed=5)
    index = ck.KvIndex.build(k[..., :700, :], v[..., :700, :])
    index.append(k[..., 700:, :], v[..., 700:, :])
    tensors = ct.index_tensors(index)
    assert tensors.values is not None
    # Sharp rows of one head, flat ones of the other.
    q = normal(1, 4, 2, 32) * torch.tensor([30.0, 30.0, 0.5, 0.5])[:, None, None]
    wide, codes = (x.double().repeat_interleave(2, 1) for x in (k, v))
    real = torch.softmax(q.double() @ wide.mT * 32**-0.5, -1) @ codes
    eps = torch.tensor([0.0, 1e-9, 0.05, 0.02]).double()[:, None].expand(1, 4, 2)
    for budget in (0.05, eps):
        given = budget if isinstance(budget, float) else budget.numpy()
        expected = ck.attention(q, k, v, given, index=index)
        found = ct.attention(q, k, v, budget, index=tensors)
        assert torch.equal(found.out, expected.out)
        same(found.tail_mass_upper, expected.tail_mass_upper)
        same(found.k, expected.k)
        assert (expected.rung[0, 2:] == ck.Rung.CODED).all()
        assert (expected.rung[0, :2] != ck.Rung.CODED).all()
        assert bool((found.tail_mass_upper <= torch.as_tensor(budget)).all())
        assert ((found.out - real).norm(dim=-1).numpy() <= expected.error_bound).all()
    # Without them it is the index of the keys.
    found = ct.attention(q, k, v, 0.05, index=tensors._replace(values=None))
    assert torch.equal(found.out, ck.attention(q, k, v, 0.05, index=_keys_of(index)).out)


def _keys_of(index: ck.KvIndex) -> ck.KeyIndex:
    return ck.KeyIndex(index._index, None)


def test_codes_of_other_values_are_refused() -> None:
    q, k, v, _ = thinned(torch.float32)
    right = ct.index_tensors(ck.KvIndex.build(k, v))
    assert right.values is not None
    other = ct.index_tensors(ck.KvIndex.build(k[:, :, :-1], v[:, :, :-1])).values
    random = torch.Generator().manual_seed(0)
    for values in (other, right.values[:-1], right.values[:0], right.values.flip(0)):
        with pytest.raises(ck.CertkError):
            ct.attention(q, k, v, 0.01, index=right._replace(values=values))
    for _ in range(50):
        values = right.values.clone()
        values[torch.randint(values.numel(), (1,), generator=random)] ^= 1
        # Refused, or taken at its word: never a crash.
        with contextlib.suppress(ck.CertkError):
            ct.attention(q, k, v, 0.01, index=right._replace(values=values))
    for wrong, says in (
        (right.values.int(), r"index\.values has dtype torch\.int32"),
        (right.values[None], r"index\.values has dtype torch\.uint8 and shape \(1, "),
        (right.values.to("meta"), r"index\.values is a tensor on device meta"),
    ):
        with pytest.raises(ck.CertkError, match=says):
            ct.attention(q, k, v, 0.01, index=right._replace(values=wrong))
    for given in (q, k, v):
        given.requires_grad_()
        with pytest.raises(ck.CertkError, match="requires a gradient"):
            ct.attention(q, k, v, 0.01, index=right)
        with torch.no_grad():
            assert not ct.attention(q, k, v, 0.01, index=right).out.requires_grad
        given.requires_grad_(False)


@pytest.mark.parametrize("part", ct.IndexTensors._fields[:-1])
def test_no_tensor_of_an_index_can_do_harm(part: str) -> None:
    q, k, v, index = thinned(torch.float32)
    tensors = ct.index_tensors(index)
    right = getattr(tensors, part)
    random = np.random.default_rng(3)
    wrong = [
        right[..., :-1],
        torch.cat([right, right], -1),
        right[0],
        right[..., :0],
        right.flip(-1),
        torch.zeros_like(right),
        torch.full_like(right, 255 if right.dtype is torch.uint8 else -7),
    ]
    for _ in range(40):
        bits = random.integers(0, 256, right.numel() * right.element_size(), dtype=np.uint8)
        wrong.append(torch.from_numpy(bits).view(right.dtype).view(right.shape))
        some = right.clone()
        at = random.integers(0, right.numel(), 3)
        some.view(-1)[at] = wrong[-1].view(-1)[at]
        wrong.append(some)
    if right.is_floating_point():
        wrong += [torch.full_like(right, x) for x in (torch.nan, torch.inf, -torch.inf, 1e38)]
    refused = 0
    for tensor in wrong:
        damaged = tensors._replace(**{part: tensor})
        try:
            found = ct.attention(q, k, v, 0.01, index=damaged)
        except ck.CertkError:
            refused += 1
            continue
        assert found.out.shape == (1, 4, 2, 16)
        assert bool((found.k <= 3000).all())
    assert refused >= 3 or part == "fingerprint"


def test_index_tensors_of_other_types_are_named() -> None:
    q, k, v, index = thinned(torch.float32)
    tensors = ct.index_tensors(index)
    with pytest.raises(ck.CertkError, match=r"index\.scales has dtype torch\.float32"):
        ct.attention(q, k, v, 0.01, index=tensors._replace(scales=tensors.scales.float()))
    with pytest.raises(ck.CertkError, match=r"index\.gram is a tensor on device meta"):
        ct.attention(q, k, v, 0.01, index=tensors._replace(gram=tensors.gram.to("meta")))
    with pytest.raises(ck.CertkError, match="pass index_tensors"):
        ct.attention(q, k, v, 0.01, index=index)
    with pytest.raises(ck.CertkError, match=r"pass a certk_rs\.KeyIndex"):
        ct.index_tensors(k)
    with pytest.raises(ck.CertkError, match="float64"):
        ct.attention(q, k.double(), v, 0.01, index=tensors)


# ------------------------------------------------------------------------------- gradients


CAUSAL: dict[str, Any] = {"causal": True, "lengths": torch.tensor(28)}
MASKED: dict[str, Any] = {"mask": torch.arange(30) > 8}
HIDDEN: dict[str, Any] = {"mask": torch.where(MASKED["mask"], 0.0, -torch.inf), "scale": -0.7}


@pytest.mark.parametrize("options", [{}, CAUSAL, MASKED, HIDDEN], ids=str)
@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_gradient_of_truncated_attention(eps: float, options: dict[str, Any]) -> None:
    q = (2 * normal(2, 3, 4, dtype=torch.float64)).requires_grad_()
    k = normal(1, 30, 4, dtype=torch.float64, seed=1).requires_grad_()
    v = normal(1, 30, 2, dtype=torch.float64, seed=2).requires_grad_()
    found = ct.attention(q, k, v, eps, **options)
    if eps > 0:
        assert int(found.k.min()) < 15
    assert not found.tail_mass_upper.requires_grad
    function = lambda q, k, v: ct.attention(q, k, v, eps, **options).out  # noqa: E731
    assert torch.autograd.gradcheck(function, (q, k, v))
    assert torch.autograd.gradgradcheck(function, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_is_that_of_dense_attention_over_the_kept_keys(dtype: torch.dtype) -> None:
    q, k, v = attended(dtype, n=200, m=2)
    # Rows that share keys drop some only if they keep less than half together.
    q *= 3
    # Keys that are equal: which of them are kept matters to their gradients.
    k[:, :, 50:150:2] = k[:, :, 51:151:2]
    # Values that tell the keys apart.
    eyes = torch.eye(200, dtype=dtype).expand(2, 2, 200, 200).contiguous()
    keep = ct.attention(q, k, eyes, 0.1).out > 0
    assert bool((keep.sum(-1) < 100).all())
    for x in (q, k, v):
        x.requires_grad_()
    upstream = normal(2, 4, 2, 8, seed=9).to(dtype)
    found = torch.autograd.grad(ct.attention(q, k, v, 0.1).out, (q, k, v), upstream)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dense = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=keep, enable_gqa=True)
    expected = torch.autograd.grad(dense, wide, upstream.double())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a, b.to(dtype))


def test_what_no_row_sees_has_no_gradient_and_does_no_harm() -> None:
    q, k, v = attended(torch.float32)
    k[:, :, 30:] = torch.nan
    v[:, :, 35:] = torch.inf
    for x in (q, k, v):
        x.requires_grad_()
    ct.attention(q, k, v, 0.05, lengths=torch.tensor(30)).out.sum().backward()
    for x in (k, v):
        assert bool((x.grad[:, :, 30:] == 0).all())
        assert bool(torch.isfinite(x.grad).all())
    assert bool(torch.isfinite(q.grad).all())
    assert bool((k.grad[:, :, :30] != 0).any())
    empty = torch.zeros(2, 4, 3, dtype=torch.int64)
    q.grad = None
    ct.attention(q, k, v, 0.05, lengths=empty).out.sum().backward()
    assert bool((q.grad == 0).all())


def test_where_there_is_no_gradient_nobody_is_surprised() -> None:
    q, k, v, index = thinned(torch.float32)
    tensors = ct.index_tensors(index)
    q.requires_grad_()
    with pytest.raises(ck.CertkError, match=r"no_grad"):
        ct.attention(q, k, v, 0.01, index=tensors)
    with torch.no_grad():
        ct.attention(q, k, v, 0.01, index=tensors)
    scores = normal(2, 30).requires_grad_()
    for result in (ct.select(scores, 0.1), ct.keep_set(scores, 0.1)):
        with pytest.raises(RuntimeError, match="does not require grad"):
            result.tail_mass_upper.sum().backward()


def test_tangents_of_forward_mode_are_refused() -> None:
    q, k, v = attended(torch.float64)
    with pytest.raises(ck.CertkError, match="q has a tangent"):
        torch.func.jvp(lambda q: ct.attention(q, k, v, 0.05).out, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        with pytest.raises(ck.CertkError, match="v has a tangent"):
            ct.attention(q, k, dual, 0.05)
        ct.attention(q, k, v, 0.05)


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ct.select(x.to("meta"), 0.1), "scores is a tensor on device meta"),
        (lambda x: ct.select(x, 0.1, mask=x.to("meta")), "mask is a tensor on device meta"),
        (lambda x: ct.keep_set(x.numpy(), 0.1), "scores is a ndarray; pass a torch tensor"),
        (lambda x: ct.select(x, "a"), "eps is a str"),
        (lambda x: ct.select(x, 1.5), "eps is 1.5"),
        (lambda x: ct.select(x / 0, 0.1), r"scores\[0, \d\] is \+?inf|scores\[0, \d\] is NaN"),
        (lambda x: ct.select(x.int(), 0.1), "scores has dtype int32"),
        (lambda x: OPS.select(x.to_sparse(), 0.1), "scores is a sparse tensor"),
        (lambda x: ct.certify(x, x), "keep has dtype float32"),
        (lambda x: ct.select(x, 0.1, max_keep=True), "max_keep is True"),
        (lambda x: OPS.keep_set(x, 0.1, max_keep=2, max_fraction=0.5), "exclude each other"),
        (lambda x: ct.keep_set(x, 0.1, effort="most"), "effort is 'most'"),
        (lambda x: OPS.select(x, 0.1, max_keep=2, max_fraction=0.5), "exclude each other"),
        (lambda x: ct.attention(x, x.to("meta"), x, 0.1), "k is a tensor on device meta"),
        (lambda x: ct.attention(x, x[:, :3], x, 0.1), "keys have 3 entries"),
        (lambda x: OPS.attention(x, x.to("meta"), x, 0.1), "on device"),
    ],
)
def test_bad_input_is_named(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ck.CertkError, match=message):
        call(normal(2, 8))


def test_a_selection_of_other_rows_is_refused() -> None:
    scores = normal(3, 20)
    kept = ct.select(scores, 0.1)
    for indptr in (kept.indptr[:-1], kept.indptr + 1, kept.indptr.flip(0), kept.indptr[0]):
        with pytest.raises(ck.CertkError, match=r"keep\.indptr"):
            ct.certify(scores, kept._replace(indptr=indptr))


def test_shapes_are_known_without_data() -> None:
    q, k, v = (x.to("meta") for x in attended(torch.bfloat16))
    out, upper, kept = OPS.attention(q, k, v, 0.1)
    assert (out.shape, out.dtype) == ((2, 4, 3, 8), torch.bfloat16)
    assert (upper.shape, upper.dtype) == ((2, 4, 3), torch.float64)
    assert (kept.shape, kept.dtype) == ((2, 4, 3), torch.int64)


# ------------------------------------------------------------------- threads and processes


def test_as_many_threads_as_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def attention(*arguments: Any) -> Any:
        asked.append(arguments[-1][-1])
        return attention_here(*arguments)

    attention_here = _native.attention
    monkeypatch.setattr(_native, "attention", attention)
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            ct.attention(*attended(torch.float32), 0.1)
        ct.attention(*attended(torch.float32), 0.1, threads=3)
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 2, 3]


def test_under_inference_mode() -> None:
    with torch.inference_mode():
        q, k, v = attended(torch.bfloat16)
        index = ct.index_tensors(ck.KeyIndex.build(k))
        found = ct.attention(q + 0, k, v, 0.05, index=index)
        again = ct.attention(q, k, v, 0.05)
        scores = 1.0 * normal(4, 50)
        kept = ct.select(scores, 0.1)
    assert found.out.is_inference()
    assert again.out.shape == found.out.shape
    assert bool(ct.certify(scores, kept, eps=0.1).holds.all())


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.scores = 3 * normal(4, 64, 500)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, int]:
        mask, upper = ct.select_mask(self.scores[i], 0.05, threads=None if i % 2 else 2)
        return mask, upper, torch.get_num_threads()


def test_in_forked_workers_of_a_loader() -> None:
    data = Rows()
    expected = [data[i] for i in range(len(data))]
    # The parent has used its pools, and torch's.
    torch.randn(300, 300) @ torch.randn(300, 300)
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    for (mask, upper, threads), (wanted, bound, _) in zip(loader, expected, strict=True):
        assert torch.equal(mask, wanted)
        assert torch.equal(upper, bound)
        assert threads == 1


def test_from_several_threads_at_once() -> None:
    q, k, v, index = thinned(torch.float32)
    tensors = ct.index_tensors(index)
    calls = (
        partial(ct.attention, q, k, v, 0.01, index=tensors),
        partial(ct.attention, q, k, v, 0.01),
        partial(ct.select_mask, 3 * normal(50, 300), 0.05),
    )
    expected = [call() for call in calls]
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(20):
            at = (seed + i) % len(calls)
            torch.randn(64, 64) @ torch.randn(64, 64)
            pairs = zip(calls[at](), expected[at], strict=True)
            wrong.extend("different" for a, b in pairs if not torch.equal(a, b))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
