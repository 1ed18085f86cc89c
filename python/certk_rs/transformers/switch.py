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
from .settings import RUNNING, Budget, Running, put_on

NAME = "certk"
"""What certified attention is called as an `attn_implementation`."""

_Model = TypeVar("_Model", bound=nn.Module)


def register() -> None:
    """Make `attn_implementation="certk"` known to transformers; `use` does so by itself.

    Models that are loaded under this name run inside `budget(eps=...)`, or after `use`.
    """
    AttentionInterface.register(NAME, certified_attention)
    # Boolean masks (batch, 1, m, n), or None where a causal or an open one would say no more.
    AttentionMaskInterface.register(NAME, sdpa_mask)


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
    """Set the attention implementation of a model and all its parts, and see that it took."""
    register()
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise CertkError(f"{type(model).__name__} cannot be switched: {error}") from error
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            took = part.config._attn_implementation
            if took != NAME or not _asks_the_registry(part):
                raise CertkError(
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
    token = RUNNING.set((*RUNNING.get(), running))
    try:
        yield
    finally:
        RUNNING.reset(token)
    if not running.calls:
        raise CertkError(
            "no certified attention ran inside budget(): switch the model over by "
            "certk_rs.transformers.use(model, eps=...), and run it in this thread"
        )
