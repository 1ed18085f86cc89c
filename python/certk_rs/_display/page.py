"""One self-contained HTML page of sections: text, tables, and plots as inline SVG.

Nothing is fetched when the page is opened: no script, no font, no style sheet.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import Any

from ..errors import CertkError, pip_install
from .plain import escaped, plain

_STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --quiet: #666; --link: #0b57d0; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --page: #15171a; --line: #3a3d42; --quiet: #999; --link: #8ab4f8; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; overflow-wrap: anywhere; }
a { color: var(--link); } p { overflow-wrap: anywhere; }
figure { display: inline-block; max-width: 100%; margin: 1rem 1rem 1rem 0; vertical-align: top; } svg { max-width: 100%; height: auto; }
svg text { fill: currentColor; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--page); } td:first-child, th:first-child { text-align: left; }
th.text, td.text { text-align: left; } td { white-space: nowrap; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 14rem; }
.note { color: var(--quiet); font-size: .85rem; max-width: 46rem; }
@media (max-width: 30rem) { th, td { padding: .15rem .3rem; } }
.wide { overflow: auto; max-height: 85vh; margin: .8rem 0; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
details { margin: .5rem 0; } summary { cursor: pointer; } .fold > summary { font-weight: 600; padding: .3rem 0; }
footer { margin-top: 3rem; color: var(--quiet); font-size: .85rem; }
"""  # noqa: E501


@dataclass(frozen=True)
class Table:
    """Column heads and rows of cells, as they are to be read.

    Columns are flush right, but for the first and those whose heads are in `text`, whose cells may
    have several lines. The note, below the table, says what columns are.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text: Collection[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Fold:
    """A part that opens at a click on its title: sentences, plots (SVG) and tables."""

    title: str
    text: Sequence[str]
    plots: Sequence[str] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Section:
    """A heading, sentences, plots (SVG) and tables; long tables are folded, and so is the rest."""

    title: str
    text: Sequence[str]
    plots: Sequence[str] = ()
    tables: Sequence[Table] = ()
    anchor: str = field(default="")
    folds: Sequence[Fold] = ()


def matplotlib() -> ModuleType:
    """Matplotlib as its user has set it."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise CertkError(
            f"plots need matplotlib, which is not installed: {pip_install('plot')}"
        ) from None
    module: ModuleType = mpl
    return module


def pyplot() -> ModuleType:
    """Matplotlib's pyplot, drawing to memory."""
    mpl = matplotlib()
    mpl.use("Agg")
    # Text stays text, and the same data gives the same bytes.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "certk", "font.size": 10})
    import matplotlib.pyplot as plt

    module: ModuleType = plt
    return module


WIDTH = 4.2
"""Inches of a plot whose text can be read on a screen of 420 pixels; on a wide one two fit."""


def panels(*grid: int, **options: Any) -> Any:
    """Make a figure and its axes like `pyplot.subplots`, laid out so that nothing overlaps."""
    return pyplot().subplots(*grid, layout="constrained", **options)


def svg(figure: Any) -> str:
    """Return a figure as inline SVG, and close it."""
    text = io.StringIO()
    figure.savefig(
        text, format="svg", bbox_inches="tight", metadata={"Date": None}, transparent=True
    )
    pyplot().close(figure)
    # What is drawn in black has the colour of the page's text, on its background.
    drawing = re.sub(r"(?<=: )#(000000|222222)\b", "currentColor", text.getvalue())
    # Matplotlib minds what is markup in a label, but not what cannot be seen.
    return "\n".join(map(escaped, drawing[drawing.index("<svg") :].split("\n")))


def legend_below(figure: Any, *args: Any, ncols: int) -> None:
    """One legend under all panels of a figure with constrained layout."""
    figure.legend(*args, frameon=False, fontsize=9, loc="outside lower center", ncols=ncols)


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks of an x- or y-axis at these values and nowhere else, written as plain numbers."""
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)


def page(title: str, lead: str, sections: Sequence[Section], foot: str) -> str:
    """Return the whole page."""
    body = [f"<h1>{_text(title)}</h1>", *([f"<p>{_text(lead)}</p>"] if lead else [])]
    if len(sections) > 2:
        links = (
            f'<li><a href="#{_text(part.anchor)}">{_text(part.title)}</a></li>'
            for part in sections
            if part.anchor
        )
        body.append(f"<ol>{''.join(links)}</ol>")
    numbers = count()
    for part in sections:
        body.append(f'<h2 id="{_text(part.anchor)}">{_text(part.title)}</h2>')
        body += _content(part, numbers)
        for fold in part.folds:
            body.append(f'<details class="fold"><summary>{_text(fold.title)}</summary>')
            body += [*_content(fold, numbers), "</details>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + f"\n<footer>{_text(foot)}</footer>\n</body></html>\n"
    )


def _content(part: Section | Fold, numbers: Iterator[int]) -> list[str]:
    """Sentences, plots, each with a number of its own, and tables."""
    return [
        *(f"<p>{_text(sentence)}</p>" for sentence in part.text),
        *(f"<figure>{_own_names(plot, f'plot{next(numbers)}-')}</figure>" for plot in part.plots),
        *(_table(table) for table in part.tables),
    ]


def _text(text: str) -> str:
    """As text of an element or in the quotes of an attribute, whatever it is."""
    return html.escape(plain(text))


def _own_names(drawing: str, prefix: str) -> str:
    """Return a drawing whose ids, and references to them, are unique in the page."""
    # Ids of images say what is in them, so that two alike have one; nothing refers to them.
    drawing = re.sub(r' id="image\w+"', "", drawing)
    return re.sub(r'(\bid="|\bhref="#|\burl\(#)', lambda found: found[0] + prefix, drawing)


def _table(table: Table) -> str:
    kinds = [' class="text"' if head in table.text else "" for head in table.heads]
    heads = _cells("th", table.heads, kinds)
    rows = "\n".join(f"<tr>{_cells('td', row, kinds)}</tr>" for row in table.rows)
    caption = f"<caption>{_text(table.caption)}</caption>" if table.caption else ""
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    whole = (
        f'<div class="wide"><table>{caption}<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{note}"
    )
    if len(table.rows) <= 24:
        return whole
    summary = _text(table.caption or "table")
    return f"<details><summary>{summary} ({len(table.rows)} rows)</summary>{whole}</details>"


def _cells(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    pairs = zip(cells, kinds, strict=True)
    return "".join(f"<{tag}{kind}>{_text(cell)}</{tag}>" for cell, kind in pairs)
