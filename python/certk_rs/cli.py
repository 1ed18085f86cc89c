"""The program `certk`. It listens for Ctrl-C before it imports anything that takes time.

Everything else is in `_cli/program.py`. Even `__future__` would be imported, before it listens.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def _interrupted() -> int:
    if sys.stderr is not None:
        os.write(2, b"certk: interrupted\n")
    return 130


try:
    from ._cli.commands import json_is_promised, named
    from ._cli.signals import Signals
except KeyboardInterrupt:
    sys.exit(_interrupted())


def main(arguments: "Sequence[str] | None" = None) -> int:
    """Run the command line; return the exit code.

    Args:
        arguments: None: those of the process, whose only work this is. From here to the end of the
            process Ctrl-C and SIGTERM are then answered with 130 and 143, whatever goes on. With
            arguments signals are left as they were found.

    Raises:
        SystemExit: SIGTERM came, or a shell was answered that asked for completion.
    """
    signals = Signals()
    try:
        if arguments is None:
            signals.begin()
        args = list(sys.argv[1:] if arguments is None else arguments)
        signals.command, signals.promised = named(args), json_is_promised(args)
        from ._cli.program import run

        return run(args, signals)
    except KeyboardInterrupt:
        if arguments is not None:
            raise
        return _interrupted()
