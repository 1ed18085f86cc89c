"""The tree of commands, as Typer parses it. A command is imported when it is asked for.

Typer's parser is a part of it in some versions and a package of its own in others; only methods
that both have are overridden here, and nothing is imported from either.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import __version__
from .commands import BRIEF, GROUPS
from .options import parameters
from .terminal import say, show_help

Job = Callable[[], int]
"""The work of a command, which returns the exit code."""

_OWN, _COMMON = "Options", "Common options"
_EXAMPLE = """\
certk demo
certk capture --model model/ --text text.txt -o cache.safetensors
certk analyze cache.safetensors
certk prune cache.safetensors -o pruned/ --eps 0.05
certk verify pruned/ --against cache.safetensors
"""
_MANNERS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Command(TyperCommand):
    """A command, whose help shows options in groups.

    `panels` has the names of parameters by the title above them.
    """

    panels: Mapping[str, tuple[str, ...]] = {}

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return [OPTIONS] CACHE..., alike in all versions of Typer."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the options of this command, and those that every command has."""
        titles = {name: panel for panel, names in self.panels.items() for name in names}
        titles["quiet"] = _COMMON
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        sections |= {title: [] for title in (*self.panels, _OWN, _COMMON)}
        order = {name: at for at, name in enumerate(titles)}
        params = self.get_params(ctx)
        for param in sorted(params, key=lambda param: order.get(param.name, len(order))):
            if param.param_type_name == "argument":
                sections["Arguments"].append((_usage(param), getattr(param, "help", "") or ""))
            elif record := param.get_help_record(ctx):
                own = _COMMON if "--help" in param.opts else _OWN
                sections[titles.get(param.name, own)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _usage(param: Any) -> str:
    name = (param.metavar or param.name.upper()).rstrip(".") + "..." * (param.nargs != 1)
    return name if param.required else f"[{name}]"


class Commands(Mapping[str, Any]):
    """All commands by name; a command is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in BRIEF:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(BRIEF)

    def __len__(self) -> int:
        return len(BRIEF)

    def __contains__(self, name: object) -> bool:
        return name in BRIEF


@cache
def _command(name: str) -> Any:
    """Return a command as Typer has it; when it is called, it returns a `Job`."""
    # No function can be named import.
    own = f"{name}_" if iskeyword(name) else name
    module = import_module(f".{own}", __package__)
    function: Callable[..., int] = getattr(module, own)
    taken = parameters(function, getattr(module, "OPTIONS", {}))
    quiet_for_all = "quiet" not in inspect.signature(function).parameters

    def command(**given: Any) -> Job:
        if quiet_for_all:
            del given["quiet"]
        return partial(function, **given)

    command.__name__, command.__doc__ = name, function.__doc__
    command.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in taken}
    one = typer.Typer(add_completion=False, **_MANNERS)
    one.command(name, cls=Command)(command)
    found: Any = typer.main.get_command(one)
    found.panels = getattr(module, "PANELS", {})
    return found


class Group(TyperGroup):
    """All commands, in groups."""

    def format_commands(self, _ctx: Any, formatter: Any) -> None:
        """Write a line on each, and an example of using them."""
        for title, briefs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(briefs.items()))
        with formatter.section("Example"):
            for line in _EXAMPLE.splitlines():
                formatter.write_text(line)


def tree() -> Any:
    """Return the tree."""
    root = typer.Typer(cls=Group, **_MANNERS)
    root.callback(invoke_without_command=True)(certk)
    group: Any = typer.main.get_command(root)
    group.commands = Commands()
    return group


def certk(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version.")] = False,
) -> int | None:
    """Certified selection of attention keys: what is dropped provably weighs no more than eps."""
    if version:
        say(f"certk {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        return None
    # As ruff and uv do: a script that lost its arguments fails, and its pipe gets no help text.
    show_help(context.get_help())
    return 2
