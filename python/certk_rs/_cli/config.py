"""Options from a file: certk.toml, or [tool.certk] in pyproject.toml, a section per command.

A file is judged as a whole before anything of it is used: a section that is no command, a key that
is no option of it and a value that the option cannot take are errors, also for commands that are
not run. Paths in it are relative to its folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from ..errors import CertkError, one_line
from .quantities import Place

NAME = "certk.toml"
PYPROJECT = "pyproject.toml"

# What a file must not decide for whoever types the command: what a script reads from stdout, what
# is overwritten, and which file this is.
_TYPED_ONLY = {"json", "force", "config", "no-config", "help"}


@dataclass(frozen=True)
class Setting:
    """An option as a file may set it.

    `kind` is the type of one value, `many` whether there may be several, `reader` what reads one
    where the type does not say it all; `parameter` is the name that the command has for it.
    """

    parameter: str
    kind: type
    many: bool = False
    reader: Any = None


Commands = Mapping[str, Mapping[str, Setting]]
"""By command and by option, as it is written without the dashes."""


@dataclass(frozen=True)
class Config:
    """A file that has been judged: per command, keys as options are called, and their values."""

    path: Path
    sections: Mapping[str, Mapping[str, Any]]

    def defaults(self, command: str, commands: Commands) -> dict[str, Any]:
        """Values by the names of the command's parameters."""
        section = self.sections.get(command, {})
        return {commands[command][key].parameter: value for key, value in section.items()}


def find(start: Path) -> Path | None:
    """The file for a folder: the nearest one of its own, its parents'; certk.toml comes first."""
    for folder in (start, *start.parents):
        if (folder / NAME).is_file():
            return folder / NAME
        if _speaks_of_certk(folder / PYPROJECT):
            return folder / PYPROJECT
    return None


def read(path: Path, commands: Commands) -> Config:
    """Read and judge a file.

    Raises:
        CertkError: It is no TOML, or something in it is no option or not of its type; the message
            names file, key and remedy.
        OSError: It cannot be read.
    """
    body = _toml(path)
    if path.name == PYPROJECT:
        tool = body.get("tool", {})
        body = tool.get("certk", {}) if isinstance(tool, dict) else {}
        if not isinstance(body, dict):
            raise CertkError(f"{path}: tool.certk is no table: write [tool.certk.prune] and so on")
    sections = {name: _section(path, name, body[name], commands) for name in body}
    return Config(path, sections)


def _speaks_of_certk(path: Path) -> bool:
    """Whether a pyproject.toml, which may be anybody's, has a section of ours."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    if "certk" not in text:
        return False
    tool = _toml(path).get("tool")
    return isinstance(tool, dict) and "certk" in tool


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise CertkError(f"{path} is not text in UTF-8 ({error.reason}): convert it") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise CertkError(
            f"{path} is no TOML ({one_line(error)}): mend it, or use --no-config"
        ) from None


def _section(path: Path, name: str, body: Any, commands: Commands) -> dict[str, Any]:
    if name not in commands:
        if not isinstance(body, dict):
            raise CertkError(
                f"{path}: {name!r} stands outside any section: put it under the command that it is "
                f"for, as in {_header(path, 'prune')}"
            )
        raise CertkError(
            f"{path}: {_header(path, name)} is no command of certk{meant(name, commands)}"
        )
    if not isinstance(body, dict):
        raise CertkError(f"{path}: {name!r} is no section: write {_header(path, name)}, then keys")
    found: dict[str, Any] = {}
    for written, value in body.items():
        key, place = written.replace("_", "-"), f"{path}: {_header(path, name)} {written}"
        if key in _TYPED_ONLY:
            raise CertkError(f"{place} cannot be set in a file: give --{key} on the command line")
        if key not in commands[name]:
            able = {each: 0 for each in commands[name] if each not in _TYPED_ONLY}
            raise CertkError(f"{place} is no option of certk {name}{meant(key, able)}")
        if key in found:
            raise CertkError(f"{place} is there twice, with - and with _: remove one")
        found[key] = _value(place, value, commands[name][key], path.parent)
    return found


def _header(path: Path, command: str) -> str:
    return f"[tool.certk.{command}]" if path.name == PYPROJECT else f"[{command}]"


def meant(name: str, known: Mapping[str, Any]) -> str:
    """The end of a message about an unknown name: what was meant, or what there is."""
    near = get_close_matches(name.lower(), known, 2) or [
        each for each in known if len(name) > 1 and each.startswith(name.lower())
    ]
    if near:
        return f": did you mean {' or '.join(near)}?"
    return f": there are {', '.join(known)}"


def _value(place: str, value: Any, setting: Setting, folder: Path) -> Any:
    if setting.many:
        if not isinstance(value, list) or not value:
            raise CertkError(f"{place} is {_shown(value)}: give an array of values, [ ... ]")
        return [_one(place, each, setting, folder) for each in value]
    return _one(place, value, setting, folder)


def _one(place: str, value: Any, setting: Setting, folder: Path) -> Any:
    """A value as the command line would have read it."""
    kind = setting.kind
    if kind is bool:
        if not isinstance(value, bool):
            raise CertkError(f"{place} is {_shown(value)}: give true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise CertkError(f"{place} is {_shown(value)}: give {_WANTED.get(kind, 'a string')}")
    if issubclass(kind, Place) and isinstance(value, str):
        # A URL is where it is, a path is relative to the file.
        return value if "://" in value or folder == Path.cwd() else str(folder / value)
    if setting.reader is not None:
        try:
            return setting.reader(value)
        except typer.BadParameter as error:
            raise CertkError(f"{place}: {error.message}") from None
    if kind is int or kind is float:
        if isinstance(value, str) or (kind is int and not isinstance(value, int)):
            raise CertkError(f"{place} is {_shown(value)}: give {_WANTED[kind]}")
        return kind(value)
    if not isinstance(value, str):
        raise CertkError(f"{place} is {_shown(value)}: give a string")
    if issubclass(kind, Enum):
        choices = [str(choice.value) for choice in kind]
        if value not in choices:
            raise CertkError(f"{place} is {_shown(value)}: give one of {', '.join(choices)}")
        return value
    if issubclass(kind, Path):
        # From here if the file is here, so that messages name what was written.
        return value if folder == Path.cwd() else str(folder / value)
    return value


_WANTED: dict[type, str] = {int: "a whole number", float: "a number"}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, dict | list):
        return f"{'a table' if isinstance(value, dict) else 'an array'}{'' if value else ', empty'}"
    return str(value)
