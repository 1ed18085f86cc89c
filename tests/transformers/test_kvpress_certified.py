"""Presses that are told a ratio, scores for other presses, and what any press has lost, proven."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import kvpress
import numpy as np
import pytest
import torch
import transformers as hf
from kvpress.utils import compute_n_kept

import certk_rs as ck
import model_caches as caches
import model_zoo as zoo
from certk_rs import transformers as ct
from certk_rs.kvpress import CertifiedPress, CertkPress, CertkScorerPress
from model_caches import pressed

pytestmark = pytest.mark.older

N, WINDOW = 72, 8


def weights(call: dict[str, Any], b: int) -> np.ndarray:
    """Softmax of the last queries of a call, (heads, m, n), in float64."""
    query, key = call["query"][b].double().numpy(), call["key"][b].double().numpy()
    size, n = len(query) // len(key), key.shape[1]
    scores = query[:, -WINDOW:] @ np.repeat(key, size, 0).swapaxes(1, 2) * query.shape[-1] ** -0.5
    scores[:, np.arange(n) > n - WINDOW + np.arange(WINDOW)[:, None]] = -np.inf
    found = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(found / found.sum(-1, keepdims=True))


def left(module: Any, layer: Any, call: dict[str, Any], b: int) -> np.ndarray:
    """Return the keys (kv_heads, n) of a prompt that are left to attention."""
    key = call["key"][b]
    shown = torch.ones(layer.keys.shape[:3], dtype=torch.bool)
    if (masked := getattr(module, "masked_key_indices", None)) is not None:
        shown[tuple(masked)] = False
    return np.stack(
        [
            (layer.keys[b, head][shown[b, head]][:, None] == key[head]).all(-1).any(0).numpy()
            for head in range(len(key))
        ]
    )


class CompactedInPlace(kvpress.KnormPress):  # type: ignore[misc]
    """Moves what it keeps to the front of the cache's own memory."""

    def compress(self, module: Any, hidden: Any, keys: Any, values: Any, *more: Any) -> Any:
        kept = super().compress(module, hidden, keys, values, *more)
        return [
            there[:, :, : each.shape[2]].copy_(each)
            for there, each in zip((keys, values), kept, strict=True)
        ]


class Masking(kvpress.BasePress):  # type: ignore[misc]
    """Masks another eighth of the slots in each head."""

    compression_ratio = 0.125

    def compress(self, module: Any, hidden: Any, keys: Any, values: Any, *more: Any) -> Any:
        head = torch.arange(keys.shape[1])[:, None]
        gone = (torch.arange(keys.shape[2])[None] + head) % 8 == 0
        module.masked_key_indices = gone.expand(keys.shape[:3]).nonzero(as_tuple=True)
        return keys, values


PRESSES: dict[str, Any] = {
    "SnapKV": lambda: kvpress.SnapKVPress(0.5, window_size=4),
    "Knorm": lambda: kvpress.KnormPress(0.4),
    "Streaming": lambda: kvpress.StreamingLLMPress(0.6),
    "Random": lambda: kvpress.RandomPress(0.3),
    "AdaKV of Knorm": lambda: kvpress.AdaKVPress(kvpress.KnormPress(0.5)),
    "ours": lambda: CertkScorerPress(0.5, window=WINDOW),
    "AdaKV": lambda: kvpress.AdaKVPress(CertkScorerPress(0.5, window=WINDOW)),
    "Chunk": lambda: kvpress.ChunkPress(CertkScorerPress(0.5, window=WINDOW), chunk_length=24),
    "ChunkKV": lambda: kvpress.ChunkKVPress(CertkScorerPress(0.5, window=WINDOW), chunk_length=6),
    "PerLayer": lambda: kvpress.PerLayerCompressionPress(
        CertkScorerPress(window=WINDOW), [0.2, 0.5, 0.6]
    ),
    "Composed": lambda: kvpress.ComposedPress(
        [kvpress.KnormPress(0.2), CertkScorerPress(0.3, window=WINDOW)]
    ),
    "in place": lambda: CompactedInPlace(0.4),
    # Slots that are masked are those of the cache that the first has left.
    "masks behind another": lambda: kvpress.ComposedPress([kvpress.KnormPress(0.4), Masking()]),
    "DMS": lambda: kvpress.DMSPress(kvpress.RandomPress(seed=0), 0.5, sliding_window_size=8),
}


@pytest.mark.parametrize("name", list(PRESSES))
def test_what_any_press_loses_is_proven(name: str) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(2, N)
    dense = caches.seen_by(model, ids)
    press = CertifiedPress(PRESSES[name](), window=WINDOW)
    cache = pressed(press, model, ids)
    assert [each.layer for each in press.certificates] == [0, 1, 2]
    some = 0.0
    for certificate, layer, call in zip(press.certificates, cache.layers, dense, strict=True):
        module = model.model.layers[certificate.layer].self_attn
        for b in range(2):
            kept = left(module, layer, call, b)
            share = weights(call, b)
            gone = np.repeat(~kept, len(share) // len(kept), 0)[:, None]
            real = (share * gone).sum(-1)
            said = certificate.tail_mass_upper[b]
            assert certificate.kept[b].tolist() == kept.sum(1).tolist()
            assert (real <= said * (1 + 1e-9)).all()
            assert (said <= real * (1 + 1e-3) + 1e-6).all()
            some = max(some, float(real.max()))
    assert press.worst >= some
    assert some > 0


class ValuesInPlace(kvpress.KnormPress):  # type: ignore[misc]
    """Adds to values where they are, as CAMPress does."""

    def compress(self, module: Any, hidden: Any, keys: Any, values: Any, *more: Any) -> Any:
        values[:, :, 1:].add_(values[:, :, :1].clone())
        return super().compress(module, hidden, keys, values, *more)


CHANGING: dict[str, Any] = {
    "KeyRerotationPress": lambda: kvpress.KeyRerotationPress(kvpress.KnormPress(0.5)),
    "MergingPress": lambda: kvpress.MergingPress(kvpress.KnormPress(0.5)),
    # Those that write into the cache's own memory.
    "ThinKPress": lambda: kvpress.ThinKPress(0.5, window_size=8),
    "ComposedPress": lambda: kvpress.ComposedPress(
        [kvpress.ThinKPress(0.5, window_size=8), kvpress.KnormPress(0.4)]
    ),
    "ValuesInPlace": lambda: ValuesInPlace(0.4),
}


@pytest.mark.parametrize("name", list(CHANGING))
def test_presses_that_change_keys_are_refused(name: str) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    press = CertifiedPress(CHANGING[name](), window=WINDOW)
    pressed(CertifiedPress(kvpress.KnormPress(0.5)), model, ids)
    with pytest.raises(ck.CertkError, match=f"layer 0: {name} does not only choose"):
        pressed(press, model, ids)
    assert not [m for m in model.modules() if m._forward_hooks]
    assert press.certificates == []
    assert math.isnan(press.worst)


def test_masks_of_keys_that_are_not_there_are_refused() -> None:
    """DMSPress counts from the prompt's end, behind a press that has made the cache shorter."""
    late = kvpress.DMSPress(kvpress.KnormPress(), 0.0, sliding_window_size=8)
    press = CertifiedPress(kvpress.ComposedPress([kvpress.KnormPress(0.5), late]), window=WINDOW)
    with pytest.raises(ck.CertkError, match="layer 0: masked_key_indices does not go with the 36"):
        pressed(press, zoo.peaked("llama"), zoo.tokens(1, N))


def _decoding() -> Any:
    return kvpress.DecodingPress(CertkScorerPress(window=WINDOW))


AFTER_THE_PROMPT: dict[str, Any] = {
    "a CertkPress, which drops keys when all": lambda: CertkPress(eps=0.1),
    "a DecodingPress, which drops keys while text is": _decoding,
    "a CAMPress, which drops keys while": lambda: kvpress.CAMPress(CertkScorerPress()),
    "a CompressionRatioDecodingPress, which drops keys while": lambda: (
        kvpress.CompressionRatioDecodingPress(CertkScorerPress())
    ),
    "a PrefillDecodingPress, which drops keys while": lambda: kvpress.PrefillDecodingPress(
        kvpress.KnormPress(0.5), _decoding()
    ),
    "a DMSPress, which drops keys while": lambda: kvpress.DMSPress(
        kvpress.KnormPress(), -1.0, decoding=True
    ),
    "a KVzipPress, which drops keys when the prompt is over": kvpress.KVzipPress,
    "a KVgradPress, which drops keys when the prompt is over": kvpress.KVgradPress,
    "a FastKVzipPress, which drops keys when the prompt is over": kvpress.FastKVzipPress,
    "a KVComposePress, which drops keys when the prompt is over": kvpress.KVComposePress,
    "a ComposedPress around a CertkPress, which": lambda: kvpress.ComposedPress(
        [kvpress.KnormPress(0.5), CertkPress(eps=0.1)]
    ),
}


@pytest.mark.parametrize("says", list(AFTER_THE_PROMPT))
def test_presses_that_drop_keys_after_the_prompt_are_refused_at_once(says: str) -> None:
    press = AFTER_THE_PROMPT[says]()
    with pytest.raises(ck.CertkError, match=f"press is {says}"):
        CertifiedPress(press)


def with_ratio(value: Any, **options: Any) -> None:
    CertkPress(**options).compression_ratio = value


GUARD: dict[str, Any] = {"rest": "file", "compact": True}
BAD: list[tuple[str, Callable[[], object]]] = [
    ("press is a type", lambda: CertifiedPress(kvpress.KnormPress)),
    ("press is a int", lambda: CertifiedPress(3)),
    ("window is 0", lambda: CertifiedPress(kvpress.KnormPress(), window=0)),
    *(
        ("compression_ratio is", functools.partial(with_ratio, value))
        for value in (1.0, -0.1, math.nan, True, "x")
    ),
    ("eps decides", lambda: with_ratio(0.5, eps=0.1)),
    ("eps is 0.0", lambda: CertkScorerPress(0.5, eps=0.0)),
    ("eps is 1", lambda: CertkScorerPress(0.5, eps=1)),
    ("window is 0", lambda: CertkScorerPress(0.5, window=0)),
    ("eps is 1;", lambda: CertkPress(eps=1.0)),
    ("eps", lambda: CertkPress(eps=-0.1)),
    ("eps", lambda: CertkPress(eps=math.nan)),
    ("eps is '0.1'", lambda: CertkPress(eps="0.1")),
    ("window is 0", lambda: CertkPress(0.1, window=0)),
    ("window is 2.5", lambda: CertkPress(0.1, window=2.5)),
    ("keep_first", lambda: CertkPress(0.1, keep_first=-1)),
    ("keep_last is True", lambda: CertkPress(0.1, keep_last=True)),
    ("threads", lambda: CertkPress(0.1, threads=-1)),
    ("pass compact=True", lambda: CertkPress(eps=0.1, rest="file")),
    ("pass later_eps", lambda: CertkPress(**GUARD)),
    ("rest is 'cells'", lambda: CertkPress(eps=0.1, rest="cells", compact=True)),
    ("go with a guard", lambda: CertkPress(eps=0.1, on_breach="recall")),
    ("go with a guard", lambda: CertkPress(eps=0.1, later_eps=0.1)),
    ("eps is 1.0", lambda: CertkPress(eps=0.1, later_eps=1.0, **GUARD)),
]


@pytest.mark.parametrize(("says", "make"), BAD)
def test_bad_arguments_are_errors(says: str, make: Callable[[], object]) -> None:
    with pytest.raises(ck.CertkError, match=says):
        make()


class Late(kvpress.KnormPress):  # type: ignore[misc]
    """Drops keys when the prompt is over, as KVzip does, or notes more of them."""

    noted = False

    @contextlib.contextmanager
    def __call__(self, model: Any) -> Any:
        with super().__call__(model):
            yield
        if self.noted:
            model.model.layers[1].self_attn.masked_key_indices = tuple(torch.zeros(3, 1).long())
        else:
            self.layer.keys = self.layer.keys[:, :, 1:]


@pytest.mark.parametrize("noted", [False, True])
def test_what_is_dropped_later_is_no_longer_certified(noted: bool) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    inside = Late(0.5)
    inside.noted = noted
    press, cache = CertifiedPress(inside, window=WINDOW), hf.DynamicCache()

    def run() -> None:
        with torch.inference_mode(), press(model):
            model(input_ids=ids, past_key_values=cache)
            inside.layer = cache.layers[1]

    with pytest.raises(ck.CertkError, match="layer 1: Late has dropped or changed keys since"):
        run()
    assert press.certificates == []


def test_there_is_no_worst_query_without_a_prompt() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(2, N)
    press = CertifiedPress(kvpress.KnormPress(0.5), window=WINDOW)
    assert math.isnan(press.worst)
    pressed(press, model, ids)
    assert 0 < press.worst < 1
    # Of a prompt that was not certified to its end nothing is left.
    module = model.model.layers[1].self_attn
    hook = module.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pressed(press, model, ids)
    hook.remove()
    assert press.certificates == []
    assert math.isnan(press.worst)


@pytest.mark.parametrize("name", ["ours", "another"])
def test_certificates_are_of_the_last_prompt(name: str) -> None:
    """Of one behind another, and behind one that was not finished."""
    model, press = zoo.peaked("llama"), CertkPress(eps=0.1, window=WINDOW)
    if name == "another":
        press = CertifiedPress(kvpress.KnormPress(0.5), window=WINDOW)
    failing = model.model.layers[1].self_attn

    def run(n: int) -> None:
        model(input_ids=zoo.tokens(1, n), past_key_values=hf.DynamicCache())

    with torch.inference_mode(), press(model):
        for n in (20, 30):
            run(n)
            assert [(each.layer, each.n) for each in press.certificates] == [
                (layer, n) for layer in range(3)
            ]
            hook = failing.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(n + 5)
            hook.remove()


def test_another_budget_is_that_of_the_next_prompt() -> None:
    model, press = zoo.peaked("llama"), CertkPress(0.1, window=4)
    assert math.isnan(press.compression_ratio)
    with torch.inference_mode(), press(model):
        assert math.isnan(press.compression_ratio)
        model(input_ids=zoo.tokens(1, 30), past_key_values=hf.DynamicCache())
        press.eps, ratio = 0.5, press.compression_ratio
        model(input_ids=zoo.tokens(1, 30), past_key_values=hf.DynamicCache())
        assert 0 < ratio < press.compression_ratio < 1
    with pytest.raises(ck.CertkError, match="set eps"):
        press.compression_ratio = 0.5


def test_a_certified_press_is_the_outermost() -> None:
    press = kvpress.ComposedPress([CertifiedPress(kvpress.KnormPress(0.5)), kvpress.KnormPress()])
    with pytest.raises(ck.CertkError, match="goes around all other presses"):
        pressed(press, zoo.peaked("llama"), zoo.tokens(1, N))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_what_another_press_writes_over_is_not_certified(first: bool, compact: bool) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    ours = CertkPress(eps=0.1, window=WINDOW, compact=compact)
    other = kvpress.ThinKPress(0.5, window_size=8)
    one, two = (other, ours) if first else (ours, other)
    with pytest.raises(ck.CertkError, match="layer 0: keys or values in the cache are no longer"):  # noqa: SIM117
        with torch.inference_mode(), one(model), two(model):
            model(input_ids=ids, past_key_values=hf.DynamicCache())
    assert ours.certificates == []


class NoPositions(torch.nn.Module):  # type: ignore[misc]
    """Rotates nothing, as in models without positions."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any) -> Any:
        cos, sin = self.inside(*args)
        return torch.ones_like(cos), torch.zeros_like(sin)


def test_of_equal_pairs_the_last_are_left() -> None:
    """A query of the window sees those before it only: the first ones would flatter a press."""
    model, ids = zoo.peaked("llama"), zoo.tokens(1, 1).expand(-1, N)
    model.model.rotary_emb = NoPositions(model.model.rotary_emb)
    press = CertifiedPress(kvpress.StreamingLLMPress(0.5, n_sink=4), window=WINDOW)
    cache = pressed(press, model, ids)
    kept = cache.layers[0].keys.shape[2]
    assert (cache.layers[0].keys == cache.layers[0].keys[:, :, :1]).all()
    position = np.arange(N - WINDOW, N)
    seen = 4 + np.maximum(position - (N - kept + 4) + 1, 0)
    real = 1 - seen / (position + 1)
    for certificate in press.certificates:
        assert (certificate.kept == kept).all()
        assert (certificate.tail_mass_upper >= real - 1e-6).all()
    # The sinks are taken for the latest ones before the window's end.
    assert press.worst <= real.max() + 4 / N


def test_equal_pairs_are_told_apart_by_how_many() -> None:
    """Of a token that is repeated without positions, as many are dropped as are."""
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    press = CertifiedPress(kvpress.KnormPress(0.5), window=WINDOW)
    pressed(press, model, torch.zeros_like(ids))
    for certificate in press.certificates:
        assert (certificate.kept == compute_n_kept(N, 0.5)).all()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.7])
def test_a_ratio_may_be_set_as_the_runner_of_kvpress_does(ratio: float, compact: bool) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(2, N)
    press = CertkPress(window=WINDOW, compact=compact)
    press.compression_ratio = ratio
    assert press.compression_ratio == ratio
    cache = pressed(press, model, ids)
    kept = compute_n_kept(N, ratio)
    counts = np.array([each.kept for each in press.certificates])
    if compact:
        assert cache.layers[0].keys.shape[2] == kept
        assert (counts <= kept).all()
    else:
        assert 0.9 * kept < counts.mean() <= kept
        # One budget: the worst queries of heads that keep fewer lose as much as those of others.
        worst = [each.tail_mass_upper.max() for each in press.certificates]
        assert ratio == 0 or max(worst) < 4 * min(worst)
    assert press.compression_ratio == pytest.approx(1 - kept / N, abs=0.1)
    # Another prompt, another ratio.
    press.compression_ratio = 0.5
    pressed(press, model, ids)
    assert press.compression_ratio == pytest.approx(0.5, abs=0.1)


def test_a_ratio_leaves_what_is_always_kept() -> None:
    press = CertkPress(window=WINDOW, compact=True, keep_first=20, keep_last=30)
    press.compression_ratio = 0.7
    cache = pressed(press, zoo.peaked("llama"), zoo.tokens(1, N))
    assert cache.layers[0].keys.shape[2] == 50 > compute_n_kept(N, 0.7)


def test_a_ratio_loses_least_in_the_worst_query() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    ours = CertkPress(window=WINDOW, compact=True)
    ours.compression_ratio = 0.5
    pressed(ours, model, ids)
    worst = max(float(each.tail_mass_upper.max()) for each in ours.certificates)
    others = (
        kvpress.SnapKVPress(0.5, window_size=4),
        kvpress.KnormPress(0.5),
        kvpress.StreamingLLMPress(0.5),
        CertkScorerPress(0.5, window=WINDOW),
    )
    for other in others:
        press = CertifiedPress(other, window=WINDOW)
        pressed(press, model, ids)
        assert worst <= press.worst


def test_scores_are_how_often_keys_are_needed() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    dense = caches.seen_by(model, ids)
    scores: list[Any] = []

    class Spy(CertkScorerPress):
        def score(self, *args: Any) -> Any:
            scores.append(super().score(*args))
            return scores[-1]

    pressed(Spy(0.5, eps=0.1, window=WINDOW), model, ids)
    for call, found in zip(dense, scores, strict=True):
        share = weights(call, 0)
        size = len(share) // found.shape[1]
        for head in range(found.shape[1]):
            needed = np.zeros((WINDOW, N), bool)
            for one in share[head * size : (head + 1) * size]:
                for row, of_row in enumerate(one):
                    order = np.argsort(-of_row)
                    k = int((np.cumsum(of_row[order]) < 0.9).sum()) + 1
                    needed[row, order[:k]] = True
            seen = np.minimum(WINDOW, N - np.arange(N))
            expected = needed.sum(0) / seen + (np.arange(N) >= N - WINDOW)
            assert (np.abs(found[0, head].numpy() - expected) <= 1 / seen + 1e-6).all()


def test_decoding_press_may_hold_it() -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    press = kvpress.DecodingPress(
        CertkScorerPress(window=WINDOW), compression_interval=4, target_size=32
    )
    cache = hf.DynamicCache()
    with torch.inference_mode(), press(model):
        model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False)
    assert cache.layers[0].keys.shape[2] < 40


def test_in_the_pipeline() -> None:
    """The certified keys are those that the answer was computed with."""
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N)
    press = CertifiedPress(kvpress.AdaKVPress(CertkScorerPress(0.5, window=WINDOW)), window=WINDOW)
    cache = hf.DynamicCache()
    with torch.inference_mode(), press(model):
        model(input_ids=ids, past_key_values=cache)
        # Later calls are no prompts: nothing is certified for them.
        model(input_ids=ids[:, -1:], past_key_values=cache)
    assert len(press.certificates) == 3
    press.compression_ratio = 0.2
    assert press.compression_ratio == 0.2


def decoded(model: Any, cache: Any, ids: Any) -> Any:
    """Logits of the rest of a text, token by token, at its positions."""
    steps = [
        caches.logits_of(
            model, ids[:, at : at + 1], cache,
            position_ids=torch.tensor([[at]]), cache_position=torch.tensor([at]),
        )
        for at in range(N, ids.shape[1])
    ]  # fmt: skip
    return torch.cat(steps, 1)


@pytest.mark.parametrize("ratio", [None, 0.6])
def test_guards_judge_what_comes_after_the_prompt(ratio: float | None) -> None:
    model, ids = zoo.peaked("llama"), zoo.tokens(1, N + 6)
    ct.use(model, eps=0)
    whole = hf.DynamicCache()
    with torch.inference_mode():
        model(input_ids=ids[:, :N], past_key_values=whole)
    keys = whole.layers[0].keys[0].double()
    dense = decoded(model, whole, ids)
    options: dict[str, Any] = {"window": WINDOW, "compact": True, "rest": "file"}
    for on_breach, later in (("report", 0.02), ("recall", 0.02), ("recall", 0.0)):
        press = CertkPress(
            eps=None if ratio else 0.3, on_breach=on_breach, later_eps=later, **options
        )
        if ratio:
            press.compression_ratio = ratio
        cache = pressed(press, model, ids[:, :N])
        assert cache.get_seq_length() == cache.layers[0].keys.shape[2] < N
        kept = cache.layers[0].keys[0].double()
        found = decoded(model, cache, ids)
        assert len(press.lost) == 6 * len(cache.layers)
        left = np.concatenate([call.left.ravel() for call in press.lost])
        if on_breach == "report":
            assert left.max() > later, "nothing was lost: nothing was tried"
            # The first step's first layer is asked the same in both.
            calls = caches.seen_by(model, ids[:, : N + 1])
            query = calls[0]["query"][0, :, -1].double()
            size = len(query) // len(keys)
            for head, q in enumerate(query):
                own = calls[0]["key"][0, head // size, -1].double()
                scores = torch.cat([keys[head // size], own[None]]) @ q * len(q) ** -0.5
                stays = (keys[head // size][:, None] == kept[head // size]).all(-1).any(1)
                gone = torch.softmax(scores, 0)[:-1][~stays].sum()
                said = press.lost[0].lost[head, 0]
                assert float(gone) <= said * (1 + 1e-9)
                assert said <= 1.3 * float(gone) + 1e-3
        else:
            assert left.max() <= later
        if on_breach == "recall" and later == 0.0:
            assert torch.allclose(found, dense, atol=1e-4)
    assert press.lost


def test_guards_need_certified_attention_and_one_sequence() -> None:
    press = CertkPress(eps=0.1, window=WINDOW, compact=True, rest="file")
    with pytest.raises(ck.CertkError, match="'sdpa' attention does not ask guards"):
        pressed(press, zoo.peaked("llama"), zoo.tokens(1, N))
    model = zoo.peaked("llama")
    ct.use(model, eps=0)
    with pytest.raises(ck.CertkError, match="one sequence at a time"):
        pressed(press, model, zoo.tokens(2, N))
    pressed(press, model, zoo.tokens(1, N))
    assert press.lost == []
