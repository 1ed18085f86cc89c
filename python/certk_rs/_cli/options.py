"""The options that commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CertkError

Job = Callable[[], int]
"""What a command hands back: the work, with the exit code for an answer."""


class Granularity(str, Enum):
    """One keep-set per kv head, or one per layer."""

    head = "head"
    layer = "layer"


Eps = Annotated[float, typer.Option("--eps", help="Tail mass that a row may lose, 0 <= eps < 1.")]
MaxKeep = Annotated[
    str | None,
    typer.Option(metavar="N|F", help="At most N keys (an integer) or a fraction F in (0, 1]."),
]
KeepFirst = Annotated[int, typer.Option(min=0, metavar="N", help="Always keep the first N keys.")]
KeepLast = Annotated[int, typer.Option(min=0, metavar="N", help="Always keep the last N keys.")]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="Default: all there are.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Names = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Names of the tensors: {i} for the layer, {key|value|query} with the three words "
        "in use, as in 'model.{i}.attn.{key|value|query}'.",
    ),
]
OneSetPer = Annotated[Granularity, typer.Option(help="One keep-set per kv head, or per layer.")]
_CACHES = typer.Argument(metavar="CACHE...", help="Cache files, or directories of them.")
Caches = Annotated[list[Path], _CACHES]
OptionalCaches = Annotated[list[Path] | None, _CACHES]
CacheFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A cache file; default: the example.")
]


def read_max_keep(text: str | None) -> int | float | None:
    """An integer is a count, anything else a fraction."""
    if text is None:
        return None
    try:
        return int(text) if text.strip().isdecimal() else float(text)
    except ValueError:
        raise CertkError(
            f"--max-keep {text!r}: give a whole number of keys or a fraction in (0, 1]"
        ) from None


def need_new(path: Path) -> None:
    """Refuse what cannot be written as a new file, before any work is done."""
    if os.path.lexists(path):
        raise CertkError(f"{path} exists already: nothing is overwritten; choose another name")
    if not path.absolute().parent.is_dir():
        raise CertkError(f"{path}: there is no directory {path.parent}: make it first")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise CertkError(f"{path}: {path.parent} cannot be written to: choose another directory")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CertkError(f"{path} is not text in UTF-8 ({error.reason}): convert it") from None
