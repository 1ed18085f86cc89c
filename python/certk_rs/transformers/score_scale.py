"""The spread of a model's scores, beside what its weights alone would say of it.

R = B^2 ||W_Q W_K^T||_F, times the scale of the head, is the standard deviation of a score if the
entries of both inputs were independent, with mean 0 and standard deviation B (arXiv 2404.02690).
The inputs of a trained model are nothing of the kind, and biases, norms and rotary positions come
between projection and score; so the measured sigma stands beside R, and what separates them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .. import gaussian, windows
from ..errors import CertkError
from .capture import load_with_text, observe
from .capture_file import Attended

# What families call the projections of queries and keys; GPT-2 has one for both and the values.
_NAMES = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"))
_FUSED = "c_attn"
# Scores of a head that sigma is taken of; of more queries some are taken, evenly spaced.
_SCORES = 1 << 22
TEXT = (
    "A reader does not give the same care to every word. Some sentences carry an argument, others "
    "only lead from one to the next, and a page can often be understood from a few of its lines. "
    "What has to be looked at again depends on the question: a date, a name, the condition under "
    "which a promise holds. Whoever sums up a long report in ten words drops nearly all of it, and "
    "still may lose nothing that anybody will ask for. It is another matter to know this "
    "beforehand. To say that the rest does not count, one must have weighed it, or have a reason "
    "why it cannot be heavy. The price of water in the towns along the river rose by a third in "
    "four years; in the hills, where most of it falls as snow, it did not change at all."
)
"""The text that a model reads where none is given."""


@dataclass(frozen=True)
class HeadScale:
    """One query head of one layer; standard deviations of scores, natural-log units."""

    layer: int
    head: int
    norm: float
    """||W_Q W_K^T||_F."""
    r: float
    """B^2 times that, times the head's scale."""
    sigma: float
    """Measured, in the mean over rows: of the visible scores of a query, which is what its softmax
    depends on."""
    spread: float
    """Measured, of all these scores together: what R would say if the inputs were as it takes
    them. A row whose scores are all raised by the same amount adds to it, and not to sigma."""


@dataclass(frozen=True)
class LayerScale:
    """One layer, and what it adds to a score that R knows nothing of."""

    layer: int
    scale: float
    b: float
    """Root mean square entry of what goes into the projections (of queries times of keys, and the
    root of that, where the two differ)."""
    common: float
    """Share of these squares, in [0, 1], that is in the mean over all tokens: independent entries
    of mean 0 would have about 1/tokens."""
    beside: tuple[str, ...]
    """Steps between the projections and the scores."""
    heads: tuple[HeadScale, ...]


@dataclass
class _Inputs:
    """Sums over the inputs of one projection."""

    tokens: int = 0
    squares: float = 0.0
    sums: Any = 0.0

    def see(self, _module: nn.Module, given: tuple[Any, ...]) -> None:
        rows = given[0].detach().reshape(-1, given[0].shape[-1]).double()
        self.tokens += rows.shape[0]
        self.squares += float(rows.square().sum())
        self.sums = self.sums + rows.sum(0)

    def mean_square(self) -> float:
        return self.squares / (self.tokens * len(self.sums))

    def common(self) -> float:
        mean = self.sums / self.tokens
        return float(mean.square().mean()) / self.mean_square() if self.squares else 0.0


def score_scales(model: Any, inputs: Mapping[str, Any] | torch.Tensor) -> list[LayerScale]:
    """Run a model densely, and measure R and sigma of every head.

    Args:
        model: As in `capture`.
        inputs: As in `capture`: one sequence, without padding.

    Returns:
        A `LayerScale` for each attention call, in the order of the layers' numbers.

    Raises:
        CertkError: What `capture` refuses, and attention whose projections of queries and keys are
            not known; it names the class.
    """
    inside: dict[nn.Module, _Inputs] = {}
    found: list[LayerScale] = []
    hooks = []
    try:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            for name in _projections(module):
                part = getattr(module, name)
                inside[part] = _Inputs()
                hooks.append(part.register_forward_pre_hook(inside[part].see))
        observe(model, inputs, lambda seen: found.append(_measured_layer(seen, inside)))
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(found, key=lambda each: each.layer)


def score_scales_of_text(
    model: str | os.PathLike[str], text: str | None = None, *, max_tokens: int | None = None
) -> tuple[int, list[LayerScale]]:
    """Load a model and its tokenizer from a directory, and measure over a text.

    Args:
        model: As in `capture_text`.
        text: The text; None: `TEXT`, as much of it as the model has positions for.
        max_tokens: Cut the text after so many tokens.

    Errors are those of `capture_text` and `score_scales`.

    Returns:
        How many tokens the text has, and what `score_scales` returns.
    """
    given = TEXT if text is None else text
    loaded, inputs, tokens = load_with_text(model, given, max_tokens, cut=text is None)
    return tokens, score_scales(loaded, inputs)


def _measured_layer(seen: Attended, inside: Mapping[nn.Module, _Inputs]) -> LayerScale:
    """Measure one attention call; its values do not matter."""
    heads, d = seen.query.shape[1], seen.query.shape[3]
    factor = d**-0.5 if seen.scale is None else seen.scale
    w_q, w_k, parts = _weights(seen.module, heads, seen.key.shape[1], d)
    inputs = [inside[part] for part in parts]
    b = float(np.prod([one.mean_square() for one in inputs])) ** (0.5 / len(inputs))
    sigmas, spreads = _measured(seen.query[0], seen.key[0], factor, seen.offset)
    norms = [
        float(windows.scale_r(1.0, w_q[head], w_k[head * len(w_k) // heads]))
        for head in range(heads)
    ]
    return LayerScale(
        seen.layer,
        factor,
        b,
        max(one.common() for one in inputs),
        _beside(seen.module, parts),
        tuple(
            HeadScale(seen.layer, i, norm, b * b * norm * abs(factor), sigmas[i], spreads[i])
            for i, norm in enumerate(norms)
        ),
    )


def _projections(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's projections of queries and keys; empty if not known."""
    for names in _NAMES:
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return names
    if isinstance(getattr(module, _FUSED, None), Conv1D) and not hasattr(module, "q_attn"):
        return (_FUSED,)
    return ()


def _weights(
    module: nn.Module, heads: int, kv_heads: int, d: int
) -> tuple[np.ndarray, np.ndarray, list[nn.Module]]:
    """Return W_Q (heads, inputs, d) and W_K (kv_heads, inputs, d) in float64, and their modules."""
    names = _projections(module)
    parts = [getattr(module, name) for name in names]
    if names == (_FUSED,):
        # Its inputs are the rows; queries, keys and values stand side by side.
        width = heads * d
        fused = parts[0].weight.detach().double().numpy()
        both = [fused[:, :width], fused[:, width : 2 * width]] if heads == kv_heads else []
        fits = heads == kv_heads and fused.shape[1] == 3 * width
    else:
        both = [part.weight.detach().double().numpy().T for part in parts]
        fits = [each.shape[1] for each in both] == [heads * d, kv_heads * d]
    if not fits:
        raise CertkError(
            f"{type(module).__name__}: its projections of queries and keys are not known (two "
            f"linear layers named {', '.join('/'.join(pair) for pair in _NAMES)} that give "
            f"{heads} and {kv_heads} heads of {d}, or GPT-2's {_FUSED}): R cannot be measured; "
            "certk capture and certk analyze CACHE measure its scores"
        )
    w_q, w_k = (
        np.moveaxis(each.reshape(len(each), count, d), 1, 0)
        for each, count in zip(both, (heads, kv_heads), strict=True)
    )
    return w_q, w_k, parts


def _measured(
    query: torch.Tensor, key: torch.Tensor, scale: float, offset: int | None
) -> tuple[list[float], list[float]]:
    """Return each head's standard deviation of scores: the mean over rows, and that of all."""
    (heads, m, _), (kv_heads, n, _) = query.shape, key.shape
    chosen = np.unique(np.linspace(0, m - 1, min(m, max(16, _SCORES // n))).astype(np.int64))
    lengths = np.full(len(chosen), n) if offset is None else np.clip(chosen + offset + 1, 0, n)
    # A single score has no spread.
    chosen, lengths = chosen[lengths > 1], lengths[lengths > 1]
    if not len(chosen):
        raise CertkError("no query sees two keys: give a longer text")
    seen = np.arange(n) < lengths[:, None]
    sigmas, spreads = [], []
    for head in range(heads):
        keys = key[head * kv_heads // heads].detach().double().numpy()
        scores = query[head].detach().double().numpy()[chosen] @ keys.T * scale
        sigmas.append(float(gaussian.fit(scores, lengths=lengths).sigma.mean()))
        spreads.append(float(np.std(scores[seen])))
    return sigmas, spreads


def _beside(module: nn.Module, parts: list[nn.Module]) -> tuple[str, ...]:
    """List the parts of this module's scores that R leaves out."""
    kind: Any = type(module)
    found = []
    if any(getattr(part, "bias", None) is not None for part in parts):
        found.append("biases")
    if any(hasattr(module, name) for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
        found.append("norms of queries and keys")
    if "position_embeddings" in inspect.signature(kind.forward).parameters:
        found.append("rotary positions")
    return tuple(found)
