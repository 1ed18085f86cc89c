"""The budget of this process, and what its certified attention has proven by layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from ..errors import CertkError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..results import AttentionResult

    OnCall = Callable[[str, NDArray[np.int64], AttentionResult], object]

_VARIABLE = "CERTK_VLLM_EPS"
_eps: float | None = None
_open: tuple[Recorder, ...] = ()
_lock = Lock()


def set_budget(eps: float) -> None:
    """Set the budget of all certified layers of this process; it goes before the environment's.

    A layer is certified, or vLLM's own, for life: it is certified if the budget was above 0 when
    vLLM made it. Then 0 is full attention. Before `LLM(...)` this only reaches an engine in the
    same process; `WorkerExtension.certk_set_budget` reaches workers later.

    Args:
        eps: Share of its softmax mass that a row (query of a head) may lose, 0 <= eps < 1.

    Raises:
        CertkError: No such number.
    """
    global _eps
    _eps = _checked("eps", eps)


def chosen() -> float | None:
    """Return the budget of this process, of the environment if none was set; None without any."""
    if _eps is None and (text := os.environ.get(_VARIABLE)):
        set_budget(_checked(_VARIABLE, text))
    return _eps


def _checked(name: str, value: float | str) -> float:
    try:
        eps = float(value)
    except (TypeError, ValueError):
        eps = -1.0
    if not 0 <= eps < 1:
        raise CertkError(f"{name} is {value!r}; pass a number with 0 <= eps < 1")
    return eps


@dataclass(frozen=True)
class LayerCertificate:
    """A certificate of all calls of one layer."""

    layer: str
    """vLLM's name of it."""
    calls: int = 0
    rows: int = 0
    """Queries of all heads."""
    eps: float = 0.0
    """The largest budget of its calls."""
    tail_mass_upper: float = 0.0
    """The most that any row has lost, or was off by where its weights were rounded, proven."""
    kept: float = 0.0
    """Mean over rows of the share of keys that went into the average."""


class Recorder:
    """Context manager that keeps what certified attention inside proves, by layer.

    It sees the calls of all threads of this process. vLLM computes in other processes unless
    `VLLM_ENABLE_V1_MULTIPROCESSING=0`; `WorkerExtension` records there.
    """

    def __init__(self, on_call: OnCall | None = None) -> None:
        """Make one.

        Args:
            on_call: Called after each call of a layer with its name, the places of its m_r requests
                in the batch (m_r,), and the `AttentionResult` of shape (m_r, heads, queries).
                `error_bound` must be read inside, as the cache is written again later.
        """
        self._on_call = on_call
        self._layers: dict[str, LayerCertificate] = {}

    @property
    def layers(self) -> list[LayerCertificate]:
        """A certificate per layer, in the order of first calls."""
        with _lock:
            return list(self._layers.values())

    def __enter__(self) -> Recorder:
        global _open
        with _lock:
            _open = (*_open, self)
        return self

    def __exit__(self, *_: object) -> None:
        global _open
        with _lock:
            _open = tuple(each for each in _open if each is not self)

    def _add(self, call: LayerCertificate) -> None:
        with _lock:
            old = self._layers.get(call.layer, LayerCertificate(call.layer))
            rows = old.rows + call.rows
            self._layers[call.layer] = replace(
                old,
                calls=old.calls + 1,
                rows=rows,
                eps=max(old.eps, call.eps),
                tail_mass_upper=max(old.tail_mass_upper, call.tail_mass_upper),
                kept=(old.kept * old.rows + call.kept * call.rows) / rows,
            )


def record(
    layer: str,
    requests: NDArray[np.int64],
    n: NDArray[np.int64],
    result: AttentionResult,
    eps: float,
) -> None:
    """Tell open recorders of a call whose rows see `n` keys each, which broadcasts to all rows."""
    if not (recorders := _open):
        return
    worst, kept = float(result.tail_mass_upper.max()), float((result.k / n).mean())
    call = LayerCertificate(layer, 1, result.k.size, eps, worst, kept)
    for each in recorders:
        each._add(call)
        if each._on_call is not None:
            each._on_call(layer, requests, result)


class WorkerExtension:
    """Methods for vLLM's workers: `LLM(worker_extension_cls="certk_rs.vllm.WorkerExtension")`."""

    def certk_record(self) -> None:
        """Begin to record; call it by `llm.collective_rpc("certk_record")`."""
        global _of_worker
        if _of_worker is None:
            _of_worker = Recorder().__enter__()

    def certk_report(self) -> list[dict[str, Any]]:
        """Return the fields of a `LayerCertificate` per layer since `certk_record`, and end it."""
        global _of_worker
        if (recorder := _of_worker) is None:
            return []
        _of_worker = None
        recorder.__exit__()
        return [asdict(each) for each in recorder.layers]

    def certk_set_budget(self, eps: float) -> None:
        """Call `set_budget` in the worker: `llm.collective_rpc("certk_set_budget", args=(.05,))`.

        Raises:
            CertkError: See `set_budget`.
        """
        set_budget(eps)


_of_worker: Recorder | None = None
