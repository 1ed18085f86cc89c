"""The one exit of the program. Typer only parses: every command hands back a job, which runs here.

Failures are one line on stderr and an exit code, never a traceback, and with `--json` one object on
stdout that says the same. 0 done; 1 a certificate or a file does not hold; 2 bad input, usage or
I/O error; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import CertkError, told
from .terminal import begin_answer, fail, print_answer, say

if TYPE_CHECKING:
    from .signals import Signals


def run(args: list[str], signals: Signals) -> int:
    """Run the command line; return the exit code. SystemExit: see `cli.main`."""
    for name in ("stdout", "stderr"):
        # Who closes one (>&-) wants to hear nothing. Python has None for it, and the next file that
        # is opened would get its number.
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    begin_answer(signals.promised, signals.command)
    try:
        code = _judged(args, signals)
    except SystemExit as stop:  # from the signal, or from Typer's answer to a shell
        if stop.code == 128 + signal.SIGTERM:
            fail("terminated", stop.code, "interrupted")
            _answer(stop.code, signals)
        raise
    _answer(code, signals)
    try:
        sys.stdout.flush()
    except OSError:
        # Or the interpreter, which flushes once more at its end, would complain in its own words.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _judged(args: list[str], signals: Signals) -> int:
    """Run a command; return its exit code, and say why it is not 0."""
    try:
        code = _run(args, signals)
        signals.promised = False
        print_answer(code)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interruption:
        return fail(str(interruption) or "interrupted", 130, "interrupted")
    except Exception as error:
        if signals.received is None:
            return _failed(error)
        # Whoever imported a module when it came took it for another failure.
        return fail("interrupted", 128 + signals.received, "interrupted")
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return fail("error: unexpected panic, told above; please report it", 2, "unexpected")


def _run(args: list[str], signals: Signals) -> int:
    if args in (["--version"], ["-V"]):  # asked by scripts, and answered without a parser
        say(f"certk {__version__}")
        return 0
    from .tree import tree

    job = tree().main(args, prog_name="certk", standalone_mode=False)
    # --help and --version give a number.
    if isinstance(job, int):
        return job
    with signals:
        code: int = job()
    return code


def _failed(error: Exception) -> int:
    """Say what went wrong; return the exit code."""
    if isinstance(error, CertkError):
        return fail(f"error: {error}", 2, "input")
    if isinstance(error, BrokenPipeError):
        return 2  # whoever read our output has gone
    if isinstance(error, OSError):
        return fail(f"error: {told(error)}", 2, "io")
    if isinstance(error, MemoryError):
        return fail("error: not enough memory: give fewer queries or keys in one file", 2, "memory")
    # Usage; its class has moved between versions of typer.
    if hasattr(error, "format_message"):
        return fail(f"error: {_usage(error)}", 2, "usage")
    what = f"unexpected {type(error).__name__}: {_joined(str(error))}"
    return fail(f"error: {what} (at {_place(error)}); please report it", 2, "unexpected")


def _place(error: Exception) -> str:
    """Return the file and the line that an exception comes from."""
    from traceback import extract_tb

    place = extract_tb(error.__traceback__)[-1]
    return f"{Path(place.filename).name}:{place.lineno}"


def _usage(error: Any) -> str:
    """Say what is wrong with the arguments, and whose help says what is right."""
    context = getattr(error, "ctx", None)
    path = "certk" if context is None else context.command_path
    return f"{_joined(error.format_message()).rstrip('.')} (see {path} --help)"


def _joined(message: str) -> str:
    return " ".join(message.split())


def _answer(code: int, signals: Signals) -> None:
    """Print what `--json` promised, if that has not been done, nor tried in vain."""
    signals.promised = False
    with contextlib.suppress(OSError):
        print_answer(code)
        sys.stdout.flush()
