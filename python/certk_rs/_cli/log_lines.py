"""`-v`: what the library logs, as lines on stderr."""

from __future__ import annotations

import contextlib
import logging

from .._log import ROOT
from .terminal import complain

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class _Lines(logging.Handler):
    """One plain line for each line of a record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record; a stderr that is gone is no error."""
        try:
            text = self.format(record)
        except Exception:  # a record whose arguments do not fit it
            self.handleError(record)
            return
        with contextlib.suppress(OSError):
            for line in text.splitlines() or [""]:
                complain(f"{record.levelname.lower()}: {line}")


_handler = _Lines()


def listen(verbose: int) -> None:
    """Show INFO for one -v, DEBUG for more; warnings are shown by themselves, and not here."""
    if verbose > 0:
        root = logging.getLogger(ROOT)
        root.setLevel(_LEVELS[min(verbose, len(_LEVELS) - 1)])
        root.addHandler(_handler)


def stop_listening() -> None:
    """Leave logging as it was found."""
    root = logging.getLogger(ROOT)
    if _handler in root.handlers:
        root.removeHandler(_handler)
        root.setLevel(logging.NOTSET)
