"""The one exception of the package. Rust raises this same class."""

from __future__ import annotations


class CertkError(ValueError):
    """Bad input, or a file that is not what it should be.

    The message is one line that names the argument, the place (full multi-index of the row or
    entry) and the remedy. Nothing has been written when it is raised. Picklable.
    """
