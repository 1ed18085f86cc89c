"""The options of commands.

A command is a function. Its signature gives names, types and defaults of its options; the table
here, and `OPTIONS` in the file of the command, give what help says of them. The options of a prune
job come from `jobs.request`, for every command that has some of them.
"""

from __future__ import annotations

import inspect
import os
import typing
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import CertkError
from ..jobs.request import Request

Argument, Option = typer.Argument, typer.Option

SHARED: dict[str, Any] = {
    "caches": Argument(
        metavar="CACHE",
        help="Cache files, directories, quoted glob patterns, URLs; - reads a list from stdin.",
    ),
    "data": Option(metavar="FILE", help="A cache file; default: the example."),
    "recursive": Option("--recursive", "-r", help="Take directories in directories, too."),
    "threads": Option(metavar="N", min=1, help="Default: all there are."),
    "fail_fast": Option("--fail-fast", help="End at the first bad input."),
    "as_json": Option("--json", help="Print one JSON object and nothing else."),
    "quiet": Option("--quiet", "-q", help="No progress bars."),
}


def parameters(function: Any, own: dict[str, Any]) -> list[inspect.Parameter]:
    """Return the parameters of a command, annotated as Typer reads them.

    Keywords that the function does not name are the options of a prune job. Every command has
    --quiet.

    Args:
        function: The command.
        own: Options by parameter, for those that are not shared, or not the same.
    """
    known, asked = SHARED | own, {field.name: field for field in fields(Request)}
    taken: dict[str, inspect.Parameter] = {}
    for each in inspect.signature(function, eval_str=True).parameters.values():
        if each.kind is each.VAR_KEYWORD:
            taken |= {
                n: _keyword(n, _of_request(field), field.default) for n, field in asked.items()
            }
        elif each.name in known:
            # Typer asks for one type, also where a parser makes the value.
            kind: Any = each.annotation if known[each.name].parser is None else str | None
            annotation = Annotated[kind, known[each.name]]
            taken[each.name] = _keyword(each.name, annotation, each.default)
        else:
            taken[each.name] = _keyword(each.name, _of_request(asked[each.name]), each.default)
    taken.setdefault("quiet", _keyword("quiet", Annotated[bool, known["quiet"]], False))
    return list(taken.values())


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _of_request(field: Field[Any]) -> Any:
    """Return the annotation of an option of a prune job."""
    said, kind, reader = field.metadata, typing.get_type_hints(Request)[field.name], None
    if said["choices"]:
        kind = Literal[said["choices"]]
    elif {int, float} <= set(typing.get_args(kind)):
        kind, reader = str, read_share
    elif field.name == "eps":
        kind = str  # a rule, which the request reads
    flag = f"--{(said['flag'] or field.name).replace('_', '-')}"
    metavar = said["metavar"] or "|".join(said["choices"])
    info = Option(flag, metavar=metavar, help=said["help"], parser=reader)
    return Annotated[kind | None if field.default is None else kind, info]


def read_share(text: str) -> int | float:
    """Read a count (3) or a share (0.25, 1.0)."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give a whole number or a fraction in (0, 1]") from None


def need_new(path: Path) -> None:
    """Refuse a path that cannot be written as a new file, before any work is done."""
    if os.path.lexists(path):
        raise CertkError(f"{path} exists already: nothing is overwritten; choose another name")
    if not path.absolute().parent.is_dir():
        raise CertkError(f"{path}: there is no directory {path.parent}: make it first")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise CertkError(f"{path}: {path.parent} cannot be written to: choose another directory")


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CertkError(f"{path} is not text in UTF-8 ({error.reason}): convert it") from None
