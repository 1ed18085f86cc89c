"""The command line. Typer only parses: every command hands back a job, which `main` then runs.

So whatever goes wrong ends in one place: one line on stderr and an exit code, never a traceback,
and with `--json` one object on stdout that says the same. 0 done; 1 a certificate or a file does
not hold; 2 bad input, usage or I/O error; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__, simd_level
from ._cli.analyze import analyze
from ._cli.capture import capture
from ._cli.command import Command, Group, uniform
from ._cli.completion import COMPLETE_VARIABLE, able_to_complete, completion
from ._cli.demo import demo
from ._cli.inspect import inspect_files
from ._cli.log_lines import stop_listening
from ._cli.options import Job
from ._cli.plan import plan
from ._cli.prune import prune
from ._cli.report import report
from ._cli.reproduce import reproduce
from ._cli.select import select
from ._cli.terminal import begin_answer, fail, print_answer, say, show_help
from ._cli.verify import verify
from ._cli.windows import windows
from ._log import logger
from .errors import CertkError

_log = logger("cli")

app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (select, prune, verify, report, capture, analyze, windows, reproduce, demo, plan):
    app.command(cls=Command)(uniform(command))
app.command("inspect", cls=Command)(uniform(inspect_files))
app.command(cls=Command)(completion)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminated)
    _stand_in_for_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    tree: Any = typer.main.get_command(app)
    named = next((each for each in args if not each.startswith("-")), None)
    begin_answer(_json_is_promised(args), named if named in tree.commands else None)
    try:
        code = _judged(tree, args)
    except SystemExit as stop:  # from the signal, or from Typer's answer to a shell
        if stop.code == 128 + signal.SIGTERM:
            fail("terminated", stop.code, "interrupted")
            _answer(stop.code)
        raise
    finally:
        stop_listening()
    _answer(code)
    _give_up_stdout_if_broken()
    return code


def _judged(tree: Any, args: list[str]) -> int:
    """Run a command to its exit code, and say why it is not 0."""
    start = time.monotonic()
    try:
        code = _run(tree, args)
        print_answer(code)
        sys.stdout.flush()
        _log.info("exit code %d after %.2f s", code, time.monotonic() - start)
        return code
    except KeyboardInterrupt as interruption:
        return fail(str(interruption) or "interrupted", 130, "interrupted")
    except CertkError as error:
        return fail(f"error: {error}", 2, "input")
    except BrokenPipeError:
        return 2  # whoever read our output has gone
    except OSError as error:
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        return fail(f"error: {place}{error.strerror or error}", 2, "io")
    except MemoryError:
        return fail("error: not enough memory: give fewer queries or keys in one file", 2, "memory")
    except Exception as error:
        # Usage; its class has moved between versions of typer.
        if hasattr(error, "format_message"):
            return fail(f"error: {_usage(error)}", 2, "usage")
        for line in traceback.format_exception(error):
            _log.debug("%s", line.rstrip())
        what = f"unexpected {type(error).__name__}: {_joined(str(error))}"
        return fail(f"error: {what}; please report it, with what -vv says", 2, "unexpected")
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return fail("error: unexpected panic, told above; please report it", 2, "unexpected")


def _answer(code: int) -> None:
    """Print what `--json` promised, if that has not been done, nor tried in vain."""
    with contextlib.suppress(OSError):
        print_answer(code)
        sys.stdout.flush()


def _stand_in_for_closed_streams() -> None:
    # Who closes one (>&-) wants to hear nothing. Python has None for it, and the next file that is
    # opened would get its number.
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _give_up_stdout_if_broken() -> None:
    # Or the interpreter, which flushes once more at its end, would complain in its own words.
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(tree: Any, args: list[str]) -> int:
    if COMPLETE_VARIABLE in os.environ:
        able_to_complete()
    try:
        job = tree.main(args, prog_name="certk", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    # A number is what --help, --version and an interruption while parsing give.
    if isinstance(job, int):
        return job
    _log.info("certk %s, %s", __version__, simd_level())
    _log.debug("arguments: %r", args)
    code: int = job()
    return code


def _json_is_promised(args: list[str]) -> bool:
    """Whether --json was asked for, by arguments that may be no usage at all."""
    return "--json" in args[: args.index("--")] if "--" in args else "--json" in args


def _usage(error: Any) -> str:
    """What is wrong with the arguments, and whose help says what is right."""
    context = getattr(error, "ctx", None)
    path = "certk" if context is None else context.command_path
    return f"{_joined(error.format_message()).rstrip('.')} (see {path} --help)"


def _joined(message: str) -> str:
    return " ".join(message.split())


def _terminated(_number: int, _frame: object) -> None:
    # Unwinds, so that temporary files are removed.
    raise SystemExit(128 + signal.SIGTERM)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"certk {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
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
