"""What all commands have in common: their help, and the options that none of them declares itself.

Typer's parser is a part of it in some versions and a package of its own in others; only methods
that both have are overridden here, and nothing is imported from either.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from .._log import logger
from ..errors import CertkError
from . import config
from .log_lines import listen
from .options import ConfigFile, Job, NoConfig, Quiet, Verbose

_log = logger("cli")
# In the order in which help lists them, below the options of the command.
_COMMON = {"quiet": Quiet, "verbose": Verbose, "config": ConfigFile, "no_config": NoConfig}
_DEFAULTS = {"quiet": False, "verbose": 0, "config": None, "no_config": False}
_SETTINGS = "certk_rs.config"
_OWN = "Options"


def uniform(function: Callable[..., Job]) -> Callable[..., Job]:
    """The command with the common options beside its own.

    It is told of --quiet if it takes it; the others are nothing that a command has to know.
    """
    # get_type_hints of Python 3.10 would hide what is declared where the default is None.
    own = inspect.signature(function, eval_str=True).parameters
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    added = [
        keyword(name=name, default=_DEFAULTS[name], annotation=annotation)
        for name, annotation in _COMMON.items()
        if name not in own
    ]
    parameters = [
        *(p.replace(kind=p.KEYWORD_ONLY) for p in own.values()),
        *added,
        keyword(name="context", annotation=typer.Context),
    ]

    def command(**given: Any) -> Job:
        listen(given["verbose"])
        _tell_settings(given["context"])
        return function(**{name: given[name] for name in own})

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


class Command(TyperCommand):
    """A command whose defaults a configuration file may set.

    `panels` has the names of parameters that go together in its help, by the title above them.
    """

    panels: Mapping[str, Sequence[str]] = MappingProxyType({})

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, --help included."""
        return [quick(param) for param in super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the configuration file that the arguments ask for, then the arguments."""
        if _configurable(self) and not ctx.resilient_parsing:
            asked, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            if not any(param.name in asked for param in self.get_params(ctx) if _is_help(param)):
                ctx.meta[_SETTINGS] = _settings(ctx, asked.get("config"), "no_config" in asked)
                ctx.default_map = ctx.meta[_SETTINGS][1]
        return super().parse_args(ctx, args)

    def make_parser(self, ctx: Any) -> Any:
        """Flags may be taken back, as --no-brief: the command line is stronger than a file."""
        parser = super().make_parser(ctx)
        for param in self.params:
            if _is_flag(param) and param.name != "no_config" and not param.secondary_opts:
                no = f"--no-{_called(param)}"
                parser.add_option(
                    obj=param,  # type: ignore[arg-type]
                    opts=[no],
                    dest=param.name,
                    action="store_const",
                    const=0 if getattr(param, "count", False) else False,
                )
        return parser

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS] CACHE..., alike in all versions of Typer."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(_usage(param) for param in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, the options of this command, and those that every command has."""
        arguments, common = (list[tuple[str, str]]() for _ in range(2))
        own: dict[str, dict[str, tuple[str, str]]] = {each: {} for each in (*self.panels, _OWN)}
        home = {name: panel for panel, names in self.panels.items() for name in names}
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                arguments.append((_usage(param), getattr(param, "help", "") or ""))
            elif record := param.get_help_record(ctx):
                if param.name in _COMMON or _is_help(param):
                    common.append(record)
                else:
                    own[home.get(param.name, _OWN)][param.name] = record
        panels = [
            (
                panel,
                [
                    own[panel][name]
                    for name in self.panels.get(panel, own[panel])
                    if name in own[panel]
                ],
            )
            for panel in own
        ]
        for title, records in (("Arguments", arguments), *panels, ("Common options", common)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def quick(param: Any) -> Any:
    """The parameter, which leaves alone what need not be read.

    Typer loads pydantic when it reads the first value, be it that of a flag, or of an option that
    was not given: each TAB, and each call for help, would wait for it.
    """
    if "process_value" in vars(param):
        return param
    read = param.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        if ctx.resilient_parsing:  # a shell asks what could be typed
            return value
        absent = value is None and not (param.required or param.multiple or param.nargs != 1)
        if absent or (_is_flag(param) and isinstance(value, bool)):
            return value if param.callback is None else param.callback(ctx, param, value)
        return read(ctx, value)

    param.process_value = process_value
    return param


def _usage(param: Any) -> str:
    name = (param.metavar or param.name.upper()).rstrip(".")
    name = f"{name}..." if param.nargs != 1 else name
    return name if param.required else f"[{name}]"


def _configurable(command: Any) -> bool:
    return any(param.name == "config" for param in command.params)


def _is_help(param: Any) -> bool:
    return "--help" in param.opts


def _is_flag(param: Any) -> bool:
    return bool(getattr(param, "is_flag", False) or getattr(param, "count", False))


def _called(param: Any) -> str:
    """The long name of an option, without the dashes."""
    name: str = max(param.opts, key=len)
    return name.lstrip("-")


# --------------------------------------------------------------------------- configuration files


def _settings(
    ctx: Any, given: str | None, none: bool
) -> tuple[config.Config | None, dict[str, Any]]:
    """The file that holds for this call, and the defaults that it sets."""
    if none and given is not None:
        raise CertkError("--config and --no-config contradict each other: give one of them")
    path = None if none else config.find(Path.cwd()) if given is None else Path(given)
    if path is None:
        return None, {}
    commands = {
        name: _options(command)
        for name, command in ctx.find_root().command.commands.items()
        if _configurable(command)
    }
    found = config.read(path, commands)
    return found, found.defaults(ctx.info_name, commands)


def _tell_settings(ctx: Any) -> None:
    """Say under -v which file is in force, and what of it."""
    found, _ = ctx.meta.get(_SETTINGS, (None, {}))
    if found is None:
        _log.info("no configuration file")
        return
    section = found.sections.get(ctx.info_name, {})
    _log.info("configuration: %s, %d options for %s", found.path, len(section), ctx.info_name)
    names = {_called(p): p.name for p in ctx.command.params if p.param_type_name == "option"}
    for key, value in section.items():
        source = ctx.get_parameter_source(names[key])
        overruled = source is not None and source.name == "COMMANDLINE"
        _log.info("  %s = %s%s", key, value, " (overruled: given here)" if overruled else "")


def _options(command: Any) -> dict[str, config.Setting]:
    """The options of a command, as a file may set them."""
    signature = inspect.signature(command.callback).parameters
    return {
        _called(param): _setting(param.name, signature[param.name].annotation)
        for param in command.params
        if param.param_type_name == "option" and param.name in signature
    }


def _setting(name: str, annotation: Any) -> config.Setting:
    declared, info = get_args(annotation)[:2]
    if get_origin(declared) in (Union, UnionType):
        [declared] = [each for each in get_args(declared) if each is not type(None)]
    many = get_origin(declared) is list
    kind = get_args(declared)[0] if many else declared
    assert issubclass(kind, bool | int | float | str | Enum | Path)
    return config.Setting(name, kind, many, info.parser)
