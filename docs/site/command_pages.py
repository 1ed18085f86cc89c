"""The page of all commands, from what the commands say of themselves when asked for help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from html import escape
from typing import Any


class _Collected:
    """Collect the sections that a command writes into the formatter of its help."""

    def __init__(self) -> None:
        self.sections: dict[str, list[tuple[str, str]]] = {}
        self._title = ""

    @contextlib.contextmanager
    def section(self, title: str) -> Iterator[None]:
        self._title = title
        yield

    def write_dl(self, records: list[tuple[str, str]]) -> None:
        self.sections[self._title] = records


def page() -> str:
    """Return the text of the page."""
    from certk_rs._cli.tree import tree

    group: Any = tree()
    parent = group.make_context("certk", [], resilient_parsing=True)
    names = group.list_commands(parent)
    parts = [
        "# Commands\n",
        f"{_plain(group.help)}\n",
        "Below is what `--help` says. [The command line](cli.md) has what all commands share: "
        "[exit codes](cli.md#output-and-exit-codes) and [`--json`](cli.md#--json).\n",
    ]
    sections = {name: _sections(group.get_command(parent, name), name, parent) for name in names}
    common = max((each["Common options"] for each in sections.values()), key=len)
    for name in names:
        command = group.get_command(parent, name)
        usage = " ".join(["certk", name, *command.collect_usage_pieces(parent)])
        parts += [f"## certk {name}\n", f"```sh\n{usage}\n```\n", f"{_plain(command.help)}\n"]
        parts += [
            _section(title, records)
            for title, records in sections[name].items()
            if records != common
        ]
    parts += ["## Common options\n", "A command that lists none of its own has these.\n"]
    return "\n".join([*parts, _list(common)])


def _sections(command: Any, name: str, parent: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the sections of a command's help on its arguments and options."""
    said = _Collected()
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    command.format_options(context, said)
    return said.sections


def _section(title: str, records: list[tuple[str, str]]) -> str:
    return f"**{title}**\n\n{_list(records)}"


def _list(records: list[tuple[str, str]]) -> str:
    return "".join(f"`{name}`\n:   {_plain(said)}\n\n" for name, said in records)


def _plain(text: str) -> str:
    """Text of a terminal as Markdown that shows the same."""
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    shown = escape("\n\n".join(paragraphs), quote=False)
    for sign in "\\`*_[]{}":
        shown = shown.replace(sign, f"\\{sign}")
    return shown
