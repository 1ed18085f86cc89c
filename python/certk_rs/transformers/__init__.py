"""Certified attention inside Hugging Face models, on the CPU.

`use(model, eps=...)` switches a model over to certified attention; `budget(eps=...)` sets another
budget for a while; a `Recorder` keeps what each layer has proven. `capture` writes the queries,
keys and values of a forward pass to a file that `certk prune` takes; `to_cache`, `from_cache` and
`prune_cache` go between such files, pruned files and caches that `generate` goes on from; a
`CertkCache` holds a `certk_rs.KvIndex` per layer for long decoding. See docs/transformers.md.

Importing this needs torch and transformers (5; decoders also with 4.57).
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec

from ..errors import pip_install as _pip_install

for _needed in ("torch", "transformers"):
    if _find_spec(_needed) is None:
        raise ImportError(
            f"certk_rs.transformers needs {_needed}, which is not installed: "
            f"{_pip_install('transformers')}"
        )

from .caches import PrunedCache, from_cache, prune_cache, to_cache  # noqa: E402
from .capture import capture, capture_text  # noqa: E402
from .coded_cache import CodedCache, encode_cache  # noqa: E402
from .decoding import CertkCache  # noqa: E402
from .presses import NAME  # noqa: E402
from .prompt import prune_prompt  # noqa: E402
from .recorder import LayerCertificate, Recorder  # noqa: E402
from .score_scale import score_scales, score_scales_of_text  # noqa: E402
from .switch import budget, register, use  # noqa: E402

__all__ = [
    "NAME",
    "CertkCache",
    "CodedCache",
    "LayerCertificate",
    "PrunedCache",
    "Recorder",
    "budget",
    "capture",
    "capture_text",
    "encode_cache",
    "from_cache",
    "prune_cache",
    "prune_prompt",
    "register",
    "score_scales",
    "score_scales_of_text",
    "to_cache",
    "use",
]
