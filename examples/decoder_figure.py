"""The figure of examples/decoder.py: perplexity against the share of keys kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

# Text stays text, and the same data gives the same bytes.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "certk", "font.size": 10})

COLOURS = {
    "certified": "#084594",
    "SnapKV": "#d94801",
    "AdaKV, SnapKV": "#fdae6b",
    "ExpectedAttention": "#238b45",
    "Knorm": "#8c6bb1",
    "StreamingLLM": "#b8860b",
    "Random": "#888888",
}
SHARES = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw what `decoder.measure` has found; the format is that of the path's suffix."""
    rows = sorted(found["rows"], key=lambda row: row["kept"])
    kept = [row["kept"] for row in rows]
    figure, axis = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
    axis.axhline(found["dense"], color="#555", lw=1, ls=(0, (5, 4)), label="all keys", zorder=1)
    # The certified line lies on top; the legend lists lines from the highest at the left end.
    names = sorted(rows[0]["perplexity"], key=lambda name: -rows[0]["perplexity"][name])
    for name in names:
        main = name == "certified"
        axis.plot(
            kept, [row["perplexity"][name] for row in rows], "o-", label=name,
            color=COLOURS[name], ms=6 if main else 3.5, lw=2.6 if main else 1.4,
            zorder=4 if main else 3,
        )  # fmt: skip
    _, high = axis.get_ylim()
    axis.set(
        xscale="log", yscale="log", xlabel="share of the keys kept", ylabel="perplexity per byte",
        xlim=(0.9 * kept[0], 1.08), ylim=(found["dense"] / (high / found["dense"]) ** 0.06, high),
    )  # fmt: skip
    axis.xaxis.set_major_locator(FixedLocator([s for s in SHARES if s > 0.9 * kept[0]]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axis.yaxis.set_major_locator(MaxNLocator(7))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for each in (axis.xaxis, axis.yaxis):
        each.set_minor_locator(NullLocator())
    axis.grid(axis="y", color="#e4e4e4", lw=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axis.get_legend_handles_labels()
    handles, labels = handles[1:] + handles[:1], labels[1:] + labels[:1]
    axis.legend(
        handles, labels, frameon=False, fontsize=9.5, loc="center left", bbox_to_anchor=(1.0, 0.5)
    )
    above = axis.secondary_xaxis("top")
    above.xaxis.set_major_locator(FixedLocator(kept))
    above.xaxis.set_minor_locator(NullLocator())
    above.xaxis.set_major_formatter(FuncFormatter(lambda _, at: f"{rows[at]['eps']:g}"))
    above.set_xlabel("eps at which certified pruning keeps as many")
    above.spines["top"].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    plt.close(figure)
