"""`certk completion`: what a shell needs to complete commands, options and choices."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import typer

from .options import Job
from .terminal import say

COMPLETE_VARIABLE = "_CERTK_COMPLETE"
"""Set by the script when the shell asks; Typer answers instead of running a command."""


class Shell(str, Enum):
    """Those that Typer has a script for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"
    powershell = "powershell"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh, fish or powershell.")],
) -> Job:
    """Print the script by which a shell completes certk's commands.

    bash: eval "$(certk completion bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, after compinit.
    fish: certk completion fish > ~/.config/fish/completions/certk.fish. Nothing is installed.
    """

    def job() -> int:
        from typer.completion import get_completion_script  # type: ignore[attr-defined]

        script = get_completion_script(
            prog_name="certk", complete_var=COMPLETE_VARIABLE, shell=shell.value
        )
        for line in script.splitlines():
            say(line)
        return 0

    return job


@contextlib.contextmanager
def able_to_complete() -> Iterator[None]:
    """Tell Typer's parser the shells, as `add_completion` would.

    To take markup out of a line of help, of which ours have none, it would load all of rich.
    """
    from typer.completion import completion_init  # type: ignore[attr-defined]

    modules: dict[str, Any] = sys.modules
    hidden = "rich" not in modules
    if hidden:
        modules["rich"] = None
    try:
        completion_init()
        yield
    finally:
        if hidden:
            del modules["rich"]
