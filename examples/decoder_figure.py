"""The figure of examples/decoder.py: perplexity against the share of keys kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

# Text stays text, and the same data gives the same bytes.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "certified", "font.size": 10})

COLOURS = {
    "certified": "#084594",
    "SnapKV": "#d94801",
    "ExpectedAttention": "#238b45",
    "Knorm": "#8c6bb1",
    "StreamingLLM": "#b8860b",
    "Random": "#888888",
}


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw what `decoder.measure` has found."""
    rows = sorted(found["rows"], key=lambda row: row["kept"])
    kept = [row["kept"] for row in rows]
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    axis.axhline(found["dense"], color="#444", lw=1, ls=(0, (4, 3)), zorder=1)
    lines = {name: [row["perplexity"][name] for row in rows] for name in rows[0]["perplexity"]}
    for name, values in lines.items():
        main = name == "certified"
        axis.plot(
            kept, values, "o-", color=COLOURS[name], ms=5 if main else 3, lw=2.4 if main else 1.3,
            zorder=3 if main else 2, label=name,
        )  # fmt: skip
    axis.set(
        xscale="log", yscale="log", xlabel="share of the keys kept", ylabel="perplexity per byte"
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
