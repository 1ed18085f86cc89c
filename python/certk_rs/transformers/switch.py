"""Switching models over: the name "certk" in the registries of transformers, and budgets.

The name goes into both registries. With an attention function alone, transformers would make no
mask at all for the name, and causality would silently be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from ..errors import CertkError
from ..sparse_attention import Weights
from .attention import certified_attention
from .batches import take_in_batches
from .own_attention import (
    asks_for_more,
    computes_by_itself,
    has_attention,
    masks_are_those_of_sdpa,
)
from .presses import NAME, unwrap
from .settings import RUNNING, Budget, Running, put_on

# Families that ask the registry from transformers 5 on.
_FROM_5 = frozenset(
    {
        *{"albert", "beit", "bert", "bert_generation", "camembert", "ctrl", "data2vec"},
        *{"diffllama", "distilbert", "dpr", "electra", "ernie", "jetmoe", "mobilebert"},
        *{"modernbert", "moshi", "nemotron", "olmoe", "phimoe", "qwen2_moe", "roberta"},
        *{"roberta_prelayernorm", "roc_bert", "seamless_m4t", "seamless_m4t_v2", "xlm_roberta"},
        *{"xlm_roberta_xl"},
    }
)

_Given = TypeVar("_Given")


def register() -> None:
    """Make `attn_implementation="certk"` known to transformers; `use` does so by itself.

    Models that are loaded under this name run inside `budget(eps=...)`, or after `use`.
    """
    AttentionInterface.register(NAME, certified_attention)
    AttentionMaskInterface.register(NAME, _mask)
    unwrap()
    take_in_batches()


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Boolean masks (batch, 1, m, n), or None where a causal or an open one would say no more.

    Families that know "eager" only get its additive masks, and always one: they may take None for
    an open mask, and read masks elsewhere, too (the routers of NLLB-MoE do).
    """
    config: Any = kwargs.get("config")
    if not _as_sdpa(type(config)):
        return eager_mask(*args, **kwargs)
    # Gemma 4 runs its last layers on the last queries only, for which a causal mask that was left
    # out would mean the first ones; of "sdpa" it knows this, by name.
    if getattr(config, "num_kv_shared_layers", 0):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


# Compilers need not look into it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _as_sdpa(config: Any) -> bool:
    return masks_are_those_of_sdpa(config)


def use(
    model: _Given,
    eps: float | None = None,
    *,
    out_tol: float | None = None,
    even_if_slower: bool = False,
    weights: Weights = "codes",
    threads: int | None = None,
) -> _Given:
    """Switch a model over to certified attention.

    Decoding gets no faster by this alone, since each step reads all keys to see which matter: pass
    a `CertkCache`, which has an index of them, to `generate` (as `cache`, before transformers 5.24
    as `past_key_values`). The first step of decoding without one warns, once in a process.

    Args:
        model: A `transformers.PreTrainedModel`, on the CPU, or what has one inside: a pipeline of
            transformers, a `PeftModel`, a `SentenceTransformer`, a compiled model.
        eps: Budget of dropped softmax mass for every row, 0 <= eps < 1; 0 is plain attention.
            Exactly one of eps and out_tol is given.
        out_tol: Budget on the error of each attention output instead (see `certk_rs.attention`).
        even_if_slower: Drop what may be dropped also where computing everything is faster, which is
            so in prefill unless nearly all keys can be dropped; to see how many are needed.
        weights: "codes": weights of few rows may come from codes of keys and values, where a
            `CertkCache` has both. "exact": they come from exact scores alone.
        threads: Number of threads; None for as many as torch uses.

    Returns:
        What was given. `set_attn_implementation("sdpa")` of the model inside switches it back.

    Raises:
        CertkError: A budget that is none; nothing with one model inside; a model (or a part of it)
            that does not take its attention from the registry, which would have gone on with its
            own, or has keys chosen by an indexer.
    """
    budget = Budget(eps, out_tol, threads, even_if_slower, weights)
    inside = _model_in(model)
    switch(inside)
    put_on(inside, budget)
    return model


def switch(model: Any) -> None:
    """Set the attention implementation of a model and all its parts, and see that it took.

    A model that is refused is as it was.
    """
    register()
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    for part in parts:
        if not _asks_the_registry(part):
            raise _keeps(part, part.config._attn_implementation)
    for module in model.modules():
        kind: Any = type(module)
        if computes_by_itself(kind):
            raise CertkError(
                f"{type(module).__name__}, a part of {type(model).__name__}, computes attention by "
                "itself, not by transformers' AttentionInterface: certified attention would not "
                "run there; use another attn_implementation for this model"
            )
        if (what := asks_for_more(module)) is not None:
            raise CertkError(
                f"{type(module).__name__}, a part of {type(model).__name__}, {what}: not "
                "supported; use another attn_implementation for this model"
            )
    if not has_attention(model):
        raise CertkError(
            f"{type(model).__name__} has no attention that asks transformers' AttentionInterface: "
            "there is nothing to certify; use it as it is"
        )
    before = [(part.config, part.config._attn_implementation) for part in parts]
    try:
        model.set_attn_implementation(NAME)
        for part in parts:
            if part.config._attn_implementation != NAME:
                raise _keeps(part, part.config._attn_implementation)
    except (ValueError, CertkError) as error:
        # Setting one sets those of its parts, which come later here.
        for config, implementation in before:
            config._attn_implementation = implementation
        if isinstance(error, CertkError):
            raise
        raise CertkError(f"{type(model).__name__} cannot be switched: {error}") from error


def _keeps(part: Any, took: str) -> CertkError:
    family = type(part).__module__.split(".")[-2]
    old = int(transformers.__version__.partition(".")[0]) < 5 and family in _FROM_5
    remedy = (
        "this family does from transformers 5 on: install that"
        if old
        else "use it as it is, or a model of another family (docs/transformers.md)"
    )
    return CertkError(
        f"{type(part).__name__} does not take its attention from transformers' "
        f"AttentionInterface (it keeps {took!r}, in transformers {transformers.__version__}), so "
        f"that certified attention would not run; {remedy}"
    )


def _model_in(given: Any) -> transformers.PreTrainedModel:
    """Return the one model that is given, or is inside of what is given."""
    # A pipeline is no module, and has its model under this name.
    root, at = given, "model"
    if not isinstance(given, nn.Module):
        root, at = getattr(given, "model", None), "model.model"
    found: dict[str, transformers.PreTrainedModel] = {}
    for name, part in root.named_modules() if isinstance(root, nn.Module) else ():
        # Parts of a model are switched over with it.
        inner = any(other == "" or name.startswith(f"{other}.") for other in found)
        if isinstance(part, transformers.PreTrainedModel) and not inner:
            found[name] = part
    if len(found) == 1:
        return next(iter(found.values()))
    said = f"model is a {type(given).__name__}, with "
    if not found:
        raise CertkError(said + "no model of transformers inside: pass a PreTrainedModel")
    ways = [
        at + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in name.split("."))
        for name in found
    ]
    raise CertkError(f"{said}{len(found)} models inside: pass each, {', '.join(ways)}")


def _asks_the_registry(part: Any) -> bool:
    # What transformers itself asks before it switches; a model loaded under the name skipped it.
    ask = getattr(type(part), "_can_set_attn_implementation", None)
    return ask is None or bool(ask())


@contextmanager
def budget(
    eps: float | None = None,
    *,
    out_tol: float | None = None,
    even_if_slower: bool = False,
    weights: Weights = "codes",
    threads: int | None = None,
) -> Iterator[None]:
    """Set the budget of all certified attention inside, over that of `use` and outer contexts.

    It holds in this thread (more exactly: this context of `contextvars`).

    Args:
        eps: As in `use`.
        out_tol: As in `use`.
        even_if_slower: As in `use`.
        weights: As in `use`.
        threads: As in `use`.

    Raises:
        CertkError: A budget that is none; on leaving, that no certified attention ran inside, so
            that nothing has been certified.
    """
    running = Running(Budget(eps, out_tol, threads, even_if_slower, weights))
    RUNNING.set((*RUNNING.get(), running))
    try:
        yield
    finally:
        # Not by a token: contexts in generators end in any order, and even in another task.
        running.over = True
        RUNNING.set(tuple(each for each in RUNNING.get() if not each.over))
    if not running.calls:
        raise CertkError(
            "no certified attention ran inside budget(): switch the model over by "
            "certk_rs.transformers.use(model, eps=...), and run it in this thread"
        )
