"""The figure of examples/decoder.py: what pruning costs, against the share of the keys kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

# Text stays text, and the same data gives the same bytes.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "certk", "font.size": 10})

COLOURS = {
    "certified": "#084594",
    "SnapKV": "#d94801",
    "ExpectedAttention": "#238b45",
    "Knorm": "#8c6bb1",
    "StreamingLLM": "#b8860b",
    "Random": "#888888",
}
LABELS = {
    "perplexity": "perplexity per byte",
    "divergence": "divergence from what all keys say (nats per byte)",
}
SCALES = {"perplexity": "linear", "divergence": "log"}
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1)


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw what `decoder.measure` has found; the format is that of the path's suffix."""
    rows = sorted((row for row in found["rows"] if row["keep_last"]), key=lambda row: row["kept"])
    bare = sorted(
        (row for row in found["rows"] if not row["keep_last"]), key=lambda row: row["kept"]
    )
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 5), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    # The legend lists lines from the highest at the left end.
    names = sorted(rows[0]["costs"], key=lambda name: -rows[0]["costs"][name]["divergence"])
    for axis, what in zip(panels, LABELS, strict=True):
        for name in names:
            main = name == "certified"
            axis.plot(
                [row["kept"] for row in rows], [row["costs"][name][what] for row in rows], "o-",
                label=name, color=COLOURS[name], ms=6 if main else 3.5, lw=2.6 if main else 1.4,
                zorder=4 if main else 3,
            )  # fmt: skip
        name = next(iter(bare[0]["costs"]))
        axis.plot(
            [row["kept"] for row in bare], [row["costs"][name][what] for row in bare], "o--",
            label=name, color=COLOURS["certified"], ms=3.5, lw=1.4, mfc="white", zorder=3,
        )  # fmt: skip
        least = min(rows[0]["kept"], bare[0]["kept"])
        axis.set(
            xscale="log",
            yscale=SCALES[what],
            xlim=(0.85 * least, 1.12),
            xlabel="share of the keys kept",
        )
        axis.xaxis.set_major_locator(FixedLocator([s for s in SHARES if s > 0.85 * least]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(axis="y", color="#e4e4e4", lw=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylabel(LABELS[what])
        above = axis.secondary_xaxis("top")
        above.xaxis.set_major_locator(FixedLocator([row["kept"] for row in rows]))
        above.xaxis.set_minor_locator(NullLocator())
        above.xaxis.set_major_formatter(
            FuncFormatter(lambda _, at: f"{rows[at]['eps']:g}".lstrip("0"))
        )
        above.tick_params(labelsize=8.5, labelcolor=COLOURS["certified"])
        above.set_xlabel("eps of the thick line", fontsize=9, color=COLOURS["certified"])
        above.spines["top"].set_visible(False)
    panels[0].axhline(found["dense"], color="#555", lw=1, ls=(0, (5, 4)), label="all keys")
    panels[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9.5, loc="outside lower center", ncols=4)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    plt.close(figure)
