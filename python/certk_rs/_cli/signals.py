"""Ctrl-C and SIGTERM, from the program's first instruction to its last.

While a command runs, a signal is an exception, so that temporary files are removed. Before that,
while modules are being imported, and when the command is over, it ends the process at once: an
exception there would be a traceback, or be taken for a module that cannot be imported. This file is
the first that the program imports, so that it imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object] | int | None

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Signals:
    """The handling of signals. As a context: they are exceptions in it.

    A signal that the process ignores, or that another handler is there for, is left alone.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that came while a command ran; its exception may have become another one."""
        self.promised = False
        """Set while stdout has yet to get the object of `--json`."""
        self.command: str | None = None
        """The command that this object names."""
        self._stderr = sys.stderr is not None
        self._before: list[tuple[signal.Signals, Handler]] = []

    def begin(self) -> None:
        """From here on a signal ends the process at once."""
        self._set(self._end)

    def __enter__(self) -> Signals:
        self._before = self._set(self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)

    def _set(self, handler: Handler) -> list[tuple[signal.Signals, Handler]]:
        """Set a handler where no one else has; return the signals with their handlers before."""
        before: list[tuple[signal.Signals, Handler]] = []
        for number in _WORDS:
            there = signal.getsignal(number)
            if there in (signal.SIG_DFL, signal.default_int_handler, self._end):
                try:
                    signal.signal(number, handler)
                except ValueError:  # not the main thread
                    continue
                before.append((number, there))
        return before

    def _end(self, number: int, _frame: FrameType | None) -> None:
        word, code = _WORDS[signal.Signals(number)], 128 + number
        try:
            if self._stderr:
                os.write(2, f"certk: {word}\n".encode())
            if self.promised:
                os.write(1, ended_object(self.command, word, code).encode())
        except OSError:
            pass
        # What was imported by halves, or waits for a thread, has no say.
        os._exit(code)

    def _raise(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def ended_object(command: str | None, word: str, code: int) -> str:
    """Return the line of `Answer`, without a module of which half may have been imported."""
    name = "null" if command is None else f'"{command}"'
    error = f'{{"kind": "interrupted", "message": "{word}", "exit_code": {code}}}'
    return f'{{"schema": 1, "command": {name}, "error": {error}}}\n'
