"""Switching models over: the name "certk" in the registries of transformers, and budgets.

The name goes into both registries. With an attention function alone, transformers would make no
mask at all for the name, and causality would silently be lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..errors import CertkError
from .attention import certified_attention
from .own_attention import computes_by_itself
from .settings import RUNNING, Budget, Running, put_on

NAME = "certk"
"""What certified attention is called as an `attn_implementation`."""

_Model = TypeVar("_Model", bound=nn.Module)


def register() -> None:
    """Make `attn_implementation="certk"` known to transformers; `use` does so by itself.

    Models that are loaded under this name run inside `budget(eps=...)`, or after `use`.
    """
    AttentionInterface.register(NAME, certified_attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Boolean masks (batch, 1, m, n), or None where a causal or an open one would say no more."""
    # Gemma 4 runs its last layers on the last queries only, for which a causal mask that was left
    # out would mean the first ones; of "sdpa" it knows this, by name.
    if getattr(kwargs.get("config"), "num_kv_shared_layers", 0):
        kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def use(
    model: _Model,
    eps: float | None = None,
    *,
    out_tol: float | None = None,
    even_if_slower: bool = False,
    threads: int | None = None,
) -> _Model:
    """Switch a model over to certified attention.

    Args:
        model: A `transformers.PreTrainedModel`, on the CPU.
        eps: Budget of dropped softmax mass for every row, 0 <= eps < 1; 0 is plain attention.
            Exactly one of eps and out_tol is given.
        out_tol: Budget on the error of each attention output instead (see `certk_rs.attention`).
        even_if_slower: Drop what may be dropped also where computing everything is faster, which is
            so in prefill unless nearly all keys can be dropped; to see how many are needed.
        threads: Number of threads; None for as many as torch uses.

    Returns:
        The model. `model.set_attn_implementation("sdpa")` switches it back.

    Raises:
        CertkError: A budget that is none, or a model (or a part of it) that does not take its
            attention from the registry: it would have gone on with its own.
    """
    budget = Budget(eps, out_tol, threads, even_if_slower)
    if not isinstance(model, transformers.PreTrainedModel):
        raise CertkError(
            f"model is a {type(model).__name__}; pass a transformers.PreTrainedModel (of a "
            "wrapper, the model inside)"
        )
    switch(model)
    put_on(model, budget)
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
    return CertkError(
        f"{type(part).__name__} does not take its attention from transformers' "
        f"AttentionInterface (it keeps {took!r}): certified attention would not run; "
        f"this is transformers {transformers.__version__}, and the BERT family needs 5"
    )


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
    threads: int | None = None,
) -> Iterator[None]:
    """Set the budget of all certified attention inside, over that of `use` and outer contexts.

    It holds in this thread (more exactly: this context of `contextvars`).

    Args:
        eps: As in `use`.
        out_tol: As in `use`.
        even_if_slower: As in `use`.
        threads: As in `use`.

    Raises:
        CertkError: A budget that is none; on leaving, that no certified attention ran inside, so
            that nothing has been certified.
    """
    running = Running(Budget(eps, out_tol, threads, even_if_slower))
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
