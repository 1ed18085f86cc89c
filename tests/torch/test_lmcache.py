"""Token dropping in LMCache: what the functions that it calls return, and what they prove.

LMCache itself is not needed: a cache kind is known by its value.
"""

from __future__ import annotations

import enum
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from certk_rs import CertkError  # noqa: E402
from certk_rs.lmcache import DroppedTokens, audited, drop_tokens, rotation  # noqa: E402

Tensor = torch.Tensor
LAYERS, HEADS, KV_HEADS, D, N = 2, 4, 2, 8, 48
SHAPE: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
# Rows far from their budgets are certified by products in float32.
CLOSE = 5e-4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Kind(enum.Enum):
    """As lmcache.sdk.LMCacheSDKCacheKind."""

    KV = "kv"
    QUERY = "query"


def made(
    n: int = N, dtype: Any = torch.float32, seed: int = 0, sharp: float = 6.0
) -> tuple[dict[Kind, Tensor], list[int]]:
    """Caches of a request as LMCache has them, with a few keys that most queries want."""
    draw = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, n, KV_HEADS * D, generator=draw)
    queries = torch.randn(1, LAYERS, n, HEADS * D, generator=draw)
    # The first token draws attention, as in models; the others are told apart by their products.
    kv[0, :, 0] = 1.0
    queries = sharp * (0.3 * queries + 0.5)
    tokens = torch.randint(0, 1000, (n,), generator=draw).tolist()
    return {Kind.KV: kv.to(dtype), Kind.QUERY: queries.to(dtype)}, tokens


def weights_of(
    caches: dict[Kind, Tensor], causal: bool, scale: float = D**-0.5
) -> np.ndarray[Any, Any]:
    """Softmax weights (layers, heads, n, n) in float64, from the stored numbers."""
    kv, queries = caches[Kind.KV].double().numpy(), caches[Kind.QUERY].double().numpy()
    layers, n = kv.shape[1:3]
    q = queries.reshape(layers, n, HEADS, D)
    k = kv[0].reshape(layers, n, KV_HEADS, D)
    weights = np.empty((layers, HEADS, n, n))
    for layer in range(layers):
        for head in range(HEADS):
            scores = scale * q[layer, :, head] @ k[layer, :, head // (HEADS // KV_HEADS)].T
            if causal:
                scores[np.triu_indices(n, 1)] = -np.inf
            each = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights[layer, head] = each / each.sum(axis=1, keepdims=True)
    return weights


def losses(caches: dict[Kind, Tensor], kept: Any, causal: bool = True, m: int = N) -> Any:
    gone = np.setdiff1d(np.arange(caches[Kind.KV].shape[2]), kept)
    return weights_of(caches, causal)[..., -m:, gone].sum(axis=-1)


def holds(told: DroppedTokens, caches: dict[Kind, Tensor], causal: bool = True) -> None:
    """See that what is told of each query is no less than the truth, and hardly more."""
    upper = told.tail_mass_upper
    real = losses(caches, told.kept, causal, upper.shape[2])
    assert upper.shape == real.shape
    assert (real <= upper + 1e-13).all()
    assert (upper <= real + CLOSE).all()
    layer, head, at = told.worst_row
    assert upper[layer, head, at - (len(told.tokens) - upper.shape[2])] == told.worst == upper.max()
    assert f"{told.k} of {len(told.tokens)} tokens" in str(told)
    assert "old positions" in str(told)
    for array in (told.kept, upper):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def choosing(kept: Any) -> Callable[..., Any]:
    """A function for LMCache that keeps some tokens."""

    def fn(caches: Any, tokens: Any) -> Any:
        return caches[Kind.KV][:, :, list(kept)], [tokens[at] for at in kept]

    return fn


def audit(
    fn: Any, caches: Any, tokens: Any, **options: Any
) -> tuple[tuple[Tensor, Any], DroppedTokens]:
    told: list[DroppedTokens] = []
    answer = audited(fn, **SHAPE, on_result=told.append, **options)(caches, tokens)
    return answer, told[0]


# ------------------------------------------------------------------------------ certified choices


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_stored_query_loses_more_than_eps(dtype: Any, causal: bool) -> None:
    caches, tokens = made(dtype=dtype)
    told: list[DroppedTokens] = []
    for eps in (0.0, 0.05, 0.3, 0.9):
        fn = drop_tokens(eps, **SHAPE, rotate=None, causal=causal, on_result=told.append)
        kv, left = fn(caches, tokens)
        found = told[-1]
        holds(found, caches, causal)
        assert found.holds
        assert found.worst <= eps == found.eps
        assert found.lower_bound is not None
        assert found.lower_bound <= found.k
        assert found.tokens == tuple(tokens)
        assert not found.keys_changed
        assert not found.refused
        assert torch.equal(kv, caches[Kind.KV][:, :, found.kept.tolist()])
        assert kv.dtype == dtype
        assert list(left) == [tokens[at] for at in found.kept]
    sizes = [each.k for each in told]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < N / 2 < N == sizes[0]


def test_a_window_covers_its_queries_and_a_scale_is_theirs() -> None:
    caches, tokens = made()
    told: list[DroppedTokens] = []
    for window in (1, 7, N, 10 * N):
        drop_tokens(0.1, **SHAPE, rotate=None, window=window, on_result=told.append)(caches, tokens)
        assert told[-1].tail_mass_upper.shape == (LAYERS, HEADS, min(window, N))
        holds(told[-1], caches)
    assert told[0].k < told[2].k
    drop_tokens(0.1, **SHAPE, rotate=None, scale=0.1, on_result=told.append)(caches, tokens)
    gone = np.setdiff1d(np.arange(N), told[-1].kept)
    real = weights_of(caches, True, 0.1)[..., gone].sum(axis=-1)
    np.testing.assert_allclose(told[-1].tail_mass_upper, real, atol=CLOSE)


def test_constraints_and_whole_chunks() -> None:
    caches, tokens = made()
    told: list[DroppedTokens] = []

    def run(**options: Any) -> DroppedTokens:
        options = {"rotate": None, "window": 4, "on_result": told.append, **options}
        kv, left = drop_tokens(0.2, **SHAPE, **options)(caches, tokens)
        assert kv.shape[2] == len(left) == told[-1].k
        holds(told[-1], caches)
        return told[-1]

    free = run()
    assert run(keep_first=3, keep_last=5).kept[:3].tolist() == [0, 1, 2]
    assert told[-1].kept[-5:].tolist() == list(range(N - 5, N))
    small = run(max_keep=2)
    assert (small.k, small.holds) == (2, False)
    for chunk in (1, 7, 16, N):
        filled = run(chunk_size=chunk)
        assert filled.k % chunk == 0 or filled.k == N
        assert filled.lower_bound == free.lower_bound
        assert set(filled.kept) >= set(free.kept)
        assert (filled.tail_mass_upper <= free.tail_mass_upper + CLOSE).all()
        added = set(filled.kept) - set(free.kept)
        assert all(at in filled.kept for at in range(min(added, default=N), N))
    assert run(chunk_size=100).k == N


def test_one_token_and_queries_without_the_leading_axis() -> None:
    caches, tokens = made(1)
    told: list[DroppedTokens] = []
    fn = drop_tokens(0.5, **SHAPE, rotate=None, on_result=told.append)
    kv, left = fn({Kind.QUERY: caches[Kind.QUERY][0], Kind.KV: caches[Kind.KV]}, tokens)
    assert torch.equal(kv, caches[Kind.KV])
    assert (list(left), told[0].worst, told[0].kept.tolist()) == (tokens, 0.0, [0])
    caches, tokens = made()
    plain = {"kv": caches[Kind.KV], "query": caches[Kind.QUERY]}
    assert torch.equal(fn(caches, tokens)[0], fn(plain, tuple(tokens))[0])


def test_streams_of_a_batch_come_in_several_threads() -> None:
    told: list[DroppedTokens] = []
    fn = drop_tokens(0.1, **SHAPE, rotate=None, threads=1, on_result=told.append)
    given = [made(seed=seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: fn(*each), given))
    by_tokens = {each.tokens: each for each in told}
    for (caches, tokens), (_, left) in zip(given, answers, strict=True):
        found = by_tokens[tuple(tokens)]
        assert [tokens[at] for at in found.kept] == list(left)
        holds(found, caches)


# -------------------------------------------------------------------------------------- rotations


def turned(x: np.ndarray[Any, Any], positions: Any, freq: Any) -> np.ndarray[Any, Any]:
    """Llama's rotary embedding of x (n, heads, d), from its definition with complex numbers."""
    r = len(freq)
    turn = np.exp(1j * np.outer(positions, freq))[:, None]
    z = (x[..., :r] + 1j * x[..., r : 2 * r]) * turn
    return np.concatenate([z.real, z.imag, x[..., 2 * r :]], axis=-1)


@pytest.mark.parametrize("r", [1, 3, D // 2])
def test_a_rotation_moves_keys_to_their_new_positions(r: int) -> None:
    freq = 100.0 ** (-np.arange(r) / r)
    plain = np.random.default_rng(0).standard_normal((N, KV_HEADS, D))
    kept = np.array([0, 3, 4, 40, 47])
    kv = torch.zeros(2, LAYERS, 5, KV_HEADS * D, dtype=torch.float64)
    kv[0] = torch.from_numpy(turned(plain, np.arange(N), freq)[kept].reshape(5, -1))
    before = kv.clone()
    moved = rotation(torch.tensor(freq), head_dim=D)(kv, torch.from_numpy(kept), torch.arange(5))
    wanted = turned(plain[kept], np.arange(5), freq).reshape(5, -1)
    np.testing.assert_allclose(moved[0, 1].numpy(), wanted, atol=1e-12)
    assert torch.equal(kv, before)
    assert torch.equal(moved[1], before[1])


def test_drop_tokens_rotates_and_still_speaks_of_old_keys() -> None:
    caches, tokens = made(dtype=torch.bfloat16)
    told: list[DroppedTokens] = []
    seen: list[Any] = []
    turn = rotation([1.0, 0.1], head_dim=D)

    def rotate(kv: Tensor, old: Tensor, new: Tensor) -> Tensor:
        seen.append((old, new))
        return turn(kv, old, new)

    kv, left = drop_tokens(0.2, **SHAPE, rotate=rotate, on_result=told.append)(caches, tokens)
    plain, same = drop_tokens(0.2, **SHAPE, rotate=None)(caches, tokens)
    ((old, new),) = seen
    assert old.tolist() == told[0].kept.tolist()
    assert new.tolist() == list(range(told[0].k))
    assert list(left) == list(same)
    assert torch.equal(kv, turn(plain, old, new))
    assert not torch.equal(kv, plain)
    assert told[0].keys_changed
    holds(told[0], caches)
    with pytest.raises(CertkError, match=r"rotate returned torch.bfloat16 \(1, 2, "):
        drop_tokens(0.2, **SHAPE, rotate=lambda kv, *_: kv[:1])(caches, tokens)


# ---------------------------------------------------------------------------- choices of others


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_of_others_are_certified(dtype: Any, causal: bool) -> None:
    caches, tokens = made(dtype=dtype)
    draw = np.random.default_rng(1)
    sets = [[N - 1], list(range(N - 9, N)), list(range(0, N, 2)), list(range(N))]
    sets += [sorted(draw.choice(N, size, replace=False).tolist()) for size in (5, 30)]
    for kept in sets:
        (kv, left), told = audit(choosing(kept), caches, tokens, causal=causal)
        assert told.kept.tolist() == kept
        assert (told.eps, told.holds, told.lower_bound) == (None, None, None)
        assert not told.keys_changed
        assert left == [tokens[at] for at in kept]
        assert kv.shape[2] == len(kept)
        holds(told, caches, causal)
    assert told.tail_mass_upper.shape == (LAYERS, HEADS, N)


def test_our_own_choice_is_certified_alike() -> None:
    caches, tokens = made()
    told: list[DroppedTokens] = []
    ours = drop_tokens(0.1, **SHAPE, rotate=rotation([0.5], head_dim=D), on_result=told.append)
    _, again = audit(ours, caches, tokens, eps=0.11)
    assert again.kept.tolist() == told[0].kept.tolist()
    np.testing.assert_allclose(again.tail_mass_upper, told[0].tail_mass_upper, atol=CLOSE)


def test_equal_tokens_are_told_apart_by_their_rows() -> None:
    caches, _ = made()
    tokens = [7] * N
    kept = [1, 5, 6, 30]
    _, told = audit(choosing(kept), caches, tokens)
    assert told.kept.tolist() == kept


def test_of_equal_rows_the_last_count() -> None:
    caches, tokens = made()
    copies = [3, 10, 20, 41]
    caches[Kind.KV][:, :, copies] = caches[Kind.KV][:, :, 3:4]
    for at in copies:
        tokens[at] = 7
    # A query between two copies may have seen the one that remains, or not: the worse is told.
    rest = [0, *range(25, 41)]
    for one in copies:
        kept = sorted([*rest, one])
        _, told = audit(choosing(kept), caches, tokens)
        holds(told, caches)
        assert (losses(caches, kept) <= told.tail_mass_upper + 1e-13).all()
        assert told.kept.tolist() == [0, *([20] if one < 25 else []), *range(25, 41)] + (
            [41] if one > 25 else []
        )
    told_all = audit(choosing(copies[:3]), caches, tokens)[1]
    assert told_all.kept.tolist() == copies[1:]


def rotating(kept: Any, in_place: bool = False) -> Callable[..., Any]:
    def fn(caches: Any, tokens: Any) -> Any:
        kv, left = choosing(kept)(caches, tokens)
        turned = rotation([1.0, 0.01], head_dim=D)(
            kv, torch.tensor(list(kept)), torch.arange(len(kept))
        )
        if in_place:
            for each in caches.values():
                each.fill_(torch.nan)
        return turned, left

    return fn


@pytest.mark.parametrize("in_place", [False, True])
def test_rotated_keys_are_known_by_their_values(in_place: bool) -> None:
    caches, tokens = made()
    before = {kind: each.clone() for kind, each in caches.items()}
    kept = [0, 2, 9, 33, 47]
    (kv, _), told = audit(rotating(kept, in_place), caches, tokens)
    assert told.kept.tolist() == kept
    assert told.keys_changed
    assert not torch.equal(kv[0], before[Kind.KV][0][:, kept])
    holds(told, before)


def test_rotated_keys_of_equal_values_are_refused_where_it_matters() -> None:
    caches, tokens = made()
    caches[Kind.KV][1, :, 20] = caches[Kind.KV][1, :, 10]
    tokens[10] = tokens[20] = 7
    with pytest.raises(CertkError, match="tokens 10 and 20 have equal ids and values but unlike"):
        audit(rotating([0, 10, 47]), caches, tokens)
    for kept in ([0, 10, 15, 47], [0, 15, 20, 47], [0, 10, 20, 47], [0, 47]):
        assert audit(rotating(kept), caches, tokens)[1].kept.tolist() == kept
    # Which of two equal keys it was makes no difference.
    caches[Kind.KV][0, :, 20] = caches[Kind.KV][0, :, 10]
    _, told = audit(rotating([0, 10, 47]), caches, tokens)
    assert told.kept.tolist() == [0, 20, 47]
    holds(told, caches)
    assert (losses(caches, [0, 10, 47]) <= told.tail_mass_upper + 1e-13).all()


def changed(caches: Any, tokens: Any) -> Any:
    kv = caches[Kind.KV][:, :, 4:9].clone()
    kv[1, 1, 2, 3] += 1
    return kv, tokens[4:9]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (changed, "changes id or values of token 2 of its answer: nothing can be certified"),
        (choosing([5, 4, 9]), "reorders tokens: nothing can be certified"),
        (choosing([4, 4]), "reorders tokens"),
        (lambda c, t: (c[Kind.KV], [*t[:-1], -1]), "changes id or values of token 47"),
        (lambda c, t: (c[Kind.KV], t[1:]), "for 47 tokens; let it return rows"),
        (lambda c, t: (c[Kind.KV][:, :, :0], []), "for 0 tokens; let it return rows"),
        (lambda c, t: (c[Kind.KV].half(), t), "torch.float16"),
        (lambda c, t: (c[Kind.KV][:, :1], t), r"\(2, 1, 48, 16\)"),
    ],
)
def test_what_is_no_choice_among_tokens_is_refused(fn: Any, message: str) -> None:
    caches, tokens = made()
    for on_breach in ("raise", "keep"):
        with pytest.raises(CertkError, match=message):
            audited(fn, **SHAPE, eps=0.9, on_breach=on_breach)(caches, tokens)  # type: ignore[arg-type]


def test_a_breach_is_raised_or_the_whole_is_kept() -> None:
    caches, tokens = made()
    before = caches[Kind.KV].clone()
    told: list[DroppedTokens] = []
    fn = rotating(range(N - 4, N), in_place=True)
    with pytest.raises(CertkError, match=r"4 of 48 tokens remain.*eps is 0.1: keep more"):
        audited(fn, **SHAPE, eps=0.1, on_result=told.append)(caches, tokens)
    assert (told[0].holds, told[0].refused, told[0].k) == (False, False, 4)
    caches, tokens = made()
    (kv, left), found = audit(fn, caches, tokens, eps=0.1, on_breach="keep")
    assert torch.equal(kv, before)
    assert (left, found.refused, found.holds, found.k) == (tokens, True, False, 4)
    caches, tokens = made()
    (kv, left), found = audit(fn, caches, tokens, eps=0.1, on_breach="keep", window=1)
    holds(found, {Kind.KV: before, Kind.QUERY: made()[0][Kind.QUERY]})


# ------------------------------------------------------------------------------------- bad input


def put(kind: Kind, value: float, *at: int) -> Callable[[Any], None]:
    def change(caches: Any) -> None:
        caches[kind][at] = value

    return change


def other(kind: Kind, make: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def change(caches: Any) -> None:
        caches[kind] = make(caches[kind])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop(Kind.QUERY), "caches has no QUERY; .*lmcache.sdk.qcache.connect"),
        (lambda c: c.pop(Kind.KV), "caches has no KV; .*kvcache.connect"),
        (put(Kind.KV, np.nan, 0, 1, 7, 3), "KV of layer 1, token 7 is not finite"),
        (put(Kind.QUERY, np.inf, 0, 0, 9, 3), "QUERY of layer 0, token 9 is not finite"),
        (other(Kind.QUERY, lambda x: x[:, :, :32]), "QUERY has 32 tokens, KV 48: .*ring_depth"),
        (other(Kind.QUERY, lambda x: x[..., :-1]), r"must be \(2, 48, 32\)"),
        (other(Kind.QUERY, lambda x: x[:, :1]), r"QUERY is torch.float32 \(1, 48, 32\)"),
        (other(Kind.QUERY, lambda x: x[0, 0]), r"must be \(2, 48, 32\)"),
        (other(Kind.QUERY, lambda x: x.double()), "float64"),
        (other(Kind.KV, lambda x: x.int()), "KV of layer 0 has dtype int32"),
        (other(Kind.KV, lambda x: x.to(torch.float8_e4m3fn)), "KV of layer 0 is a torch.float8"),
        (other(Kind.KV, lambda x: x.to("meta")), "KV of layer 0 is a tensor on device meta"),
        (other(Kind.KV, lambda x: x[0]), r"pass keys and values \(2, layers, n, 2 \* d\)"),
        (other(Kind.KV, lambda x: x[:1]), "pass keys and values"),
        (other(Kind.KV, lambda x: x[..., :15]), "pass keys and values"),
        (other(Kind.KV, lambda x: x[:, :, :0]), "n >= 1"),
        (other(Kind.KV, lambda x: x[:, :, :40]), "tokens has 48 ids for the 40 tokens of KV"),
    ],
)
def test_bad_caches(change: Any, message: str) -> None:
    caches, tokens = made()
    change(caches)
    for fn in (drop_tokens(0.1, **SHAPE, rotate=None), audited(choosing([0]), **SHAPE)):
        with pytest.raises(CertkError, match=message) as caught:
            fn(caches, tokens)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 1.0}, "eps is 1.0; pass one number with 0 <= eps < 1"),
        ({"eps": np.nan}, "eps is nan"),
        ({"eps": [0.1, 0.2]}, "eps is"),
        ({"num_heads": 3}, "num_heads is 3, no multiple of num_kv_heads, 2"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"num_heads": 4.0}, "num_heads is 4.0"),
        ({"window": 0}, "window is 0"),
        ({"scale": np.inf}, "scale is inf"),
    ],
)
def test_bad_arguments_of_both(options: Any, message: str) -> None:
    given = {**SHAPE, "eps": 0.1, **options}
    with pytest.raises(CertkError, match=message):
        drop_tokens(**given, rotate=None)
    with pytest.raises(CertkError, match=message):
        audited(choosing([0]), **given)


def test_other_bad_arguments() -> None:
    caches, tokens = made()
    with pytest.raises(CertkError, match="chunk_size is 0"):
        drop_tokens(0.1, **SHAPE, rotate=None, chunk_size=0)
    with pytest.raises(CertkError, match="keep_first is -1"):
        drop_tokens(0.1, **SHAPE, rotate=None, keep_first=-1)(caches, tokens)
    with pytest.raises(CertkError, match="fn is a NoneType"):
        audited(None, **SHAPE)  # type: ignore[arg-type]
    with pytest.raises(CertkError, match="on_breach is 'drop'"):
        audited(choosing([0]), **SHAPE, on_breach="drop")  # type: ignore[arg-type]
    for freq in ([], [[1.0]], [np.inf], [1.0] * 5):
        with pytest.raises(CertkError, match="inv_freq has shape"):
            rotation(freq, head_dim=D)
    rotate, places = rotation([1.0], head_dim=5), torch.arange(N)
    with pytest.raises(CertkError, match=r"head_dim is 5, but KV is torch.float32 \(2, 2, 48, 16"):
        rotate(caches[Kind.KV], places, places)


def test_importing_it_loads_neither_torch_nor_lmcache() -> None:
    code = "import sys, certk_rs.lmcache; print({'torch', 'lmcache'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ----------------------------------------------------------------------------------- a real model


def test_the_queries_and_keys_of_a_model() -> None:
    pytest.importorskip("transformers")
    import model_caches
    import model_zoo

    model, ids = model_zoo.peaked("llama"), model_zoo.tokens(1, 64)
    calls = model_caches.seen_by(model, ids)
    heads, kv_heads, d = (*(calls[0][x].shape[1] for x in ("query", "key")), 0)
    d = calls[0]["key"].shape[-1]

    def rows(name: str) -> Tensor:
        return torch.stack([call[name][0].transpose(0, 1).flatten(1) for call in calls])

    caches = {Kind.KV: torch.stack([rows("key"), rows("value")]), Kind.QUERY: rows("query")}
    told: list[DroppedTokens] = []
    rotate = rotation(model.model.rotary_emb.inv_freq, head_dim=d)
    shape = {"num_heads": heads, "num_kv_heads": kv_heads}
    fn = drop_tokens(0.2, **shape, rotate=rotate, window=16, on_result=told.append)
    kv, left = fn(caches, ids[0].tolist())
    assert 1 < told[0].k < 64
    for layer, call in enumerate(calls):
        q, k = (call[name][0].double().numpy() for name in ("query", "key"))
        for head in range(heads):
            scores = d**-0.5 * q[head, -16:] @ k[head // (heads // kv_heads)].T
            scores[np.arange(64) > np.arange(48, 64)[:, None]] = -np.inf
            each = np.exp(scores - scores.max(axis=1, keepdims=True))
            each /= each.sum(axis=1, keepdims=True)
            lost = 1 - each[:, told[0].kept].sum(axis=1)
            assert (lost <= told[0].tail_mass_upper[layer, head] + 1e-13).all()
    assert told[0].worst <= 0.2
    # Keys of the first layer depend on their token and position alone: the model's own agree.
    ((first, *_),) = (model_caches.seen_by(model, torch.tensor([list(left)])),)
    own = first["key"][0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(kv[0, 0], own, atol=1e-5, rtol=1e-5)
