"""The command line. Typer only parses: every command hands back a job, which `main` then runs.

So whatever goes wrong ends in one place: one line on stderr and an exit code, never a traceback.
0 done; 1 a certificate or a file does not hold; 2 bad input, usage or I/O error; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from . import __version__
from ._cli.analyze import analyze
from ._cli.capture import capture
from ._cli.demo import demo
from ._cli.plan import plan
from ._cli.prune import prune
from ._cli.reproduce import reproduce
from ._cli.select import select
from ._cli.terminal import fail, say
from ._cli.verify import verify
from ._cli.windows import windows
from .errors import CertkError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
for command in (select, prune, verify, capture, analyze, windows, reproduce, demo, plan):
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminated)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = fail("interrupted", 130)
    except CertkError as error:
        code = fail(f"error: {error}", 2)
    except BrokenPipeError:
        code = 2  # whoever read our output has gone
    except OSError as error:
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        code = fail(f"error: {place}{error.strerror or error}", 2)
    except MemoryError:
        code = fail("error: not enough memory: give fewer queries or keys in one file", 2)
    except Exception as error:
        # Others' messages may be of several lines.
        if hasattr(error, "format_message"):  # usage; its class has moved between versions of typer
            code = fail(f"error: {_joined(error.format_message())} (see certk --help)", 2)
        else:
            what = f"unexpected {type(error).__name__}: {_joined(str(error))}"
            code = fail(f"error: {what}; please report it", 2)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        code = fail("error: unexpected panic, told above; please report it", 2)
    _give_up_stdout_if_broken()
    return code


def _give_up_stdout_if_broken() -> None:
    # Or the interpreter, which flushes once more at its end, would complain in its own words.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str] | None) -> int:
    command = typer.main.get_command(app)
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        job = command.main(args, prog_name="certk", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    # A number is what --help, --version and an interruption while parsing give.
    return job if isinstance(job, int) else job()


def _joined(message: str) -> str:
    return " ".join(message.split())


def _terminated(_number: int, _frame: object) -> None:
    # Unwinds, so that temporary files are removed.
    raise SystemExit(128 + signal.SIGTERM)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"certk {__version__}")
        raise typer.Exit


@app.callback()
def certk(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Certified selection of attention keys: what is dropped provably weighs no more than eps."""
