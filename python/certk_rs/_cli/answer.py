"""The one JSON object that a command with `--json` prints, also when it fails."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

SCHEMA = 1
"""Raised when a field goes, or means something else; not when one is added (docs/cli.md)."""

Kind = Literal["usage", "input", "io", "memory", "interrupted", "does-not-hold", "unexpected"]
"""The reason for which a command failed."""


class Answer:
    """The object to be printed: a result, an error, or a result that does not hold."""

    def __init__(self) -> None:
        self.begin(False, None)

    def begin(self, promised: bool, command: str | None) -> None:
        """Forget what was held; `promised` says whether `--json` was given."""
        self._promised = promised
        self._command = command
        self._body: str | None = None
        self._error: dict[str, str] | None = None

    def hold(self, body: dict[str, Any]) -> None:
        """Keep the result, to be printed when the command ends: its end is then part of it.

        Schema and command are added. Numbers that are not finite become null, and what else JSON
        cannot have fails here.
        """
        if self._body is not None:
            raise RuntimeError("a second JSON object: --json promises one")
        self._body = _text({"schema": SCHEMA, "command": self._command, **body})

    def failed(self, message: str, kind: Kind) -> None:
        """Keep the reason for which the command fails."""
        message = message.removeprefix("error: ").removeprefix("failed: ")
        self._error = {"kind": kind, "message": message}

    def take(self, code: int) -> str | None:
        """Return one line in ASCII without control characters; None if there is nothing to print.

        It is handed out once: a stdout that has refused it is not tried again.
        """
        body, error = self._body, self._error or {"kind": "does-not-hold", "message": "failed"}
        if body is None and code != 0 and self._promised:
            body = _text({"schema": SCHEMA, "command": self._command})
        self.begin(False, None)
        if body is None or code == 0:
            return body
        return f'{body[:-1]}, "error": {_text({**error, "exit_code": code})}}}'


def _text(body: dict[str, Any]) -> str:
    return json.dumps(_finite(body), allow_nan=False)


def _finite(value: Any) -> Any:
    """Return the same with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
