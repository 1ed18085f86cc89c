"""`certk analyze --model`: the spread of a model's scores beside what its weights say of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CertkError
from .options import read_text
from .terminal import print_json, print_table, print_text, say

if TYPE_CHECKING:
    from ..transformers.score_scale import LayerScale


def analyze_model(model: Path, text: Path | None, max_tokens: int | None, as_json: bool) -> int:
    """Do the work; return the exit code."""
    written = None if text is None else read_text(text)
    try:
        from ..transformers.score_scale import score_scales_of_text
    except ImportError as error:
        raise CertkError(f"certk analyze --model cannot run: {error}") from None
    tokens, layers = score_scales_of_text(model, written, max_tokens=max_tokens)
    if as_json:
        said = {"model": str(model), "tokens": tokens, "layers": [asdict(one) for one in layers]}
        print_json(said)
    else:
        source = "a text of certk's own" if text is None else str(text)
        say(f"{model}: {tokens} tokens of {source}")
        _show(layers)
    return 0


def _show(layers: list[LayerScale]) -> None:
    rows = [
        [
            f"{one.layer}.{head.head}",
            f"{one.b:.3f}",
            f"{head.norm:.3g}",
            f"{head.r:.3g}",
            f"{head.sigma:.3f}",
            f"{head.spread:.3f}",
            f"{head.sigma / head.r:.2f}" if head.r else "",
        ]
        for one in layers
        for head in one.heads
    ]
    print_table(("head", "B", "|W_Q W_K^T|", "R", "sigma", "all", "sigma/R"), rows)
    print_text(
        "B: root mean square entry of the projections' inputs; R: B^2 |W_Q W_K^T|_F times the "
        "scale; sigma: standard deviation of the scores of a row, in the mean; all: of all scores "
        "of the head together."
    )
    beside = sorted({each for one in layers for each in one.beside})
    common = max(one.common for one in layers)
    print_text(
        "R takes the entries of the inputs for independent, with mean 0. Here they are what a "
        f"layer norm or a sum of layers makes of a text: up to {common:.1%} of their squares is "
        "common to all tokens, and tokens are related. Between projection and score stand: "
        f"{', '.join(beside) or 'nothing'}. R is no estimate of sigma, and sigma is what a "
        "budget depends on (certk plan --sigma)."
    )
