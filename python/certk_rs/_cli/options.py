"""The options that commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CertkError
from .quantities import AT_LEAST_ONE as AT_LEAST_ONE
from .quantities import COUNT as COUNT
from .quantities import MAX_KEEP as MAX_KEEP
from .quantities import NUMBER as NUMBER
from .quantities import SIZE as SIZE
from .quantities import WHOLE as WHOLE
from .quantities import count_or_fraction

Job = Callable[[], int]
"""What a command hands back: the work, with the exit code for an answer."""


class Granularity(str, Enum):
    """One keep-set per kv head, or one per layer."""

    head = "head"
    layer = "layer"


class Order(str, Enum):
    """How tensors are stored: (heads, rows, d) or (rows, heads, d)."""

    hnd = "hnd"
    nhd = "nhd"


Layout = Annotated[
    Order | None,
    typer.Option(
        metavar="hnd|nhd",
        help="How tensors are stored: hnd, (heads, rows, d), or nhd, (rows, heads, d). Default: "
        "hnd, and what looks otherwise is refused.",
    ),
]
Recursive = Annotated[
    bool, typer.Option("--recursive", "-r", help="Take directories in directories, too.")
]
Eps = Annotated[
    float,
    typer.Option(
        "--eps", parser=NUMBER, metavar="EPS", help="Tail mass that a row may lose, 0 <= eps < 1."
    ),
]
MaxKeep = Annotated[
    str | None,
    typer.Option(
        parser=MAX_KEEP, metavar="N|F", help="At most N keys (an integer) or a fraction in (0, 1]."
    ),
]
KeepFirst = Annotated[
    int, typer.Option(parser=COUNT, metavar="N", help="Always keep the first N keys.")
]
KeepLast = Annotated[
    int, typer.Option(parser=COUNT, metavar="N", help="Always keep the last N keys.")
]
Threads = Annotated[
    int | None, typer.Option(parser=AT_LEAST_ONE, metavar="N", help="Default: all there are.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Verbose = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Tell on stderr what is done; -vv tells more.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Read options from this file; default: certk.toml, or [tool.certk] in pyproject.toml, "
        "here or in a parent directory.",
    ),
]
NoConfig = Annotated[bool, typer.Option("--no-config", help="Read no configuration file.")]
Names = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN",
        help="Names of the tensors: {i} for the layer, {key|value|query} with the three words "
        "in use, as in 'model.{i}.attn.{key|value|query}'.",
    ),
]
OneSetPer = Annotated[Granularity, typer.Option(help="One keep-set per kv head, or per layer.")]
_INPUTS = typer.Argument(
    metavar="CACHE",
    help="Cache files, directories, quoted glob patterns, URLs; - reads a list from stdin.",
)
Inputs = Annotated[list[str], _INPUTS]
OptionalInputs = Annotated[list[str] | None, _INPUTS]
_CACHES = typer.Argument(metavar="CACHE", help="Cache files, or directories of them.")
Caches = Annotated[list[Path], _CACHES]
CacheFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A cache file; default: the example.")
]


def read_max_keep(text: str | None) -> int | float | None:
    """What --max-keep says, a count or a fraction."""
    return None if text is None else count_or_fraction(text)


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
