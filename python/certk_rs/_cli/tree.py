"""The tree of commands, as Typer parses it. A command is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from . import config
from .command import Command, quick, uniform
from .commands import BRIEF, GROUPS
from .options import Job
from .terminal import say, show_help

# Functions whose names are those of builtins or modules.
_FUNCTIONS = {"inspect": "inspect_files"}
_EXAMPLE = """\
certk demo
certk capture --model model/ --text text.txt -o cache.safetensors
certk analyze cache.safetensors
certk prune cache.safetensors -o pruned/ --eps 0.05
certk verify pruned/ --against cache.safetensors
"""


class Commands(Mapping[str, Any]):
    """All commands by name; what is looked up is imported."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in BRIEF:
            raise KeyError(name)
        if name not in self._found:
            module = import_module(f".{name}", __package__)
            command = _command(name, getattr(module, _FUNCTIONS.get(name, name)))
            command.panels = getattr(module, "PANELS", command.panels)
            self._found[name] = command
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(BRIEF)

    def __len__(self) -> int:
        return len(BRIEF)

    def __contains__(self, name: object) -> bool:
        return name in BRIEF


def _command(name: str, function: Any) -> Any:
    one = typer.Typer(**_MANNERS)
    # A shell asks for completion at its start, in any folder: no file has a say in that.
    one.command(name, cls=Command)(function if name == "completion" else uniform(function))
    return typer.main.get_command(one)


class _Named:
    """What a completion asks of a command: the line on it, as far as there is room."""

    hidden = False

    def __init__(self, name: str) -> None:
        self._name = name

    def get_short_help_str(self, _limit: int = 0) -> str:
        return BRIEF[self._name]


class Group(TyperGroup):
    """All commands; one that does not exist is told the nearest that does."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, --help included."""
        return [quick(param) for param in super().get_params(ctx)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or say which one was meant."""
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {name!r}{config.meant(name, self.commands)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete a name, for which no command has to be imported."""
        named: Any = {name: _Named(name) for name in BRIEF}
        commands, self.commands = self.commands, named
        try:
            return list(super().shell_complete(ctx, incomplete))
        finally:
            self.commands = commands

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write a line on each, and how they go together."""
        for title, briefs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(briefs.items()))
        with formatter.section("Example"):
            for line in _EXAMPLE.splitlines():
                formatter.write_text(line)


_MANNERS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def tree() -> Any:
    """Make the tree."""
    root = typer.Typer(cls=Group, **_MANNERS)
    root.callback(invoke_without_command=True)(certk)
    group: Any = typer.main.get_command(root)
    group.commands = Commands()
    return group


def _version(wanted: bool) -> None:
    if wanted:
        say(f"certk {__version__}")
        raise typer.Exit


def certk(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> Job | None:
    """Certified selection of attention keys: what is dropped provably weighs no more than eps."""
    if context.invoked_subcommand is not None:
        return None

    def job() -> int:
        # As ruff and uv do: a script that lost its arguments fails, and its pipe gets no help text.
        show_help(context.get_help())
        return 2

    return job
